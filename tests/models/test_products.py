from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mstar.models import products
from mstar.models.products import Choices, Kernels, bounds


def kernel(x: Tensor, weight: Tensor, out: Tensor) -> bool:
    return True


@pytest.mark.parametrize(
    ("sizes", "most", "expected"),
    [
        ([], 0, []),
        ([1], 1, []),
        ([1, 2, 4, 8], 256, [16]),
        ([16, 17], 257, [16, 32, 257]),
        ([256], 1024, [256, 512, 1024]),
        ([240, 224, 64], 1500, [64, 256, 512, 1024, 1500]),
    ],
)
def test_a_kernel_is_chosen_for_every_power_of_two(
    sizes: list[int], most: int, expected: list[int]
) -> None:
    assert bounds(sizes, most) == expected


def test_a_kernel_serves_down_to_half_its_rows() -> None:
    kernels = Kernels({16: kernel, 64: kernel, 256: None, 8192: kernel})
    served = [n for n in range(1, 9000) if kernels.find(n) is not None]
    assert served == [*range(1, 17), *range(33, 65), *range(4097, 8193)]


def test_choices_are_remembered(tmp_path: Path) -> None:
    path = tmp_path / "products" / "card.json"
    choices = Choices(path)
    assert choices["a"] is None
    other = Choices(path)
    choices["a"], choices["b"], choices["c"] = bytes(range(64)), b"", b"\x01"
    assert choices.write(["a", "b"])
    # Two that choose at the same time lose nothing.
    other["d"] = b"\x02"
    assert other.write(["d"])
    again = Choices(path)
    assert (again["a"], again["b"], again["c"]) == (bytes(range(64)), b"", None)
    assert again["d"] == b"\x02"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'{"a": 1}', b'{"a": "no hexadecimal"}', b"\xff"]
)
def test_a_broken_memory_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "card.json"
    path.write_bytes(content)
    choices = Choices(path)
    assert choices["a"] is None
    choices["b"] = b"\x01"
    assert choices.write(["b"])
    assert Choices(path)["b"] == b"\x01"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    choices = Choices(tmp_path / "file" / "card.json")
    choices["a"] = b"\x01"
    assert not choices.write(["a"])
    assert choices["a"] == b"\x01"


@pytest.mark.parametrize("failing", ["library", "product", "contest", None])
def test_what_fails_while_kernels_are_tried_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str | None
) -> None:
    """The library and the device are stood in for; whether they work is tested on a GPU."""
    tried = []

    class StandIn:
        version, device = 1, "cpu"

        def __init__(self, *given: Any) -> None:
            self._given = given

        def accepts(self, algo: bytes, num_rows: int) -> bool:
            return True

        def kernel(self, algo: bytes) -> Any:
            return kernel

        def winner(self) -> bytes:
            tried.append(self._given[2])
            return bytes([self._given[2]]) * 64

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: something")

    places = {"library": "Library", "product": "Product", "contest": "_Contest"}
    for place, name in places.items():
        monkeypatch.setattr(products, name, fail if place == failing else StandIn)
    monkeypatch.setattr(torch.cuda, "Stream", StandIn)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "stand-in")
    products._library.cache_clear()
    weights = [torch.zeros(2048, 1024, dtype=torch.bfloat16)]
    for _ in range(2):
        (found,) = products.choose([weights], [16, 32], tmp_path)
        chosen = None if found is None else found.find(20)
        assert chosen is (kernel if failing is None else None)
    # The second time it is remembered.
    assert tried == ([16, 32] if failing is None else [])
    products._library.cache_clear()
