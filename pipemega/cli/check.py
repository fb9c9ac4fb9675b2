"""Check a config for a number of ranks, and print what it resolves to.

The page shows the mesh, the batch equation, the values that are computed ("auto", null, names), the
files and folders that the config names, warnings and notes. If the config cannot run, all its
errors are printed instead, one on each line, and the exit code is 1.

  text       the page
  json       the config with all defaults, which can be used as a config again
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from textwrap import indent

from pipemega.cli.run_options import Subparsers, add_command, add_config
from pipemega.config import Config, examine
from pipemega.config.batch import BatchSizes
from pipemega.planning.run_checks import resolved_values, run_files, run_rules, topology_of
from pipemega.printing import aligned, coloured, print_report

_EXAMPLE = "example: python -m pipemega check ds.json --world 8 --set mesh.tensor=2"


def add_parser(subparsers: Subparsers) -> None:
    """Add the command `check`."""
    parser = add_command(subparsers, "check", __doc__, _EXAMPLE)
    add_config(parser)
    parser.add_argument(
        "--format", choices=("text", "json"), default="text", help="(default: text)"
    )
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the page and return 0; or print all errors and return 1.

    Raises:
        ConfigError: the file does not exist or is not JSON.
    """
    draft = examine(arguments.config, arguments.overrides, arguments.world)
    if draft.config is not None:
        draft.builder.apply(run_rules(arguments.world), draft.config)
    if draft.errors:
        label = coloured("error:", "ERROR", sys.stderr)
        print(f"{label} {draft.source.error(draft.errors)}", file=sys.stderr)
        return 1
    assert draft.config is not None, "a draft without a config has errors"
    if arguments.format == "json":
        print(draft.config.to_json())
    else:
        print_report("\n".join(_page(draft.config, arguments.world)))
    return 0


def _page(config: Config, world: int | None) -> Iterator[str]:
    topology = topology_of(config, world)
    batch = config.batch(topology.data)
    ranks = f"{topology.world_size} rank{'s' if topology.world_size > 1 else ''}"
    mesh, equation = f"{ranks} = {topology}", batch.equation.split("; ")[0]
    if world is None and config.mesh.data == "auto":
        mesh += "  (the smallest number that fits; --world N checks another)"
    yield f"mesh       {mesh}"
    yield f"batch      {equation}"
    yield f"precision  {_precision(config)}"
    sizes = config.batch_sizes(topology.data)
    if sizes.changes:
        yield f"ramp-up    {_ramp_up(sizes)}"
    steps = sizes.run_length(config.training).steps
    if steps is not None:
        yield f"length     {_length(config, steps, sizes.samples_of(steps))}"
    elif config.training.epochs is not None:
        yield f"length     {config.training.epochs:,} epochs; the data determine the steps"
    resolved = list(resolved_values(config, topology))
    if resolved:
        yield from ("", "computed values", _table(resolved))
    files = [(found.key, found.path, found.state) for found in run_files(config)]
    if files:
        yield from ("", "files and folders", _table(files))
    yield ""
    for warning in (*config.warnings, *batch.warnings):
        yield f"warning: {warning}"
    # Without --world, one data rank is only the smallest possible number: print no ZeRO notes.
    known = world is not None or topology.data > 1
    for note in (*config.notes, *(config.zero_notes(topology.data) if known else ())):
        yield f"note: {note}"
    yield f"ok: this config can run on {ranks}"


def _precision(config: Config) -> str:
    name = "bf16" if config.bf16.enabled else "fp16" if config.fp16.enabled else ""
    return f"{name}, fp32 master weights" if name else "fp32"


def _ramp_up(sizes: BatchSizes) -> str:
    begin, last = sizes.phases[-1]
    # The first full step begins after the last smaller one.
    steps = sizes.steps_within(begin)
    steps += sizes.samples_of(steps) < begin
    return (
        f"{sizes.sizes[0]:,} to {last:,} samples in {len(sizes.sizes)} sizes; full from step "
        f"{steps + 1:,} on, after {sizes.samples_of(steps):,} samples"
    )


def _length(config: Config, steps: int, samples: int) -> str:
    text = f"{steps:,} steps, {samples:,} samples"
    tokens = config.model.sample_tokens() if config.model else None
    return text if tokens is None else f"{text}, {samples * tokens:,} tokens"


def _table(rows: Sequence[tuple[str, str, str]]) -> str:
    return indent(aligned(rows, left=3), "  ")
