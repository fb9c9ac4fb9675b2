"""A package imports only packages that are lower in the list of layers.

The modules of one package may import each other as long as no cycle results. Its `__init__`, which
re-exports their names, may import them all.
"""

import ast
import io
import subprocess
import sys
import tokenize
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "pipemega"

# From low to high. A nested package that has a line of its own does not belong to its parent's.
LAYERS = [
    "lazy_imports",
    "cuda_settings",
    "errors",
    "printing",
    "storage",
    "pipeline/plan",
    "pipeline/schedules",
    "pipeline/autoschedule",
    "config",
    "compat/megatron",
    "distributed",
    "random",
    "kernels",
    "parameters",
    "monitor",
    "data",
    "tensor_parallel",
    "pipeline/visualize",
    "pipeline",
    "lora",
    "moe",
    "models",
    "optimizer",
    "layer_costs",
    "diagnostics",
    "checkpoint",
    "fault_tolerance",
    "engine/run",
    "engine",
    "profiling",
    "planning",
    "doctor",
    "training",
    "hf",
    "hf_check",
    "compat",
    "cli",
    "__init__",
    "__main__",
]
LEAF_MODULES = {
    "lazy_imports", "cuda_settings", "errors", "printing", "random", "kernels", "parameters",
}  # fmt: skip
# Every package up to `compat/megatron` runs without torch, and so do these.
NO_TORCH_LAYERS = LAYERS[: LAYERS.index("compat/megatron") + 1]
NO_TORCH = (
    "pipeline/visualize/",
    "pipeline/plan_selection.py",
    "pipeline/pipeline_graph.py",
    "profiling/step_trace.py",
    "profiling/measured_costs.py",
    "distributed/topology.py",
    "monitor/",
    "data/tokens/data_files.py",
    "data/images/image_paths.py",
    "data/finetuning/record_files.py",
    "planning/run_checks.py",
    "doctor/attendance.py",
    "cli/",
)
# Commands that need torch: stages run on the meta device; a checkpoint's index is torch's;
# the connections of a cluster are torch's; a trained model runs.
NEEDS_TORCH = (
    "cli/plan.py", "cli/checkpoint.py", "cli/doctor.py", "cli/evaluate.py", "cli/generate.py",
    "cli/hf.py",
)  # fmt: skip

# Ways in, ways out and views: what not every training step needs.
LEAVES = {
    "checkpoint/deepspeed", "cli", "compat", "compat/deepspeed", "compat/megatron",
    "data/finetuning", "data/images", "doctor", "hf", "hf/weights", "hf_check", "lora", "planning",
    "pipeline/autoschedule", "pipeline/tracing", "pipeline/visualize", "profiling",
}  # fmt: skip
# Lines of code, without comments and docstrings, and modules. Both numbers only get smaller.
MOST_LINES = 59836
MOST_MODULES = 317

# Libraries that may be missing, and are therefore imported where they are used.
OPTIONAL = {
    "apex", "amp_C", "wandb", "tensorboard", "torch.utils.tensorboard", "matplotlib",
    "fsspec", "transformers", "safetensors", "huggingface_hub", "peft", "sentencepiece",
    "tiktoken", "pyarrow", "jinja2", "PIL", "sklearn", "torchvision",
}  # fmt: skip

FILES = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py"))


class Import(NamedTuple):
    """One import in a file: the module, the names taken from it, and if it is in a function."""

    module: str
    names: tuple[str, ...]
    deferred: bool


@cache
def imports_of(file):
    tree = ast.parse((PACKAGE / file).read_text())
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


def layer_of(file):
    """The innermost line of LAYERS that `file` belongs to."""
    module = file.removesuffix(".py")
    parents = [parent.as_posix() for parent in Path(file).parents]
    return next((name for name in (module, *parents) if name in LAYERS), None)


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


def test_every_file_belongs_to_a_layer_and_every_layer_has_files():
    assert [file for file in FILES if layer_of(file) is None] == []
    assert set(LAYERS) == {layer_of(file) for file in FILES}


@pytest.mark.parametrize("file", FILES)
def test_every_import_goes_to_a_lower_layer(file):
    here = layer_of(file)
    for other in ours(file):
        there = layer_of(other)
        assert LAYERS.index(there) <= LAYERS.index(here), (
            f"{file} (layer {here}) imports {other} (layer {there}), which is higher"
        )


def package_of(file):
    return Path(file).parent.as_posix()


def test_the_core_imports_no_leaves():
    found = {
        (package_of(file), package_of(other))
        for file in FILES
        if package_of(file) not in LEAVES and package_of(file) != "."
        for other in ours(file)
        if package_of(other) in LEAVES
    }
    assert found == set()


def test_a_package_has_3_to_14_modules():
    packages = [package_of(file) for file in FILES if Path(file).name != "__init__.py"]
    sizes = {package: packages.count(package) for package in {*packages} - {"."}}
    assert {name: n for name, n in sizes.items() if not 3 <= n <= 14} == {}


def lines_of_code(file):
    """The number of lines with code, without comments and docstrings."""
    text = (PACKAGE / file).read_text()
    skipped = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        first = body[0] if isinstance(body, list) and body else None
        value = first.value if isinstance(first, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            skipped.update(range(first.lineno, first.end_lineno + 1))
    lines = set()
    other = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in other and token.string:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - skipped)


def test_the_package_keeps_to_its_budget():
    assert sum(map(lines_of_code, FILES)) <= MOST_LINES
    assert len(FILES) <= MOST_MODULES


def test_only_leaf_modules_lie_outside_of_a_package():
    top = {file.removesuffix(".py") for file in FILES if "/" not in file}
    assert top - {"__init__", "__main__"} == LEAF_MODULES


def is_section_or_command(file):
    """Such a module has the name of its section or command, as the module that does the work."""
    is_section = file.startswith("config/") and "(Section)" in (PACKAGE / file).read_text()
    return is_section or file.startswith("cli/")


def test_no_two_modules_have_the_same_name():
    names = [
        Path(file).name
        for file in FILES
        if not is_section_or_command(file) and Path(file).name not in ("__init__.py", "__main__.py")
    ]
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_no_two_public_classes_have_the_same_name():
    found = {}
    for file in FILES:
        for node in ast.parse((PACKAGE / file).read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(file)
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_no_import_cycle():
    done, path = set(), []

    def follow(file):
        assert file not in path, f"import cycle: {' -> '.join([*path[path.index(file) :], file])}"
        if file not in done:
            path.append(file)
            for other in ours(file):
                follow(other)
            done.add(path.pop())

    for file in FILES:
        follow(file)


@pytest.mark.parametrize("file", FILES)
def test_only_optional_libraries_are_imported_inside_functions(file):
    for module, _, deferred in imports_of(file):
        optional = module in OPTIONAL or module.split(".")[0] in OPTIONAL
        assert optional or not deferred, f"{file} imports {module} inside a function"


def test_lower_layers_and_the_command_line_import_no_torch():
    modules = [
        "pipemega." + file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for file in FILES
        if (layer_of(file) in NO_TORCH_LAYERS or file.startswith(NO_TORCH))
        and file not in NEEDS_TORCH
    ]
    assert "pipemega.pipeline.schedules" in modules
    code = f"import importlib, sys\nfor m in {modules}: importlib.import_module(m)\n" + (
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent).returncode == 0


@pytest.mark.parametrize("file", FILES)
def test_every_file_has_at_most_600_lines(file):
    assert len((PACKAGE / file).read_text().splitlines()) <= 600


@pytest.mark.parametrize("file", FILES)
def test_no_file_is_named_utils_helpers_common_or_misc(file):
    assert Path(file).stem not in {"utils", "util", "helpers", "common", "misc"}


def test_the_functions_of_this_test_find_layers_and_files():
    assert layer_of("pipeline/schedules/one_f_one_b.py") == "pipeline/schedules"
    assert layer_of("pipeline/executor.py") == "pipeline"
    assert layer_of("errors.py") == "errors"
    assert layer_of("unknown.py") is None
    assert file_of("pipemega.pipeline.schedules") == "pipeline/schedules/__init__.py"
    assert file_of("pipemega") == "__init__.py"
    assert file_of("pipemega.nothing") is None
    assert "pipeline/plan/instructions.py" in set(ours("pipeline/plan/lowering.py"))
