"""Checks that need no model: ranks, batch, schedule and files of a config.  Imports no torch.

Each check is a `Rule`, so that a config with errors elsewhere is still checked as far as possible.

Values that a config leaves to be computed ("auto", null, names).  Imports no torch.
"""

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import starmap
from pathlib import Path
from typing import NamedTuple

from pipemega.config import Config
from pipemega.config.batch import MICRO, RAMPUP, STEPS, TRAIN
from pipemega.config.declarations import Rule
from pipemega.config.sections.data_section import PATH_KEYS
from pipemega.config.sections.gpt_section import GPTSection
from pipemega.config.sections.pipeline_sections import CostsSection, PlanFile
from pipemega.data.tokens.data_files import data_inputs, errors_of_eod, known_vocabulary
from pipemega.distributed.topology import Topology
from pipemega.pipeline.plan.channels import MessageOrder
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan.lowering import lower
from pipemega.pipeline.plan_selection import (
    plan_is_provisional,
    plan_of_size,
    training_plan,
    validated,
)
from pipemega.printing import show_bytes

_FILE_KEYS = (
    *(f"data.{key}" for key in PATH_KEYS),
    "data.corpus", "data.path", "data.valid_path", "data.chat_template", "data.tokenizer",
    "data.cache_path", "checkpoint.load", "checkpoint.save", "wandb.dir", "monitor.trace.folder",
)  # fmt: skip
_SIZES = (TRAIN, MICRO, STEPS, "mesh", "pipeline.stages")


class RunFile(NamedTuple):
    """A file or folder that the config names.

    Args:
        state: what it is, for a table: "exists, 1.31 GB".
        error: why the run cannot start; empty if it can.
    """

    key: str
    path: str
    state: str
    error: str = ""


def topology_of(config: Config, world: int | None) -> Topology:
    """Return the mesh of `world` ranks; None: of the smallest number that fits the config.

    Raises:
        MeshError: the mesh does not fit this number of ranks.
    """
    mesh = config.mesh
    if world is None:
        return Topology(mesh.pipeline, config.smallest_data_size, mesh.tensor, mesh.expert)
    return Topology.fit(world, mesh.pipeline, mesh.tensor, mesh.data, mesh.expert)


def first_plan_of(config: Config, topology: Topology) -> Plan | None:
    """Return the plan of the first steps; None without a section `model`: its size is unknown.

    Raises:
        ConfigError, ScheduleError: there is none for these sizes, or its file is not valid.
    """
    layers, order = layers_of(config, topology), planned_order(config)
    if layers is None:
        return None
    count = config.batch(topology.data).num_microbatches
    return training_plan(config.pipeline, topology.pipeline, count, layers, order)


def layers_of(config: Config, topology: Topology) -> int | None:
    """Return the number of pipeline layers of the section `model`; None if there is none.

    Raises:
        ConfigError: the model has to be built to count them, and cannot be.
    """
    if config.model is None:
        return None
    known = config.model.layer_count()
    if known is not None:
        return known
    # By name: torch is imported only if the model has to be built.
    count: int = import_module("pipemega.planning.meta_model").count_layers(config, topology)
    return count


def planned_order(config: Config) -> MessageOrder:
    """Return how messages are separated on the devices of the run: NCCL's way between two GPUs."""
    ranks = range(config.mesh.pipeline)
    on_gpus = [rank for rank in ranks if config.mesh.device_of(rank) == "cuda"]
    # As in the run: gloo transfers the messages of a rank on a CPU.
    one_gpu = len(on_gpus) < len(ranks) and len(on_gpus) < 2
    return "tags" if one_gpu else "queues"


def run_rules(world: int | None) -> tuple[Rule, ...]:
    """Return the checks of a config for `world` ranks; None: for the smallest number that fits."""

    def ranks(config: Config) -> tuple[str, ...]:
        topology_of(config, world)
        return ()

    def batch(config: Config) -> tuple[str, ...]:
        config.batch(topology_of(config, world).data)
        return ()

    def growing_batch(config: Config) -> tuple[str, ...]:
        config.batch_sizes(topology_of(config, world).data)
        return ()

    def plan(config: Config) -> tuple[str, ...]:
        topology = topology_of(config, world)
        full, sizes = first_plan_of(config, topology), config.batch_sizes(topology.data)
        if full is not None:
            unit = config.batch(topology.data).samples_per_slice
            order = planned_order(config)
            for size in sizes.sizes[:-1]:
                smaller = plan_of_size(config.pipeline, full, size // unit)
                validated(lower(smaller), config.pipeline, order)
        return ()

    listed: list[RunFile] = []

    def file_errors(key: str, config: Config) -> Iterator[str]:
        # Listed once, for all keys: a corpus may have many files.
        if not listed:
            listed.extend(_run_files(config))
        yield from (found.error for found in listed if found.key == key and found.error)

    # A rule runs only if those before it found no error in its keys.
    return (
        Rule(("model.path", "model"), _model_file_errors),
        *(Rule((key,), partial(file_errors, key)) for key in _FILE_KEYS),
        Rule(("mesh.data", "mesh.tensor", "mesh.pipeline"), ranks),
        Rule(_SIZES, batch),
        Rule((RAMPUP, "training.train_samples", *_SIZES), growing_batch),
        Rule(("pipeline.schedule", "pipeline", "model", "imports", RAMPUP, *_SIZES), plan),
        Rule(("model.vocab_size", "data"), _vocabulary_fits),
        Rule(("data.eod_id", "data", "model.vocab_size"), _eod_is_known),
        Rule(("model.num_classes", "data"), _classes_fit),
    )


def _vocabulary_fits(config: Config) -> Iterator[str]:
    found = None if config.data.mock else known_vocabulary(config.data)
    # Only for data with a vocabulary: transformers reads the vocabulary of a Hugging Face model.
    size = config.model.vocabulary() if config.model and found and found.is_certain else None
    if isinstance(size, int) and found is not None and size < found.size:
        yield (
            f"model.vocab_size is {size}, but the {found.origin} has {found.size} tokens: make it "
            f"at least {found.size}, or 'auto'"
        )


def _classes_fit(config: Config) -> Iterator[str]:
    known = getattr(config.model, "num_classes", None)
    folders = data_inputs(config.data) if config.data.images == "folder" else ()
    needed = max((found.classes for found in folders), default=0)
    if isinstance(known, int) and known < needed:
        yield (
            f"model.num_classes is {known}, and data.path has {needed} classes: set "
            f"model.num_classes to {needed}"
        )


def _eod_is_known(config: Config) -> Iterator[str]:
    # The vocabulary of a Hugging Face model is not read here.
    size = config.model.vocabulary() if isinstance(config.model, GPTSection) else None
    yield from errors_of_eod(config.data, size if isinstance(size, int) else None)


def _model_file_errors(config: Config) -> Iterator[str]:
    yield from (found.error for found in _model_files(config) if found.error)


def run_files(config: Config) -> Iterator[RunFile]:
    """Yield every file and folder that the config names, except plans, which `plan` reads."""
    yield from _model_files(config)
    yield from _run_files(config)


def _model_files(config: Config) -> Iterator[RunFile]:
    for key, path, error in config.model.input_files() if config.model else ():
        yield RunFile(key, path, "missing" if error else "exists", error)


def _run_files(config: Config) -> Iterator[RunFile]:
    for found in data_inputs(config.data):
        state = "missing" if found.error else "exists"
        state += f", {show_bytes(found.size)}" if found.size else ""
        state += f", {found.tokens:,} tokens" if found.tokens else ""
        state += f", {found.classes:,} classes" if found.classes else ""
        yield RunFile(found.key, found.name, state, found.error)
    if isinstance(config.pipeline.schedule, PlanFile):
        path = config.pipeline.schedule.file
        # The plan itself reports a missing file.
        yield RunFile("pipeline.schedule.file", path, _state(path, "missing"))
    yield from _checkpoint_folders(config)
    folders = {"data.cache_path": config.data.cache_path, "wandb.dir": config.wandb.dir}
    folders["monitor.trace.folder"] = config.monitor.trace.folder
    for key, name in folders.items():
        if name is not None:
            yield _folder_to_write(key, name)


def _checkpoint_folders(config: Config) -> Iterator[RunFile]:
    save, load = config.checkpoint.save, config.checkpoint.load
    if save is not None:
        yield _folder_to_write("checkpoint.save", save)
    if load is None:
        return
    error = ""
    # A run that continues its own checkpoints does not read the folder `load`.
    continues = config.training.resume == "auto" and save is not None and Path(save).exists()
    if not (continues or _is_url(load) or Path(load).expanduser().is_dir()):
        error = (
            f"checkpoint.load: the folder {load} does not exist; remove the key to start a new run"
        )
    yield RunFile("checkpoint.load", load, _state(load, "missing"), error)


def _folder_to_write(key: str, name: str) -> RunFile:
    path = Path(name).expanduser()
    if not _is_url(name) and path.exists() and not path.is_dir():
        return RunFile(key, name, "a file", f"{key}: {name} is a file, and must be a folder")
    return RunFile(key, name, _state(name, "will be created"))


def _state(name: str, otherwise: str) -> str:
    if _is_url(name):
        return "a URL, not checked"
    return "exists" if Path(name).expanduser().exists() else otherwise


def _is_url(name: str) -> bool:
    return "://" in name


class Resolved(NamedTuple):
    """A computed value.

    Args:
        why: where it is from.
    """

    key: str
    value: str
    why: str


def resolved_values(config: Config, topology: Topology) -> Iterator[Resolved]:
    """Yield the value of each key that the config leaves to be computed.

    Raises:
        DataError: a tokenizer cannot be read.
    """
    yield from _batch(config, topology)
    yield from _model(config)
    yield from _pipeline(config, topology)
    yield from _training(config, topology)


def _batch(config: Config, topology: Topology) -> Iterator[Resolved]:
    batch = config.batch(topology.data)
    if config.mesh.data == "auto":
        ranks = "rank" if topology.world_size == 1 else "ranks"
        why = (
            f"{topology.world_size} {ranks} / (tensor {topology.tensor} x pipeline "
            f"{topology.pipeline})"
        )
        yield Resolved("mesh.data", str(topology.data), why)
    if config.mesh.device == "auto":
        yield Resolved("mesh.device", "cuda or cpu", "cuda if torch finds a GPU")
    sizes = {
        TRAIN: batch.train_batch_size,
        MICRO: batch.micro_batch_size,
        STEPS: batch.num_microbatches,
    }
    for key, size in sizes.items():
        if getattr(config, key) is None:
            given = [f"{k} {sizes[k]}" for k in sizes if getattr(config, k) is not None]
            yield Resolved(key, str(size), f"from {', '.join(given)}, data {topology.data}")


def _model(config: Config) -> Iterator[Resolved]:
    model = config.model
    if model is None:
        return
    if model.vocabulary() == "auto":
        found = known_vocabulary(config.data)
        if found is None:
            yield Resolved("model.vocab_size", "unknown", "no tokenizer was found here")
        else:
            bound = "" if found.is_certain else "at most "
            yield Resolved("model.vocab_size", f"{bound}{found.size:,}", found.origin)
    yield from starmap(Resolved, model.computed_values())


def _pipeline(config: Config, topology: Topology) -> Iterator[Resolved]:
    section = config.pipeline
    plan = first_plan_of(config, topology)
    provisional = plan_is_provisional(section, topology.pipeline)
    if section.schedule == "auto" and plan is not None:
        if provisional:
            why = "measures the first steps; the best plan for the measured costs follows"
        elif isinstance(section.costs, CostsSection):
            why = "the best plan for pipeline.costs"
        else:
            why = "on one pipeline rank all schedules are equally fast"
        yield Resolved("pipeline.schedule", plan.name, why)
    if section.chunks == "auto" and plan is not None:
        source = "the plan in the file" if isinstance(section.schedule, PlanFile) else plan.name
        yield Resolved("pipeline.chunks", str(plan.num_stages // plan.num_ranks), source)
    if section.schedule == "auto" and section.memory_limit == "auto":
        yield Resolved("pipeline.memory_limit", "that of 1F1B", "its largest activation memory")
    if not isinstance(section.partition, tuple) and topology.pipeline > 1:
        why = {
            "auto": "for the shortest simulated step",
            "uniform": "equal in layers",
            "profile": "equal in time, measured when the run starts",
        }.get(section.partition, "equal in parameters")
        if section.partition.startswith("type:"):
            pattern = section.partition.removeprefix("type:")
            why = f"equal in layers whose class matches {pattern!r}"
        stages = "stages" if plan is None else f"{plan.num_stages} stages"
        yield Resolved("pipeline.partition", stages, f"{why}; 'pipemega plan' shows them")


def _training(config: Config, topology: Topology) -> Iterator[Resolved]:
    if config.scheduler is not None and config.scheduler.type is not None:
        length = config.batch_sizes(topology.data).run_length(config.training)
        unit = "_samples" if config.scheduler.by == "sample" else "_steps"
        shown = ", ".join(
            f"{name.replace('_steps', unit)} {value:{'g' if isinstance(value, float) else ''}}"
            for name, value in config.scheduler.arguments(length).items()
        )
        yield Resolved("scheduler", f"{config.scheduler.type} by {config.scheduler.by}", shown)
    elif config.optimizer is not None:
        rate = getattr(config.optimizer.params, "lr", None)
        shown = "constant" if rate is None else f"constant {rate:g}"
        yield Resolved("scheduler", shown, "there is no section scheduler")
    if config.training.stragglers.factor and config.training.stragglers.interval is None:
        steps = str(config.steps_per_print or "10")
        yield Resolved("training.stragglers.interval", steps, "steps_per_print")
