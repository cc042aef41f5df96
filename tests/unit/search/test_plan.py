import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagraph.artifacts import CostModel, SearchResult, Workload
from megagraph.config import ParallelPlan, UserError
from megagraph.search import plan as plan_module
from megagraph.search.cost import PARTS, role_index, stage_costs
from megagraph.search.depth import Depth
from megagraph.search.memory import PRIOR, peak_bytes, stage_of
from megagraph.search.plan import list_cells, num_partitions, partitions, search


def small_workload(rng):
    heads = int(rng.choice([2, 4]))
    return Workload(
        batch=int(rng.integers(1, 40)),
        num_regular=int(rng.integers(1, 40)),
        num_super=int(rng.integers(1, 5)),
        num_readout=1,
        layers=int(rng.integers(1, 8)),
        heads=heads,
        hidden=heads * int(rng.choice([4, 16])),
        ffn=int(rng.choice([32, 128])),
        bias_channels=4,
        global_tokens=1,
        num_features=int(rng.integers(4, 500)),
        num_classes=5,
        attention=str(rng.choice(["dense", "tiled"])),
    )


def every_plan(w, world_size, ks):
    """All plans by plain nested loops over compositions found by filtering."""
    for pp, cp, dp in itertools.product(range(1, world_size + 1), repeat=3):
        if pp * cp * dp != world_size or cp > w.num_regular or (w.attention == "dense" and cp > 1) or dp > w.batch:
            continue
        for k in ks:
            if k > -(-w.batch // dp):
                continue
            for layers in itertools.product(range(1, w.layers + 1), repeat=pp):
                if sum(layers) == w.layers:
                    yield ParallelPlan(pp=pp, cp=cp, dp=dp, layers=layers, microbatches=k)


def simulated(cost, w, plan, simulate):
    table = stage_costs(cost, w, plan.pp, plan.cp, plan.dp, plan.microbatches)
    roles = [role_index(s == 0, s == plan.pp - 1) for s in range(plan.pp)]
    f, b, a = (
        [float(part[role, n]) for role, n in zip(roles, plan.layers, strict=True)]
        for part in (table.forward, table.backward, table.update)
    )
    return simulate(f, b, a, plan.microbatches, table.link, table.link)


def test_partition_counts():
    for num_layers, num_stages, count in ((24, 4, 1771), (32, 4, 4495), (5, 1, 1), (3, 3, 1), (9, 2, 8)):
        rows = np.concatenate(list(partitions(num_layers, num_stages)))
        assert len(rows) == len({tuple(row) for row in rows}) == num_partitions(num_layers, num_stages) == count
        assert rows.shape[1] == num_stages
        assert (rows >= 1).all()
        assert (rows.sum(axis=1) == num_layers).all()


def test_partitions_are_cut_into_chunks(monkeypatch):
    whole = np.concatenate(list(partitions(12, 4)))
    monkeypatch.setattr(plan_module, "CHUNK", 10)
    chunks = list(partitions(12, 4))
    assert max(map(len, chunks)) == 10
    np.testing.assert_array_equal(np.concatenate(chunks), whole)


def test_search_equals_brute_force_with_the_simulator(make_cost, simulate):
    rng = np.random.default_rng(0)
    infeasible = 0
    for _ in range(200):
        w, world_size = small_workload(rng), int(rng.integers(1, 5))
        cost = make_cost(rng, w)
        ks = tuple(int(k) for k in rng.choice([1, 2, 3, 4, 8], size=2, replace=False))
        plans = list(every_plan(w, world_size, ks))
        if not plans:
            with pytest.raises(UserError, match="no layout"):
                search(w, world_size, 1e12, ks, cost)
            continue
        peaks = [max(peak_bytes(cost.memory, stage_of(w, p, s)) for s in range(p.pp)) for p in plans]
        limit = float(rng.choice(peaks)) * float(rng.choice([0.999, 1.0, 1.5]))
        fitting = [(p, peak) for p, peak in zip(plans, peaks, strict=True) if peak <= limit]
        if not fitting:
            infeasible += 1
            with pytest.raises(UserError, match="no plan of"):
                search(w, world_size, limit, ks, cost)
            continue
        found = search(w, world_size, limit, ks, cost)
        times = [simulated(cost, w, p, simulate) for p, _ in fitting]
        assert found.best.step_seconds == pytest.approx(min(times), rel=1e-12)
        assert simulated(cost, w, found.best.plan, simulate) == pytest.approx(min(times), rel=1e-12)
        assert (found.num_enumerated, found.num_fitting) == (len(plans), len(fitting))
        assert {c.plan for c in found.candidates} == set(plans)
        front = [
            (peak, t)
            for (_, peak), t in zip(fitting, times, strict=True)
            if not any(q < peak and u <= t * (1 + 1e-12) for (_, q), u in zip(fitting, times, strict=True))
        ]
        lowest = {peak: min(t for q, t in front if q == peak) for peak, _ in front}
        assert [c.peak_bytes for c in found.frontier] == sorted(lowest)
        np.testing.assert_allclose([c.step_seconds for c in found.frontier], [lowest[k] for k in sorted(lowest)])
    assert 0 < infeasible < 60


@pytest.fixture
def problem(make_cost, workload):
    deep = workload.model_copy(update={"layers": 10})
    return deep, make_cost(np.random.default_rng(3), deep)


def test_every_returned_plan_fits(problem):
    w, cost = problem
    everything = search(w, 4, 1e12, (1, 2, 4), cost)
    limit = float(np.median([c.peak_bytes for c in everything.candidates]))
    found = search(w, 4, limit, (1, 2, 4), cost)
    assert 0 < found.num_fitting < found.num_enumerated
    for item in (found.best, *found.frontier):
        assert item.fits
        assert max(item.stage_bytes) <= limit
    assert all(item.fits == (max(item.stage_bytes) <= limit) for item in found.candidates)
    times = [item.step_seconds for item in found.frontier]
    assert times == sorted(times, reverse=True)
    assert found.frontier[-1].step_seconds == found.best.step_seconds


def test_less_memory_is_never_faster(problem):
    w, cost = problem
    peaks = [c.peak_bytes for c in search(w, 4, 1e12, (4,), cost).candidates]

    def best(limit):
        try:
            return search(w, 4, limit, (4,), cost).best.step_seconds
        except UserError:
            return float("inf")

    @settings(max_examples=25, deadline=None, derandomize=True)
    @given(st.floats(min(peaks) * 0.9, max(peaks)), st.floats(min(peaks) * 0.9, max(peaks)))
    def check(one, other):
        assert best(min(one, other)) >= best(max(one, other))

    check()


def test_strategies_of_four_ranks(problem):
    w, cost = problem
    found = search(w, 4, 1e12, (1,), cost)
    assert {c.strategy for c in found.candidates} == {"DP", "CP", "PP", "PP+DP", "CP+DP", "PP+CP"}
    assert {c.strategy for c in search(w, 1, 1e12, (1,), cost).candidates} == {"single"}
    assert "PP+CP+DP" in {cell.strategy for cell in list_cells(w, 8, (1,))}


def test_the_full_space_of_32_layers_on_four_ranks(make_cost, workload):
    w = workload.model_copy(update={"layers": 32})
    cost = make_cost(np.random.default_rng(0), w)
    assert search(w, 4, 1e12, (4,), cost).num_enumerated == 4560


def test_large_spaces_keep_best_and_frontier(problem, monkeypatch):
    w, cost = problem
    peaks = [c.peak_bytes for c in search(w, 4, 1e12, (1, 2, 4), cost).candidates]
    limit = float(np.quantile(peaks, 0.6))
    full = search(w, 4, limit, (1, 2, 4), cost)
    monkeypatch.setattr(plan_module, "MAX_CANDIDATES", 150)
    monkeypatch.setattr(plan_module, "CHUNK", 20)
    thin = search(w, 4, limit, (1, 2, 4), cost)
    assert len(thin.candidates) <= 150 < len(full.candidates)
    assert thin.best == full.best
    assert [c.peak_bytes for c in thin.frontier] == [c.peak_bytes for c in full.frontier]
    assert thin.best in thin.candidates
    assert (thin.num_enumerated, thin.num_fitting) == (full.num_enumerated, full.num_fitting)
    assert {c.strategy for c in thin.candidates} == {c.strategy for c in full.candidates}


def test_nothing_fits_names_the_smallest_requirement(problem, monkeypatch):
    w, cost = problem
    least = min(search(w, 4, 1e12, (1, 4), cost).candidates, key=lambda c: c.peak_bytes)
    with pytest.raises(UserError, match="raise memory_limit_gb, allow more microbatches or add ranks") as error:
        search(w, 4, 1e5, (1, 4), cost)
    text = str(error.value)
    assert "\n" not in text
    assert "no plan of 4 ranks fits in 0.0001 GB" in text
    assert least.plan.label in text
    needed = float(text.split("needs ")[1].split(" GB")[0]) * 1e9
    assert search(w, 4, needed, (1, 4), cost).num_fitting >= 1
    monkeypatch.setattr(plan_module, "MAX_CANDIDATES", 10)
    with pytest.raises(UserError) as thinned:
        search(w, 4, 1e5, (1, 4), cost)
    assert str(thinned.value) == text


def test_bad_requests_are_refused(problem, monkeypatch):
    w, cost = problem
    for limit in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(UserError, match="give a positive memory_limit_gb"):
            search(w, 4, limit, (1,), cost)
    with pytest.raises(UserError, match=r"world_size=0"):
        search(w, 0, 1e9, (1,), cost)
    with pytest.raises(UserError, match=r"microbatches=\[\]"):
        search(w, 4, 1e9, (), cost)
    with pytest.raises(UserError, match="no layout of world_size=4"):
        search(w.model_copy(update={"batch": 1, "num_regular": 1, "layers": 1}), 4, 1e9, (1,), cost)
    monkeypatch.setattr(plan_module, "MAX_PLANS", 50)
    with pytest.raises(UserError, match="more than the 50"):
        search(w, 4, 1e9, (1,), cost)


def test_result_survives_the_disk(problem, tmp_path):
    w, cost = problem
    found = search(w, 4, 1e12, (1, 2), cost)
    found.save(tmp_path / "search.json")
    assert SearchResult.load(tmp_path / "search.json") == found


def test_a_large_node_table_moves_layers_off_the_first_stage():
    """The paper's [3,7,7,7] of 24 layers: without the table the same limit has [6,6,6,6]."""
    layer = {f"{part}_slope": 1e-3 * part.startswith("layer") for part in PARTS}
    compute = {str(cp): {**{f"{part}_fixed": 0.0 for part in PARTS}, **layer} for cp in (1, 2, 4)}
    found = []
    for num_nodes, node_table in ((0, "none"), (30_000, "sharded")):
        w = Workload(
            batch=32,
            num_regular=63,
            num_super=2,
            num_readout=1,
            layers=24,
            heads=8,
            hidden=64,
            ffn=64,
            bias_channels=4,
            global_tokens=1,
            num_features=100,
            num_classes=10,
            num_nodes=num_nodes,
            node_table=node_table,
        )
        cost = CostModel(
            device="test",
            world_size=4,
            workload=w,
            memory={**PRIOR, "eager_gradients": 0.0},
            compute=compute,
            comm={"p2p": ((1e3, 1e-6), (1e6, 1e-6)), "all_reduce/4": ((1e3, 1e-3), (1e6, 1.0))},
            depth=Depth().stored(),
            quality={},
            valid={},
        )
        found.append(search(w, 4, 55e6, (8,), cost).best.plan)
    assert [plan.label for plan in found] == ["pp4[6,6,6,6] cp1 dp1 k8", "pp4[3,7,7,7] cp1 dp1 k8"]
