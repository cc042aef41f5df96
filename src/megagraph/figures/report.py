"""The report: the paper's claims beside ours, every run, the fit of the cost model, and where the numbers come from."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path

import pandas as pd

from megagraph.artifacts import RunSummary
from megagraph.config import UserError
from megagraph.figures.claims import STATUSES, Claim, Finding, load_claims, status, trend_holds
from megagraph.figures.evaluators import evaluate
from megagraph.figures.evidence import Evidence, is_estimated
from megagraph.figures.style import GB
from megagraph.files import atomic_path

CONVENTIONS = """\
GB is 1e9 bytes. B is sequences per step over all replicas, N tokens per sequence (sampled nodes, super nodes and
global tokens). Peak memory is the largest rank's. A number measured at another scale than the paper's is never called
reproduced: at most *same trend*, judged by the bounds in the file of paper values; *contradicted* says that our
numbers fall outside of them at our scale. *Estimated* numbers come from the cost model."""


def report(results: Path, paper_values: Path, out: Path) -> None:
    """Write the report as Markdown to `out` and its claims as CSV beside it, both or neither.

    One row per claim of `paper_values`. Raises `UserError` if there is no training run, or a file is broken.
    """
    if out.suffix != ".md":
        raise UserError(f"{out}: the report is Markdown: give a name that ends in .md")
    evidence = Evidence(results)
    claims = claim_table(evidence, load_claims(paper_values).claims)
    text = "\n\n".join(
        [
            "# Paper against measured",
            _counts(claims),
            CONVENTIONS,
            "## Claims",
            markdown(claims.drop(columns=["id", "where"])),
            "## Runs",
            markdown(run_table(evidence)),
            *_cost_model(evidence),
            "## Provenance",
            _provenance(evidence),
        ]
    )
    with ExitStack() as stack:
        parts = [stack.enter_context(atomic_path(path)) for path in (out, out.with_suffix(".csv"))]
        parts[0].write_text(text + "\n")
        parts[1].write_text(claims.to_csv(index=False, lineterminator="\n"))


def claim_table(evidence: Evidence, claims: tuple[Claim, ...]) -> pd.DataFrame:
    """Columns: id, where, claim, paper, ours, scale and hardware, status."""
    rows = []
    for claim in claims:
        finding = evaluate(evidence, claim)
        rows.append(
            {
                "id": claim.id,
                "where": claim.where,
                "claim": f"{claim.id}. {claim.where}: {claim.claim}",
                "paper": claim.paper,
                "ours": _ours(claim, finding),
                "scale and hardware": finding.where,
                "status": status(claim, finding),
            }
        )
    return pd.DataFrame(rows)


def _ours(claim: Claim, finding: Finding) -> str:
    """Our numbers; for an estimate also whether the trend holds, which its status does not say."""
    if not finding.estimated or finding.missing is not None:
        return finding.ours
    return f"{finding.ours} (the trend {'holds' if trend_holds(claim, finding) else 'does not hold'} in the estimate)"


def _counts(claims: pd.DataFrame) -> str:
    """How many claims have which status."""
    kinds = claims["status"].str.split(" (", regex=False).str[0]
    return f"{len(claims)} claims: " + ", ".join(f"{int((kinds == name).sum())} {name}" for name in STATUSES) + "."


def run_table(evidence: Evidence) -> pd.DataFrame:
    """One row per training run, with everything a number must be stated with."""
    return pd.DataFrame([_run_row(evidence, summary) for summary in evidence.summaries.values()])


def _run_row(evidence: Evidence, summary: RunSummary) -> dict[str, str]:
    """One run for a reader."""
    ok = summary.status == "ok"
    peak = f"{max(summary.peak_bytes) / GB:.4g}" if ok and summary.peak_bytes else "-"
    kind = "estimated" if is_estimated([summary.memory_source]) else "measured"
    seconds = summary.seconds_per_epoch
    wall = evidence.training_seconds(summary.run)
    return {
        "run": summary.run,
        "system": summary.system,
        "data set": summary.dataset,
        "status": "ok" if ok else "OOM",
        "test accuracy": f"{summary.test_accuracy:.2%} (epoch {summary.best_epoch} of {summary.epochs})" if ok else "-",
        "split, seed": f"{summary.split.rule}, {summary.split.seed}",
        "B": str(summary.sequences_per_step),
        "N": str(summary.num_tokens),
        "samples per node": str(summary.samples_per_node),
        "attention": summary.attention,
        "plan": f"{summary.plan.label} ({summary.plan_source})",
        "s/epoch": f"{seconds.median:.3g} ± {seconds.iqr:.2g} (IQR)" if ok else "-",
        "peak GB": f"{peak} {kind} ({summary.memory_source})",
        "device": summary.provenance.device,
        "threads per rank": str(summary.provenance.threads),
        "training s": "-" if math.isnan(wall) else f"{wall:.3g}",
    }


def _cost_model(evidence: Evidence) -> list[str]:
    """How well each fitted cost model predicts, section title included; nothing if there is none."""
    rows = [
        {
            "run": run,
            "quantity": name,
            "MAPE %": f"{quality.mape_percent:.2f}",
            "bias %": f"{quality.bias_percent:+.2f}",
            "R2": f"{quality.r2:.4f}",
            "points": str(quality.num_points),
            "held out": "yes" if quality.held_out else "no",
            "worst": f"{quality.worst} ({quality.worst_percent:+.1f} %)",
        }
        for run, cost in evidence.costs.items()
        for name, quality in cost.quality.items()
    ]
    return ["## Cost model", markdown(pd.DataFrame(rows))] if rows else []


def _provenance(evidence: Evidence) -> str:
    """Commits (with a warning if they differ), versions, wall time."""
    commits = evidence.commits
    lines = []
    if len(commits) > 1:
        lines.append(f"**Warning: files come from {len(commits)} commits; make all of them again before comparing.**\n")
    if any("+dirty" in commit or commit == "unknown" for commit in commits):
        lines.append("**Warning: some files were made from a source tree that no commit describes.**\n")
    for commit, paths in sorted(commits.items()):
        lines.append(f"- commit {commit}: {len(paths)} file(s): {', '.join(paths)}")
    origins = evidence.provenance.values()
    for name in ("version", "python", "torch", "device"):
        values = sorted({str(getattr(origin, name)) for origin in origins} - {""})
        lines.append(f"- {name}: {', '.join(values) or 'not recorded'}")
    times = sorted(origin.time for origin in origins if origin.time)
    if times:
        lines.append(f"- made between {times[0]} and {times[-1]}")
    wall = [seconds for run in evidence.summaries if not math.isnan(seconds := evidence.training_seconds(run))]
    searched = sum(search.seconds for search in evidence.searches.values())
    lines.append(f"- wall time: {sum(wall):.4g} s in the epochs of {len(wall)} run(s), {searched:.2g} s in the search")
    return "\n".join(lines)


def markdown(table: pd.DataFrame) -> str:
    """A pipe table; pipes and line ends inside cells are escaped."""
    clean = table.map(lambda cell: str(cell).replace("|", r"\|").replace("\n", " "))
    return str(clean.to_markdown(index=False, disable_numparse=True))
