"""Sums and gathers of GPUs' shares, as a program that runs once a rank.

``python -m tests.gpu.sums_program RANK SIZE MEETING`` fails where a result is not what the shares
give, which every rank draws by itself, or where the ranks differ in a bit. Calls of all kinds and
sizes are queued one behind the other, and looked at only at the end: what hurries ahead must not
overwrite what others have yet to take. Now and then one rank dawdles, or a recording is replayed.
"""

import random
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mstar.models.parallel.collectives import DistributedShard

WIDTH = 1024
NUM_ROUNDS, NUM_CALLS = 4, 300
DAWDLE_CYCLES = 300_000
EPS = 1e-5
# Of a sum of few numbers, rounded once or, by NCCL, at each addition, relative to the largest.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 2**-20}


class Call(NamedTuple):
    """One of the rank's, queued."""

    kind: str
    shares: list[Tensor]
    """Of all ranks."""
    found: tuple[Tensor, ...]
    base: Tensor
    """What ``norm`` adds to."""
    weight: Tensor


def queue(shard: DistributedShard, dice: random.Random, generator: torch.Generator) -> Call:
    """Draw a call and queue it."""
    device = torch.device("cuda", shard.rank)
    kind = dice.choice(["total", "norm", "norm", "join"])
    dtype = dice.choice([torch.bfloat16, torch.bfloat16, torch.float32])
    rows = dice.choice([1, 2, dice.randint(1, 64), dice.randint(1, 300), dice.randint(1, 5000)])
    width = WIDTH if dtype == torch.bfloat16 else WIDTH // 2
    if kind == "join":
        rows, width = min(rows, 200), dice.choice([3, 640, 9000])
    generator.manual_seed(dice.randrange(2**32))

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    shares = [drawn(rows, width).to(dtype) for _ in range(shard.size)]
    base, weight = drawn(rows, width).to(dtype), drawn(width)
    run = partial(_run, shard, kind, shares[shard.rank], base, weight)
    dawdler = dice.randrange(10 * shard.size)
    if dawdler == shard.rank:
        torch.cuda._sleep(DAWDLE_CYCLES)
    return Call(kind, shares, run(), base, weight)


def _run(
    shard: DistributedShard, kind: str, own: Tensor, base: Tensor, weight: Tensor
) -> tuple[Tensor, ...]:
    if kind == "join":
        return (shard.join(own),)
    if kind == "norm":
        kept = base.clone()
        normed = shard.add_norm(kept, own, weight, EPS)
        peers = shard._peers
        assert peers is not None
        assert (normed is None) == (peers.sums(own) is None)
        if normed is not None:
            return kept, normed
    return (shard.total(own.clone()),)


def check(call: Call) -> None:
    """Hold a call's results against what the shares give."""
    if call.kind == "join":
        assert torch.equal(call.found[0], torch.cat(call.shares, 1)), call.kind
        return
    tolerance = TOLERANCE[call.base.dtype]
    exact = torch.stack(call.shares).double().sum(0)
    if len(call.found) > 1:
        exact += call.base.double()
        kept = call.found[0].double()
        scale = (kept.square().mean(1, keepdim=True) + EPS).rsqrt()
        _check_near(call.found[1], kept * scale * call.weight.double(), tolerance)
    _check_near(call.found[0], exact, tolerance)


def _check_near(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    error, largest = (found.double() - wanted).abs().max(), wanted.abs().max()
    assert error < tolerance * largest, (tuple(found.shape), found.dtype, error, largest)


def check_same(shard: DistributedShard, calls: list[Call]) -> None:
    """Hold the bits of all results against those of the other ranks."""
    own = torch.cat([tensor.view(torch.uint8).flatten() for call in calls for tensor in call.found])
    others = [torch.empty_like(own) for _ in range(shard.size)]
    dist.all_gather(others, own)
    assert all(torch.equal(other, own) for other in others), "ranks differ"


class Recording:
    """Calls that are recorded once and replayed between others.

    It keeps the share that it reads at each replay.
    """

    def __init__(self, shard: DistributedShard) -> None:
        self._size = shard.size
        device = torch.device("cuda", shard.rank)
        own = self._own = torch.ones(40, WIDTH, device=device, dtype=torch.bfloat16)
        shard.total(own.clone())
        shard.join(own)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._summed = [shard.total(own) for _ in range(3)]
            self._joined = shard.join(own)

    def check(self) -> None:
        """Hold what the last replay gave against what it must, and clear it."""
        assert all((own == self._size).all() for own in self._summed)
        assert self._joined.shape == (40, self._size * WIDTH)
        assert (self._joined == 1).all()
        for own in (*self._summed, self._joined):
            own.zero_()


def main() -> None:
    rank, size, meeting = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    shard = DistributedShard(rank, size, torch.device("cuda", rank), meeting)
    assert shard._peers is not None, "GPUs do not reach each other"
    # The same calls on all ranks; which of them dawdles follows from the dice, too.
    dice = random.Random(0)
    generator = torch.Generator(torch.device("cuda", rank))
    recording = Recording(shard)
    for _ in range(NUM_ROUNDS):
        calls = []
        for number in range(NUM_CALLS):
            calls.append(queue(shard, dice, generator))
            if number % 7 == 0:
                recording.graph.replay()
        torch.cuda.synchronize()
        recording.check()
        for call in calls:
            check(call)
        check_same(shard, calls)
    shard.close()


if __name__ == "__main__":
    main()
