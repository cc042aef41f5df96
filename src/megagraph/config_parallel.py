"""The configuration of the layout: a parallel plan, and where and how a run runs.

`megagraph.config` gives all of it on, so that the rest of the package knows one module.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megagraph.config_data import PositiveInt, Strict
from megagraph.config_search import SearchConfig


class UserError(ValueError):
    """A mistake in the input: value, rule and remedy in one line; the command line exits with 2."""


class ParallelPlan(Strict):
    """A parallel layout: degrees, the number of layers on each pipeline stage, micro-batches per step.

    `recompute` counts, per stage, the layers whose activations are made again in backward instead of kept.
    """

    pp: PositiveInt = 1
    cp: PositiveInt = 1
    dp: PositiveInt = 1
    layers: tuple[PositiveInt, ...]
    microbatches: PositiveInt = 1
    schedule: Literal["gpipe", "1f1b"] = "gpipe"
    recompute: tuple[Annotated[int, Field(ge=0)], ...] = ()

    @model_validator(mode="after")
    def _one_count_per_stage(self) -> Self:
        if self.schedule == "1f1b" and self.microbatches < self.pp:
            raise ValueError(
                f"schedule=1f1b needs at least pp={self.pp} micro-batches but microbatches={self.microbatches}: "
                f"raise it, or use schedule: gpipe"
            )
        if self.recompute and len(self.recompute) != self.pp:
            raise ValueError(
                f"recompute={list(self.recompute)} has {len(self.recompute)} stages but pp={self.pp}: "
                f"give one count per stage"
            )
        for stage, (again, owned) in enumerate(zip(self.recompute, self.layers, strict=False)):
            if again > owned:
                raise ValueError(f"recompute={again} on stage {stage} exceeds its layers={owned}: lower it")
        if len(self.layers) != self.pp:
            raise ValueError(
                f"layers={list(self.layers)} has {len(self.layers)} stages but pp={self.pp}: give one count per stage"
            )
        return self

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.cp * self.dp

    @property
    def label(self) -> str:
        """Short name for tables, for example ``pp2[1,3] cp1 dp2 k4``."""
        stages = ",".join(map(str, self.layers))
        schedule = " 1f1b" if self.schedule == "1f1b" else ""
        recompute = f" r[{','.join(map(str, self.recompute))}]" if any(self.recompute) else ""
        return f"pp{self.pp}[{stages}] cp{self.cp} dp{self.dp} k{self.microbatches}{schedule}{recompute}"

    def check(self, num_layers: int) -> None:
        """Raise `UserError` unless the stages hold exactly the model's layers."""
        if sum(self.layers) != num_layers:
            raise UserError(
                f"plan layers={list(self.layers)} sum to {sum(self.layers)} but model.layers={num_layers}: "
                f"give counts that sum to {num_layers}"
            )


class ParallelConfig(Strict):
    """Where a run runs: number of ranks and nodes, the plan (`search` asks the search for one), memory per rank.

    Over cp ranks, `attention: tiled` is GA-CP with the `exchange` named (`allgather` where messages are short), and
    `all_to_all` the TorchGT baseline. `backend` chooses the kernel: `auto` is `tiled`, in compiled loops
    for short sequences on a CPU; `flex` and `triton` need CUDA.
    The table of `model.node_embedding` is `sharded` by rows over the first stage's cp x dp ranks, or `replicated`.
    """

    world_size: PositiveInt = 1
    nodes: PositiveInt = 1
    plan: ParallelPlan | Literal["search"] = "search"
    attention: Literal["dense", "tiled", "all_to_all"] = "tiled"
    exchange: Literal["ring", "allgather"] = "ring"
    backend: Literal["auto", "tiled", "flex", "triton"] = "auto"
    node_table: Literal["replicated", "sharded"] = "sharded"
    memory_limit_gb: Annotated[float, Field(gt=0)] = 8.0
    microbatches: tuple[PositiveInt, ...] = (1, 2, 4)
    timeout_seconds: Annotated[float, Field(gt=0)] = 300.0
    search: SearchConfig = SearchConfig()

    @model_validator(mode="after")
    def _plan_fits_ranks(self) -> Self:
        if self.world_size % self.nodes:
            raise ValueError(f"world_size={self.world_size} does not divide over nodes={self.nodes}: change one")
        ranks = sum(device.count for device in self.search.devices)
        if ranks and ranks != self.world_size:
            raise ValueError(
                f"search.devices have {ranks} ranks but world_size={self.world_size}: give counts that sum to it"
            )
        if isinstance(self.plan, ParallelPlan):
            if self.plan.world_size != self.world_size:
                raise ValueError(
                    f"plan {self.plan.label} needs {self.plan.world_size} ranks but world_size={self.world_size}: "
                    f"set world_size to {self.plan.world_size}"
                )
            if self.attention == "dense" and self.plan.cp > 1:
                raise ValueError(f"attention=dense cannot be sharded over cp={self.plan.cp}: use attention: tiled")
        return self
