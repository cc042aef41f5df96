"""The configuration of what is measured for the cost model."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from megagraph.config_data import Identifier, PositiveInt, Strict


class GridConfig(Strict):
    """The cost model's validation grid (paper: b 1-8, l 2-32, h 4-16, d 32-128; N is ours to state)."""

    batch: tuple[PositiveInt, ...]
    layers: tuple[PositiveInt, ...]
    heads: tuple[PositiveInt, ...]
    hidden: tuple[PositiveInt, ...]
    tokens: PositiveInt
    shards: PositiveInt = 1


class ProfileConfig(Strict):
    """What is measured: warm-ups and timed repeats, micro-batch sizes, message sizes, the validation grid.

    `heldout` is a second grid, of other sizes, and `heldout_runs` names other runs that are profiled, too: the model is
    not fitted to them, they say how well it predicts.
    """

    warmup: PositiveInt = 2
    repeats: Annotated[int, Field(ge=3)] = 3
    microbatch_sizes: tuple[PositiveInt, ...] = (8, 32, 128)
    message_bytes: tuple[PositiveInt, ...] = (1024, 65536, 1048576, 4194304)
    grid: GridConfig | None = None
    heldout: GridConfig | None = None
    heldout_runs: tuple[Identifier, ...] = ()
    measured_plans: Annotated[int, Field(ge=0)] = 6
    measured_steps: PositiveInt = 3
