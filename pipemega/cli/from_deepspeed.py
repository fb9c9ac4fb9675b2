"""Explain a DeepSpeed JSON file key by key, and print it as a config of pipemega.

The config goes to standard output, the explanation to standard error, a line for each key:

  honoured   it has DeepSpeed's meaning
  ignored    it has no effect, with the reason
  changed    it becomes another key or value
  default    it is "auto", and means the default here
  user       a key of your own; `config.user` has it
  needed     a value that must be set
  refused    it is left out of the config: the reason, and what to use instead

The exit code is 0 if the config can run and trains what the file describes. It is 1 if a key was
refused, or if keys must be set: the last line has the options.
"""

import argparse
import sys

from pipemega.cli.run_options import Subparsers, add_command, add_config
from pipemega.config.from_deepspeed import Explanation, as_json, explain
from pipemega.printing import line_width, wrapped

_EXAMPLE = (
    "example: pipemega config from-deepspeed ds_config.json --set zero_optimization.stage=1 > "
    "run.json"
)
_SUMMARY = "explain a DeepSpeed JSON file, and print it as a config"


def add_from_deepspeed(subparsers: Subparsers) -> None:
    """Add the page `from-deepspeed` of the command `config`."""
    parser = add_command(subparsers, "from-deepspeed", __doc__, _EXAMPLE, _SUMMARY)
    add_config(parser)
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the config and the explanation; return 0, or 1 if the config is incomplete.

    Raises:
        ConfigError: the file does not exist or is not JSON, or an override is not KEY=VALUE.
    """
    found = explain(arguments.config, arguments.overrides, arguments.world)
    lines = [f"{key.status:<9}  {key.text}" for key in found.keys]
    lines += [f"{'note':<9}  {note}" for note in found.notes]
    if (summary := _summary(found)) is not None:
        lines.append(summary)
    text = "\n".join(lines)
    if sys.stderr.isatty():
        text = wrapped(text, line_width(sys.stderr, 80))
    print(text, file=sys.stderr)
    print(as_json(found))
    return 0 if found.is_complete else 1


def _summary(found: Explanation) -> str | None:
    """Return the last line: the options that the file needs, and what is left out."""
    parts = []
    if found.overrides:
        options = " ".join(f"--set {override}" for override in found.overrides)
        parts.append(f"to run the file itself, add {options}")
    if refused := sum(key.status == "refused" for key in found.keys):
        parts.append(f"{refused} refused, left out of the config")
    return f"{'result':<9}  {'; '.join(parts)}" if parts else None
