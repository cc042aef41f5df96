"""pyproject.toml, the locks and the conda environment agree, and every import is declared."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DISTRIBUTIONS = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}  # imports whose distribution has another name


def pins(lines):
    """Exact versions by canonical name; refuses any other form of line."""
    found = {}
    for line in lines:
        name, version = re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.]+)", line).groups()
        found[canonicalize_name(name)] = version
    return found


def lock(name):
    lines = (ROOT / "envs" / name).read_text().splitlines()
    return pins(line for line in lines if line and not line.startswith(("#", "-r ")))


RUNTIME = lock("requirements.lock")
DEVELOPMENT = RUNTIME | lock("requirements-dev.lock")
EXTRAS = PROJECT["optional-dependencies"]["dev"]
OPTIONAL = [requirement for extra in PROJECT["optional-dependencies"].values() for requirement in extra]


@pytest.mark.parametrize(
    ("requirement", "locked"),
    [*((each, RUNTIME) for each in PROJECT["dependencies"]), *((each, DEVELOPMENT) for each in EXTRAS)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_lock_is_within_the_range(requirement, locked):
    wanted = Requirement(requirement)
    assert wanted.specifier.contains(locked[canonicalize_name(wanted.name)])


def test_lock_fits_every_build_of_torch():
    assert not [name for name in DEVELOPMENT if name.startswith("nvidia") or name in ("megagraph", "triton")]
    assert "+" not in RUNTIME["torch"]


def test_development_lock_stands_on_the_runtime_lock():
    assert "-r requirements.lock" in (ROOT / "envs" / "requirements-dev.lock").read_text().splitlines()
    assert not RUNTIME.keys() & lock("requirements-dev.lock").keys()


def test_conda_environment_has_the_same_versions():
    environment = yaml.safe_load((ROOT / "envs" / "environment.yaml").read_text())
    (pip,) = [entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict)]
    wanted = {canonicalize_name(Requirement(each).name) for each in PROJECT["dependencies"]} - {"snakemake"}
    assert pins(pip) == {name: RUNTIME[name] for name in wanted}


def imports(folder):
    """Top-level modules imported by the Python files under a folder."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((alias.name.split(".")[0], path) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level:
                yield node.module.split(".")[0], path


def undeclared(folder, declared):
    known = {"megagraph", *sys.stdlib_module_names}
    return {
        (module, str(path.relative_to(ROOT)))
        for module, path in imports(ROOT / folder)
        if module not in known and canonicalize_name(DISTRIBUTIONS.get(module, module)) not in declared
    }


def test_every_import_of_the_package_is_declared():
    declared = [*PROJECT["dependencies"], *OPTIONAL]
    assert not undeclared("src", {canonicalize_name(Requirement(each).name) for each in declared})


def test_every_import_of_the_tests_is_locked():
    helpers = {canonicalize_name(path.stem) for path in (ROOT / "tests").rglob("*.py")}
    assert not undeclared("tests", DEVELOPMENT.keys() | helpers)


def test_every_dependency_is_used():
    used = {canonicalize_name(DISTRIBUTIONS.get(module, module)) for module, _ in imports(ROOT / "src")}
    # Called as a program; used by pandas' to_markdown; compiled by torch_geometric's get_ppr.
    indirect = {"snakemake", "tabulate", "numba"}
    unused = {canonicalize_name(Requirement(each).name) for each in PROJECT["dependencies"]} - used - indirect
    assert not unused


def test_citation_has_the_version():
    from megagraph import __version__

    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == __version__
