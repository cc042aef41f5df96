"""The configuration of the data: where a graph comes from, how it is made coarse, which nodes train.

`megagraph.config` gives all of it on, so that the rest of the package knows one module.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

PositiveInt = Annotated[int, Field(ge=1)]
Identifier = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9-]*$")]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
FeatureNorm = Literal["none", "row", "standard"]


class Strict(BaseModel):
    """Base of everything that touches a disk: unknown keys refused, values frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DigitsConfig(Strict):
    """scikit-learn's handwritten digits with a symmetric k-nearest-neighbour graph."""

    source: Literal["digits"]
    neighbors: PositiveInt = 8
    feature_norm: FeatureNorm = "none"


class PublicConfig(Strict):
    """A public graph under its paper name; `MEGAGRAPH_MIRROR` may name a local copy of the raw files.

    `undirected` adds the inverse of every edge that lacks it, `self_loops` drops or keeps those of the raw files.
    `feature_norm` `row` divides a node's features by their absolute sum, `standard` gives every feature mean 0 and
    variance 1 over all nodes. `split` is the number of the data set's own split to carry along (only tolokers has
    more than number 0), or `none`.
    """

    source: Literal["products", "reddit", "reddit2", "citeseer", "computers", "arxiv", "cora", "tolokers", "wordnet"]
    undirected: bool = True
    self_loops: Literal["drop", "keep"] = "drop"
    feature_norm: FeatureNorm = "none"
    split: Annotated[int, Field(ge=0)] | Literal["none"] = 0

    @model_validator(mode="after")
    def _planetoid_is_undirected(self) -> Self:
        if self.source in ("citeseer", "cora") and not (self.undirected and self.self_loops == "drop"):
            raise ValueError(
                f"undirected={self.undirected}, self_loops={self.self_loops}: the loader of {self.source} makes edges "
                f"undirected and drops self-loops: set undirected: true and self_loops: drop"
            )
        return self


class PlantedConfig(Strict):
    """A degree-corrected planted partition: communities are the labels, degrees have a heavy tail."""

    source: Literal["planted"]
    nodes: PositiveInt
    communities: PositiveInt = 10
    average_degree: Annotated[float, Field(gt=0)] = 10.0
    homophily: Annotated[float, Field(ge=0, le=1)] = 0.75
    features: PositiveInt = 32
    feature_noise: Annotated[float, Field(ge=0)] = 1.0
    degree_exponent: Annotated[float, Field(gt=1)] = 2.5
    feature_norm: FeatureNorm = "none"
    seed: Seed = 0


DatasetConfig = Annotated[DigitsConfig | PublicConfig | PlantedConfig, Field(discriminator="source")]


class CoarseningConfig(Strict):
    """How the graph is made coarse; `ratio` is super nodes per node (0.1 keeps a tenth).

    `partition` is METIS, and KaMinPar for graphs of more than `kaminpar_above` stored directed edges (METIS needs
    some 100 bytes per edge). `label_propagation` makes as many parts in a few passes over the edges, less balanced and
    with more edges cut. `variation_neighborhoods` and `algebraic_jc` contract connected nodes (Loukas 2019),
    steered by `num_vectors` eigenvectors or smoothed test vectors; they miss the ratio where components are small.
    """

    method: Literal["partition", "label_propagation", "variation_neighborhoods", "algebraic_jc"] = "partition"
    ratio: Annotated[float, Field(gt=0, le=1)] = 0.1
    kaminpar_above: Annotated[int, Field(ge=0)] = 20_000_000
    num_vectors: PositiveInt = 10
    seed: Seed = 0


class SplitConfig(Strict):
    """Which nodes train: `random-60-20-20` by seed, or `official` (also called `public`), the data set's own masks."""

    rule: Literal["random-60-20-20", "official", "public"] = "random-60-20-20"
    seed: Seed = 0


class AdaptiveConfig(Strict):
    """EXP4-style learning of the heuristics' shares from validation attention (ans-gt 3), every `period` epochs.

    p_h = (1 - H p_min) w_h / sum(w) + p_min, and w_h grows by exp(rate (r_h + confidence / p_h)). It runs for
    `builder: ego` with two heuristics or more; elsewhere there is nothing to learn.
    """

    enabled: bool = True
    period: PositiveInt = 10
    p_min: Annotated[float, Field(ge=0, lt=0.25)] = 0.05
    rate: Annotated[float, Field(gt=0)] = 2.0
    confidence: Annotated[float, Field(ge=0)] = 0.01


class SamplingConfig(Strict):
    """What one sequence holds (`ego`): the centre and `num_sampled` nodes, the centre's super node and
    `num_super` more, the global tokens. N' = 1 + num_sampled, N_s = 1 + num_super + model.global_tokens.

    `union`: sequences of `seeds_per_sequence` centres, all read out, and `num_sampled` nodes drawn for each;
    N' = seeds_per_sequence (1 + num_sampled). Its super nodes are those of the sequence's nodes (`super_set: members`,
    at most N'), `all`, or the `num_super` that hold most of them (`top`).

    `heuristics` shares the draws among personalised PageRank, neighbours (`one_hop`), neighbours of neighbours
    (`two_hop`) and nodes with similar features (`knn`); `adaptive` learns the shares. `compat: ansgt` samples as
    ANS-GT ships (ans-gt 6): shares learned every 10000 epochs only, drawn from PageRank alone until then, PageRank of
    another matrix afterwards, short sequences completed with unrelated nodes, the first 9 sampled nodes rewarded."""

    builder: Literal["ego", "union"] = "ego"
    seeds_per_sequence: PositiveInt = 64
    super_set: Literal["members", "all", "top"] = "members"
    heuristics: dict[Literal["ppr", "one_hop", "two_hop", "knn"], Annotated[float, Field(gt=0)]] = {
        "ppr": 1.0,
        "one_hop": 1.0,
    }
    num_sampled: Annotated[int, Field(ge=0)] = 14
    num_super: Annotated[int, Field(ge=0)] = 0
    powers: Literal["global", "induced"] = "global"
    samples: PositiveInt = 1
    eval_samples: PositiveInt = 4
    ppr_restart: Annotated[float, Field(gt=0, lt=1)] = 0.15
    ppr_epsilon: Annotated[float, Field(gt=0)] = 1e-4
    adaptive: AdaptiveConfig = AdaptiveConfig()
    compat: Literal["none", "ansgt"] = "none"

    @model_validator(mode="after")
    def _some_heuristic(self) -> Self:
        if not self.heuristics:
            raise ValueError("heuristics={} names no source of nodes: give at least one, for example {ppr: 1.0}")
        return self

    @model_validator(mode="after")
    def _some_super_node(self) -> Self:
        if self.builder == "union" and self.super_set == "top" and self.num_super == 0:
            raise ValueError("super_set=top with num_super=0 keeps no super node: raise num_super or use members")
        return self

    @property
    def adapts(self) -> bool:
        """Whether the shares of the heuristics are learned."""
        return self.adaptive.enabled and self.builder == "ego" and len(self.heuristics) > 1

    @property
    def adaptive_period(self) -> int:
        """Epochs between two updates of the shares."""
        return 10_000 if self.compat == "ansgt" else self.adaptive.period

    @property
    def seeds(self) -> int:
        """R: read-out nodes of one sequence."""
        return self.seeds_per_sequence if self.builder == "union" else 1
