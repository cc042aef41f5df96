"""A small planted graph, in files or in memory, and one training step of the real engine on it: loss, reduced gradients
and weights of a rank."""

import numpy as np

from megagraph.config import CoarseningConfig, ModelConfig, PlantedConfig, SamplingConfig
from megagraph.graph.coarsen import coarsen
from megagraph.graph.planted import planted
from megagraph.graph.store import save_coarsening, save_graph

CENTRES = 22
UNION = SamplingConfig(builder="union", seeds_per_sequence=5, num_sampled=1, powers="induced", samples=2)
EGO = SamplingConfig(num_sampled=6, samples=2)


def make_planted(**keys):
    """A graph of 120 nodes, `keys` of its configuration beside, and its coarsening."""
    graph = planted("small", PlantedConfig(source="planted", nodes=120, communities=3, features=8, **keys))
    return graph, coarsen(graph, CoarseningConfig(ratio=0.1))


def write_planted(folder, **keys):
    """`make_planted` as the files of a data set; returns the graph."""
    graph, coarsening = make_planted(**keys)
    save_graph(graph, folder / "graph.safetensors")
    save_coarsening(coarsening, folder / "default.safetensors")
    return graph


def make_data():
    from megagraph.train.engine import Data

    return Data(*make_planted())


def make_engine(data, mesh, *, sampling=EGO, layers=4, **settings):
    """An engine whose weights are large enough that every path matters."""
    import torch

    from megagraph.train.engine import Engine, EngineConfig

    model = ModelConfig(layers=layers, heads=4, hidden=16, ffn=24, bias_channels=3)
    defaults = {"attention": "tiled", "dtype": "float64", "seed": 3, "peak_lr": 1e-2}
    engine = Engine(EngineConfig(model, sampling, **{**defaults, **settings}), data, mesh)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.mul_(20.0 if parameter.ndim > 1 else 1.0)
    return engine


def centres(count=CENTRES):
    return np.random.default_rng(0).permutation(120)[:count]


def gradients_of(engine):
    return {name: p.grad.double().numpy().copy() for name, p in engine.model.named_parameters()}


def relative_error(got, expected):
    """Norm of the difference over the norm, of all named arrays together."""
    difference = sum(np.square(got[name] - expected[name]).sum() for name in got)
    return float(np.sqrt(difference / sum(np.square(expected[name]).sum() for name in got)))


def assert_close(got, expected, tolerance):
    for name, value in got.items():
        bound = tolerance * (1 + np.abs(expected[name]).max())
        assert np.abs(value - expected[name]).max() <= bound, name


def step(data, plan, count=CENTRES, **settings):
    """(loss, gradients, (type, logits) of a prediction on the last stage) of this rank after one step."""
    return steps(data, plan, [(count, settings)])[0]


def steps(data, plan, cases):
    """`step` of each (count of centres, settings), each from new weights."""
    from megagraph.parallel.mesh import make_mesh, process_group

    with process_group(plan.world_size, "cpu", 60.0):
        mesh = make_mesh(plan, "cpu", 60.0)
        return [_step(data, mesh, count, settings) for count, settings in cases]


def _step(data, mesh, count, settings):
    import torch.distributed as dist

    engine = make_engine(data, mesh, **settings)
    samples = engine.config.sampling.samples
    makers = engine.step_makers(centres(count), CENTRES, 1, samples, 7)
    loss = engine.train_step((make() for make in makers), float(count * samples))
    dist.all_reduce(loss)
    gradients = gradients_of(engine)
    logits = engine.pipeline.predict(engine.microbatches(centres(count), CENTRES, -1, samples, None))
    return loss.item(), gradients, None if logits is None else (str(logits.dtype), logits.double().numpy())
