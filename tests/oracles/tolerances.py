"""How far a result may be from its float64 oracle, per dtype; each number with its reason."""

import torch

ATTENTION: dict[torch.dtype, float] = {
    # A few hundred terms of size 1, each off by half a unit of 2**-52.
    torch.float64: 1e-12,
    # The same with 2**-23, where the scores' error enters through exp.
    torch.float32: 1e-5,
    # As bfloat16, with 2**-11.
    torch.float16: 4e-3,
    # Torch rounds the weights to 2**-8 before it weighs the values, and then the result.
    torch.bfloat16: 2e-2,
}
"""Absolute, for attention over normally distributed values."""
