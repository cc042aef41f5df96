"""One GPU, eight minutes: is every attention backend right, how fast, how large; an epoch; predicted memory.

    python benchmarks/gpu_check.py --out gpu_check.json
    python benchmarks/gpu_check.py --budget 240 --tokens 1024 4096 --out gpu_check.json

Sections, each in processes of their own, so that a backend that fails (or breaks its CUDA context) is recorded and the
others still run; what no time is left for is recorded as skipped:

- `correct`: out and the gradients of q, k, v and the bias projection against float64, in float32 and bfloat16.
- `speed`: seconds and peak bytes of forward with backward at every N, beside SDPA without any bias.
- `epoch`: one epoch at the paper's end-to-end shape (L16 h8 d64 ffn64 M4) on a planted graph, by `Training`.
- `memory`: the closed form of the search at its expected coefficients against what was allocated.

On a machine without CUDA it runs on the CPU; `flex` and `triton` are then recorded as not run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from gpu_sections import CHANNELS, GLOBAL, HEADS, SECTIONS, Row

from megagraph.files import git_commit
from megagraph.profile.profiler import device_name

BACKENDS = ("tiled", "triton", "flex")
NEEDS_CUDA = ("triton", "flex")


def error_line(error: BaseException) -> str:
    """Type and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def child(options: argparse.Namespace) -> None:
    """The cases of one section and backend, a JSON line each, until `--budget` seconds are over."""
    end = time.monotonic() + options.budget
    section, backend = options.child
    for case, measure in SECTIONS[section](options, backend):
        row = {"section": section, **case}
        if time.monotonic() > end:
            row |= {"status": "skipped", "why": "no time left"}
        else:
            begin = time.monotonic()
            try:
                row |= {"status": "ok", **measure()}
            except Exception as error:
                row |= {"status": "failed", "why": error_line(error)}
            row["wall_seconds"] = time.monotonic() - begin
        print(json.dumps(row), flush=True)


def jobs(options: argparse.Namespace) -> list[tuple[str, str]]:
    """(section, backend) of every process, what matters most first."""
    pairs = [("correct", backend) for backend in options.backends]
    pairs += [("epoch", "-"), ("memory", "-")]
    pairs += [("speed", backend) for backend in ("sdpa", *options.backends)]
    return [pair for pair in pairs if pair[0] in options.sections]


def drive(options: argparse.Namespace) -> list[Row]:
    """Run the jobs one after the other within the budget; a row for every case, and one for a job that did not run."""
    end = time.monotonic() + options.budget
    rows: list[Row] = []
    for section, backend in jobs(options):
        job = {"section": section, "backend": backend}
        left = end - time.monotonic()
        if options.device == "cpu" and backend in NEEDS_CUDA:
            rows.append({**job, "status": "not run here (needs CUDA)"})
        elif left < options.start_seconds:
            rows.append({**job, "status": "skipped", "why": "no time left"})
        else:
            # At most half of what is left, so that a backend that hangs leaves time for the others.
            rows += spawn(job, max(options.start_seconds, left / 2))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return rows


def spawn(job: Row, limit: float) -> list[Row]:
    """The rows of one child, which is ended when its time is over: those it printed stay."""
    name = [str(job["section"]), str(job["backend"])]
    command = [sys.executable, __file__, *sys.argv[1:], "--child", *name, "--budget", str(0.8 * limit)]
    why, stderr = "", ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, check=False)
        stdout, stderr = done.stdout, done.stderr
        if done.returncode:
            why = f"exit code {done.returncode}: {(stderr.strip().splitlines() or [''])[-1]}"
    except subprocess.TimeoutExpired as error:
        stdout = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        why = "ended at its time limit"
    rows = [json.loads(line) for line in stdout.splitlines() if line.startswith("{") and line.endswith("}")]
    return [*rows, {**job, "status": "failed", "why": why}] if why else rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--budget", type=float, default=440.0, help="seconds for everything")
    parser.add_argument("--start-seconds", type=float, default=15.0, help="no process is started with less time left")
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--check-tokens", type=int, default=300, help="N of `correct`; no multiple of a block")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 8192, 16384], help="N of `speed`")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[8, 16], help="flex needs 16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--nodes", type=int, default=20000, help="of the planted graph")
    parser.add_argument("--features", type=int, default=100)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run every section and write one JSON."""
    options = arguments()
    if options.device == "cpu":
        torch.set_num_threads(1)
    if options.child:
        child(options)
        return
    begin = time.monotonic()
    rows = drive(options)
    config = {name: value for name, value in vars(options).items() if name not in ("out", "child")}
    shape = {"heads": HEADS, "channels": CHANNELS, "global_tokens": GLOBAL, "layout": "pp1 cp1 dp1"}
    where = {"device": device_name(options.device), "threads": torch.get_num_threads(), "torch": torch.__version__}
    body: Row = {"benchmark": "gpu_check", "config": {**config, **shape}, "where": {**where, "commit": git_commit()}}
    body |= {"wall_seconds": time.monotonic() - begin, "rows": rows}
    options.out.write_text(json.dumps(body, indent=1) + "\n")
    wrong = [row for row in rows if row["status"] == "failed" or row.get("ok") is False]
    for row in wrong:
        print(json.dumps(row))
    print(f"{len(rows)} rows, {len(wrong)} failed or wrong, {body['wall_seconds']:.0f} s")


if __name__ == "__main__":
    main()
