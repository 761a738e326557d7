"""The weights of a checkpoint, or of a part of one, taken one by one and none forgotten."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor

from mstar.errors import WeightsError
from mstar.models.checkpoint import Checkpoint
from mstar.models.linear import Linear
from mstar.models.upload import Upload


class Weights:
    """Takes a checkpoint's tensors, and knows which nobody took.

    Args:
        checkpoint: Where they are; of a composite one, the part.
        dtype: What they are to be in.
        device: Where they are to lie.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._upload = Upload(device) if device.type == "cuda" else None
        self._left = set(checkpoint.names())

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a tensor of this shape.

        Raises:
            WeightsError: If it is missing, broken or of another shape.
        """
        self._left.discard(name)
        tensor = self._checkpoint.tensor(name, shape)
        if self._upload is not None and tensor.device.type == "cpu":
            return self._upload.copy(tensor, self._dtype)
        return tensor.to(self._device, self._dtype)

    def linear(self, names: Sequence[str], out_features: int, in_features: int) -> Linear:
        """Return projections of one input as a single one, biases included.

        Args:
            names: What stands before ``.weight`` and ``.bias``, in the order of the output.
            out_features: Of each.
            in_features: Of all.
        """
        weights = [self.take(f"{name}.weight", out_features, in_features) for name in names]
        biases = [self.take(f"{name}.bias", out_features) for name in names]
        return Linear(torch.cat(weights), torch.cat(biases))

    def finish(self, ignored: str = "", owner: str = "the model") -> None:
        """Refuse a checkpoint with tensors that nobody took: they would change the answer.

        Args:
            ignored: Regular expression of names that change nothing.
            owner: What messages call the model.

        Raises:
            WeightsError: If there is one.
        """
        left = sorted(name for name in self._left if not re.fullmatch(ignored, name))
        if left:
            raise WeightsError(
                f"{self._checkpoint.path}: {len(left)} tensors have no place in {owner}, among "
                f"them {self._checkpoint.stored_as(left[0])!r}"
            )
