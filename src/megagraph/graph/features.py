"""Feature normalisation, in place and in blocks: no second copy of a large feature matrix.

Shapes: V nodes, F features.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megagraph.config import FeatureNorm

BLOCK_ROWS = 1 << 16


def normalise_features(features_VF: NDArray[np.float32], how: FeatureNorm) -> None:
    """Change `features_VF` in place: `row` makes absolute row sums 1, `standard` columns of mean 0 and variance 1.

    Rows of zeros and constant columns become zeros. `standard` uses all nodes and no label (the graph is known whole).
    """
    if how == "row":
        for rows in _blocks(len(features_VF)):
            sums = np.abs(features_VF[rows]).sum(1, keepdims=True)
            features_VF[rows] /= np.where(sums > 0, sums, 1)
    elif how == "standard" and len(features_VF):
        mean_F = sum(features_VF[rows].sum(0, dtype=np.float64) for rows in _blocks(len(features_VF)))
        mean_F /= len(features_VF)
        square_F = np.zeros(features_VF.shape[1])
        for rows in _blocks(len(features_VF)):
            features_VF[rows] -= mean_F
            square_F += np.square(features_VF[rows], dtype=np.float64).sum(0)
        deviation_F = np.sqrt(square_F / len(features_VF))
        # What is left of a constant column is rounding, of the size of its mean's last bit.
        constant_F = deviation_F <= np.abs(mean_F) * np.finfo(np.float32).eps
        scale_F = np.divide(1.0, deviation_F, out=np.zeros_like(deviation_F), where=~constant_F)
        for rows in _blocks(len(features_VF)):
            features_VF[rows] *= scale_F


def _blocks(num_rows: int) -> list[slice]:
    return [slice(first, first + BLOCK_ROWS) for first in range(0, num_rows, BLOCK_ROWS)]
