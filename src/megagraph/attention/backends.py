"""Which kernel computes a block: one key, `parallel.backend`."""

from __future__ import annotations

from importlib.util import find_spec

from megagraph.attention.kernel import TILED, Kernel
from megagraph.config import UserError

MIN_FLEX_HEAD_DIM = 16


def choose_kernel(backend: str, device: str, head_dim: int) -> Kernel:
    """The kernel of a backend on a device type; all have the signatures of the tiled functions and equal results.

    `tiled` runs everywhere, and is what `auto` means but for short sequences on a CPU, whose loops are compiled
    (`short`). `flex` and `triton` fuse the forward pass on a CUDA device; their backward pass stays tiled, which is
    deterministic, where their own would add the projection's gradient atomically.

    Raises `UserError` where the backend cannot run.
    """
    if backend == "tiled" or (backend == "auto" and device != "cpu"):
        return TILED
    if backend == "auto":
        from megagraph.attention.short import SHORT

        return SHORT
    if device != "cuda":
        raise UserError(f"backend={backend} needs device=cuda, not {device}: use backend: tiled")
    if backend == "flex":
        if head_dim < MIN_FLEX_HEAD_DIM:
            raise UserError(
                f"backend=flex needs {MIN_FLEX_HEAD_DIM} features per head, not {head_dim}: use backend: tiled, "
                f"or fewer heads"
            )
        from megagraph.attention.flex import FLEX

        return FLEX
    if find_spec("triton") is None:
        raise UserError("backend=triton needs the package triton: install megagraph[triton], or use backend: tiled")
    from megagraph.attention.fused import FUSED

    return FUSED
