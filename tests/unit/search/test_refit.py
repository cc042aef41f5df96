"""An old cost model carried over to a new device by a few points."""

import pytest

from megagraph.artifacts import CostModel
from megagraph.cli import main
from megagraph.config import UserError
from megagraph.search.cost import all_reduce_seconds, part_seconds, predict_cell
from megagraph.search.fit import fit, profiled_stage
from megagraph.search.memory import peak_bytes
from megagraph.search.refit import refit

FIXED, SLOPE, LINK, COPIES, CONSTANT = 0.3, 0.05, 0.1, 1.2, 5e6


@pytest.fixture
def measured(make_profile, make_grid):
    return fit(make_profile(), make_grid(layers=(2, 4, 8)))


@pytest.fixture
def device(measured, make_profile):
    """A profile of a device that is faster in every part, for cp 1 and 2: the truth, and twelve points of it."""
    whole = make_profile(noise=0.01)
    compute = []
    for row in whole.compute:
        parts = {}
        for name in ("layer", "embed", "head"):
            for direction in ("forward", "backward"):
                key = f"{name}_{direction}"
                at_zero = part_seconds(measured, whole.workload, row.cp, 0.0)[key]
                rest = getattr(row, key).median - at_zero
                timing = getattr(row, key).model_copy(update={"median": FIXED * at_zero + SLOPE * max(rest, 0.0)})
                parts[key] = timing
        compute.append(row.model_copy(update=parts))
    comm = [row.model_copy(update={"seconds": scaled(row.seconds, LINK)}) for row in whole.comm]
    coefficients = {name: COPIES * value for name, value in measured.memory.items()}
    coefficients |= {"constant": CONSTANT, "eager_gradients": 0.0}
    memory = [
        row.model_copy(update={"peak_bytes": round(peak_bytes(coefficients, profiled_stage(whole, row)))})
        for row in whole.memory
    ]
    new = {"device": "gpu x", "compute": tuple(compute), "comm": tuple(comm), "memory": tuple(memory)}
    return whole.model_copy(update=new)


def scaled(timing, factor):
    return timing.model_copy(update={"median": timing.median * factor})


def few(device):
    """Four compute rows, four messages, four peaks."""
    rows = [row for row in device.compute if row.cp in (1, 2) and row.sequences in (8, 128)]
    comm = [row for row in device.comm if row.ranks == 2 and row.bytes in (1024, 1048576)]
    return device.model_copy(update={"compute": tuple(rows), "comm": tuple(comm), "memory": device.memory[::7][:4]})


def test_twelve_points_recover_a_faster_device(measured, device):
    points = few(device)
    assert len(points.compute) + len(points.comm) + len(points.memory) <= 12
    found = refit(measured, points)
    for row in device.compute:
        for part in ("layer_forward", "layer_backward", "embed_forward", "head_backward"):
            seconds = part_seconds(found, device.workload, row.cp, row.sequences)[part]
            assert seconds == pytest.approx(getattr(row, part).median, rel=0.05), (row.cp, row.sequences, part)
    for row in device.memory:
        assert peak_bytes(found.memory, profiled_stage(device, row)) == pytest.approx(row.peak_bytes, rel=0.02)
    # groups of four were not measured again
    assert all_reduce_seconds(found, 4, 65536) == pytest.approx(LINK * all_reduce_seconds(measured, 4, 65536), rel=0.05)
    assert found.device == "gpu x" and found.estimated_from == ""
    assert found.quality["layer_before"].mape_percent > 100
    assert found.quality["layer_in_sample"].mape_percent < 2
    assert found.quality["memory_in_sample"].mape_percent < 1
    assert found.memory_margin == measured.memory_margin


def test_whole_models_are_scaled_as_their_layers(measured, device, make_grid):
    found = refit(measured, few(device))
    row = max(make_grid(layers=(2, 4, 8)), key=lambda cell: float(cell["step_seconds"]))
    ratio = predict_cell(found, row).step_seconds / predict_cell(measured, row).step_seconds
    assert SLOPE * 0.95 < ratio < FIXED
    assert found.depth == measured.depth


def test_the_same_device_changes_nothing(measured, make_profile):
    found = refit(measured, make_profile())
    for cp in (1, 2, 4):
        for part, seconds in part_seconds(measured, measured.workload, cp, 50).items():
            assert part_seconds(found, measured.workload, cp, 50)[part] == pytest.approx(seconds, rel=1e-6)
    assert found.comm == measured.comm


def test_what_cannot_be_carried_over(measured, device):
    with pytest.raises(UserError, match="is estimated from cpu: start from a measured one"):
        refit(measured.model_copy(update={"estimated_from": "cpu"}), device)
    with pytest.raises(UserError, match="cannot tell fixed seconds from slopes"):
        refit(measured, device.model_copy(update={"compute": device.compute[:1]}))
    half = device.workload.model_copy(update={"autocast": "bfloat16"})
    with pytest.raises(UserError, match="autocast=none but the profile bfloat16: profile the same again"):
        refit(measured, device.model_copy(update={"workload": half}))
    other = [row.model_copy(update={"cp": 3}) for row in device.compute]
    with pytest.raises(UserError, match="no cp degree of the profile"):
        refit(measured, device.model_copy(update={"compute": tuple(other)}))


def test_the_verb_starts_from_an_old_model(measured, device, tmp_path, capsys):
    measured.save(tmp_path / "old.json")
    few(device).save(tmp_path / "profile.json")
    words = ["fit", tmp_path / "profile.json", "--from", tmp_path / "old.json", "--out", tmp_path / "cost.json"]
    assert main(list(map(str, words))) == 0
    assert CostModel.load(tmp_path / "cost.json").device == "gpu x"
    (tmp_path / "grid.csv").write_text("")
    assert main(list(map(str, [*words, "--heldout", tmp_path / "grid.csv"]))) == 2
    assert "--from takes a profile alone" in capsys.readouterr().err
