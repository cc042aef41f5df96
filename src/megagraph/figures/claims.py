"""The paper's claims (``config/paper_values.yaml``) and how a finding of ours is judged against one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from megagraph.config import Strict, validated
from megagraph.files import read_yaml

Scalar = float | int | str
STATUSES = ("reproduced", "same trend", "contradicted", "estimated", "not run")


class PaperValue(Strict):
    """One number that the paper prints, by the name that the evaluator of its claim uses."""

    name: str
    value: Annotated[float, Field(allow_inf_nan=False)]
    unit: str = ""

    @property
    def text(self) -> str:
        """For a reader, for example ``70.56 GB``."""
        return f"{self.value:g}{'' if self.unit in ('x', '') else ' '}{self.unit}"


class Bounds(Strict):
    """Where a value of ours must lie for the claim's trend to hold."""

    min: float = -math.inf
    max: float = math.inf

    def holds(self, value: float) -> bool:
        """Whether `value` lies inside; NaN does not."""
        return self.min <= value <= self.max


class Claim(Strict):
    """One claim. `source` speaks of it now, or `needs` says what is missing; `scale` is the paper's own setting."""

    id: Annotated[int, Field(ge=1)]
    where: str
    claim: str
    values: tuple[PaperValue, ...] = ()
    trend: dict[str, Bounds] = Field(default_factory=dict)
    tolerance: Annotated[float, Field(ge=0)] = 0.0
    configuration: str
    hardware: str
    scale: dict[str, Scalar] = Field(default_factory=dict)
    reproducible: bool = True
    source: str | None = None
    needs: str | None = None

    @model_validator(mode="after")
    def _spoken_or_missing(self) -> Self:
        if self.source is None and self.needs is None:
            raise ValueError("neither source nor needs is set: say what speaks of the claim or what is missing")
        return self

    @property
    def paper(self) -> str:
        """What the paper states, with its configuration and hardware."""
        numbers = ", ".join(f"{value.name.replace('_', ' ')} {value.text}" for value in self.values) or "no number"
        setting = "; ".join(text for text in (self.configuration, self.hardware) if text != "-")
        return f"{numbers} ({setting})" if setting else numbers


class PaperValues(Strict):
    """All claims, each id once."""

    claims: tuple[Claim, ...]

    @model_validator(mode="after")
    def _ids_once(self) -> Self:
        ids = [claim.id for claim in self.claims]
        twice = sorted({number for number in ids if ids.count(number) > 1})
        if twice:
            raise ValueError(f"claim id {twice[0]} stands twice: give each claim its own")
        return self


def load_claims(path: Path) -> PaperValues:
    """Read and validate the YAML file; raises `UserError` naming the file and the field."""
    values: PaperValues = validated(PaperValues, read_yaml(path, "give the paper's values with --paper"), str(path))
    return values


@dataclass(frozen=True)
class Finding:
    """What our results say of a claim.

    ours: for a reader. values: by the claim's names. where: scale and hardware for a reader. scale: the same as
    values, compared with the claim's. estimated: from the cost model, not measured. missing: why it was not run.
    """

    ours: str = "-"
    values: Mapping[str, float] = field(default_factory=dict)
    where: str = "-"
    scale: Mapping[str, Scalar] = field(default_factory=dict)
    estimated: bool = False
    missing: str | None = None


def status(claim: Claim, finding: Finding) -> str:
    """One of `STATUSES`, ``not run`` with its reason.

    A number at another scale than the paper's is never "reproduced": at most "same trend".
    """
    if finding.missing is not None:
        return f"not run ({finding.missing})"
    if finding.estimated:
        return "estimated"
    if not trend_holds(claim, finding):
        return "contradicted"
    if claim.reproducible and _at_scale(claim, finding) and _close(claim, finding):
        return "reproduced"
    return "same trend"


def trend_holds(claim: Claim, finding: Finding) -> bool:
    """Whether every value that we have lies within the claim's bounds."""
    return all(bounds.holds(finding.values[name]) for name, bounds in claim.trend.items() if name in finding.values)


def _at_scale(claim: Claim, finding: Finding) -> bool:
    """Whether our setting is the paper's. Device names match by part: `A100` in `NVIDIA A100-SXM4-80GB`."""

    def same(key: str, wanted: Scalar) -> bool:
        have = finding.scale.get(key)
        return str(wanted) in str(have) if key == "device" else have == wanted

    return all(same(key, wanted) for key, wanted in claim.scale.items())


def _close(claim: Claim, finding: Finding) -> bool:
    """Whether all the paper's numbers are there and ours are within the relative tolerance."""
    return all(
        value.name in finding.values
        and math.isclose(finding.values[value.name], value.value, rel_tol=claim.tolerance, abs_tol=1e-12)
        for value in claim.values
    )
