"""The report that a reader gets: claims, runs, provenance and its warnings."""

import shutil
from pathlib import Path

import pandas as pd
import pytest

from megagraph.config import UserError
from megagraph.figures.report import report

VALUES = Path(__file__).parents[3] / "config" / "paper_values.yaml"


@pytest.fixture
def copy(drawn, tmp_path):
    """A copy of the drawn results that a test may change."""
    return Path(shutil.copytree(drawn.results, tmp_path / "copy"))


def test_report_files(copy):
    out = copy / "report.md"
    report(copy, VALUES, out)
    text, table = out.read_text(), pd.read_csv(out.with_suffix(".csv"))
    assert table.columns.tolist() == ["id", "where", "claim", "paper", "ours", "scale and hardware", "status"]
    assert table["id"].tolist() == list(range(1, 28))
    assert "| claim" in text and "scale and hardware" in text
    for word in (
        "random-60-20-20, 0",
        "90.10%",
        "tiled",
        "pp2[1,3] cp1 dp1 k1 (config)",
        "measured (MemTracker)",
        "1e9",
    ):
        assert word in text
    for number in (13, 18, 20, 27):
        assert "cpu x2" in table.set_index("id")["scale and hardware"][number]
    assert "commit abc123" in text and "Warning" not in text
    assert "480 s in the epochs of 6 run(s)" in text
    first = text, out.with_suffix(".csv").read_bytes()
    report(copy, VALUES, out)
    assert (out.read_text(), out.with_suffix(".csv").read_bytes()) == first


def test_report_warns_of_mixed_and_dirty_commits_and_shows_runs_out_of_memory(copy, make):
    origin = make.provenance.model_copy(update={"commit": "fff999+dirty"})
    lost = make.summary("lost", make.plan(1, 1, 2, (4,)), status="oom", peak=(), provenance=origin)
    make.write_run(copy, lost)
    report(copy, VALUES, copy / "report.md")
    text = (copy / "report.md").read_text()
    assert "Warning: files come from 2 commits" in text and "no commit describes" in text
    row = next(line for line in text.splitlines() if line.startswith("| lost"))
    assert "OOM" in row


def test_report_without_runs_or_with_a_wrong_name_is_one_line_and_writes_nothing(tmp_path, copy):
    with pytest.raises(UserError, match=r"summary\.json: no such files: make one with `megagraph train`"):
        report(tmp_path / "empty", VALUES, tmp_path / "report.md")
    with pytest.raises(UserError, match=r"ends in \.md"):
        report(copy, VALUES, tmp_path / "report.txt")
    assert not list(tmp_path.glob("report.*"))
