"""Everything under ``results/`` that the report speaks from, read once and without failing on what is not there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from megagraph.artifacts import (
    CostModel,
    GraphManifest,
    HardwareProfile,
    Provenance,
    RunSummary,
)
from megagraph.artifacts_search import SearchResult
from megagraph.config import RunConfig, UserError
from megagraph.figures.data import EPOCH_COLUMNS, read_config, read_table


@dataclass(frozen=True)
class Evidence:
    """The artifacts and drawn figures of a results folder. Broken files raise `UserError`; missing ones are absent."""

    results: Path

    @cached_property
    def summaries(self) -> dict[str, RunSummary]:
        """Every training run by its id; `UserError` if there is none."""
        found = {path.parent.name: RunSummary.load(path) for path in sorted(self.results.glob("train/*/summary.json"))}
        if not found:
            raise UserError(f"{self.results}/train/*/summary.json: no such files: make one with `megagraph train`")
        return found

    def summary(self, run: str) -> RunSummary:
        """The summary of a run that a drawn figure names; `UserError` if it has gone since."""
        if run not in self.summaries:
            raise UserError(
                f"{self.results}/train/{run}/summary.json: no such file, but a figure shows it: draw it again"
            )
        return self.summaries[run]

    @cached_property
    def run_configs(self) -> dict[str, RunConfig]:
        """The configuration of every run that has one on disk."""
        return {path.stem: read_config(RunConfig, path) for path in sorted(self.results.glob("config/run/*.json"))}

    @cached_property
    def profiles(self) -> dict[str, HardwareProfile]:
        """Every profile by its run."""
        return {p.parent.name: HardwareProfile.load(p) for p in sorted(self.results.glob("search/*/profile.json"))}

    @cached_property
    def costs(self) -> dict[str, CostModel]:
        """Every fitted cost model by its run."""
        return {p.parent.name: CostModel.load(p) for p in sorted(self.results.glob("search/*/cost.json"))}

    @cached_property
    def searches(self) -> dict[str, SearchResult]:
        """Every search by its run."""
        return {p.parent.name: SearchResult.load(p) for p in sorted(self.results.glob("search/*/search.json"))}

    def figure(self, name: str) -> pd.DataFrame | None:
        """The drawn data of a figure; None if it was not drawn."""
        path = self.results / "figures" / f"{name}.csv"
        return read_table(path, (), f"figure {name}") if path.is_file() else None

    def training_seconds(self, run: str) -> float:
        """Seconds in all epochs of a run; NaN without its epochs.csv."""
        path = self.results / "train" / run / "epochs.csv"
        return float(read_table(path, EPOCH_COLUMNS, "train")["seconds"].sum()) if path.is_file() else float("nan")

    @cached_property
    def provenance(self) -> dict[str, Provenance]:
        """Where every artifact comes from, by its path under the results folder."""
        manifests = {
            f"data/{path.parent.name}/manifest.json": GraphManifest.load(path).provenance
            for path in sorted(self.results.glob("data/*/manifest.json"))
        }
        return {
            **manifests,
            **{f"search/{run}/profile.json": artifact.provenance for run, artifact in self.profiles.items()},
            **{f"search/{run}/cost.json": artifact.provenance for run, artifact in self.costs.items()},
            **{f"search/{run}/search.json": artifact.provenance for run, artifact in self.searches.items()},
            **{f"train/{run}/summary.json": artifact.provenance for run, artifact in self.summaries.items()},
        }

    @cached_property
    def commits(self) -> dict[str, list[str]]:
        """Files by the commit of the source that made them."""
        found: dict[str, list[str]] = {}
        for path, origin in self.provenance.items():
            found.setdefault(origin.commit, []).append(path)
        for table in sorted([*self.results.glob("search/*/grid-*.csv"), *self.results.glob("search/*/plans.csv")]):
            for commit in read_table(table, ("commit",), "profile")["commit"].astype(str).unique():
                found.setdefault(commit, []).append(str(table.relative_to(self.results)))
        return found


def describe(summary: RunSummary, config: RunConfig | None) -> str:
    """Scale and hardware of a run: data set, model, B, N, samples per node, ranks, device."""
    layers = f"L={sum(summary.plan.layers)}"
    model = f"{layers}, D={config.model.hidden}, H={config.model.heads}" if config else layers
    return (
        f"{summary.dataset}, {model}, B={summary.sequences_per_step}, N={summary.num_tokens}, "
        f"{summary.samples_per_node} sample(s) per node, W={summary.plan.world_size}, {hardware(summary.provenance)}"
    )


def hardware(origin: Provenance) -> str:
    """Device and threads per rank."""
    return f"{origin.device or 'device not recorded'}, {origin.threads} thread(s) per rank"


def scale_of(summary: RunSummary, config: RunConfig | None) -> dict[str, float | int | str]:
    """What `Claim.scale` is compared with."""
    scale: dict[str, float | int | str] = {
        "dataset": summary.dataset,
        "device": summary.provenance.device,
        "layers": sum(summary.plan.layers),
        "batch": summary.sequences_per_step,
        "world_size": summary.plan.world_size,
    }
    return scale | {"hidden": config.model.hidden, "heads": config.model.heads} if config else scale


def is_estimated(sources: Sequence[str]) -> bool:
    """Whether any memory number was predicted without being measured, by its stated source."""
    return any(word in source.lower() for source in sources for word in ("estimat", "predict"))
