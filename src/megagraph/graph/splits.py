"""Which nodes train, validate and test.

Shapes: V nodes.
"""

from __future__ import annotations

import numpy as np
from numpy.random import PCG64, Generator

from megagraph.config import SplitConfig, UserError
from megagraph.graph.store import Graph, Split


def split(graph: Graph, config: SplitConfig) -> Split:
    """The (train, val, test) node numbers, int64, sorted, disjoint; a pure function of graph and config.

    `random-60-20-20` deals all labelled nodes (label >= 0) by seed, as ANS-GT does (ans-gt 1.1); `official` (also
    called `public`) gives the data set's own masks, which may leave nodes out. Raises `UserError` where there are
    none or a part stays empty.
    """
    if config.rule in ("official", "public"):
        if graph.public_split is None:
            raise UserError(
                f"split.rule={config.rule}: data set {graph.name} publishes no split: use split.rule=random-60-20-20"
            )
        train, val, test = (np.sort(part).astype(np.int64) for part in graph.public_split)
        return train, val, test
    labelled = np.flatnonzero(graph.labels_V >= 0).astype(np.int64)
    count = len(labelled)
    if count < 3:
        raise UserError(
            f"split.rule={config.rule}: data set {graph.name} has {count} labelled nodes, three parts need 3: "
            f"use a larger data set"
        )
    shuffled = Generator(PCG64(config.seed)).permutation(labelled)
    train, val, test = (np.sort(part) for part in np.split(shuffled, [count * 6 // 10, count * 8 // 10]))
    return train, val, test
