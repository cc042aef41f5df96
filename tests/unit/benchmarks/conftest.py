"""A benchmark script runs at a tiny size and writes what it says; none of its times is judged."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def module(monkeypatch):
    """A script, or what stands beside it, as a module."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def script(tmp_path):
    """Run a script with the given words; the JSON it writes, which says where it ran.

    In a process of its own: the tests of several ranks fork, which a process group in this one might not survive.
    """

    def run(name, *words):
        out = tmp_path / "out.json"
        command = [sys.executable, BENCHMARKS / f"{name}.py", "--out", out, *words]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
        body = json.loads(out.read_text())
        assert body["benchmark"] == name
        assert body["where"]["threads"] >= 1
        assert body["where"]["device"].startswith("cpu ")
        assert body["where"]["commit"] and body["where"]["torch"]
        return body

    return run
