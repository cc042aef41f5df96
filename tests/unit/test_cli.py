"""The command line: exit codes, one-line errors, nothing half-written, and no torch where none is needed."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megagraph import __version__
from megagraph.cli import main
from megagraph.config import DigitsConfig, RunConfig, UserError

RUN = {"id": "a", "dataset": "digits", "model": {"layers": 4}, "parallel": {"plan": {"layers": [4]}}}


def fails(capsys, *arguments):
    """Run a verb that must fail for the user: its one line."""
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert re.fullmatch(r"megagraph: error: [^\n]+\n", err), err
    return err


def resolve(kind, spec, out):
    return ["resolve", kind, "a", "--spec", json.dumps(spec), "--out", str(out)]


def test_version():
    done = subprocess.run([sys.executable, "-m", "megagraph", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"megagraph {__version__}\n")


def test_resolve_writes_the_complete_run(tmp_path):
    out = tmp_path / "deep" / "a.json"
    assert main(resolve("run", RUN, out)) == 0
    assert RunConfig.model_validate_json(out.read_text()) == RunConfig.model_validate(RUN)
    assert json.loads(out.read_text())["train"]["epochs"] == 100


def test_resolve_picks_the_source(tmp_path):
    out = tmp_path / "a.json"
    assert main(resolve("dataset", {"source": "digits", "neighbors": 3}, out)) == 0
    assert DigitsConfig.model_validate_json(out.read_text()).neighbors == 3


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (RUN | {"colour": 1}, ["run a", "colour", "unknown key", "remove it"]),
        (RUN | {"parallel": {"plan": {"layers": [3]}}}, ["layers=[3]", "model.layers=4", "sum to 4"]),
        (RUN | {"parallel": {"plan": {"pp": 2, "layers": [4]}}}, ["layers=[4]", "pp=2", "one count per stage"]),
        (RUN | {"model": {"layers": 4, "heads": 3, "hidden": 64}}, ["hidden=64", "heads=3"]),
    ],
)
def test_bad_run_is_one_line_and_no_file(tmp_path, capsys, spec, words):
    line = fails(capsys, *resolve("run", spec, tmp_path / "a.json"))
    assert all(word in line for word in words), line
    assert list(tmp_path.iterdir()) == []


def test_spec_that_is_not_json(tmp_path, capsys):
    assert "not JSON" in fails(capsys, "resolve", "run", "a", "--spec", "{a", "--out", tmp_path / "a.json")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fly"], "invalid choice: 'fly'"),
        (["profile", "w.json", "--data", "d", "--out", "o", "--grid", "6/6"], "from 0 to 5"),
        (["profile", "w.json", "--data", "d", "--out", "o", "--grid", "x"], "'x' is not I/N"),
        (["launch", "--nodes", "1", "--tasks", "0", "--", "train"], "'0' is not a whole number"),
        (["train", "run.json"], "required: --data, --out"),
    ],
)
def test_wrong_arguments_are_one_line(capsys, arguments, words):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert err.startswith("megagraph: error: ")
    assert err.count("\n") == 1
    assert words in err


def test_missing_input_names_the_file(tmp_path, capsys):
    line = fails(capsys, "coarsen", tmp_path / "none.safetensors", tmp_path / "c.json", "--out", tmp_path / "o")
    assert "none.safetensors" in line
    assert list(tmp_path.iterdir()) == []


def test_foreign_json_is_refused(tmp_path, capsys):
    (tmp_path / "profile.json").write_text('{"schema": "megagraph.cost/1"}')
    line = fails(capsys, "fit", tmp_path / "profile.json", "--out", tmp_path / "cost.json")
    assert "schema is 'megagraph.cost/1', expected 'megagraph.profile/1'" in line
    assert not (tmp_path / "cost.json").exists()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_disk_errors_are_one_line(tmp_path, capsys, monkeypatch, number):
    def full(self, text, *rest):
        raise OSError(number, "the system's words", str(self))

    monkeypatch.setattr(Path, "write_text", full)
    line = fails(capsys, *resolve("run", RUN, tmp_path / "a.json"))
    assert "the system's words" in line
    assert str(tmp_path) in line
    assert list(tmp_path.iterdir()) == []


def test_other_errors_keep_their_traceback(monkeypatch):
    from megagraph import verbs

    def broken(arguments):
        raise RuntimeError("ours")

    monkeypatch.setattr(verbs, "schema", broken)
    with pytest.raises(RuntimeError, match="ours"):
        main(["schema", "--out", "x"])


def test_a_message_of_several_lines_becomes_one(monkeypatch, capsys):
    from megagraph import verbs

    def refuse(arguments):
        raise UserError("first\n  second")

    monkeypatch.setattr(verbs, "schema", refuse)
    assert fails(capsys, "schema", "--out", "x") == "megagraph: error: first second\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["resolve", "run", "a", "--spec", json.dumps(RUN), "--out", "a.json"],
        ["schema", "--out", "s.json"],
        ["check", "--gpus", "0"],
        ["fit", "none.json", "--out", "cost.json"],
        ["search", "none.json", "cost.json", "--out", "search.json"],
        ["figure", "fig8b", "--results", "none", "--out", "none"],
        ["report", "--results", "none", "--paper", "none.yaml", "--out", "report.md"],
        ["launch", "--nodes", "1", "--tasks", "1", "--", "schema", "--out", "s.json"],
        ["launch", "--nodes", "2", "--tasks", "2", "--", "train", "a.json"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_light_verbs_never_load_torch(tmp_path, arguments):
    code = (
        "import sys; from megagraph.cli import main\n"
        f"main({arguments!r})\n"
        "heavy = sorted({'torch', 'torch_geometric', 'snakemake'} & set(sys.modules))\nassert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def mirror(tmp_path, monkeypatch):
    """A copy of CiteSeer's raw files that a test may spoil."""
    target = tmp_path / "mirror"
    shutil.copytree(Path(os.environ["MEGAGRAPH_MIRROR"]) / "CiteSeer", target / "CiteSeer")
    monkeypatch.setenv("MEGAGRAPH_MIRROR", str(target))
    return target / "CiteSeer" / "raw"


def citeseer(tmp_path):
    spec = tmp_path / "citeseer.json"
    spec.write_text('{"source": "citeseer"}')
    return ["download", spec, "citeseer", "--out", tmp_path / "out"]


@pytest.mark.mirror
def test_download_reads_the_mirror(tmp_path, mirror):
    assert main([str(argument) for argument in citeseer(tmp_path)]) == 0
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["num_nodes"] == 3327


@pytest.mark.mirror
@pytest.mark.parametrize(
    ("name", "spoil", "words"),
    [
        ("ind.citeseer.x", Path.unlink, ["ind.citeseer.x"]),
        ("ind.citeseer.tx", lambda path: path.write_bytes(path.read_bytes()[:-100]), ["ind.citeseer.tx"]),
        (
            "ind.citeseer.graph",
            lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
            ["ind.citeseer.graph", "sha256"],
        ),
    ],
    ids=["missing", "truncated", "wrong checksum"],
)
def test_spoilt_mirror_is_one_line(tmp_path, capsys, mirror, name, spoil, words):
    path = mirror / name
    path.chmod(0o644)
    spoil(path)
    line = fails(capsys, *citeseer(tmp_path))
    assert all(word in line for word in words), line
    assert not (tmp_path / "out" / "graph.safetensors").exists()
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_truncated_graph_is_one_line(tmp_path, capsys):
    spec = tmp_path / "digits.json"
    spec.write_text('{"source": "digits"}')
    assert main(["download", str(spec), "digits", "--out", str(tmp_path)]) == 0
    graph = tmp_path / "graph.safetensors"
    graph.write_bytes(graph.read_bytes()[:-1000])
    (tmp_path / "c.json").write_text("{}")
    line = fails(capsys, "coarsen", graph, tmp_path / "c.json", "--out", tmp_path / "coarse.safetensors")
    assert "graph.safetensors" in line
    assert "make the file again" in line
    assert not (tmp_path / "coarse.safetensors").exists()
