from pathlib import Path

import pytest
from torch import Tensor

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
    choices["a"], choices["b"] = bytes(range(64)), b""
    choices.write()
    again = Choices(path)
    assert (again["a"], again["b"], again["c"]) == (bytes(range(64)), b"", None)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[1]", b'{"a": 1}', b'{"a": "no hexadecimal"}', b"\xff"]
)
def test_a_broken_memory_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "card.json"
    path.write_bytes(content)
    choices = Choices(path)
    assert choices["a"] is None
    choices["b"] = b"\x01"
    choices.write()
    assert Choices(path)["b"] == b"\x01"


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    choices = Choices(tmp_path / "file" / "card.json")
    choices["a"] = b"\x01"
    choices.write()
    assert choices["a"] == b"\x01"
