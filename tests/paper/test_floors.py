"""The house has a stair: a file imports only files on lower floors.

The table below is the plan of the house. A folder's floor is that of all its files, which may
import each other as long as no ring comes of it; its `__init__.py`, which gathers them, may import
them all.
"""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

HOUSE = Path(__file__).parents[2] / "pipemega"

PLAN = {
    0: ["errors.py", "endings.py", "pipeline/__init__.py"],
    1: [
        "config/",
        "topology.py",
        "buckets.py",
        "pipeline/instructions.py",
        "pipeline/partition.py",
        "pipeline/costs.py",
        "pipeline/clocks.py",
    ],
    2: [
        "monitor/",
        "pipeline/schedules/",
        "pipeline/lowering.py",
        "pipeline/order.py",
        "pipeline/warm_up.py",
        "lives.py",
    ],
    3: [
        "mesh.py",
        "random.py",
        "allocator.py",
        "meetings.py",
        "kernels.py",
        "pipeline/messages.py",
        "pipeline/validate.py",
        "pipeline/simulate.py",
        "pipeline/standstill.py",
    ],
    4: [
        "pipeline/render.py",
        "pipeline/pictures/",
        "pipeline/synthesis/",
        "pipeline/trace.py",
        "tensor_parallel/vocabulary.py",
        "parameters.py",
        "slots.py",
        "failure.py",
        "ties.py",
        "data/",
        "tensor_parallel/collectives.py",
        "pipeline/spec.py",
        "pipeline/transport.py",
        "pipeline/buffers.py",
        "pipeline/recorder.py",
        "pipeline/recompute.py",
        "pipeline/split_backward.py",
    ],
    5: [
        "feed.py",
        "stopping.py",
        "watch.py",
        "precision.py",
        "gradients.py",
        "tensor_parallel/",
        "pipeline/module.py",
        "pipeline/measured.py",
        "pipeline/choice.py",
        "pipeline/pipeline_graph.py",
        "tracer.py",
    ],
    6: [
        "models/",
        "optimizer/",
        "pipeline/build.py",
        "pipeline/cut.py",
        "pipeline/executor.py",
        "pipeline/comparison.py",
        "tuning.py",
    ],
    7: [
        "assemble_step.py",
        "checkpoint/",
        "evaluation.py",
        "nonfinite.py",
        "replicas.py",
        "pipeline/ahead.py",
        "pipeline/whole.py",
    ],
    8: ["engine.py"],
    9: ["assemble.py", "launch.py", "training/", "cli/"],
    10: ["__init__.py", "__main__.py", "planning/"],
    11: ["cli/plan.py", "cli/checkpoint.py"],
}
FLOOR_OF = {entry: floor for floor, entries in PLAN.items() for entry in entries}
# No torch on these floors, and none in these rooms above them; cli/plan.py, which runs stages on
# the meta device, and cli/checkpoint.py, which reads an index of torch's, are lines of their own.
PAPER_FLOORS = (0, 1, 2)
PAPER_ROOMS = (
    "pipeline/validate.py",
    "pipeline/simulate.py",
    "pipeline/standstill.py",
    "pipeline/render.py",
    "pipeline/pictures/",
    "pipeline/trace.py",
    "pipeline/measured.py",
    "pipeline/comparison.py",
    "pipeline/synthesis/",
    "pipeline/choice.py",
    "pipeline/pipeline_graph.py",
    "cli/",
)

# What may be missing from a machine, and is therefore imported where it is used.
OPTIONAL = {
    "apex", "amp_C", "wandb", "tensorboard", "torch.utils.tensorboard", "matplotlib", "ortools",
    "fsspec",
}  # fmt: skip

FILES = sorted(str(path.relative_to(HOUSE)) for path in HOUSE.rglob("*.py"))


class Import(NamedTuple):
    """One import in a file: the module, the names taken from it, and if it is in a function."""

    module: str
    names: tuple[str, ...]
    deferred: bool


@cache
def imports_of(file):
    tree = ast.parse((HOUSE / file).read_text())
    deferred = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, (), node in deferred) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, (
                f"{file}, line {node.lineno}: write the whole name of the module"
            )
            names = tuple(alias.name for alias in node.names)
            found.append(Import(node.module, names, node in deferred))
    return found


def entry_of(file):
    """The line of the plan that `file` belongs to: its own, or that of its folder."""
    folders = [f"{folder.as_posix()}/" for folder in Path(file).parents if folder.name]
    return next((entry for entry in (file, *folders) if entry in FLOOR_OF), None)


def file_of(module):
    """The file of a module of ours, None if there is none of that name."""
    path = module.removeprefix("pipemega").removeprefix(".").replace(".", "/")
    candidates = (f"{path}.py", f"{path}/__init__.py" if path else "__init__.py")
    return next((file for file in candidates if file in FILES), None)


def ours(file):
    """The files of ours that `file` imports."""
    for module, names, _ in imports_of(file):
        if module.split(".")[0] == "pipemega":
            # `from pipemega.pipeline import partition` names a module, not something in one.
            files = {file_of(f"{module}.{name}") or file_of(module) for name in names}
            yield from sorted(files or {file_of(module)})


def test_every_file_has_its_floor_and_every_line_of_the_plan_its_files():
    assert [file for file in FILES if entry_of(file) is None] == []
    assert set(FLOOR_OF) == {entry_of(file) for file in FILES}


@pytest.mark.parametrize("file", FILES)
def test_every_import_points_to_a_lower_floor(file):
    here = entry_of(file)
    for other in ours(file):
        there = entry_of(other)
        gathers = file.endswith("__init__.py") and other.startswith(str(Path(file).parent))
        if there == here or gathers:
            continue
        assert FLOOR_OF[there] < FLOOR_OF[here], (
            f"{file} is on floor {FLOOR_OF[here]} and imports {other} on floor {FLOOR_OF[there]}"
        )


def test_no_file_comes_back_to_itself_by_its_imports():
    done, path = set(), []

    def follow(file):
        assert file not in path, f"a ring: {' -> '.join([*path[path.index(file) :], file])}"
        if file not in done:
            path.append(file)
            for other in ours(file):
                follow(other)
            done.add(path.pop())

    for file in FILES:
        follow(file)


@pytest.mark.parametrize("file", FILES)
def test_an_import_waits_for_its_use_only_where_a_library_may_be_missing(file):
    for module, _, deferred in imports_of(file):
        optional = module in OPTIONAL or module.split(".")[0] in OPTIONAL
        assert optional or not deferred, f"{file} imports {module} inside a function"


def test_the_paper_floors_and_the_command_line_know_no_torch():
    modules = [
        "pipemega." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for file in FILES
        if FLOOR_OF[entry_of(file)] in PAPER_FLOORS or entry_of(file) in PAPER_ROOMS
    ]
    assert "pipemega.pipeline.schedules" in modules
    code = f"import importlib, sys\nfor m in {modules}: importlib.import_module(m)\n" + (
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=HOUSE.parent).returncode == 0


@pytest.mark.parametrize("file", FILES)
def test_every_file_stays_under_400_lines(file):
    assert len((HOUSE / file).read_text().splitlines()) < 400


@pytest.mark.parametrize("file", FILES)
def test_no_file_is_named_for_nothing(file):
    assert Path(file).stem not in {"utils", "util", "helpers", "common", "misc"}


def test_the_plan_is_read_as_it_is_meant():
    """The test's own tools, on files that stay."""
    assert entry_of("pipeline/schedules/gpipe.py") == "pipeline/schedules/"
    assert entry_of("tensor_parallel/vocabulary.py") == "tensor_parallel/vocabulary.py"
    assert entry_of("attic.py") is None
    assert file_of("pipemega.pipeline.schedules") == "pipeline/schedules/__init__.py"
    assert file_of("pipemega") == "__init__.py"
    assert file_of("pipemega.nothing") is None
    assert "pipeline/instructions.py" in set(ours("pipeline/order.py"))
