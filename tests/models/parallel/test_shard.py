"""The parts of a model, put together, are the model: every sum and gather done by hand."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from mstar.errors import ConfigError
from mstar.models.checkpoint import open_checkpoint
from mstar.models.decoder import load
from mstar.models.fused import RMSNorm
from mstar.models.linear import Linear
from mstar.models.parallel.shard import WHOLE, JoinedLinear, Shard, SummedLinear, SummingNorm
from tests.models.families import saved


class Heard(Shard):
    """A rank that is told what the others have."""

    def __init__(self, rank: int, size: int, others: list[Tensor]) -> None:
        super().__init__(rank, size)
        self._others = others

    def total(self, x: Tensor) -> Tensor:
        return torch.stack([x, *self._others]).sum(0)

    def join(self, x: Tensor) -> Tensor:
        parts = [*self._others]
        parts.insert(self.rank, x)
        return torch.cat(parts, 1)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [5, 6, 7, 30])
def test_parts_are_the_whole_and_differ_by_one_at_most(length: int, size: int) -> None:
    whole = torch.arange(length * 4).view(length, 4)
    for axis, tensor in ((0, whole), (1, whole.T)):
        parts = [Shard(rank, size).part(tensor, axis) for rank in range(size)]
        assert torch.equal(torch.cat(parts, axis), tensor)
        lengths = [part.shape[axis] for part in parts]
        assert max(lengths) - min(lengths) <= 1
        assert all(part.is_contiguous() for part in parts[:size] if size > 1)


def test_part_keeps_no_more_memory_than_its_own() -> None:
    part = Shard(1, 4).part(torch.zeros(64, 8), 0)
    assert part.untyped_storage().nbytes() == 16 * 8 * 4


def test_what_cannot_be_dealt_out_is_refused_with_the_sizes_that_can() -> None:
    assert Shard(0, 4).part_of(8, "key heads") == 2
    with pytest.raises(
        ConfigError, match=r"is 3 and the model has 8 key heads.*it may be 1, 2, 4, 8"
    ):
        Shard(0, 3).part_of(8, "key heads")


@pytest.mark.parametrize("size", [2, 3])
def test_summed_projection_adds_its_bias_once(size: int) -> None:
    weight, bias, x = torch.randn(5, 12), torch.randn(5), torch.randn(4, 12)
    shards = [Shard(rank, size) for rank in range(size)]
    shares = [
        SummedLinear(shard.part(weight, 1), bias, shard, is_left=True)(shard.part(x, 1))
        for shard in shards
    ]
    expected = Linear(weight, bias)(x)
    torch.testing.assert_close(torch.stack(shares).sum(0), expected)
    heard = Heard(0, size, shares[1:])
    summed = SummedLinear(heard.part(weight, 1), bias, heard)(heard.part(x, 1))
    torch.testing.assert_close(summed, expected)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("vocab", [6, 7, 8])
def test_joined_projection_is_the_whole_without_padding(vocab: int, size: int) -> None:
    weight, x = torch.randn(vocab, 12), torch.randn(4, 12)
    width = -(-vocab // size)
    padded = torch.zeros(size * width, 12)
    padded[:vocab] = weight
    parts = [x @ own.T for own in padded.split(width)]
    for rank in range(size):
        heard = Heard(rank, size, parts[:rank] + parts[rank + 1 :])
        torch.testing.assert_close(JoinedLinear(weight, heard)(x), x @ weight.T)


@pytest.mark.parametrize("is_offset", [False, True])
def test_summing_norm_is_the_norm_of_the_sum(is_offset: bool) -> None:
    weight, x, own, other = (torch.randn(*shape) for shape in ((8,), (3, 8), (3, 8), (3, 8)))
    plain = RMSNorm(weight, 1e-3, is_offset=is_offset)
    summing = SummingNorm(weight, 1e-3, Heard(0, 2, [other]), is_offset=is_offset)
    expected_x, found_x = x.clone(), x.clone()
    expected = plain.add(expected_x, own + other)
    torch.testing.assert_close(summing.add(found_x, own), expected)
    torch.testing.assert_close(found_x, expected_x)
    torch.testing.assert_close(summing.add(x.clone(), None), plain.add(x.clone(), None))


def test_rank_loads_its_heads_and_the_caches_specs_say_so(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(saved("llama", tmp_path)))
    options = {"name": "tiny", "dtype": torch.float32, "device": torch.device("cpu")}
    whole = load(checkpoint, **options)  # type: ignore[arg-type]
    part = load(checkpoint, shard=Shard(1, 2), **options)  # type: ignore[arg-type]
    assert (part.config.num_heads, part.config.num_kv_heads) == (2, 1)
    assert part.specs[0].config.num_kv_heads == 1
    assert part.vocab_size == whole.vocab_size
    assert part.root_constants != whole.root_constants, "pages of parts are no pages of the whole"
    with pytest.raises(ConfigError, match=r"2 key heads.*it may be 1, 2"):
        load(checkpoint, shard=Shard(0, 3), **options)  # type: ignore[arg-type]
    assert WHOLE.size == 1
