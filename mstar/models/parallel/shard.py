"""Shard: the part of a model's weights that one rank has, and what puts the parts together.

Of a layer, a rank has some of the heads and some of the MLP's width, so that each of its two blocks
ends in a sum over all ranks. Everything else of a layer is the same on every rank.
"""

import torch
from torch import Tensor
from torch.nn import functional

from mstar.errors import ConfigError
from mstar.models.fused import RMSNorm
from mstar.models.linear import Linear


class Shard:
    """One of ``size`` equal parts; of one part, the whole, nothing is to be put together.

    Args:
        rank: Which part, from 0.
        size: How many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank = rank
        self.size = size

    def part(self, tensor: Tensor, axis: int) -> Tensor:
        """Return this rank's slice of a tensor, as a copy; slices differ by one at most."""
        if self.size == 1:
            return tensor
        length = tensor.shape[axis]
        begin, end = (length * rank // self.size for rank in (self.rank, self.rank + 1))
        return tensor.narrow(axis, begin, end - begin).clone(memory_format=torch.contiguous_format)

    def part_of(self, count: int, what: str) -> int:
        """Return how many of ``count`` things a rank has.

        Raises:
            ConfigError: If they cannot be dealt out evenly.
        """
        if count % self.size:
            fitting = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise ConfigError(
                f"tensor_parallel_size is {self.size} and the model has {count} {what}, which "
                f"cannot be dealt out evenly; it may be {fitting}"
            )
        return count // self.size

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of all ranks' ``x``, ``[num_rows, width]``, which may be overwritten."""
        return x

    def add_norm(self, x: Tensor, share: Tensor, weight: Tensor, eps: float) -> Tensor | None:
        """Add the sum of all ranks' ``share`` to ``x`` in place and return it normalised.

        Args:
            x: ``[num_rows, width]``.
            share: The same shape and dtype.
            weight: float32 ``[width]``.
            eps: Added to the mean square.

        Returns:
            ``None`` where that is not done at once; nothing has happened then.
        """
        return None

    def join(self, x: Tensor) -> Tensor:
        """Return all ranks' ``x`` side by side, ``[num_rows, size * width]``."""
        return x


WHOLE = Shard()
"""A model on one device."""


class SummedLinear(Linear):
    """A projection whose input is dealt out over the ranks.

    Args:
        weight: ``[out_features, in_features]``, the rank's columns.
        bias: ``[out_features]`` or ``None``; added once.
        shard: The rank.
        is_left: The sum is left to whoever reads the output, a ``SummingNorm``.
    """

    __slots__ = ("_is_left", "_shard")
    is_whole = False

    def __init__(
        self, weight: Tensor, bias: Tensor | None, shard: Shard, *, is_left: bool = False
    ) -> None:
        super().__init__(weight, bias if shard.rank == 0 else None)
        self._shard = shard
        self._is_left = is_left

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[num_tokens, out_features]``, summed over the ranks or the rank's share."""
        share = super().__call__(x)
        return share if self._is_left else self._shard.total(share)


class SummingNorm(RMSNorm):
    """A norm of a sum with the output of a block, of which every rank has a share.

    Args:
        weight: ``[width]`` in the model's dtype.
        eps: Added to the mean square.
        shard: The rank.
        is_offset: The stored weight is the factor minus one.
    """

    __slots__ = ("_shard",)

    def __init__(
        self, weight: Tensor, eps: float, shard: Shard, *, is_offset: bool = False
    ) -> None:
        super().__init__(weight, eps, is_offset=is_offset)
        self._shard = shard

    def add(self, x: Tensor, added: Tensor | None) -> Tensor:
        """Add the sum of all ranks' ``added`` to ``x`` in place and return it normalised."""
        if added is None:
            return super().add(x, None)
        done = self._shard.add_norm(x, added, self._weight, self._eps)
        return super().add(x, self._shard.total(added)) if done is None else done


class JoinedLinear(Linear):
    """A projection whose output is dealt out over the ranks, and gathered by each.

    All ranks have bit for bit the same output, and so choose the same tokens from it.

    Args:
        weight: ``[out_features, in_features]``, all of it.
        shard: The rank.
    """

    __slots__ = ("_num_all", "_shard")
    is_whole = False

    def __init__(self, weight: Tensor, shard: Shard) -> None:
        self._shard = shard
        self._num_all = weight.shape[0]
        # Padded, since only parts of one size can be gathered at once.
        width = -(-self._num_all // shard.size)
        own = weight[shard.rank * width : (shard.rank + 1) * width]
        super().__init__(functional.pad(own, (0, 0, 0, width - len(own))).clone())

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``[num_tokens, out_features]``."""
        return self._shard.join(super().__call__(x))[:, : self._num_all]
