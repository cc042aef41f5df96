"""``python -m megagraph VERB``: one verb per rule of the workflow, files in, files out.

A mistake in the input ends in one line on stderr and exit code 2; anything else is a bug and shows its traceback.
"""

from __future__ import annotations

import argparse
import errno
import logging
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from megagraph import __version__, verbs
from megagraph.config import UserError, one_line
from megagraph.failure import leaving_word
from megagraph.launch import become_only_rank, become_rank, launch, report_error

USER_ERRNOS = {errno.ENOENT, errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EISDIR}


class Parser(argparse.ArgumentParser):
    """A parser whose complaint is one line."""

    def error(self, message: str) -> NoReturn:
        """Exit with 2."""
        self.exit(2, f"megagraph: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code: 0, or 2 for a mistake in the input."""
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if arguments.error_dir:
        become_rank()
    try:
        with leaving_word(arguments.error_dir) if arguments.error_dir else nullcontext():
            return arguments.function(arguments) or 0
    except UserError as error:
        message = str(error)
    except ValidationError as error:
        message = one_line(error)
    except OSError as error:
        if error.errno not in USER_ERRNOS:
            raise
        message = f"{error.filename or 'output'}: {error.strerror}: check the path, its rights and the free space"
    line = " ".join(message.split())
    if arguments.error_dir:
        report_error(arguments.error_dir, line)
    else:
        sys.stderr.write(f"megagraph: error: {line}\n")
    return 2


def _launch(arguments: argparse.Namespace) -> int:
    """Run a verb on several ranks, or in this process for one."""
    verb = arguments.verb_arguments[arguments.verb_arguments[:1] == ["--"] :]
    if not verb:
        raise UserError("launch has no verb: give one after --, for example launch --nodes 1 --tasks 2 -- train ...")
    if arguments.tasks > 1:
        return launch(arguments.nodes, arguments.tasks, verb)
    become_only_rank()
    return main(verb)


def _shard(text: str) -> tuple[int, int]:
    """``I/N`` with 0 <= I < N."""
    try:
        index, count = (int(part) for part in text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not I/N, for example 0/6") from None
    if not 0 <= index < count:
        raise argparse.ArgumentTypeError(f"{text!r}: the shard must be from 0 to {count - 1}")
    return index, count


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)


def _parser() -> Parser:
    parser = Parser(prog="megagraph", description=sys.modules["megagraph"].__doc__)
    parser.add_argument("--version", action="version", version=f"megagraph {__version__}")
    parser.add_argument("--error-dir", type=Path, help=argparse.SUPPRESS)  # set by launch for its ranks
    commands = parser.add_subparsers(required=True, metavar="VERB")

    def verb(name: str) -> Parser:
        function = _launch if name == "launch" else getattr(verbs, name)
        sub: Parser = commands.add_parser(name, help=function.__doc__, description=function.__doc__)
        sub.set_defaults(function=function)
        return sub

    _data_verbs(verb("resolve"), verb("download"), verb("coarsen"))
    _search_verbs(verb("profile"), verb("memory"), verb("fit"), verb("search"))
    _result_verbs(verb("train"), verb("export"), verb("figure"), verb("report"))
    _other_verbs(verb("launch"), verb("check"), verb("schema"))
    return parser


def _data_verbs(resolve: Parser, download: Parser, coarsen: Parser) -> None:
    resolve.add_argument("kind", choices=list(verbs.KINDS))
    resolve.add_argument("id")
    resolve.add_argument("--spec", required=True, metavar="JSON")
    download.add_argument("dataset", type=Path, metavar="DATASET.json")
    download.add_argument("name", metavar="NAME")
    coarsen.add_argument("graph", type=Path, metavar="GRAPH")
    coarsen.add_argument("coarsening", type=Path, metavar="COARSENING.json")
    for sub in (resolve, download, coarsen):
        sub.add_argument("--out", type=Path, required=True)


def _search_verbs(profile: Parser, memory: Parser, fit: Parser, search: Parser) -> None:
    for sub in (profile, memory):
        sub.add_argument("workload", type=Path, metavar="WORKLOAD.json")
        sub.add_argument("--data", type=Path, required=True, metavar="DIR")
    which = memory.add_mutually_exclusive_group()
    which.add_argument("--plan", metavar="JSON", help="instead of the workload's own")
    which.add_argument("--plans", type=Path, metavar="SEARCH.json", help="the plans that profile --plans measures")
    what = profile.add_mutually_exclusive_group()
    what.add_argument("--grid", type=_shard, metavar="I/N", help="measure one shard of the grid")
    what.add_argument("--heldout", type=_shard, metavar="I/N", help="measure one shard of the held-out grid")
    what.add_argument("--plans", type=Path, metavar="SEARCH.json", help="measure the plans of a search")
    fit.add_argument("profile", type=Path, metavar="PROFILE.json")
    fit.add_argument("grid", type=Path, nargs="*", metavar="GRID.csv")
    fit.add_argument("--from", dest="base", type=Path, metavar="COST.json", help="rescale it to a small profile")
    fit.add_argument("--heldout", type=Path, nargs="+", default=[], metavar="GRID.csv", help="predicted, not fitted to")
    fit.add_argument("--heldout-profile", type=Path, nargs="+", default=[], metavar="PROFILE.json")
    fit.add_argument("--quantile", type=float, default=0.95, help="of the memory that plans reckon with")
    search.add_argument("workload", type=Path, metavar="WORKLOAD.json")
    search.add_argument("cost", type=Path, metavar="COST.json")
    search.add_argument("--hardware", type=Path, metavar="FILE.yaml", help="estimate for it: config/hardware/*.yaml")
    search.add_argument("--devices", type=_count, help="of that hardware, instead of the workload's world_size")
    search.add_argument("--nodes", type=_count, help="over which they are spread; 1 if not said")
    search.add_argument("--allow-tf32", action="store_true", help="let float32 products be TF32 there")
    for sub in (profile, memory, fit, search):
        sub.add_argument("--out", type=Path, required=True)


def _result_verbs(train: Parser, export: Parser, figure: Parser, report: Parser) -> None:
    train.add_argument("run", type=Path, metavar="RUN.json")
    train.add_argument("--data", type=Path, required=True, metavar="DIR")
    train.add_argument("--plan", type=Path, metavar="SEARCH.json", help="take the plan that the search found")
    train.add_argument(
        "--resume",
        choices=["strict", "auto"],
        nargs="?",
        default="no",
        const="strict",
        help="go on from the last checkpoint; auto: only if it is of this very run, and that has not finished",
    )
    export.add_argument("run", type=Path, metavar="RUN.json")
    export.add_argument("trained", type=Path, metavar="DIR", help="the folder that train wrote")
    export.add_argument("--data", type=Path, required=True, metavar="DIR")
    figure.add_argument("name", metavar="NAME", help="for example fig8b")
    figure.add_argument("--results", type=Path, required=True, metavar="DIR")
    report.add_argument("--results", type=Path, required=True, metavar="DIR")
    report.add_argument("--paper", type=Path, required=True, metavar="PAPER_VALUES.yaml")
    for sub in (train, export, figure, report):
        sub.add_argument("--out", type=Path, required=True)


def _other_verbs(starter: Parser, check: Parser, schema: Parser) -> None:
    starter.add_argument("--nodes", type=_count, required=True)
    starter.add_argument("--tasks", type=_count, required=True)
    starter.add_argument("verb_arguments", nargs=argparse.REMAINDER, metavar="-- VERB ...")
    check.add_argument("config", type=Path, nargs="?", metavar="CONFIG.yaml")
    check.add_argument("--gpus", type=int, help="instead of the number in the config")
    check.add_argument("--gpu-memory-gb", type=float, help="instead of the size in the config")
    schema.add_argument("--out", type=Path, required=True)
