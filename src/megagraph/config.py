"""The configuration: what a person writes in ``config/*.yaml`` and what a rule hands to a verb.

One YAML file is one `Experiment`. `Experiment.run(id)` merges the file's ``defaults`` with the overrides of one
run into a `RunConfig`, the only thing training reads. Everything here is pure: no file, no torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from megagraph.config_checked import one_line, validated
from megagraph.config_data import (
    AdaptiveConfig,
    CoarseningConfig,
    DatasetConfig,
    DigitsConfig,
    FeatureNorm,
    Identifier,
    PlantedConfig,
    PositiveInt,
    PublicConfig,
    SamplingConfig,
    Seed,
    SplitConfig,
    Strict,
)
from megagraph.config_parallel import ParallelConfig, ParallelPlan, UserError
from megagraph.config_profile import GridConfig, ProfileConfig

__all__ = [
    "AdaptiveConfig",
    "CoarseningConfig",
    "DatasetConfig",
    "DigitsConfig",
    "FeatureNorm",
    "GridConfig",
    "ParallelConfig",
    "ParallelPlan",
    "PlantedConfig",
    "ProfileConfig",
    "PublicConfig",
    "SamplingConfig",
    "Seed",
    "SplitConfig",
    "UserError",
    "one_line",
    "validated",
]

Probability = Annotated[float, Field(ge=0.0, lt=1.0)]
Autocast = Literal["none", "bfloat16"]


class ModelConfig(Strict):
    """The hierarchical graph transformer (`hierarchical`) or a graph convolution control (`gcn`).

    `node_embedding` adds a learned row to the projected features of each real node (super nodes have none);
    `parallel.node_table` says where the |V| x hidden table is held.
    """

    arch: Literal["hierarchical", "gcn"] = "hierarchical"
    layers: PositiveInt = 4
    heads: PositiveInt = 8
    hidden: PositiveInt = 64
    ffn: PositiveInt = 64
    bias_channels: PositiveInt = 4
    global_tokens: Annotated[int, Field(ge=0)] = 1
    input_dropout: Probability = 0.1
    residual_dropout: Probability = 0.3
    attention_dropout: Probability = 0.5
    node_embedding: bool = False

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.hidden % self.heads:
            raise ValueError(f"hidden={self.hidden} is not a multiple of heads={self.heads}: change one of them")
        if self.node_embedding and self.arch == "gcn":
            raise ValueError("node_embedding=true belongs to graph transformers but arch=gcn: remove it")
        return self


class TrainConfig(Strict):
    """Optimisation. `batch` counts centres per step over all replicas, computed in `accumulate` passes one after the
    other: the same numbers in less memory. The schedule is linear warm-up, then linear decay to `end_lr`, stepped once
    per epoch. `prefetch` makes the next pass's sequences in a thread. `autocast: bfloat16` computes layers in half
    precision; weights, optimiser and sums stay float32. A checkpoint is saved every `checkpoint_every` epochs and every
    `checkpoint_steps` steps of the run, if given; the last `keep_checkpoints` stay."""

    batch: PositiveInt = 1024
    accumulate: PositiveInt = 1
    epochs: PositiveInt = 100
    peak_lr: Annotated[float, Field(gt=0)] = 2e-4
    end_lr: Annotated[float, Field(ge=0)] = 1e-9
    warmup_epochs: Annotated[int, Field(ge=0)] = 10
    weight_decay: Annotated[float, Field(ge=0)] = 0.01
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    seed: Seed = 0
    eval_every: PositiveInt = 1
    checkpoint_every: PositiveInt = 10
    checkpoint_steps: PositiveInt | None = None
    keep_checkpoints: PositiveInt = 1
    prefetch: bool = True
    dtype: Literal["float32", "float64"] = "float32"
    autocast: Autocast = "none"

    @model_validator(mode="after")
    def _one_precision(self) -> Self:
        if self.autocast != "none" and self.dtype == "float64":
            raise ValueError(
                f"autocast={self.autocast} keeps weights in float32 but dtype={self.dtype}: "
                f"use dtype: float32, or autocast: none"
            )
        return self


class WorkloadConfig(Strict):
    """The part of a run that its cost depends on: changing a learning rate does not measure the machine again.

    `batch` counts sequences of a pass, of which an optimiser step has `accumulate`.
    """

    id: Identifier
    dataset: Identifier
    coarsening: Identifier
    device: Literal["cpu", "cuda"]
    sampling: SamplingConfig
    model: ModelConfig
    parallel: ParallelConfig
    profile: ProfileConfig
    batch: PositiveInt
    accumulate: PositiveInt = 1
    dtype: Literal["float32", "float64"]
    autocast: Autocast = "none"


class RunConfig(Strict):
    """One training run, complete: what `megagraph train` reads."""

    id: Identifier
    system: Literal["megagraph", "gcn"] = "megagraph"
    dataset: Identifier
    coarsening: Identifier = "default"
    device: Literal["cpu", "cuda"] = "cpu"
    split: SplitConfig = SplitConfig()
    sampling: SamplingConfig = SamplingConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    parallel: ParallelConfig = ParallelConfig()
    profile: ProfileConfig = ProfileConfig()

    @model_validator(mode="after")
    def _system_fits(self) -> Self:
        if (self.system == "gcn") != (self.model.arch == "gcn"):
            raise ValueError(
                f"system={self.system} cannot have model.arch={self.model.arch}: set both to gcn or neither"
            )
        plan = self.parallel.plan
        if isinstance(plan, ParallelPlan) and sum(plan.layers) != self.model.layers:
            raise ValueError(
                f"plan layers={list(plan.layers)} sum to {sum(plan.layers)} but model.layers={self.model.layers}: "
                f"give counts that sum to {self.model.layers}"
            )
        if isinstance(plan, ParallelPlan) and self.parallel.attention == "all_to_all" and self.model.heads % plan.cp:
            raise ValueError(
                f"attention=all_to_all cannot divide heads={self.model.heads} over cp={plan.cp}: "
                f"choose cp among the divisors of heads"
            )
        if self.system == "gcn" and self.parallel.world_size != 1:
            raise ValueError(f"system=gcn trains on one rank but world_size={self.parallel.world_size}: set it to 1")
        if self.system == "gcn" and self.train.autocast != "none":
            raise ValueError(f"system=gcn trains in float32 but train.autocast={self.train.autocast}: set it to none")
        return self

    @model_validator(mode="after")
    def _passes_fit(self) -> Self:
        accumulate = self.train.accumulate
        if accumulate > self._sequences:
            raise ValueError(
                f"train.accumulate={accumulate} exceeds the {self._sequences} sequences of a step "
                f"(train.batch={self.train.batch}): lower it, or raise the batch"
            )
        if self.system == "gcn" and accumulate > 1:
            raise ValueError(f"system=gcn takes whole-graph steps but train.accumulate={accumulate}: set it to 1")
        return self

    @property
    def _sequences(self) -> int:
        return -(-self.train.batch // self.sampling.seeds)

    @property
    def workload(self) -> WorkloadConfig:
        """What profile, fit and search of this run depend on."""
        return WorkloadConfig(
            id=self.id,
            dataset=self.dataset,
            coarsening=self.coarsening,
            device=self.device,
            sampling=self.sampling,
            model=self.model,
            parallel=self.parallel,
            profile=self.profile,
            batch=-(-self._sequences // self.train.accumulate) * self.sampling.samples,
            accumulate=self.train.accumulate,
            dtype=self.train.dtype,
            autocast=self.train.autocast,
        )


class FigureConfig(Strict):
    """A figure or table: the runs it draws and the run whose profile and search it shows."""

    runs: tuple[Identifier, ...] = ()
    search: Identifier | None = None


FigureName = Literal["fig8b", "fig9a", "fig9b", "fig10", "table1"]


class Experiment(Strict):
    """A whole ``config/*.yaml``: data sets, coarsenings, runs as overrides of `defaults`, figures."""

    title: str
    gpus: Annotated[int, Field(ge=0)] = 0
    gpu_memory_gb: Annotated[float, Field(ge=0)] = 0.0
    datasets: dict[Identifier, DatasetConfig]
    coarsenings: dict[Identifier, CoarseningConfig] = {"default": CoarseningConfig()}
    defaults: dict[str, Any] = {}
    runs: dict[Identifier, dict[str, Any]]
    figures: dict[FigureName, FigureConfig] = {}

    @model_validator(mode="after")
    def _names_resolve(self) -> Self:
        for run_id in self.runs:
            run = self.run(run_id)
            if run.dataset not in self.datasets:
                raise ValueError(f"run {run_id}: dataset={run.dataset} is not in datasets {sorted(self.datasets)}")
            if run.coarsening not in self.coarsenings:
                raise ValueError(f"run {run_id}: coarsening={run.coarsening} is not in {sorted(self.coarsenings)}")
            for other in run.profile.heldout_runs:
                if other not in self.runs or other == run_id:
                    raise ValueError(f"run {run_id}: heldout_runs={other}: name other runs of {sorted(self.runs)}")
        for name, figure in self.figures.items():
            for run_id in (*figure.runs, *([figure.search] if figure.search else [])):
                if run_id not in self.runs:
                    raise ValueError(f"figure {name}: run {run_id} is not in runs {sorted(self.runs)}")
        return self

    def run(self, run_id: str) -> RunConfig:
        """The complete configuration of one run: `defaults`, deep-merged with the run's own keys."""
        if run_id not in self.runs:
            raise UserError(f"run {run_id!r} is not in runs {sorted(self.runs)}: name one of them")
        try:
            return RunConfig.model_validate({"id": run_id, **deep_merge(self.defaults, self.runs[run_id])})
        except ValidationError as error:
            raise ValueError(f"run {run_id}: {one_line(error)}") from None


def deep_merge(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """`override` on top of `base`; mappings are merged key by key, everything else is replaced."""
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        merged[key] = deep_merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def load_experiment(raw: dict[str, Any], where: str = "") -> Experiment:
    """The experiment described by a parsed YAML file; `UserError` in one line, with `where` it stands."""
    experiment: Experiment = validated(Experiment, raw, where)
    return experiment
