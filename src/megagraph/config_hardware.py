"""What a file of `config/hardware/` says of a device and its links, so that plans can be estimated for it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from megagraph.config_data import Strict


class Number(Strict):
    """A positive number in SI units; `estimated` where no data sheet or measurement states it."""

    value: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    estimated: bool = False


def _bare(value: Any) -> Any:
    """A bare number is one that is stated."""
    return value if isinstance(value, dict | Number) else {"value": value}


Stated = Annotated[Number, BeforeValidator(_bare)]


class Rates(Strict):
    """By number format: operations per second of dense products, or the fraction of them that is achieved."""

    fp32: Stated
    tf32: Stated
    bf16: Stated


class Link(Strict):
    """A message of n bytes takes `latency_seconds` + n / `bytes_per_second`, one way."""

    latency_seconds: Stated
    bytes_per_second: Stated


class HardwareConfig(Strict):
    """One type of device: a GPU, or one rank on a CPU.

    `devices` are the names under which profiles know it. `reserved_bytes` are not for tensors (driver, libraries).
    `dispatch_seconds` is the least time of one operation, however small.
    """

    name: str
    devices: tuple[str, ...] = ()
    memory_bytes: Stated
    reserved_bytes: Annotated[float, Field(ge=0)] = 0.0
    peak_flops: Rates
    achieved_fraction: Rates
    memory_bytes_per_second: Stated
    achieved_memory_fraction: Stated
    dispatch_seconds: Stated
    within_node: Link
    between_nodes: Link

    @property
    def estimates(self) -> list[str]:
        """Names of the numbers that are extrapolated."""
        return _estimates("", self)


def _estimates(prefix: str, part: Strict) -> list[str]:
    found = []
    for key in type(part).model_fields:
        value = getattr(part, key)
        if isinstance(value, Number):
            found += [prefix + key] * value.estimated
        elif isinstance(value, Strict):
            found += _estimates(f"{prefix}{key}.", value)
    return found
