"""The profiler measures the program itself: rows for every degree, bytes that add up, files the fit accepts."""

import csv

import pytest
from engine_case import write_planted

from megagraph.artifacts import HardwareProfile
from megagraph.artifacts_search import SearchResult
from megagraph.config import RunConfig, UserError
from megagraph.search.fit import fit
from megagraph.search.plan import search

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    write_planted(folder)
    return folder


WORKLOAD = RunConfig.model_validate(
    {
        "id": "small",
        "dataset": "small",
        "model": {"layers": 2, "heads": 2, "hidden": 8, "ffn": 8, "bias_channels": 2},
        "sampling": {"num_sampled": 5},
        "train": {"batch": 16},
        "parallel": {"world_size": 2, "microbatches": [1, 2]},
        "profile": {
            "warmup": 1,
            "microbatch_sizes": [2, 4, 8],
            "message_bytes": [1024, 65536],
            "measured_plans": 3,
            "grid": {"batch": [2, 4], "layers": [1, 2], "heads": [2], "hidden": [8, 16], "tokens": 9},
        },
    }
).workload


def profile_rank(data, out):
    from megagraph.profile.profiler import profile_workload

    profile_workload(WORKLOAD, data, out)


def grid_rank(data, out, shard):
    from megagraph.profile.profiler import profile_grid

    profile_grid(WORKLOAD, data, out, shard)


def plans_rank(data, out, search_file):
    from megagraph.profile.profiler import profile_plans

    profile_plans(WORKLOAD, data, out, search_file)


def read(path):
    with path.open() as handle:
        return list(csv.DictReader(handle))


@pytest.fixture(scope="module")
def measured(run_ranks, data, tmp_path_factory):
    """Profile, two grid shards, cost model, search and measured plans, as the workflow makes them."""
    out = tmp_path_factory.mktemp("measured")
    run_ranks(2, profile_rank, data, out / "profile.json")
    for shard in (0, 1):
        run_ranks(1, grid_rank, data, out / f"grid-{shard}.csv", (shard, 2))
    profile = HardwareProfile.load(out / "profile.json")
    grid = read(out / "grid-0.csv") + read(out / "grid-1.csv")
    cost = fit(profile, grid)
    search(profile.workload, 2, 1e9, (1, 2), cost).save(out / "search.json")
    run_ranks(2, plans_rank, data, out / "plans.csv", out / "search.json")
    return out, profile, grid


def test_profile_covers_degrees_sizes_and_stages(measured):
    _, profile, _ = measured
    assert {(row.cp, row.sequences) for row in profile.compute} == {(cp, b) for cp in (1, 2) for b in (2, 4, 8)}
    assert {row.local_tokens for row in profile.compute if row.cp == 1} == {8}
    assert {row.local_tokens for row in profile.compute if row.cp == 2} == {5}
    assert all(row.layer_forward.median > 0 and row.layer_backward.median > 0 for row in profile.compute)
    assert all(row.layer_forward.repeats == 3 for row in profile.compute)
    assert {(row.operation, row.bytes) for row in profile.comm} == {
        (operation, size) for operation in ("p2p", "all_reduce") for size in (1024, 65536)
    }
    assert all(row.seconds.median > 0 for row in profile.comm)
    places = {(row.first, row.last) for row in profile.memory}
    assert places == {(True, True), (True, False), (False, True)}


def test_memory_grows_with_layers_and_sequences(measured):
    _, profile, _ = measured
    peaks = {
        (row.layers, row.sequences): row.peak_bytes
        for row in profile.memory
        if row.first and row.last and row.cp == 1 and row.microbatches == 1
    }
    assert peaks[3, 8] > peaks[1, 8] > peaks[1, 4]


def test_grid_shards_hold_every_cell_once(measured):
    _, _, grid = measured
    cells = {(row["batch"], row["layers"], row["hidden"]) for row in grid}
    assert len(grid) == len(cells) == 8
    assert {row["num_regular"] for row in grid} == {"7"}
    assert all(float(row["step_seconds"]) > 0 and int(row["peak_bytes"]) > 0 for row in grid)


def test_plans_are_measured_beside_their_prediction(measured):
    out, _, _ = measured
    rows = read(out / "plans.csv")
    result = SearchResult.load(out / "search.json")
    assert rows[0]["label"] == result.best.plan.label
    assert len(rows) == len({row["label"] for row in rows}) == 3
    for row in rows:
        assert max(map(int, row["peak_bytes_by_rank"].split(";"))) == int(row["peak_bytes"])
        assert float(row["predicted_bytes"]) == pytest.approx(int(row["peak_bytes"]), rel=0.25)
        assert float(row["step_seconds"]) > 0


def test_a_workload_without_grid_is_one_line(data, tmp_path):
    from megagraph.profile.profiler import profile_grid

    profile = WORKLOAD.profile.model_copy(update={"grid": None})
    with pytest.raises(UserError, match=r"no profile\.grid"):
        profile_grid(WORKLOAD.model_copy(update={"profile": profile}), data, tmp_path / "grid.csv", (0, 1))
