"""Length of one GPipe step with unequal stages: a closed form, exact for identical micro-batches.

Legend: K micro-batches; stages are the last axis of every array; seconds throughout.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Seconds = NDArray[np.float64]


def gpipe_makespan(
    forward: ArrayLike,
    backward: ArrayLike,
    update: ArrayLike,
    *,
    microbatches: int,
    link_forward: float = 0.0,
    link_backward: float = 0.0,
) -> Seconds:
    """Seconds from the first forward to the last weight update, for any number of pipelines at once.

    forward, backward: seconds [..., P] of one micro-batch on each stage. update: seconds [..., P] that a stage needs
    after its last backward (gradient all-reduce and optimiser). link_*: seconds of one boundary transfer, overlapping
    with compute. Forward is a flow shop of identical jobs; the last stage turns round when all K have arrived, and no
    stage is then still busy, so backward is the mirrored flow shop. The largest f and the largest b enter separately
    (paper, Eq. 10, adds them and under-estimates pipelines whose slowest stages differ by direction).
    """
    f, b, a = (np.asarray(part, dtype=np.float64) for part in (forward, backward, update))
    num_stages = f.shape[-1]
    repeats = microbatches - 1
    slowest = f.max(axis=-1)
    if num_stages > 1:
        slowest = np.maximum(slowest, link_forward)
    turn = f.sum(axis=-1) + (num_stages - 1) * link_forward + repeats * slowest
    path = np.zeros_like(turn)
    slowest = np.zeros_like(turn)
    end = np.zeros_like(turn)
    for stage in reversed(range(num_stages)):
        link = link_backward if stage < num_stages - 1 else 0.0
        path = path + b[..., stage] + link
        slowest = np.maximum(slowest, np.maximum(b[..., stage], link))
        end = np.maximum(end, path + repeats * slowest + a[..., stage])
    return np.asarray(turn + end)
