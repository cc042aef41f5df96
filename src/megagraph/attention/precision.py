"""Mixed precision: layers compute in bfloat16 under autocast; what is summed over many terms stays in float32.

Weights, gradients, optimiser state, the residual stream, layer norms, attention scores with their softmax, the
structural bias and its projection, the classifier and the loss are float32. Matrix products of embedding, attention
projections and feed-forward block are bfloat16, and so is what travels: keys and values between cp ranks, activations
between stages.
"""

from __future__ import annotations

import torch
from torch import Tensor


def low_precision(device_type: str, dtype: torch.dtype | None) -> torch.autocast:
    """The context of a forward pass in `dtype`; None changes nothing."""
    return torch.autocast(device_type, dtype=dtype, enabled=dtype is not None)


def full_precision(like: Tensor) -> torch.autocast:
    """The context of what must not be cast, on the device of `like`; inputs may still be bfloat16."""
    return torch.autocast(like.device.type, enabled=False)
