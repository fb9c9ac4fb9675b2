"""`python -m pipemega check`: is a config right, and what does it come to?"""

import argparse

from pipemega.cli.run_options import add_config
from pipemega.config import load
from pipemega.topology import Topology

_DESCRIPTION = """\
Validates a config and prints it as it resolves, defaults included, as JSON on standard output that
can be used as a config again, then the batch equation, warnings and notes.

Exit code 2 and one line on standard error if anything is wrong.
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command `check`."""
    parser = subparsers.add_parser(
        "check",
        help="validate a config and show what it resolves to",
        description=_DESCRIPTION,
        epilog="example: python -m pipemega check ds.json --world 8 --set mesh.tensor=2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_config(parser)
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the resolved config and returns 0.

    Raises:
        ConfigError: the config cannot be run.
        MeshError: not on that number of ranks.
    """
    config = load(arguments.config, arguments.overrides)
    data_size = config.smallest_data_size
    if arguments.world is not None:
        mesh = config.mesh
        data_size = Topology.fit(arguments.world, mesh.pipeline, mesh.tensor, mesh.data).data
    batch = config.batch(data_size)
    config.check_zero(data_size)
    print(config.to_json())
    print()
    print(batch.equation)
    for warning in (*config.warnings, *batch.warnings):
        print(f"warning: {warning}")
    # Without --world one data rank is the least that there may be, and nothing to speak of.
    known = arguments.world is not None or data_size > 1
    for note in (*config.notes, *(config.zero_notes(data_size) if known else ())):
        print(f"note: {note}")
    return 0
