"""Hand-made cost models and profiles with known coefficients, and a simulator of pipelines."""

import itertools

import numpy as np
import pytest

from megagraph.artifacts import CommRow, ComputeRow, CostModel, HardwareProfile, MemoryRow, Timing, Workload
from megagraph.search.cost import (
    LAYER_TERMS,
    PARTS,
    REST_TERMS,
    cell_workload,
    last_layer_factor,
    layer_terms,
    rest_terms,
    update_terms,
    whole_model,
)
from megagraph.search.depth import Depth
from megagraph.search.memory import PRIOR, Stage, peak_bytes

WORKLOAD = Workload(
    batch=64,
    num_regular=15,
    num_super=2,
    num_readout=1,
    layers=4,
    heads=8,
    hidden=64,
    ffn=64,
    bias_channels=4,
    global_tokens=1,
    num_features=100,
    num_classes=10,
)
MEMORY = {**PRIOR, "constant": 3e6, "table_rows": 2000.0, "hidden": 10.5, "ffn": 2.5}
MEMORY |= {"bias": 1.5, "eager_gradients": 0.0}
GRID_FORWARD = {"fixed": 2e-4, "linear": 2e-11, "scores": 2e-11, "softmax": 2e-9, "token": 1e-9}
GRID_FORWARD |= {"rest_fixed": 3e-4, "rest_features": 5e-11, "rest_token": 2e-9}
GRID_BACKWARD = {name: 1.7 * value for name, value in GRID_FORWARD.items()}
UPDATE = {"fixed": 1e-4, "layer": 5e-5, "parameter": 2e-9}
HINGE = Depth("hinge", 8.0, 1.68, 8.0, 8.0)


def timing(seconds):
    return Timing(median=seconds, iqr=0.0, repeats=3)


@pytest.fixture(autouse=True)
def no_git(monkeypatch):
    """Hundreds of searches must not each start git for their provenance."""
    monkeypatch.setattr("megagraph.artifacts.git_commit", lambda: "test")


@pytest.fixture
def workload():
    return WORKLOAD


@pytest.fixture
def true_memory():
    return dict(MEMORY)


@pytest.fixture
def true_latency():
    return {"grid_forward": GRID_FORWARD, "grid_backward": GRID_BACKWARD, "update": UPDATE}


@pytest.fixture
def make_profile():
    """A profile of `workload` whose numbers follow the known coefficients."""

    def make(workload=WORKLOAD, degrees=(1, 2, 4), noise=0.0, seed=0, memory=True):
        rng = np.random.default_rng(seed)

        def noisy(value):
            return float(value * np.exp(noise * rng.standard_normal()))

        compute = []
        for cp, m in itertools.product(degrees, (8, 32, 128)):
            local = -(-workload.num_regular // cp) + workload.num_super
            seconds = {part: noisy(1e-4 * (i + 1) + 1e-5 * (i + 1) * m * local) for i, part in enumerate(PARTS)}
            rows = {part: timing(value) for part, value in seconds.items()}
            compute.append(ComputeRow(cp=cp, sequences=m, local_tokens=local, **rows))
        sizes = (1024, 65536, 1048576)
        comm = [CommRow(operation="p2p", ranks=2, bytes=n, seconds=timing(8e-5 + n / 2.5e9)) for n in sizes]
        for ranks in (2, 4):
            comm += [
                CommRow(operation="all_reduce", ranks=ranks, bytes=n, seconds=timing(ranks * (1e-4 + n / 1e9)))
                for n in sizes
            ]
        points = []
        ends = ((True, True), (True, False), (False, False), (False, True))
        if memory:
            for (first, last), n, cp, k in itertools.product(ends, (1, 2, 4), degrees, (1, 4)):
                stages = 1 if first and last else 2
                stage = Stage(workload, first, last, n, cp, max(1, 4 // (cp * stages)), k, 32)
                size = round(noisy(peak_bytes(MEMORY, stage)))
                points.append(
                    MemoryRow(first=first, last=last, layers=n, cp=cp, microbatches=k, sequences=32, peak_bytes=size)
                )
        return HardwareProfile(
            device="cpu",
            world_size=4,
            warmup=2,
            workload=workload,
            compute=tuple(compute),
            comm=tuple(comm),
            memory=tuple(points),
            memory_source="tracker",
        )

    return make


@pytest.fixture
def make_grid():
    """A grid whose times follow the known coefficients under a depth penalty."""

    def make(depth=HINGE, noise=0.0, seed=0, layers=(2, 4, 8, 16, 24, 32)):
        rng = np.random.default_rng(seed)
        rows = []
        for b, n, h, d in itertools.product((1, 2, 4, 8), layers, (4, 8, 16), (32, 64, 128)):
            w = WORKLOAD.model_copy(
                update={"batch": b, "layers": n, "heads": h, "hidden": d, "ffn": d, "num_regular": 63}
            )
            seconds = []
            for table in (GRID_FORWARD, GRID_BACKWARD):
                layer = layer_terms(w, 1, b) @ np.array([table[name] for name in LAYER_TERMS])
                layer *= last_layer_factor(w, 1, n)
                rest = rest_terms(w, 1, b) @ np.array([table[name] for name in REST_TERMS])
                seconds.append(float(depth.effective(n) * layer + rest) * np.exp(noise * rng.standard_normal()))
            update = float(update_terms(w, first=True, last=True, layers=n) @ np.array(list(UPDATE.values())))
            names = ("batch", "layers", "heads", "hidden", "ffn", "num_regular", "num_super", "bias_channels")
            row = {name: str(getattr(w, name)) for name in (*names, "num_features", "num_classes")}
            stage = whole_model(cell_workload(WORKLOAD, row))
            row |= {"peak_bytes": str(peak_bytes(MEMORY, stage)), "forward_seconds": str(seconds[0])}
            row |= {"backward_seconds": str(seconds[1]), "step_seconds": str(sum(seconds) + update)}
            rows.append(row)
        return rows

    return make


@pytest.fixture
def make_cost():
    """A random but plausible cost model for search tests."""

    def make(rng, workload, degrees=(1, 2, 3, 4)):
        compute = {}
        for cp in degrees:
            compute[str(cp)] = {
                f"{part}_{kind}": float(rng.uniform(0, 1) * scale * (8 if "embed" in part else 1))
                for part in PARTS
                for kind, scale in (("fixed", 1e-3), ("slope", 1e-3 / cp))
            }
        compute["update"] = {"fixed": 1e-4, "layer": float(rng.uniform(0, 1e-3)), "parameter": 1e-9}
        p2p = ((1e3, 1e-4), (1e6, float(rng.uniform(1e-4, 2e-2))))
        reduce = {f"all_reduce/{n}": ((1e3, 1e-4), (1e6, float(rng.uniform(1e-4, 1e-2)))) for n in (2, 4)}
        memory = {name: value * float(rng.uniform(0.3, 2)) for name, value in PRIOR.items()}
        memory |= {"constant": 1e5, "table_rows": float(rng.uniform(0, 2000)), "eager_gradients": 0.0}
        form = ("none", "hinge", "jump")[rng.integers(3)]
        depth = Depth(form, float(rng.integers(1, 5)), float(rng.uniform(1, 2)))
        return CostModel(
            device="test",
            world_size=4,
            workload=workload,
            memory=memory,
            compute=compute,
            comm={"p2p": p2p, **reduce},
            depth=depth.stored(),
            quality={},
            valid={},
        )

    return make


@pytest.fixture
def simulate():
    """Discrete-event pipeline, written independently of the package: each stage works through its own list of passes,
    a message takes the link after the one before it; returns the end of the last update."""

    def passes(num_stages, stage, microbatches, schedule):
        forwards, backwards = [("f", k) for k in range(microbatches)], [("b", k) for k in range(microbatches)]
        if schedule == "gpipe":
            return forwards + backwards
        ahead = min(microbatches, num_stages - stage)
        pairs = itertools.zip_longest(backwards, forwards[ahead:])
        return forwards[:ahead] + [one for pair in pairs for one in pair if one]

    def run(f, b, a, microbatches, link_forward=0.0, link_backward=0.0, schedule="gpipe"):
        num_stages = len(f)
        todo = [passes(num_stages, stage, microbatches, schedule) for stage in range(num_stages)]
        free, links = [0.0] * num_stages, {}
        arrived = {("f", 0, k): 0.0 for k in range(microbatches)}
        while any(todo):
            stage = next(s for s, own in enumerate(todo) if own and (own[0][0], s, own[0][1]) in arrived)
            kind, k = todo[stage].pop(0)
            free[stage] = max(free[stage], arrived[kind, stage, k]) + (f if kind == "f" else b)[stage]
            if kind == "f" and stage == num_stages - 1:
                arrived["b", stage, k] = free[stage]
                continue
            delay, to = (link_forward, stage + 1) if kind == "f" else (link_backward, stage - 1)
            links[kind, stage] = max(links.get((kind, stage), 0.0), free[stage]) + delay
            arrived[kind, to, k] = links[kind, stage]
        return max(end + own for end, own in zip(free, a, strict=True))

    return run
