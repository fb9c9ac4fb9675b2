"""The command-line arguments of a training script: the config file, and changes of its keys."""

import argparse
from collections.abc import Mapping
from typing import Any


def add_arguments(
    parser: argparse.ArgumentParser, config: Mapping[str, Any] | None = None
) -> argparse.ArgumentParser:
    """Add `--config`, `--set` and `--local-rank` to the parser of a script; return the parser.

        parser = pipemega.add_arguments(argparse.ArgumentParser())
        parser.add_argument("--epochs", type=int, default=2)
        args = parser.parse_args()
        config = pipemega.load_config(args.config, args.set)

    `--local-rank` is what torch.distributed.launch and DeepSpeed's launcher pass; it is ignored,
    because they also set LOCAL_RANK.

    Args:
        config: the value of `args.config` if there is no `--config`; without it, `--config` is
            required.
    """
    group = parser.add_argument_group("pipemega")
    group.add_argument(
        "--config",
        required=config is None,
        default=config,
        help="path of the config: JSON, JSON5 or Python (.py); see docs/config.md"
        + ("" if config is None else " (default: the config in the script)"),
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one key of the config, as in --set mesh.pipeline=2 (repeatable)",
    )
    group.add_argument(
        "--local-rank",
        "--local_rank",
        type=int,
        default=argparse.SUPPRESS,
        metavar="N",
        help="passed by some launchers; ignored, LOCAL_RANK is used",
    )
    return parser
