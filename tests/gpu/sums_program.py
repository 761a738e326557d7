"""Sums and gathers of two GPUs' shares, as a program that runs once a rank.

``python -m tests.gpu.sums_program RANK SIZE MEETING`` fails where a result is not what the shares
give, which every rank draws by itself, or where the ranks differ in a bit.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mstar.models.parallel.collectives import DistributedShard

WIDTH = 1024
EPS = 1e-5
# Of a sum of two numbers, rounded once or, by NCCL, at each addition, relative to the largest.
TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 2**-21}


def check_same(shard: DistributedShard, found: Tensor) -> None:
    all_found = [torch.empty_like(found) for _ in range(shard.size)]
    dist.all_gather(all_found, found)
    assert all(torch.equal(own, found) for own in all_found), "ranks differ"


def check_sums(shard: DistributedShard, shares: list[Tensor], generator: torch.Generator) -> None:
    own, dtype = shares[shard.rank], shares[0].dtype
    exact = torch.stack(shares).double().sum(0)
    total = shard.total(own.clone())
    check_same(shard, total)
    assert (total.double() - exact).abs().max() < TOLERANCE[dtype] * exact.abs().max()

    residual = torch.randn(own.shape, generator=generator).to(own)
    weight = torch.rand(WIDTH, generator=generator).to(own.device)
    exact += residual.double()
    normed = shard.add_norm(residual, own, weight, EPS)
    if normed is None:
        return
    check_same(shard, residual)
    check_same(shard, normed)
    assert (residual.double() - exact).abs().max() < TOLERANCE[dtype] * exact.abs().max()
    kept = residual.double()
    wanted = kept * (kept.square().mean(1, keepdim=True) + EPS).rsqrt() * weight.double()
    assert (normed.double() - wanted).abs().max() < TOLERANCE[dtype] * wanted.abs().max()


def main() -> None:
    rank, size, meeting = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    device = torch.device("cuda", rank)
    shard = DistributedShard(rank, size, device, meeting)
    generator = torch.Generator().manual_seed(0)
    for turn in range(200):
        dtype = torch.float32 if turn % 5 == 4 else torch.bfloat16
        most = 10_000 if turn % 20 == 0 else 300
        rows = int(torch.randint(1, most, (1,), generator=generator))
        shape = (rows, WIDTH)
        shares = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(size)]
        check_sums(shard, shares, generator)
        parts = [share[:, : 1 + turn % 7 * 100].contiguous() for share in shares]
        assert torch.equal(shard.join(parts[rank]), torch.cat(parts, 1))
    torch.cuda.synchronize()
    shard.close()


if __name__ == "__main__":
    main()
