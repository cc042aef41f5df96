"""Plans for hardware that was not measured: what scales how, what is refused, and that it says what it is."""

import json
from pathlib import Path

import pytest
import yaml

from megagraph.artifacts import CostModel
from megagraph.artifacts_search import SearchResult
from megagraph.cli import main
from megagraph.config import RunConfig, UserError
from megagraph.config_hardware import HardwareConfig
from megagraph.search.cost import all_reduce_seconds, p2p_seconds, part_seconds, predict_cell
from megagraph.search.fit import fit
from megagraph.search.hardware import estimate, limit_bytes, load_hardware

FOLDER = Path(__file__).parents[3] / "config" / "hardware"
NAMES = ["a100-80", "cpu-2core", "h100-80", "h200-141", "m40-24", "rtx-4090"]


def hardware(factor=1.0, **changes):
    """A device `factor` times as fast in every respect."""
    rates = dict.fromkeys(("fp32", "tf32", "bf16"), 1e11 * factor)
    link = {"latency_seconds": 1e-4 / factor, "bytes_per_second": 1e9 * factor}
    body = {
        "name": f"x{factor:g}",
        "memory_bytes": 1e9,
        "peak_flops": rates,
        "achieved_fraction": dict.fromkeys(rates, 1),
    }
    body |= {"memory_bytes_per_second": 1e10 * factor, "achieved_memory_fraction": 1.0}
    body |= {"dispatch_seconds": 1e-5 / factor, "within_node": link, "between_nodes": link}
    return HardwareConfig.model_validate(body | changes)


@pytest.fixture
def measured(make_profile, make_grid):
    return fit(make_profile(), make_grid(layers=(2, 4, 8)))


@pytest.mark.parametrize("name", NAMES)
def test_every_file_is_complete(name):
    found = load_hardware(FOLDER / f"{name}.yaml")
    assert found.name == name
    assert found.devices
    assert limit_bytes(found) > 3e9
    assert "dispatch_seconds" in found.estimates
    assert "memory_bytes" in found.estimates or name != "cpu-2core"


def test_no_file_is_missing_here():
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == NAMES


def test_the_same_hardware_changes_nothing(measured, make_grid):
    same = estimate(measured, hardware(), hardware(), 1)
    for part, seconds in part_seconds(measured, measured.workload, 1, 32).items():
        assert part_seconds(same, same.workload, 1, 32)[part] == pytest.approx(seconds, rel=1e-12)
    row = make_grid()[5]
    assert predict_cell(same, row).step_seconds == pytest.approx(predict_cell(measured, row).step_seconds, rel=1e-12)


def test_twice_as_fast_takes_half(measured, make_grid):
    twice = estimate(measured, hardware(), hardware(2.0), 1)
    for part, seconds in part_seconds(measured, measured.workload, 1, 32).items():
        assert part_seconds(twice, twice.workload, 1, 32)[part] == pytest.approx(seconds / 2, rel=1e-12)
    row = make_grid()[5]
    cell, old = predict_cell(twice, row), predict_cell(measured, row)
    assert cell.step_seconds == pytest.approx(old.step_seconds / 2, rel=1e-12)
    assert cell.peak_bytes == old.peak_bytes


def test_every_operation_meets_its_own_roof(measured):
    """Faster products alone leave softmax and dispatch alone; more bandwidth alone leaves products alone."""
    rates = dict.fromkeys(("fp32", "tf32", "bf16"), 1e13)
    faster = estimate(measured, hardware(), hardware(peak_flops=rates), 1).compute["grid_forward"]
    old = measured.compute["grid_forward"]
    # 16 operations per byte at 1e10 bytes per second: the roof is at 1.6e11, where it was at 1e11
    assert faster["linear"] == pytest.approx(old["linear"] / 1.6)
    assert faster["softmax"] == old["softmax"]
    assert faster["fixed"] == old["fixed"]
    wider = estimate(measured, hardware(), hardware(memory_bytes_per_second=1e12), 1).compute["grid_forward"]
    assert wider["linear"] == old["linear"]
    assert wider["softmax"] == pytest.approx(old["softmax"] / 8)


def test_messages_are_those_of_the_links(measured):
    slow = {"latency_seconds": 1e-3, "bytes_per_second": 1e8}
    found = estimate(measured, hardware(), hardware(between_nodes=slow), 8, nodes=2)
    assert p2p_seconds(found, 1e6) == pytest.approx(1e-3 + 1e6 / 1e8)
    assert all_reduce_seconds(found, 4, 1e6) == pytest.approx(6 * (1e-4 + 2.5e5 / 1e9))
    assert all_reduce_seconds(found, 8, 1e6) == pytest.approx(14 * (1e-3 + 1.25e5 / 1e8))
    assert sorted(key for key in found.compute if key.isdigit()) == ["1", "2", "4", "8"]
    four, eight = (part_seconds(found, found.workload, cp, 64) for cp in (4, 8))
    assert four["layer_forward"] < part_seconds(found, found.workload, 1, 64)["layer_forward"]
    assert eight["layer_forward"] > four["layer_forward"]
    assert eight["layer_backward"] - eight["layer_forward"] > 7e-3


def test_an_estimate_says_so_and_is_no_base_for_another(measured):
    found = estimate(measured, hardware(), hardware(2.0), 4)
    assert found.estimated_from == "cpu"
    assert found.device == "x2 (estimated from cpu)"
    assert found.quality == {} and found.intervals == {}
    with pytest.raises(UserError, match="already estimated from cpu"):
        estimate(found, hardware(), hardware(), 4)


@pytest.mark.parametrize(("devices", "nodes"), [(3, 2), (0, 1)])
def test_devices_that_nodes_do_not_divide(measured, devices, nodes):
    with pytest.raises(UserError, match=f"{devices} devices on {nodes} nodes"):
        estimate(measured, hardware(), hardware(), devices, nodes)


@pytest.fixture
def files(tmp_path, measured):
    """A workload, a cost model and two hardware files."""
    run = RunConfig(id="a", dataset="d", model={"layers": 4}, parallel={"plan": {"layers": [4]}, "memory_limit_gb": 1})
    (tmp_path / "workload.json").write_text(run.workload.model_dump_json())
    measured.save(tmp_path / "cost.json")
    for name, one in (("own", hardware(devices=["cpu"])), ("big", hardware(20.0))):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(json.loads(one.model_dump_json())))
    return tmp_path


def search(files, *words):
    command = ["search", files / "workload.json", files / "cost.json", "--out", files / "search.json", *words]
    return main([str(word) for word in command])


def test_the_verb_plans_for_other_hardware(files, capsys):
    assert search(files) == 0
    here = SearchResult.load(files / "search.json")
    assert search(files, "--hardware", files / "big.yaml", "--devices", 4, "--nodes", 2) == 0
    there = SearchResult.load(files / "search.json")
    assert (here.estimated_from, there.estimated_from) == ("", "cpu")
    assert "estimated: x20 (estimated from cpu)" in capsys.readouterr().out
    assert there.world_size == 4 and there.limit_bytes == 1e9
    assert there.best.step_seconds < here.best.step_seconds
    assert "estimated from cpu" in there.provenance.device


def change(path, **keys):
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | keys))


def test_mistakes_are_one_line_with_a_remedy(files, capsys):
    def fails(*words):
        assert search(files, *words) == 2
        err = capsys.readouterr().err
        assert err.startswith("megagraph: error: ")
        assert err.count("\n") == 1
        assert not (files / "search.json").exists()
        return err

    big = ("--hardware", files / "big.yaml")
    assert "name it with --hardware" in fails("--devices", 4)
    assert "no such file: name one of config/hardware" in fails("--hardware", files / "none.yaml")
    (files / "bad.yaml").write_text("a: [")
    assert "not YAML" in fails("--hardware", files / "bad.yaml")
    (files / "bad.yaml").unlink()
    change(files / "big.yaml", memory_bytes=1e6)
    assert "no plan of 2 ranks fits in 0.001 GB: set one of memory_limit_gb" in fails(*big, "--devices", 2)
    (files / "search.remedies.json").unlink()
    change(files / "big.yaml", memory_bytes=1e9, colour="red")
    assert "big.yaml: colour: unknown key: remove it" in fails(*big)
    body = yaml.safe_load((files / "big.yaml").read_text())
    del body["colour"]
    (files / "big.yaml").write_text(yaml.safe_dump(body))
    change(files / "own.yaml", devices=["another"])
    assert "measured on 'cpu', which no file of" in fails(*big)


def test_a_coefficient_that_is_no_number_is_named(files, measured, capsys):
    table = {**measured.compute["1"], "layer_forward_slope": float("nan")}
    broken = measured.model_copy(update={"compute": {**measured.compute, "1": table}})
    body = {"schema": CostModel.kind, **broken.model_dump()}
    (files / "cost.json").write_text(json.dumps(body))
    assert search(files) == 2
    assert "compute.1.layer_forward_slope=nan: profile again and fit again" in capsys.readouterr().err
