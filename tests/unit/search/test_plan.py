import itertools

import numpy as np
import pytest

from megagraph.artifacts import CostModel, Workload
from megagraph.artifacts_search import Remedies, SearchResult
from megagraph.cli import main
from megagraph.config import RunConfig, UserError
from megagraph.config_search import DeviceConfig, SearchConfig
from megagraph.search import plan as plan_module
from megagraph.search.cost import PARTS
from megagraph.search.depth import Depth
from megagraph.search.memory import PRIOR
from megagraph.search.plan import search
from megagraph.search.remedies import NothingFitsError, fits
from megagraph.search.stages import predict_step
from megagraph.search.table import table
from megagraph.search.tables import Problem, problem_cells


@pytest.fixture
def problem(make_cost, workload):
    deep = workload.model_copy(update={"layers": 10})
    return deep, make_cost(np.random.default_rng(3), deep)


def peaks(problem, **changes):
    w, cost = problem
    return sorted(c.peak_bytes for c in search(w, 4, 1e12, (1, 2, 4), cost, SearchConfig(**changes)).candidates)


def test_every_returned_plan_fits(problem):
    w, cost = problem
    limit = float(np.median(peaks(problem)))
    found = search(w, 4, limit, (1, 2, 4), cost)
    assert 0 < found.num_fitting < found.num_enumerated == len(found.candidates)
    assert found.num_fitting == sum(item.fits for item in found.candidates)
    for item in (found.best, *found.frontier, found.runner_up.candidate):
        assert item.fits
        assert max(item.stage_bytes) <= limit
        assert item.step_seconds == predict_step(cost, w, item.plan)
    assert all(item.fits == (max(item.stage_bytes) <= limit) for item in found.candidates)
    times = [item.step_seconds for item in found.frontier]
    assert times == sorted(times, reverse=True)
    assert found.frontier[-1] == found.best


def test_the_margin_of_the_cost_model_counts(problem):
    w, cost = problem
    limit = float(np.median(peaks(problem)))
    wide = cost.model_copy(update={"memory_margin": 1.25})
    found, safe = (search(w, 4, limit, (1, 2, 4), model) for model in (cost, wide))
    assert safe.best.peak_bytes * 1.25 <= limit
    assert safe.best.step_seconds >= found.best.step_seconds
    assert safe.stages[0].upper_bytes == 1.25 * safe.stages[0].peak_bytes
    assert safe.num_fitting == sum(1.25 * item.peak_bytes <= limit for item in found.candidates) < found.num_fitting


def test_large_spaces_keep_best_and_frontier(problem, monkeypatch):
    w, cost = problem
    limit = float(np.quantile(peaks(problem), 0.6))
    full = search(w, 4, limit, (1, 2, 4), cost)
    monkeypatch.setattr(plan_module, "MAX_CANDIDATES", 150)
    monkeypatch.setattr(plan_module, "MAX_LISTED", 600)
    thin = search(w, 4, limit, (1, 2, 4), cost)
    assert (thin.best, thin.frontier) == (full.best, full.frontier)
    assert (thin.num_enumerated, thin.num_fitting) == (full.num_enumerated, full.num_fitting)
    assert 50 < len(thin.candidates) <= 150
    assert {item.plan for item in thin.candidates} <= {item.plan for item in full.candidates}


def test_recompute_only_where_nothing_else_fits(problem):
    w, cost = problem
    smallest = peaks(problem)[0]
    roomy, tight = (search(w, 4, share * smallest, (1, 2, 4), cost) for share in (1.0, 0.97))
    assert not roomy.recompute
    assert roomy.best.plan.recompute == ()
    assert tight.recompute
    assert any(tight.best.plan.recompute)
    assert sum(tight.best.plan.recompute) == sum(stage.recompute for stage in tight.stages)
    with pytest.raises(NothingFitsError, match="recompute: if_needed"):
        search(w, 4, 0.97 * smallest, (1, 2, 4), cost, SearchConfig(recompute="never"))


def test_the_explanation_adds_up(problem):
    w, cost = problem
    found = search(w, 4, float(np.quantile(peaks(problem), 0.1)), (1, 2, 4), cost)
    assert sum(vars(found.parts).values()) == pytest.approx(found.best.step_seconds)
    assert min(vars(found.parts).values()) >= -1e-12
    for stage, size in zip(found.stages, found.best.stage_bytes, strict=True):
        assert sum(stage.bytes_by_term.values()) == pytest.approx(size)
        assert stage.peak_bytes <= stage.limit_bytes
    assert sum(stage.layers for stage in found.stages) == w.layers
    assert found.runner_up.slower >= 0
    best, other = found.best.plan, found.runner_up.candidate.plan
    assert (best.pp, best.cp, best.dp) != (other.pp, other.cp, other.dp)
    fastest = min(
        item.step_seconds
        for item in found.candidates
        if item.fits and (item.plan.pp, item.plan.cp, item.plan.dp) != (best.pp, best.cp, best.dp)
    )
    assert found.runner_up.candidate.step_seconds == pytest.approx(fastest)


def test_what_binds_and_what_a_gigabyte_is_worth(problem):
    """Memory is counted in gigabytes here by a margin, so that one of them matters."""
    w, cost = problem
    points = [item.peak_bytes for item in search(w, 4, 1e15, (1, 2, 4), cost).frontier]
    low, high = min(itertools.pairwise(points[2:]), key=lambda pair: pair[1] - pair[0])
    scale = 0.9e9 / (high - low)
    large = cost.model_copy(update={"memory_margin": scale})
    roomy = search(w, 4, 1e15, (1, 2, 4), large)
    limit = low * scale * (1 + 1e-9)
    tight = search(w, 4, limit, (1, 2, 4), large)
    assert roomy.binding.constraint == "time"
    assert roomy.gigabyte.more == 0.0
    assert tight.binding.constraint == "memory"
    assert "would take" in tight.binding.reason
    by_limit = {
        extra: search(w, 4, tight.limit_bytes + extra, (1, 2, 4), large).best.step_seconds for extra in (-1e9, 0.0, 1e9)
    }
    assert tight.gigabyte.more == pytest.approx(by_limit[1e9] / by_limit[0.0] - 1)
    assert tight.gigabyte.less == pytest.approx(by_limit[-1e9] / by_limit[0.0] - 1)
    assert tight.gigabyte.more < 0 < tight.gigabyte.less


def test_what_would_fit_does_fit(problem):
    w, cost = problem
    limit = 0.5 * peaks(problem)[0]
    with pytest.raises(
        NothingFitsError, match=r"^no plan of 4 ranks fits in .* GB: set one of memory_limit_gb"
    ) as error:
        search(w, 4, limit, (1, 2, 4), cost, SearchConfig(recompute="never"))
    never = SearchConfig(recompute="never")
    by_change = {one.change: one for one in error.value.remedies.remedies}
    budget = by_change["memory_limit_gb"].value * 1e9
    assert search(w, 4, budget, (1, 2, 4), cost, never).best.peak_bytes <= budget
    with pytest.raises(NothingFitsError):
        search(w, 4, 0.99 * by_change["memory_limit_gb"].peak_bytes, (1, 2, 4), cost, never)
    batch = int(by_change["batch"].value)
    assert search(w.model_copy(update={"batch": batch}), 4, limit, (1, 2, 4), cost, never)
    for larger in range(batch + 1, 65):
        grown = Problem(w.model_copy(update={"batch": larger}), 4, limit, (1, 2, 4), cost, never)
        assert not any(fits(grown, cell) for cell in problem_cells(grown))
    ranks = int(by_change["world_size"].value)
    assert search(w, ranks, limit, (1, 2, 4), cost, never)
    for fewer in range(5, ranks):
        few = Problem(w, fewer, limit, (1, 2, 4), cost, never)
        assert not any(fits(few, cell) for cell in problem_cells(few))


def test_weak_batches_compare_time_per_sequence(problem):
    w, cost = problem
    found = search(w, 4, 1e12, (1, 2, 4), cost, SearchConfig(batch_mode="weak"))
    assert {item.sequences for item in found.candidates} == {64, 128, 256}
    values = [item.step_seconds / item.sequences for item in found.candidates]
    assert found.best.step_seconds / found.best.sequences == pytest.approx(min(values))


def test_unequal_devices_are_named(problem):
    w, cost = problem
    devices = (
        DeviceConfig(name="big", count=2, memory_gb=900),
        DeviceConfig(name="fast", count=2, memory_gb=900, speed=2),
    )
    found = search(w, 4, 1e12, (4,), cost, SearchConfig(devices=devices))
    assert len(found.best.devices) == found.best.plan.pp
    assert set(found.best.devices) <= {"big", "fast", "big+fast", "fast+big"}


def test_table_tells_what_the_file_tells(problem):
    w, cost = problem
    found = search(w, 4, float(np.quantile(peaks(problem), 0.2)), (1, 2, 4), cost)
    text = table(found)
    for words in (found.best.plan.label, "proven optimum", found.binding.reason, found.runner_up.reason, "1 GB"):
        assert words in text
    assert max(map(len, text.splitlines())) < 220


def test_impossible_requests(problem):
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


def test_results_survive_the_disk(problem, tmp_path):
    w, cost = problem
    found = search(w, 4, 1e12, (1, 2), cost)
    found.save(tmp_path / "search.json")
    assert SearchResult.load(tmp_path / "search.json") == found
    with pytest.raises(NothingFitsError) as error:
        search(w, 4, 1.0, (1, 2), cost)
    error.value.remedies.save(tmp_path / "remedies.json")
    assert Remedies.load(tmp_path / "remedies.json") == error.value.remedies


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
        found.append(search(w, 4, 55e6, (8,), cost, SearchConfig(schedules=("gpipe",))).best.plan)
    assert [plan.label for plan in found] == ["pp4[6,6,6,6] cp1 dp1 k8", "pp4[3,7,7,7] cp1 dp1 k8"]


def test_the_verb_prints_its_reasons_and_leaves_remedies_where_nothing_fits(problem, tmp_path, capsys):
    _, cost = problem
    cost.save(tmp_path / "cost.json")
    for limit, code in ((1.0, 0), (1e-6, 2)):
        parallel = {"world_size": 4, "memory_limit_gb": limit, "search": {"schedules": ["gpipe"]}}
        workload = RunConfig(id="a", dataset="d", model={"layers": 10}, parallel=parallel).workload
        (tmp_path / "workload.json").write_text(workload.model_dump_json())
        words = ["search", str(tmp_path / "workload.json"), str(tmp_path / "cost.json"), "--out"]
        assert main([*words, str(tmp_path / f"{code}.json")]) == code
    said = capsys.readouterr()
    found = SearchResult.load(tmp_path / "0.json")
    assert found.best.plan.label in said.out
    assert {item.plan.schedule for item in found.candidates} == {"gpipe"}
    assert said.err.count("\n") == 1
    assert "no plan of 4 ranks fits in 1e-06 GB: set one of memory_limit_gb" in said.err
    assert Remedies.load(tmp_path / "2.remedies.json").remedies[0].change == "memory_limit_gb"
    assert not (tmp_path / "2.json").exists()
