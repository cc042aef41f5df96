"""Quality on points that had no part in the fit, by kind; the verb that reads them."""

import json

import numpy as np
import pytest

from megagraph.artifacts import CostModel
from megagraph.cli import main
from megagraph.config import UserError
from megagraph.files import write_csv
from megagraph.search.fit import fit
from megagraph.search.heldout import held_out

LAYERS = (2, 4, 8, 16)


def smaller(grid):
    return [row for row in grid if row["heads"] != "8"]


def test_every_kind_of_held_out_point_is_reported(make_profile, make_grid, workload):
    profile, grid = make_profile(degrees=(1, 2)), smaller(make_grid(layers=LAYERS))
    cost = fit(profile, grid)
    cells = [row for row in make_grid(layers=(8, 12)) if row["heads"] == "8" or row["layers"] == "12"]
    other = workload.model_copy(update={"num_features": 200})
    profiles = [make_profile(), make_profile(workload=other, degrees=(1,))]
    quality = held_out(cost, profile, grid, cells, profiles).quality
    assert {name: one for name, one in quality.items() if not name.startswith("heldout")} == cost.quality
    for name in ("heldout_memory/depth", "heldout_memory/width", "heldout_memory/depth+width", "heldout_memory/cp"):
        assert quality[name].held_out
        assert quality[name].mape_percent < 8, name
        assert quality[name].false_feasible_percent is not None
    assert quality["heldout_memory/dataset"].num_points == 24
    assert quality["heldout_latency"].num_points == len(cells) == 48
    assert quality["heldout_latency"].mape_percent < 5
    assert quality["heldout_layer/inside"].mape_percent < 0.1
    assert set(quality) >= {"heldout_layer/dataset", "heldout_latency/depth", "heldout_memory"}


def test_a_wrong_model_is_found_out(make_profile, make_grid):
    profile, grid = make_profile(), make_grid(layers=LAYERS)
    cost = fit(profile, grid)
    cells = [row | {"peak_bytes": str(2 * float(row["peak_bytes"]))} for row in make_grid(layers=(12,))]
    found = held_out(cost, profile, grid, cells).quality["heldout_memory"]
    assert found.bias_percent == pytest.approx(-50, abs=2)
    assert found.exceeded_percent == 100
    assert found.false_feasible_percent > 5


def test_another_device_is_refused(make_profile):
    profile = make_profile()
    with pytest.raises(UserError, match="held-out profile is of gpu x but the cost model of cpu"):
        held_out(fit(profile), profile, [], profiles=[profile.model_copy(update={"device": "gpu x"})])


def test_the_verb_reads_held_out_files(make_profile, make_grid, tmp_path, capsys):
    make_profile().save(tmp_path / "profile.json")
    write_csv(tmp_path / "grid.csv", make_grid(layers=LAYERS))
    write_csv(tmp_path / "more.csv", make_grid(layers=(12,)))
    words = ["fit", tmp_path / "profile.json", tmp_path / "grid.csv", "--heldout", tmp_path / "more.csv"]
    words += ["--heldout-profile", tmp_path / "profile.json", "--quantile", "0.9", "--out", tmp_path / "cost.json"]
    assert main(list(map(str, words))) == 0
    quality = CostModel.load(tmp_path / "cost.json").quality
    assert quality["heldout_latency"].num_points == 36
    assert quality["heldout_layer"].num_points == 9
    body = json.loads((tmp_path / "profile.json").read_text())
    body["compute"][0]["layer_forward"]["median"] = float(np.nan)
    (tmp_path / "profile.json").write_text(json.dumps(body))
    (tmp_path / "cost.json").unlink()
    assert main(list(map(str, words))) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "compute.0.layer_forward.median" in err and "make the file again" in err
    assert not (tmp_path / "cost.json").exists()
