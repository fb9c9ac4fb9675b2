"""`pipemega config`: print the JSON Schema, the reference pages, and configs of other engines.

`pipemega config from-deepspeed`.

`pipemega config from-megatron`.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pipemega.cli.run_options import Subparsers, add_command, add_config, add_overrides
from pipemega.compat.megatron import MegatronConversion, TrainingLaunch, convert, find_launches
from pipemega.compat.megatron.arguments import argument_page
from pipemega.config import examine
from pipemega.config.from_deepspeed import Explanation, as_json, explain
from pipemega.config.reference_pages import deepspeed_page, reference_page, schema
from pipemega.config.source import override, read
from pipemega.errors import ConfigError
from pipemega.printing import coloured, line_width, print_error, wrapped

_DEEPSPEED = """\
Explain a DeepSpeed JSON file key by key, and print it as a config of pipemega.

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
_DEEPSPEED_EXAMPLE = (
    "example: pipemega config from-deepspeed ds_config.json --set zero_optimization.stage=1 > "
    "run.json"
)
_SUMMARY = "explain a DeepSpeed JSON file, and print it as a config"


def add_from_deepspeed(subparsers: Subparsers) -> None:
    """Add the page `from-deepspeed` of the command `config`."""
    parser = add_command(subparsers, "from-deepspeed", _DEEPSPEED, _DEEPSPEED_EXAMPLE, _SUMMARY)
    add_config(parser)
    parser.set_defaults(func=_explain)


def _explain(arguments: argparse.Namespace) -> int:
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


_MEGATRON = """\
Print the config of a training with Megatron-LM or Megatron-DeepSpeed.

SOURCE is a launch script, its arguments in quotes, a YAML file with MODEL_ARGS, or `-` for stdin.
The script is read, not run: variables, arrays, conditions and functions are followed, and a
variable that the script does not set is taken from the environment. The config is printed on
stdout. stderr has a line for each argument that has no counterpart:

  refused    the config would train something else without it; the reason and the way out
  unknown    its value is not known, or a file was not found
  changed    the training is the same except for a detail
  ignored    no key is needed
  note       something else to know

The exit code is 1 if a line is refused or unknown, or if the config cannot run.
"""
_MEGATRON_EXAMPLES = """\
examples:
  pipemega config from-megatron pretrain.sh checkpoints data/wiki_text_document > config.json
  pipemega config from-megatron pretrain.sh --var TP=2 --set checkpoint.save=runs/mine
  pipemega config from-megatron "--num-layers 24 --hidden-size 2048 --micro-batch-size 4 ..."
"""


def add_from_megatron(subparsers: Subparsers) -> None:
    """Add the page `from-megatron` of the command `config`."""
    summary = "the config of a Megatron-LM launch script or of its arguments"
    parser = add_command(subparsers, "from-megatron", _MEGATRON, _MEGATRON_EXAMPLES, summary)
    parser.add_argument("source", metavar="SOURCE", help="script, arguments in quotes, or -")
    parser.add_argument(
        "parameters", metavar="PARAMETER", nargs="*", help="parameters of the script: $1, $2, ..."
    )
    parser.add_argument(
        "--var",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="set a variable of the script, for example SLURM_JOB_ID=1; repeatable",
    )
    add_overrides(parser, "set a key of the config, for example mesh.tensor=2")
    parser.add_argument(
        "--launch",
        type=int,
        default=1,
        metavar="N",
        help="which training, if the script starts several (default: %(default)s)",
    )
    parser.add_argument(
        "--explain", action="store_true", help="also print the keys that each argument sets"
    )
    parser.set_defaults(func=_convert)


def _convert(arguments: argparse.Namespace) -> int:
    """Print the config and the lines; return 0 if the config trains what the launch does, else 1.

    Raises:
        ConfigError: SOURCE does not exist or starts no training, or an option is not NAME=VALUE.
    """
    text, path = _source(arguments.source)
    script = {} if path is None else {"0": str(path.absolute())}
    folder = Path.cwd() if path is None else path.parent
    variables = dict(os.environ) | script | dict(_pairs(arguments.var))
    launches = find_launches(text, folder, variables, arguments.parameters)
    launch = _chosen(launches, arguments.launch)
    conversion = convert(launch, folder)
    config = override(read(conversion.config), arguments.overrides).tree
    if arguments.explain:
        for name, keys in conversion.settings:
            print(f"{name} -> {', '.join(keys.split())}", file=sys.stderr)
    for remark in conversion.remarks:
        colour = {"refused": "ERROR", "unknown": "ERROR", "changed": "WARNING"}
        label = coloured(f"{remark.level}:", colour.get(remark.level, ""), sys.stderr)
        print(f"{label}{str(remark).removeprefix(f'{remark.level}:')}", file=sys.stderr)
    if len(launches) > 1:
        others = f"training {arguments.launch} of {len(launches)} in the script (--launch)"
        print(f"note: this is {others}, line {launch.line}", file=sys.stderr)
    print(json.dumps(config, indent=2, ensure_ascii=False))
    return _verdict(conversion, config, launch)


def _source(name: str) -> tuple[str, Path | None]:
    """Return the text of SOURCE, and its path if it is a file."""
    if name == "-":
        return sys.stdin.read(), None
    is_text = name.lstrip().startswith("-") or "\n" in name
    path = Path(name).expanduser()
    if not is_text and path.is_file():
        return path.read_text(encoding="utf-8", errors="replace"), path
    if is_text or " --" in name:
        return name, None
    raise ConfigError(f'{name} is no file; arguments must be in quotes: "--num-layers 24 ..."')


def _pairs(given: list[str]) -> list[tuple[str, str]]:
    pairs = [(name, value) for name, mark, value in (one.partition("=") for one in given) if mark]
    if len(pairs) < len(given):
        raise ConfigError(f"--var must be NAME=VALUE, not {given}")
    return pairs


def _chosen(launches: list[TrainingLaunch], number: int) -> TrainingLaunch:
    if not 1 <= number <= len(launches):
        lines = ", ".join(str(launch.line) for launch in launches)
        raise ConfigError(
            f"--launch must be from 1 to {len(launches)}, not {number}: the script starts "
            f"trainings at lines {lines}"
        )
    return launches[number - 1]


def _verdict(conversion: MegatronConversion, config: object, launch: TrainingLaunch) -> int:
    """Print the errors of the config, or how to start it; return the exit code."""
    assert isinstance(config, dict), "a conversion is an object"
    draft = examine(config)
    if draft.errors:
        print_error(str(draft.source.error(draft.errors)))
        return 1
    processes, nodes = launch.ranks
    ranks = f" --nproc_per_node={processes}" if processes else ""
    ranks += f" --nnodes={nodes}" if nodes and nodes > 1 else ""
    print(f"note: start it with torchrun{ranks} pretrain_gpt.py --config FILE", file=sys.stderr)
    return 0 if conversion.is_complete else 1


_PAGES: Mapping[str, tuple[str, Callable[[], str]]] = {
    "schema": (
        "the JSON Schema, for completion and checks in an editor",
        lambda: json.dumps(schema(), indent=2) + "\n",
    ),
    "docs": ("the config reference, docs/config.md", reference_page),
    "deepspeed": ("the list of DeepSpeed keys, docs/deepspeed.md", deepspeed_page),
    "megatron": ("the list of Megatron-LM arguments, docs/megatron.md", argument_page),
}


def add_parser(subparsers: Subparsers) -> None:
    """Add the command `config`."""
    parser = subparsers.add_parser(
        "config",
        description="Print the JSON Schema or a reference page, or convert a run of DeepSpeed or "
        "Megatron-LM to a config.",
        epilog="example: pipemega config schema > pipemega.schema.json",
    )
    pages = parser.add_subparsers(title="pages", metavar="PAGE", required=True)
    for name, (text, _) in _PAGES.items():
        page = pages.add_parser(name, help=text, description=f"Print {text}.")
        page.set_defaults(func=run, page=name, config=None)
        if name == "schema":
            page.add_argument(
                "--config",
                metavar="FILE",
                help="a config with `imports`: the schema includes the types of these modules",
            )
    add_from_deepspeed(pages)
    add_from_megatron(pages)


def run(arguments: argparse.Namespace) -> int:
    """Print the page and return 0.

    Raises:
        ConfigError: a module of `imports` cannot be imported.
    """
    if arguments.config is not None:
        draft = examine(arguments.config)
        failed = [error for error in draft.errors if error.path == ("imports",)]
        if failed:
            raise draft.source.error(failed)
    _, make = _PAGES[arguments.page]
    print(make(), end="")
    return 0
