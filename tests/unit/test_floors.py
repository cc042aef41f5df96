"""Rules that import-linter cannot state, by reading the source."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "megagraph"
LAUNCHER = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
ALLOWED = {"MEGAGRAPH_MIRROR", *LAUNCHER}


def distributed_imports(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        yield from (name for name in names if f"{name}.".startswith("torch.distributed."))


def environment_uses(tree):
    """Every use of the environment: the name read by a constant key, or None for any other use."""
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        name = getattr(node, "attr", getattr(node, "id", None))
        if name not in ("environ", "getenv", "environb"):
            continue
        user = parents[node]
        if isinstance(user, ast.Attribute):  # environ.get(...)
            user = parents[user]
        key = None
        if isinstance(user, ast.Subscript):
            key = user.slice
        elif isinstance(user, ast.Call) and user.args:
            key = user.args[0]
        elif isinstance(user, ast.Compare):
            key = user.left
        yield key.value if isinstance(key, ast.Constant) else None


def parse(path):
    return ast.parse(path.read_text())


@pytest.mark.parametrize("path", sorted((SOURCE / "model").rglob("*.py")), ids=lambda path: path.name)
def test_model_never_imports_torch_distributed(path):
    assert list(distributed_imports(parse(path))) == []


def test_environment_is_no_configuration():
    """Only the mirror and what a launcher says; launch.py itself passes the environment on."""
    strange = {}
    for path in sorted(SOURCE.rglob("*.py")):
        uses = set(environment_uses(parse(path))) - ALLOWED
        if path.name == "launch.py" or (path.name == "verbs.py" and uses == {None}):
            continue
        if uses:
            strange[path.name] = uses
    assert strange == {}


@pytest.mark.parametrize(
    "code",
    [
        "import torch.distributed as d",
        "from torch import distributed",
        "from torch.distributed import x",
        "import torch\ntorch.distributed.barrier()",
    ],
)
def test_the_first_check_sees(code):
    assert list(distributed_imports(ast.parse(code)))


@pytest.mark.parametrize(
    ("code", "key"),
    [
        ("import os\nos.environ['A']", "A"),
        ("import os\nos.environ.get('A', 1)", "A"),
        ("import os\nos.getenv('A')", "A"),
        ("from os import environ\nenviron['A']", "A"),
        ("import os\n'A' in os.environ", "A"),
        ("import os\nos.environ[name]", None),
        ("import os\nf(os.environ)", None),
    ],
)
def test_the_second_check_sees(code, key):
    assert key in set(environment_uses(ast.parse(code)))


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_files_and_functions_stay_short(path):
    tree = parse(path)
    long = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno + 1 > 60
    ]
    assert not long
    limit = 300
    assert len(path.read_text().splitlines()) <= limit
