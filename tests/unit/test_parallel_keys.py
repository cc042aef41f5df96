"""Keys of the attention backend: defaults keep old files valid, contradictions are refused in one line."""

import pytest

from megagraph.config import ModelConfig, ParallelConfig, RunConfig


def test_defaults():
    parallel = ParallelConfig()
    assert (parallel.attention, parallel.exchange, parallel.backend) == ("tiled", "ring", "auto")


def test_all_to_all_needs_ranks_that_divide_heads():
    spec = {
        "id": "a",
        "dataset": "d",
        "model": {"layers": 1, "heads": 8},
        "parallel": {"world_size": 3, "attention": "all_to_all", "plan": {"cp": 3, "layers": [1]}},
    }
    with pytest.raises(ValueError, match="heads=8 over cp=3"):
        RunConfig.model_validate(spec)
    spec["parallel"] = {"world_size": 4, "attention": "all_to_all", "plan": {"cp": 4, "layers": [1]}}
    assert RunConfig.model_validate(spec).parallel.attention == "all_to_all"


def test_a_node_embedding_is_off_by_default_and_belongs_to_transformers():
    assert (ModelConfig().node_embedding, ParallelConfig().node_table) == (False, "sharded")
    with pytest.raises(ValueError, match=r"node_embedding=true .* arch=gcn: remove it"):
        ModelConfig(arch="gcn", node_embedding=True)
