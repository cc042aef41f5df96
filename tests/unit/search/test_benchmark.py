"""The benchmark of the search runs and writes what it says."""

import json
import runpy
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "search.py"


def test_a_tiny_benchmark_writes_its_table(tmp_path, monkeypatch, capsys):
    out = tmp_path / "search.json"
    words = ["--ranks", "2", "--layers", "4", "6", "--problems", "2", "--frontiers", "1", "--out"]
    monkeypatch.setattr(sys, "argv", ["search.py", *words, str(out)])
    runpy.run_path(str(BENCHMARK), run_name="__main__")
    body = json.loads(out.read_text())
    assert [(row["ranks"], row["layers"], row["problems"]) for row in body["searches"]] == [(2, 4, 2), (2, 6, 2)]
    assert all(row["proven"] + row["infeasible"] == 2 and row["max_gap"] == 0 for row in body["searches"])
    assert all(0 <= row["p50_ms"] <= row["p90_ms"] <= row["max_ms"] for row in body["searches"])
    assert all(row["complete"] == 1 for row in body["frontiers"])
    assert set(body["met"]) == {"few_ranks", "all", "frontier"}
    assert len(capsys.readouterr().out.splitlines()) == 2
