"""Running Snakemake in a folder of its own."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


class Workflow:
    """Snakemake on the repository's Snakefile with everything it writes under `folder`."""

    def __init__(self, folder):
        self.folder = folder

    def __call__(self, *arguments, config=None, **options):
        configfile = ["--configfile", str(config)] if config else []
        return subprocess.run(
            [sys.executable, "-m", "snakemake", "--directory", str(self.folder), *configfile, *map(str, arguments)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
            **options,
        )

    def jobs(self, *arguments, config=None):
        """Number of jobs by rule that a run would start."""
        done = self("-n", "--cores", "2", *arguments, config=config)
        text = done.stdout + done.stderr
        assert done.returncode == 0, text
        if "Nothing to be done" in text:
            return Counter()
        table = text.split("Job stats:")[1].split("\ntotal")[0]
        return Counter({rule: int(n) for rule, n in re.findall(r"^(\w+) +(\d+)$", table, re.MULTILINE)})

    def planned(self, config):
        """The log files of the jobs that a run would start: one name for each job."""
        done = self("-n", "-p", "--cores", "2", config=config)
        assert done.returncode == 0, done.stdout + done.stderr
        return set(re.findall(r"> logs/(\S+)\.log", done.stdout + done.stderr))


@pytest.fixture(scope="session")
def workflow_in():
    """Makes a `Workflow` in a given folder."""
    return Workflow


@pytest.fixture
def workflow(tmp_path):
    return Workflow(tmp_path / "work")


@pytest.fixture
def demo():
    """The demo's configuration, to be changed and written elsewhere."""
    return yaml.safe_load((ROOT / "config" / "demo.yaml").read_text())
