"""The configuration of the plan search: what may be proposed, on which devices, and how long it may take."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megagraph.config_data import PositiveInt, Strict


class DeviceConfig(Strict):
    """Some ranks of one type: bytes of each in GB (1e9), and its speed relative to the profiled device."""

    name: Annotated[str, Field(min_length=1)]
    count: PositiveInt
    memory_gb: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    speed: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0


class SearchConfig(Strict):
    """What the search may propose.

    `recompute`: `if_needed` tries it only where nothing fits without, `allowed` weighs it like anything else.
    `batch_mode`: `strong` divides the batch over replicas; `weak` gives each replica a whole one, and compares time per
    sequence. `time_budget_seconds` stops the search early, with a proven gap. `devices` describes unequal ranks (their
    memory replaces `memory_limit_gb`); every order of the types along the pipeline is tried.
    """

    schedules: Annotated[tuple[Literal["gpipe", "1f1b"], ...], Field(min_length=1)] = ("gpipe", "1f1b")
    recompute: Literal["never", "if_needed", "allowed"] = "if_needed"
    batch_mode: Literal["strong", "weak"] = "strong"
    time_budget_seconds: Annotated[float, Field(gt=0)] | None = None
    devices: tuple[DeviceConfig, ...] = ()
