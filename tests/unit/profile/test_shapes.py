"""What has no numbers has the shapes and types of what has."""

from dataclasses import fields

import numpy as np
import pytest

from megagraph.config import CoarseningConfig, ModelConfig, PlantedConfig, SamplingConfig, UserError
from megagraph.graph.coarsen import coarsen
from megagraph.graph.planted import planted
from megagraph.graph.sizes import GraphSizes, count_tokens
from megagraph.graph.store import save_coarsening, save_graph
from megagraph.profile.shapes import ShapeData
from megagraph.train.engine import Data, EngineConfig

UNION = {"builder": "union", "seeds_per_sequence": 4, "num_super": 2}
SAMPLING = [{"num_super": 2}, *({**UNION, "super_set": kind} for kind in ("members", "all", "top"))]


@pytest.fixture(scope="module")
def data():
    graph = planted("small", PlantedConfig(source="planted", nodes=60, communities=3, features=5))
    return Data(graph, coarsen(graph, CoarseningConfig(ratio=0.1)))


@pytest.fixture(scope="module")
def sizes(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    save_graph(data.graph, folder / "graph.safetensors")
    save_coarsening(data.coarsening, folder / "default.safetensors")
    return GraphSizes.read(folder, "default")


def test_sizes_come_from_the_headers(data, sizes):
    assert sizes == GraphSizes(60, data.coarsening.num_super, 5, 3)


@pytest.mark.parametrize("sampling", SAMPLING, ids=lambda options: options.get("super_set", "ego"))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_batches_have_the_shapes_of_real_ones(data, sizes, sampling, dtype):
    model = ModelConfig(bias_channels=3, global_tokens=2)
    config = EngineConfig(model, SamplingConfig(num_sampled=3, **sampling), "tiled", dtype, seed=0)
    real, hollow = data.builder(config), ShapeData.of(sizes).builder(config)
    counts = [(one.num_regular, one.num_super, one.num_readout) for one in (real, hollow)]
    assert counts[0] == counts[1]
    assert tuple(hollow.features.shape) == real.features.shape
    assert str(hollow.features.dtype) == f"torch.{real.features.dtype}"
    nodes = np.arange(8)
    for regular in (None, slice(1, 3)):
        rule = {"stream": 0, "samples": 2, "first_sequence": 5, "regular": regular}
        batches = [builder.build(nodes, **rule) for builder in (real, hollow)]
        for field in fields(batches[0]):
            one, other = (getattr(batch, field.name) for batch in batches)
            assert (one.shape, one.dtype) == (other.shape, other.dtype), field.name


def test_a_sequence_larger_than_the_graph_is_one_line():
    sampling = SamplingConfig(builder="union", seeds_per_sequence=40, num_sampled=3)
    with pytest.raises(UserError, match="needs 160 distinct nodes but the graph has 60"):
        count_tokens(sampling, 1, 60, 6)
