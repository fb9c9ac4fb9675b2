"""Check a cluster before the first run: start it in place of the training script.

It checks, in this order: the variables of the launcher; whether all ranks start; the checkpoint
folder (written by one rank of each node, seen by all nodes, free space); versions, devices, memory
and variables of all ranks; one element over every connection (with --config: every group of the
mesh and every pipeline connection; without: all ranks, and a ring); latency and bandwidth of each
axis; with --config also the memory that `pipemega plan` predicts.

Rank 0 prints one line per check: ok, warning or failed, and what to do. Every wait has a deadline,
and the message names the ranks that did not answer. Without GPUs it uses gloo.

The exit code is 1 if a check failed.
"""

import argparse
import json
import os
import sys
import threading
from contextlib import suppress

import torch.distributed as dist

from pipemega.cli.run_options import Subparsers, add_command, add_overrides, positive_number
from pipemega.config import Config, load
from pipemega.config.launch_variables import LaunchVariables, launch_variables
from pipemega.doctor.attendance import (
    THREAD_NAME,
    Attendance,
    Finding,
    as_table,
    as_values,
    has_failed,
    judge_launch,
)
from pipemega.doctor.examination import Examination, Options, open_store
from pipemega.errors import ConfigError, MeshError
from pipemega.fault_tolerance.run import skip_teardown
from pipemega.printing import print_report

_EPILOG = """\
examples:
  torchrun --nproc_per_node=8 -m pipemega doctor --config ds.json
  srun --ntasks-per-node=8 python -m pipemega doctor --config ds.json --json > doctor.json
  python -m pipemega doctor
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add the command `doctor`."""
    parser = add_command(subparsers, "doctor", __doc__, _EPILOG)
    parser.add_argument(
        "--config", metavar="CONFIG", help="path of the config of the run: JSON, JSON5 or Python"
    )
    add_overrides(parser, "override a key of the config")
    parser.add_argument(
        "--folder",
        metavar="PATH",
        help="folder for checkpoints (default: checkpoint.save of the config, or the current "
        "folder)",
    )
    parser.add_argument(
        "--timeout",
        type=positive_number,
        default=60.0,
        metavar="S",
        help="deadline of each wait in seconds (default: 60)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON values, for scripts")
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the checks, print the result on rank 0 and return the exit code."""
    if arguments.json:
        _keep_stdout_for_json()
    launch = launch_variables()
    os.environ |= launch.values
    found = judge_launch(launch)
    if has_failed([found]):
        return _print(launch, [found], arguments.json)
    rank, world_size = launch.number("RANK", 0), launch.number("WORLD_SIZE", 1)
    try:
        store = open_store(launch, arguments.timeout)
    except MeshError as error:
        remedy = "check that rank 0 was started, and that this node reaches that address and port"
        return _print(launch, [Finding("failed", "ranks", str(error), remedy)], arguments.json)
    attendance = Attendance(store, rank, world_size, arguments.timeout)
    examination = Examination(attendance, _options(arguments))
    examination.run()
    attendance.leave()
    code = 0
    if rank == 0 or examination.findings:
        findings = [found, *examination.findings]
        code = _print(launch, findings, arguments.json, **examination.measured)
    if any(thread.name == THREAD_NAME for thread in threading.enumerate()):
        # A check did not end: its thread is in a call of torch.
        skip_teardown(code)
    elif dist.is_initialized() and not has_failed(examination.findings):
        dist.destroy_process_group()
    return code


def _keep_stdout_for_json() -> None:
    """Move the descriptor of stdout to stderr, on which NCCL_DEBUG prints; `print` keeps stdout."""
    with suppress(OSError, ValueError):  # replaced by the caller
        if sys.stdout.fileno() == 1:
            sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8")
            os.dup2(2, 1)


def _options(arguments: argparse.Namespace) -> Options:
    config: Config | None = None
    error = ""
    if arguments.config is not None:
        try:
            config = load(arguments.config, arguments.overrides)
        except ConfigError as problem:
            error = str(problem)
    folder = arguments.folder or (config is not None and config.checkpoint.save) or "."
    return Options(config, error, folder)


def _print(
    launch: LaunchVariables, findings: list[Finding], as_json: bool, **measured: object
) -> int:
    """Print the findings on rank 0, or on the first rank of a node; return the exit code."""
    failed = has_failed(findings)
    if 0 in (launch.number("RANK", 0), launch.number("LOCAL_RANK", 0)):
        if as_json:
            size = max(1, launch.number("WORLD_SIZE", 1))
            values = as_values(findings, world_size=size, measured=measured)
            print(json.dumps(values, indent=1))
        else:
            print_report(as_table(findings))
        sys.stdout.flush()
    return 1 if failed else 0
