"""The search against all plans, each simulated event by event; nothing here uses labels, bounds or tables by kind."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from megagraph.artifacts import Workload
from megagraph.config import ParallelPlan, UserError
from megagraph.config_search import DeviceConfig, SearchConfig
from megagraph.search.memory import peak_bytes, stage_of
from megagraph.search.plan import frontier, runner_up, search
from megagraph.search.remedies import NothingFitsError
from megagraph.search.solver import Solver
from megagraph.search.stages import stage_costs, stage_roles
from megagraph.search.tables import Limit, Problem


def random_workload(rng, layers):
    heads = int(rng.choice([2, 4]))
    return Workload(
        batch=int(rng.integers(1, 40)),
        num_regular=int(rng.integers(1, 40)),
        num_super=int(rng.integers(1, 5)),
        num_readout=1,
        layers=int(rng.integers(1, layers + 1)),
        heads=heads,
        hidden=heads * int(rng.choice([4, 16])),
        ffn=int(rng.choice([32, 128])),
        bias_channels=4,
        global_tokens=1,
        num_features=int(rng.integers(4, 500)),
        num_classes=5,
        attention=str(rng.choice(["dense", "tiled", "all_to_all"])),
    )


def random_config(rng):
    return SearchConfig(
        schedules=[("gpipe",), ("1f1b",), ("gpipe", "1f1b")][rng.integers(3)],
        recompute=str(rng.choice(["never", "allowed"], p=[0.7, 0.3])),
        batch_mode=str(rng.choice(["strong", "weak"], p=[0.7, 0.3])),
    )


def degrees(w, world_size, weak):
    for pp, cp, dp in itertools.product(range(1, world_size + 1), repeat=3):
        sharded = cp > 1 and (w.attention == "dense" or (w.attention == "all_to_all" and w.heads % cp))
        if pp * cp * dp == world_size and cp <= w.num_regular and not sharded and (weak or dp <= w.batch):
            yield pp, cp, dp


def every_plan(problem):
    """All plans by plain nested loops; a cut with every choice of recompute where that is allowed."""
    w, config, weak = problem.workload, problem.config, problem.config.batch_mode == "weak"
    for pp, cp, dp in degrees(w, problem.world_size, weak):
        for k, schedule in itertools.product(problem.microbatches, config.schedules):
            if k > (w.batch if weak else -(-w.batch // dp)) or (schedule == "1f1b" and k < pp):
                continue
            for layers in itertools.product(range(1, w.layers + 1), repeat=pp):
                if sum(layers) != w.layers:
                    continue
                levels = [range(n + 1) if problem.recompute else (0,) for n in layers]
                for again in itertools.product(*levels):
                    yield ParallelPlan(
                        pp=pp, cp=cp, dp=dp, layers=layers, microbatches=k, schedule=schedule, recompute=again
                    )


def price(problem, plan, simulate, speeds=None):
    """Seconds per sequence, and bytes to reckon with of the largest rank."""
    sized = problem.sized(plan.dp)
    table = stage_costs(problem.cost, sized, plan.pp, plan.cp, plan.dp, plan.microbatches)
    roles, n, q = stage_roles(plan.pp), np.array(plan.layers), np.array(plan.recompute or (0,) * plan.pp)
    speeds = np.ones(plan.pp) if speeds is None else speeds
    f, b = table.forward[roles, n] / speeds, table.backward_with(roles, n, q) / speeds
    a = table.optimiser[roles, n] / speeds + table.reduce[roles, n]
    seconds = simulate(f, b, a, plan.microbatches, table.link, table.link, schedule=plan.schedule)
    sizes = [peak_bytes(problem.cost.memory, stage_of(sized, plan, stage)) for stage in range(plan.pp)]
    return seconds / sized.batch, np.array(sizes) * problem.cost.memory_margin


def problems(make_cost, simulate, count, layers, seed):
    """Random problems with all their plans priced; the limit is that of some plan, or a little less or more."""
    rng = np.random.default_rng(seed)
    while count:
        w, config = random_workload(rng, layers), random_config(rng)
        cost = make_cost(rng, w).model_copy(update={"memory_margin": float(rng.choice([1.0, 1.2]))})
        ks = tuple(int(k) for k in rng.choice([1, 2, 3, 4, 8], size=2, replace=False))
        recompute = config.recompute == "allowed"
        problem = Problem(w, int(rng.integers(1, 5)), 1.0, ks, cost, config, recompute)
        plans = list(every_plan(problem))
        if not plans or len(plans) > 80:
            continue
        priced = [(plan, *price(problem, plan, simulate)) for plan in plans]
        limit = float(rng.choice([size.max() for _, _, size in priced])) * float(rng.choice([0.999, 1.0, 1.5]))
        yield replace(problem, limit_bytes=limit), priced
        count -= 1


def front(priced, limit):
    """(bytes, seconds) that no plan beats in both, by rising bytes."""
    points = []
    for _, value, size in sorted(priced, key=lambda item: (item[2].max(), item[1])):
        if size.max() <= limit and (not points or value < points[-1][1] * (1 - 1e-12)):
            points.append((size.max(), value))
    return points


def other(plan, best):
    cell = best.cell
    return (plan.pp, plan.cp, plan.dp) != (cell.pp, cell.cp, cell.dp)


def test_1000_random_problems_equal_exhaustive_simulation(make_cost, simulate):
    feasible = 0
    for problem, priced in problems(make_cost, simulate, 1000, 4, 0):
        found = Solver(problem).best(Limit())
        best = min((value for _, value, size in priced if size.max() <= problem.limit_bytes), default=None)
        if best is None:
            assert found is None
            continue
        feasible += 1
        assert found.value == pytest.approx(best, rel=1e-12)
        assert found.gap == 0.0
        assert found.size <= problem.limit_bytes
    assert 700 < feasible < 1000


def test_frontiers_equal_exhaustive_simulation(make_cost, simulate):
    """Also after the runner-up was asked for: what was closed against the pick must be opened again."""
    lengths = []
    for problem, priced in problems(make_cost, simulate, 100, 5, 1):
        solver = Solver(problem)
        best = solver.best(Limit())
        if best is not None:
            second = runner_up(solver, best)
            others = [value for plan, value, size in priced if other(plan, best) and size.max() <= problem.limit_bytes]
            if others:
                assert second.value == pytest.approx(min(others), rel=1e-12)
        points, complete = frontier(solver)
        expected = front(priced, problem.limit_bytes)
        assert complete
        assert len(points) == len(expected)
        for one, (size, value) in zip(points, expected, strict=True):
            assert (one.size, one.value) == pytest.approx((size, value), rel=1e-12)
        lengths.append(len(points))
    assert max(lengths) >= 5


def test_less_memory_is_never_faster(make_cost, simulate):
    for problem, priced in problems(make_cost, simulate, 60, 5, 2):
        solver, last = Solver(problem), 0.0
        for share in (1.0, 0.9, 0.7, 0.5):
            found = solver.best(Limit(cap=share * problem.limit_bytes))
            fitting = [value for _, value, size in priced if size.max() <= share * problem.limit_bytes]
            assert (found.value if found else np.inf) == pytest.approx(min(fitting, default=np.inf), rel=1e-12)
            assert (found.value if found else np.inf) >= last
            last = found.value if found else np.inf


def test_answers_and_remedies_equal_exhaustive_simulation(make_cost, simulate):
    """The public entry: what is returned fits and is the best; where nothing fits, the smallest budget is."""
    refused = 0
    for problem, priced in problems(make_cost, simulate, 60, 4, 3):
        arguments = problem.workload, problem.world_size
        rest = problem.microbatches, problem.cost, problem.config
        try:
            found = search(*arguments, problem.limit_bytes, *rest)
        except NothingFitsError as error:
            refused += 1
            budget = error.remedies.remedies[0]
            assert budget.change == "memory_limit_gb"
            smallest = min(size.max() for _, _, size in priced)
            if problem.config.recompute == "allowed":
                assert budget.peak_bytes == pytest.approx(smallest)
            assert search(*arguments, budget.value * 1e9, *rest).best.peak_bytes <= budget.value * 1e9
            continue
        margin = problem.cost.memory_margin
        for item in (found.best, *found.frontier):
            assert item.fits
            assert item.peak_bytes * margin <= problem.limit_bytes
        value, size = price(problem, found.best.plan, simulate)
        fitting = front(priced, problem.limit_bytes)
        assert value == pytest.approx(fitting[-1][1], rel=1e-12)
        assert size.max() == pytest.approx(fitting[-1][0], rel=1e-12)
        assert found.best.step_seconds / found.best.sequences == pytest.approx(value, rel=1e-12)
    assert 3 < refused < 40


def test_unequal_devices_equal_exhaustive_simulation(make_cost, simulate):
    """Ranks stand along the pipeline in any order of their types; a mixed stage is as slow and as small as its worst
    rank."""
    rng = np.random.default_rng(4)
    feasible = 0
    for _ in range(50):
        w = random_workload(rng, 5)
        cost = make_cost(rng, w)
        counts = [(1, 1), (1, 2), (2, 2), (1, 3)][rng.integers(4)]
        draft = Problem(w, sum(counts), 1.0, (1, 4), cost, SearchConfig(schedules=("gpipe", "1f1b")))
        plans = list(every_plan(draft))
        if not plans:
            continue
        sizes = [price(draft, plan, simulate)[1].max() for plan in plans]
        memory = rng.choice(sizes, size=2) * rng.uniform(0.8, 1.2, 2)
        devices = tuple(
            DeviceConfig(name=name, count=count, memory_gb=float(size / 1e9), speed=float(rng.uniform(0.5, 2.0)))
            for name, count, size in zip("ab", counts, memory, strict=True)
        )
        best = np.inf
        for plan, order in itertools.product(plans, itertools.permutations(devices)):
            ranks = [device for device in order for _ in range(device.count)]
            size = plan.cp * plan.dp
            own = [ranks[stage * size : (stage + 1) * size] for stage in range(plan.pp)]
            speeds = np.array([min(device.speed for device in stage) for stage in own])
            limits = np.array([1e9 * min(device.memory_gb for device in stage) for stage in own])
            value, held = price(draft, plan, simulate, speeds)
            best = min(best, value) if (held <= limits).all() else best
        found = Solver(replace(draft, config=draft.config.model_copy(update={"devices": devices}))).best(Limit())
        assert (found.value if found else np.inf) == pytest.approx(best, rel=1e-12)
        feasible += found is not None
    assert feasible > 20


def test_a_budget_of_no_time_gives_a_plan_and_an_honest_gap(make_cost):
    rng = np.random.default_rng(5)
    gaps = []
    for _ in range(30):
        w = random_workload(rng, 5).model_copy(update={"layers": 12, "batch": 32, "attention": "tiled"})
        problem = Problem(w, 4, 1e12, (1, 2, 4, 8), make_cost(rng, w), SearchConfig())
        best, hasty = Solver(problem).best(Limit()), Solver(problem, deadline=0.0).best(Limit())
        assert hasty.value / (1 + hasty.gap) <= best.value * (1 + 1e-12) <= hasty.value * (1 + 2e-12)
        gaps.append(hasty.gap)
    assert max(gaps) > 0


def test_limits_only_fall(make_cost):
    rng = np.random.default_rng(6)
    w = random_workload(rng, 4)
    solver = Solver(Problem(w, 1, 1e12, (1,), make_cost(rng, w), SearchConfig()))
    solver.best(Limit(cap=1e11))
    with pytest.raises(AssertionError, match="limits must fall"):
        solver.best(Limit())


def test_a_space_without_cells_is_refused(make_cost):
    rng = np.random.default_rng(7)
    w = random_workload(rng, 1).model_copy(update={"batch": 1, "num_regular": 1})
    with pytest.raises(UserError, match="no layout of world_size=4"):
        Solver(Problem(w, 4, 1e12, (1,), make_cost(rng, w), SearchConfig()))
