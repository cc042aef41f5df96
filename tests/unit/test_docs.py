"""What the documents say is so: links, paths, names, commands, examples."""

import ast
import re
import shlex
from pathlib import Path

import pytest
import yaml
from snakemake.cli import get_argument_parser

from megagraph.artifacts import Artifact
from megagraph.artifacts_memory import MemoryPrediction
from megagraph.artifacts_search import Remedies, SearchResult
from megagraph.cli import _parser
from megagraph.config import RunConfig, load_experiment

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in DOCUMENTS}
NOT_RUN = "# not run:"
ARTIFACTS = {*Artifact.__subclasses__(), MemoryPrediction, SearchResult, Remedies}
CONFIGS = {
    path.name: load_experiment(yaml.safe_load(path.read_text()))
    for path in (ROOT / "config").glob("*.yaml")
    if path.name != "paper_values.yaml"
}


def fences(language):
    """(document, text) of every fenced block of a language."""
    pattern = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [(name, block) for name, text in TEXTS.items() for block in pattern.findall(text)]


def commands():
    """(document, words) of every command in a bash block, without comments and leading assignments."""
    found = []
    for name, block in fences("bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = [] if NOT_RUN in line else shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words:
                found.append((name, words))
    return found


def calls(*program):
    """Commands that start with `program`, without it."""
    size = len(program)
    return [(name, words[size:]) for name, words in COMMANDS if tuple(words[:size]) == program]


COMMANDS = commands()
MEGAGRAPH = calls("megagraph") + calls("python", "-m", "megagraph")
SNAKEMAKE = calls("snakemake")
MAKE = calls("make")


def ids(value):
    return value if isinstance(value, str) else " ".join(value)


def anchors(text):
    """Anchors of the headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", TEXTS)
def test_links_resolve(name):
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[name]):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / name).parent / path if path else ROOT / name
        assert file.exists(), target
        assert not anchor or anchor in anchors(file.read_text()), target


def test_every_document_is_reached_from_the_readme():
    linked = set(re.findall(r"\]\(([^)\s]+)\)", TEXTS["README.md"]))
    assert set(TEXTS) - {"README.md"} <= linked


@pytest.mark.parametrize("name", TEXTS)
def test_paths_exist(name):
    """Paths in backquotes that begin with a folder of the repository, or name one of its files."""
    folders = "src|workflow|config|profiles|envs|tests|docs"
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", TEXTS[name], flags=re.MULTILINE | re.DOTALL))
    paths = {span for span in spans if re.fullmatch(rf"({folders})/[\w./-]*", span)}
    # config/KIND/ID.json stands for files below results/.
    missing = {path for path in paths if not re.search(r"KIND|ID\.json", path) and not (ROOT / path).exists()}
    assert not missing


@pytest.mark.parametrize("name", TEXTS)
def test_names_stand_in_the_file_they_are_said_to_stand_in(name):
    """`name` in `path.py`: the file has it."""
    for found, path in re.findall(r"`([\w.]+)` (?:in|\()\s*`?(src/[\w/]+\.py)`", TEXTS[name]):
        text = (ROOT / path).read_text()
        assert all(re.search(rf"\b{part}\b", text) for part in found.split(".")), (found, path)


def test_the_documents_have_commands():
    """Guards the tests below against a pattern that finds nothing."""
    assert len(MEGAGRAPH) >= 5
    assert len(SNAKEMAKE) >= 5
    assert {"run", "test"} <= {word for _, words in MAKE for word in words}


@pytest.mark.parametrize(("name", "words"), MEGAGRAPH, ids=ids)
def test_megagraph_commands_parse(name, words):
    arguments = _parser().parse_args(words)
    if hasattr(arguments, "verb_arguments"):
        assert words.count("--") == 1
        inner = _parser().parse_args(words[words.index("--") + 1 :])
        assert not hasattr(inner, "verb_arguments")


def output_patterns():
    """Regular expressions of what the rules make; wildcards are groups."""
    rules = "\n".join(path.read_text() for path in (ROOT / "workflow" / "rules").glob("*.smk"))
    named = (re.split(r"\{(\w+)\}", path) for path in set(re.findall(r'"(results/[^"]+)"', rules)))
    return [
        "".join(f"(?P<{part}>[a-z0-9-]+)" if at % 2 else re.escape(part) for at, part in enumerate(parts))
        for parts in named
    ]


def is_target(target, experiment):
    """Whether a config can make it: a figure, a target rule, or a file of one of its runs, data sets, figures."""
    known = {"run": experiment.runs, "dataset": experiment.datasets, "coarsening": experiment.coarsenings}
    known |= {"fig": experiment.figures, "table": experiment.figures}
    if target in (*experiment.figures, "all", "everything", "report"):
        return True
    matches = [match for pattern in output_patterns() if (match := re.fullmatch(pattern, target))]
    return any(all(value in known.get(key, [value]) for key, value in m.groupdict().items()) for m in matches)


@pytest.mark.parametrize(("name", "words"), SNAKEMAKE, ids=ids)
def test_snakemake_commands_name_what_exists(name, words):
    arguments = get_argument_parser().parse_args(words)
    files = [str(path) for path in arguments.configfile or ["config/paper.yaml"]]
    assert all((ROOT / path).is_file() for path in files), files
    experiment = CONFIGS[Path(files[0]).name]
    assert all(is_target(target, experiment) for target in arguments.targets), arguments.targets


def test_targets_that_are_none():
    """The check above can fail."""
    demo = CONFIGS["demo.yaml"]
    assert is_target("results/train/digits-cp2/summary.json", demo)
    wrong = ["fig8a", "results/train/digits-cp3/summary.json", "results/train/digits-cp2/summary.yaml"]
    assert not any(is_target(target, demo) for target in wrong)


@pytest.mark.parametrize(("name", "words"), MAKE, ids=ids)
def test_make_targets_exist(name, words):
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert words
    assert {word for word in words if "=" not in word} <= targets


@pytest.mark.parametrize("name", TEXTS)
def test_make_in_running_text(name):
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z][a-z-]*)", TEXTS[name])) <= targets


@pytest.mark.parametrize(("name", "block"), fences("python"), ids=lambda value: value[:20])
def test_python_blocks_run(name, block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(block, name, "exec"), {})
    assert list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize(("name", "block"), fences("yaml"), ids=lambda value: value[:20])
def test_yaml_blocks_are_configuration(name, block):
    """Laid over the demo, each is a valid experiment."""
    demo = yaml.safe_load((ROOT / "config" / "demo.yaml").read_text())
    for key, value in yaml.safe_load(block).items():
        demo[key] |= value
    assert load_experiment(demo)


@pytest.mark.parametrize("plan", re.findall(r"`plan: (\{[^`]+\})`", TEXTS["docs/oom.md"]))
def test_plans_in_running_text(plan):
    body = yaml.safe_load(plan)
    ranks = body.get("pp", 1) * body.get("cp", 1) * body.get("dp", 1)
    assert RunConfig(
        id="a", dataset="d", model={"layers": sum(body["layers"])}, parallel={"world_size": ranks, "plan": body}
    )


@pytest.mark.parametrize(("name", "block"), fences("json"), ids=lambda value: value[:40])
def test_artifact_examples_load(name, block, tmp_path):
    path = tmp_path / "example.json"
    path.write_text(block)
    kinds = {kind.kind: kind for kind in ARTIFACTS}
    (tag,) = re.findall(r'"schema": "([^"]+)"', block)
    assert kinds[tag].load(path)


def test_every_artifact_has_its_example():
    shown = {tag for _, block in fences("json") for tag in re.findall(r'"schema": "([^"]+)"', block)}
    assert shown == {kind.kind for kind in ARTIFACTS}


def returned_keys(path, *functions):
    """Literal string keys of the mappings that functions of a file return, in order."""
    tree = ast.parse((ROOT / path).read_text())
    bodies = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    keys = []
    for function in functions:
        (value,) = [node.value for node in ast.walk(bodies[function]) if isinstance(node, ast.Return)]
        keys += [key.value for key in value.keys if key is not None]
    return keys


def test_table_examples_have_the_columns():
    from megagraph.train.progress import Epoch

    headers = [block.splitlines()[0].split(",") for name, block in fences("csv") if name == "docs/artifacts.md"]
    profiler = "src/megagraph/profile/profiler.py"
    assert returned_keys(profiler, "_cell", "_where") in headers
    assert returned_keys(profiler, "_plan", "_where") in headers
    assert list(Epoch.__dataclass_fields__) in headers
    assert ["id", "where", "claim", "paper", "ours", "scale and hardware", "status"] in headers


def test_the_memory_coefficients_are_all_documented():
    from megagraph.search.memory import PRIOR

    text = TEXTS["docs/cost-model.md"]
    assert not [name for name in [*PRIOR, "eager_gradients"] if f"`{name}`" not in text]


def test_expected_copies_are_those_of_the_code():
    from megagraph.search.memory import PRIOR

    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| ([\d., -]+) \|", TEXTS["docs/cost-model.md"], re.MULTILINE)
    said = {}
    for names, values in rows:
        numbers = [0.0 if value == "-" else float(value) for value in values.split(", ")]
        said |= dict(zip(re.findall(r"\w+", names), numbers, strict=True))
    assert said == PRIOR


def test_the_workflow_catalogue_finds_its_words():
    assert {"snakemake", "workflow"} <= set(re.findall(r"\w+", TEXTS["README.md"].lower()))
