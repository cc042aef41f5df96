# Helpers of the rules: the validated experiment, paths, resources. No rule here, and nothing that loads torch.
import os
import sys
from os import environ
from pathlib import Path

from snakemake.exceptions import WorkflowError

ROOT = Path(str(workflow.current_basedir)).resolve().parents[1]

# `python` in a rule is the interpreter that runs Snakemake, even in a venv that nobody activated; said through the
# environment and not by shell.prefix, so that --sdm conda still wins. The source is found in a plain checkout, too.
environ["PATH"] = os.pathsep.join(
    [os.path.dirname(sys.executable), *os.get_exec_path()]
)
environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ROOT / "src"), environ.get("PYTHONPATH")])
)
if str(ROOT / "src") not in sys.path:
    sys.path.insert(0, str(ROOT / "src"))

from megagraph import resources as needs
from megagraph.config import UserError, load_experiment

try:
    EXPERIMENT = load_experiment(config)
except UserError as error:
    raise WorkflowError(f"config: {error}") from None

RUNS = {run_id: EXPERIMENT.run(run_id) for run_id in EXPERIMENT.runs}
PAPER_VALUES = str(ROOT / "config" / "paper_values.yaml")


def run_of(wildcards):
    """The run a job belongs to."""
    try:
        return RUNS[wildcards.run]
    except KeyError:
        raise WorkflowError(
            f"run {wildcards.run!r} is not in this config: it has {sorted(RUNS)}"
        ) from None


def spec(wildcards):
    """One piece of the configuration as JSON. It is the parameter of its `resolve` job: a changed setting runs
    that job again and then exactly what depends on the piece."""
    kind, name = wildcards.kind, wildcards.id
    if kind in ("run", "workload"):
        run = run_of(type("Wildcards", (), {"run": name}))
        return (run if kind == "run" else run.workload).model_dump_json()
    pieces = {
        "dataset": EXPERIMENT.datasets,
        "coarsening": EXPERIMENT.coarsenings,
        "figure": EXPERIMENT.figures,
    }
    if name not in pieces[kind]:
        raise WorkflowError(
            f"{kind} {name!r} is not in this config: it has {sorted(pieces[kind])}"
        )
    return pieces[kind][name].model_dump_json()


def data_dir(wildcards):
    """The folder that a run reads its graph from."""
    return f"results/data/{run_of(wildcards).dataset}"


def data_files(wildcards):
    """What must be in that folder."""
    folder = data_dir(wildcards)
    return [
        f"{folder}/graph.safetensors",
        f"{folder}/manifest.json",
        f"{folder}/{run_of(wildcards).coarsening}.safetensors",
    ]


def grid_files(run_id):
    """The shards of a run's validation grid; none if it has no grid."""
    grid = RUNS[run_id].profile.grid
    return [
        f"results/search/{run_id}/grid-{i}.csv"
        for i in range(grid.shards if grid else 0)
    ]


def heldout_files(run_id):
    """The shards of a run's held-out grid; none if it has none."""
    grid = RUNS[run_id].profile.heldout
    return [
        f"results/search/{run_id}/heldout-{i}.csv"
        for i in range(grid.shards if grid else 0)
    ]


def heldout_profiles(run_id):
    """The profiles of other runs that a run's cost model must predict."""
    return [
        f"results/search/{other}/profile.json"
        for other in RUNS[run_id].profile.heldout_runs
    ]


def plan_file(wildcards):
    """The search result a run takes its plan from; none if the config gives the plan."""
    if run_of(wildcards).parallel.plan != "search":
        return []
    return f"results/search/{wildcards.run}/search.json"


def train_files(run_id):
    """What training leaves for figures."""
    return [f"results/train/{run_id}/{name}" for name in ("summary.json", "epochs.csv")]


def figure_files(name):
    """What a figure or table is drawn from."""
    figure = EXPERIMENT.figures[name]
    files = [f"results/config/figure/{name}.json"]
    for run_id in figure.runs:
        files += [f"results/config/run/{run_id}.json", *train_files(run_id)]
    if figure.search:
        folder = f"results/search/{figure.search}"
        files += [
            f"results/config/workload/{figure.search}.json",
            f"{folder}/cost.json",
        ]
        files += (
            [f"{folder}/search.json", f"{folder}/plans.csv"]
            if name == "fig10"
            else [*grid_files(figure.search), *heldout_files(figure.search)]
        )
    return files


def drawn_kinds(name):
    """What drawing leaves beside the PNG."""
    return [".pdf", ".csv", *([".md", ".tex"] if name.startswith("table") else [])]


def all_results():
    """Every figure, table and run of the config."""
    files = [
        f"results/figures/{name}{kind}"
        for name in EXPERIMENT.figures
        for kind in (".png", *drawn_kinds(name))
    ]
    return files + [path for run_id in RUNS for path in train_files(run_id)]


def ranks(wildcards):
    """Ranks of a job."""
    return needs.tasks(run_of(wildcards))


def nodes(wildcards):
    """Nodes of a job."""
    return needs.nodes(run_of(wildcards))


def mpi(wildcards):
    """How SLURM is told that a job has several ranks."""
    return needs.mpi(run_of(wildcards))


def gres(wildcards):
    """GPUs per node."""
    return needs.gres(run_of(wildcards))


def gres_of_one(wildcards):
    """The GPU of a job with one rank."""
    return needs.gres(run_of(wildcards), ranks=1)


def mem_mb(wildcards):
    """Memory per node."""
    return needs.mem_mb(run_of(wildcards))


def mem_mb_of_one(wildcards):
    """Memory of a job with one rank."""
    return needs.mem_mb(run_of(wildcards), ranks=1)


def minutes(base):
    """A time limit that grows with each retry of the profile."""
    return lambda wildcards, attempt: needs.runtime(base, attempt)
