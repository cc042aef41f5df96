"""What can be known of a graph and of its sequences without their numbers.

Shapes: V nodes, S super nodes, F features, C classes; N' regular tokens, N_s super nodes and global tokens, R read-out
tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megagraph.config import SamplingConfig, UserError
from megagraph.graph.store import read_header


@dataclass(frozen=True)
class GraphSizes:
    """V, S, F and C."""

    num_nodes: int
    num_super: int
    num_features: int
    num_classes: int

    @classmethod
    def read(cls, folder: Path, coarsening: str) -> GraphSizes:
        """From the headers of the files that `download` and `coarsen` wrote into `folder`, however large they are."""
        graph, metadata = read_header(folder / "graph.safetensors", "megagraph.graph/1")
        coarse, _ = read_header(folder / f"{coarsening}.safetensors", "megagraph.coarsening/1")
        (num_nodes, num_features), (num_super, _) = graph["features"], coarse["features"]
        return cls(num_nodes, num_super, num_features, int(metadata["num_classes"]))


@dataclass(frozen=True)
class TokenCounts:
    """N', N_s and R."""

    num_regular: int
    num_super: int
    num_readout: int


def count_tokens(sampling: SamplingConfig, global_tokens: int, num_nodes: int, num_super: int) -> TokenCounts:
    """Tokens of a sequence over a graph of V nodes and S super nodes.

    Raises `UserError` where a sequence needs more distinct nodes than the graph has.
    """
    if sampling.builder == "ego":
        return TokenCounts(1 + sampling.num_sampled, 1 + sampling.num_super + global_tokens, 1)
    seeds = sampling.seeds_per_sequence
    regular = seeds * (1 + sampling.num_sampled)
    if regular > num_nodes:
        raise UserError(
            f"sampling.seeds_per_sequence={seeds} with num_sampled={sampling.num_sampled} needs {regular} distinct "
            f"nodes but the graph has {num_nodes}: lower one of them"
        )
    most = {"members": regular, "all": num_super, "top": sampling.num_super}[sampling.super_set]
    return TokenCounts(regular, min(most, num_super) + global_tokens, seeds)
