"""k-NN rows by blocks of nodes: cosine similarity without a V x V matrix.

Shapes: V nodes, F features, T centres, C centres of one product, W nodes of one block, K kept entries per centre.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megagraph.graph.jit import kernel
from megagraph.graph.pagerank import keep_largest

CENTRES, BLOCK = 64, 1 << 14


def unit_rows(features_VF: NDArray[np.float32]) -> NDArray[np.float32]:
    """Features with L2-normalised rows [V, F]; a row of zeros stays."""
    norm_V = np.linalg.norm(features_VF, axis=1)
    scale_V = 1.0 / np.where(norm_V > 0, norm_V, 1.0)
    return np.multiply(features_VF, scale_V[:, None], dtype=np.float32)


@kernel()
def _offer(
    similar_CW: NDArray, first: int, centres_C: NDArray, values_CK: NDArray, nodes_CK: NDArray, kept_C: NDArray
) -> None:
    """Offer the float32 similarities of nodes first.. to the heaps of the int64 centres; positive ones only."""
    for row in range(len(centres_C)):
        kept = kept_C[row]
        for column in range(similar_CW.shape[1]):
            value = similar_CW[row, column]
            if value > 0 and first + column != centres_C[row]:
                kept = keep_largest(value, first + column, kept, values_CK[row], nodes_CK[row])
        kept_C[row] = kept


def nearest_rows(
    unit_VF: NDArray[np.float32],
    centres_T: NDArray[np.int64],
    nodes_TK: NDArray[np.int32],
    values_TK: NDArray[np.float64],
    counts_T: NDArray[np.int64],
) -> None:
    """Fill `nodes_TK`, `values_TK` and `counts_T` with the largest positive similarities of each centre, in no order.

    Products have a fixed shape, padded with zeros: a library may round another shape differently, and a row has to
    be the same whichever centres it is asked with. Memory O(T K + 64 * 16384).
    """
    num_nodes, num_features = unit_VF.shape
    counts_T[:] = 0
    asked_CF = np.zeros((CENTRES, num_features), np.float32)
    block_WF = np.zeros((min(BLOCK, -(-num_nodes // CENTRES) * CENTRES), num_features), np.float32)
    for start in range(0, len(centres_T), CENTRES):
        rows = slice(start, min(start + CENTRES, len(centres_T)))
        centres_C = centres_T[rows]
        asked_CF[: len(centres_C)] = unit_VF[centres_C]
        for first in range(0, num_nodes, len(block_WF)):
            count = min(len(block_WF), num_nodes - first)
            block_WF[:count] = unit_VF[first : first + count]
            similar_CW = (asked_CF @ block_WF.T)[: len(centres_C), :count]
            _offer(similar_CW, first, centres_C, values_TK[rows], nodes_TK[rows], counts_T[rows])
