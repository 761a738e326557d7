"""Weights on their way to a CUDA device."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mstar.models import upload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PIECE = upload._PIECE_NBYTES


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.mark.parametrize("nbytes", [0, 1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE - 7, 40 * PIECE])
def test_bytes_arrive_as_they_are(device: torch.device, nbytes: int) -> None:
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    found = upload.Upload(device).copy(source, torch.uint8)
    assert found.device.type == "cuda"
    assert torch.equal(found.cpu(), source)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
def test_every_dtype_and_stride_arrives(device: torch.device, dtype: torch.dtype) -> None:
    source = torch.randint(-100, 100, (3000, 1025)).to(dtype)
    for own in (source, source.t(), source[::2, 1:]):
        found = upload.Upload(device).copy(own, dtype)
        assert found.dtype == dtype
        assert found.is_contiguous()
        assert torch.equal(found.cpu(), own)


def test_mapped_files_arrive_while_kernels_are_queued(device: torch.device, tmp_path: Path) -> None:
    tensors = {str(i): torch.randn(1024, 2048 + i) for i in range(12)}
    save_file(tensors, tmp_path / "a.safetensors")
    copy = upload.Upload(device).copy
    busy = torch.randn(4096, 4096, device=device)
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        for name, tensor in tensors.items():
            # What is freed here is given to the copy while the device still works on it.
            scratch = torch.full_like(tensor, 7.0, device=device)
            for _ in range(20):
                busy = busy @ busy * 1e-3
            scratch.add_(1)
            del scratch
            found = copy(file.get_tensor(name), torch.float32)
            assert torch.equal(found * 2, tensor.to(device) * 2)


def test_an_error_of_a_thread_is_raised(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no pinned memory")

    monkeypatch.setattr(upload._Stage, "send", fail)
    with pytest.raises(MemoryError, match="no pinned memory"):
        upload.Upload(device).copy(torch.zeros(2 * PIECE, dtype=torch.uint8), torch.uint8)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_a_tensor_may_change_its_dtype_on_the_way(
    device: torch.device, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    source = torch.randn(1500, 1001).to(dtypes[0])
    found = upload.Upload(device).copy(source, dtypes[1])
    assert found.dtype == dtypes[1]
    assert torch.equal(found.cpu(), source.to(dtypes[1]))


def test_the_callers_mode_does_not_matter(device: torch.device) -> None:
    source = torch.randn(1500, 1001)
    with torch.inference_mode():
        found = upload.Upload(device).copy(source, torch.float32)
    assert torch.equal(found.cpu(), source)


def test_memory_that_cannot_be_pinned_is_done_without(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(upload._Stage, "__init__", refuse)
    source = torch.randn(1500, 1001)
    assert torch.equal(upload.Upload(device).copy(source, torch.float32).cpu(), source)
