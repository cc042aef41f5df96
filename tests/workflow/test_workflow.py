"""The workflow's own rules: linters, no torch in the Snakefile, and what happens before any work starts."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.workflow


def test_lint(workflow):
    done = workflow("--lint")
    assert done.returncode == 0, done.stderr


def test_snakefmt():
    argv = [sys.executable, "-m", "snakefmt", "--check", "Snakefile", "workflow"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_snakefile_never_loads_torch(workflow, tmp_path):
    """Every SLURM job parses it again: an interpreter that cannot import torch must do."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nfor name in ('torch', 'torch_geometric', 'scipy', 'sklearn'):\n    sys.modules[name] = None\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = workflow("-n", "--cores", "2", config=ROOT / "config" / "demo.yaml", env=environment)
    assert done.returncode == 0, done.stderr
    assert "Job stats" in done.stdout + done.stderr


def test_missing_gpus_stop_the_run_before_any_work(workflow, tmp_path):
    """The paper's config on a machine whose driver tool finds no GPU."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\nexit 9\n")
    tool.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tool.parent}{os.pathsep}{os.environ['PATH']}"}
    done = workflow("--cores", "2", env=environment)
    text = done.stdout + done.stderr
    assert done.returncode == 1
    lines = {line.strip() for line in text.splitlines() if "megagraph: error:" in line}
    assert len(lines) == 1
    (line,) = lines
    assert "needs 2 GPUs with at least 80 GB, none found" in line
    assert "--configfile config/demo.yaml" in line
    assert not (workflow.folder / "results").exists() or not list((workflow.folder / "results").rglob("*.json"))


def test_a_real_first_job(workflow):
    """The resolved configuration is written by a job, and a second call finds nothing to do."""
    target = "results/config/run/digits-cp2.json"
    config = ROOT / "config" / "demo.yaml"
    first = workflow("--cores", "1", target, config=config)
    assert first.returncode == 0, first.stderr
    assert '"cp": 2' in (workflow.folder / target).read_text()
    assert "Nothing to be done" in workflow("--cores", "1", target, config=config).stderr


def test_every_rule_of_the_workflow_is_one_verb():
    """No rule holds code: one call of the command line, with its log."""
    rules = {}
    for path in sorted((ROOT / "workflow" / "rules").glob("*.smk")):
        text = path.read_text()
        assert not re.search(r"^ +(run|script|notebook|wrapper):", text, re.MULTILINE)
        for name, body in re.findall(r"^rule (\w+):\n((?:    .*\n|\n)+)", text, re.MULTILINE):
            rules[name] = body
    assert set(rules) >= {"hardware", "resolve", "dataset", "coarsen", "profile", "grid", "fit", "search", "plans"}
    for name, body in rules.items():
        assert body.count("python -m megagraph ") == 1, name
        for directive in ("log:", "conda:", "message:", "> {log} 2>&1"):
            assert directive in body, (name, directive)


def test_no_python_or_an_old_one_is_one_line(tmp_path):
    """`make` in a copy without a venv."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copytree(ROOT / "envs", tmp_path / "envs")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    old = tmp_path / "oldpython"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    for python in ("no-such-python", str(old)):
        argv = ["make", "--no-print-directory", f"PYTHON={python}", "run"]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        (line,) = [line for line in done.stderr.splitlines() if "megagraph: error:" in line]
        assert f"PYTHON={python}" in line
        assert "3.11" in line
    assert not (tmp_path / ".venv").exists()
