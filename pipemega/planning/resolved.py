"""Values that a config leaves to be computed ("auto", null, names).  Imports no torch."""

from collections.abc import Iterator
from itertools import starmap
from typing import NamedTuple

from pipemega.config import Config
from pipemega.config.batch_equation import MICRO, STEPS, TRAIN
from pipemega.config.pipeline import CostsSection, PlanFile
from pipemega.data.data_files import known_vocabulary
from pipemega.distributed.topology import Topology
from pipemega.pipeline.plan_selection import plan_is_provisional
from pipemega.planning.run_checks import first_plan_of


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
