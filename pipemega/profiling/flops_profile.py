"""The table of `flops_profiler`: FLOPs and times of the modules in one training step."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from pipemega.config.batch import Batch
from pipemega.config.sections.monitor_sections import FlopsProfilerSection
from pipemega.distributed.mesh import Mesh, gather_objects
from pipemega.engine.train_step import StepFeature, TrainStep
from pipemega.monitor import MultiTimer, get_logger, print_table
from pipemega.monitor.timers import PARTS
from pipemega.pipeline.model.module import Stage
from pipemega.pipeline.model.stages import LocalModel
from pipemega.pipeline.model.vocabulary_shard import VocabularyShard
from pipemega.pipeline.recorder import step_clock
from pipemega.printing import aligned, percent, show_count, show_time, three
from pipemega.profiling.module_profiler import ModuleCost, ModuleProfiler, ProfiledLayer

# Backward computes the gradients of both factors of each matrix product.
_BACKWARD = 2


@dataclass(frozen=True)
class RankProfile:
    """What one pipeline rank has measured in the step.

    Args:
        modules: costs of its layers, then of its shards of embedding and head; FLOPs and times of
            one micro-batch on this rank.
        seconds: seconds of the step by name: forward, backward, communication, optimizer.
        step: seconds of the step.
        only_timed: the FLOPs were counted in an earlier step, so any step gives the times.
    """

    modules: tuple[ModuleCost, ...]
    seconds: Mapping[str, float]
    step: float
    only_timed: bool

    def seconds_of(self, name: str) -> float:
        return self.seconds.get(name, 0.0)


@dataclass(frozen=True)
class FlopsProfile:
    """The profile of a step.

    Args:
        step: the number of the step.
        ranks: for each pipeline rank, the profile of the rank with data and tensor rank 0.
        tensor, data: number of tensor and data ranks.
        num_microbatches: number of micro-batches of each data rank.
        micro_batch_size: samples of a micro-batch.
        parameters: number of parameters of the model; tied copies count once.
    """

    step: int
    ranks: tuple[RankProfile, ...]
    tensor: int
    data: int
    num_microbatches: int
    micro_batch_size: int
    parameters: int

    @property
    def modules(self) -> list[tuple[int | None, ModuleCost]]:
        """(pipeline rank, module) in the order of the model; FLOPs of one tensor rank.

        If all pipeline ranks have a shard of the module, the rank is None, and FLOPs and seconds
        are the sums over the ranks.
        """
        found: dict[str, tuple[int | None, ModuleCost]] = {}
        for rank, own in enumerate(self.ranks):
            for cost in own.modules:
                former = found.get(cost.name)
                found[cost.name] = (rank, cost) if former is None else (None, former[1] + cost)
        return sorted(found.values(), key=lambda pair: _position(pair[1].name))

    @property
    def forward_flops(self) -> float:
        """FLOPs of the forward of one micro-batch, on all pipeline and tensor ranks."""
        return self.tensor * sum(cost.flops for _, cost in self._layers())

    @property
    def forward_seconds(self) -> float:
        """Seconds of the forward of one micro-batch, summed over all stages and shards."""
        return sum(cost.seconds for _, cost in self._layers())

    def _layers(self) -> Iterable[tuple[int | None, ModuleCost]]:
        outermost = min((cost.level for _, cost in self.modules), default=0)
        return (pair for pair in self.modules if pair[1].level == outermost)

    def text(self, section: FlopsProfilerSection) -> str:
        """Return the table."""
        parts = [self._summary(section.recompute_fwd_factor), self._times()]
        rows = self._rows()
        if section.top_modules:
            parts.append(_largest(rows, section.top_modules))
        if section.detailed:
            parts.append(self._details(rows))
        return "\n\n".join(parts)

    def _summary(self, recompute: float) -> str:
        forward, backward = self.forward_flops, (_BACKWARD + recompute) * self.forward_flops
        total = (forward + backward) * self.num_microbatches * self.data
        devices = len(self.ranks) * self.tensor * self.data
        seconds = max(rank.step for rank in self.ranks)
        speed = show_flops(total / seconds / devices)
        lines = {
            "mesh": f"pipeline {len(self.ranks)} x data {self.data} x tensor {self.tensor}; "
            f"{self.num_microbatches} micro-batches of {self.micro_batch_size} samples",
            "parameters": show_count(self.parameters),
            "forward": f"{show_flops(forward)} and {show_time(self.forward_seconds)} per "
            "micro-batch",
            "backward": f"{show_flops(backward)} per micro-batch: ({_BACKWARD} + "
            f"recompute_fwd_factor {recompute:g}) x forward",
            "step": f"{show_flops(total)} in {show_time(seconds)}: {speed}/s per device",
        }
        if not all(rank.only_timed for rank in self.ranks):
            lines["note"] = (
                "FLOPs were counted in this step, so it is slower than others: for the speed of "
                f"the others set flops_profiler.profile_step to {self.step + 1} or more"
            )
        title = f"flops profile of step {self.step}"
        return "\n".join([title, *(f"{name:12}{text}" for name, text in lines.items())])

    def _times(self) -> str:
        measured = {name for rank in self.ranks for name in rank.seconds}
        names = [name for name in PARTS if name in measured]
        rows = [
            [str(number), *(show_time(s) for s in (*map(rank.seconds_of, names), rank.step))]
            for number, rank in enumerate(self.ranks)
        ]
        table = aligned([["pipeline rank", *names, "step"], *rows], left=0)
        return f"times of the step (data and tensor rank 0)\n{table}"

    def _rows(self) -> list[tuple[int | None, ModuleCost]]:
        """Return the modules, after a row for the whole model."""
        modules = [(rank, _times_tensor(cost, self.tensor)) for rank, cost in self.modules]
        if modules and modules[0][1].level == 0:
            return modules
        timed = self.tensor * sum(cost.timed_flops for _, cost in self._layers())
        costs = self.forward_flops, self.forward_seconds, timed
        whole = ModuleCost("", "model", 0, self.parameters, *costs)
        return [(None, whole), *modules]

    def _details(self, rows: Sequence[tuple[int | None, ModuleCost]]) -> str:
        whole = rows[0][1]
        table = []
        for rank, cost in rows:
            name = cost.name.rsplit(".", 1)[-1] if cost.level > 1 else cost.name or "model"
            speed = cost.timed_flops / self.tensor / cost.seconds if cost.seconds else 0.0
            without_speed = "in the loss" if cost.flops else ""
            of_no_rank = "all" if cost.name else ""
            table.append(
                [
                    f"{'  ' * cost.level}{name}",
                    cost.kind,
                    of_no_rank if rank is None else str(rank),
                    *_shares(cost.parameters, whole.parameters, show_count),
                    *_shares(cost.flops, whole.flops, show_flops),
                    *_shares(cost.seconds, whole.seconds, show_time),
                    f"{show_flops(speed)}/s" if cost.timed_flops else without_speed,
                ]
            )
        head = [
            "module",
            "class",
            "rank",
            "parameters",
            "",
            "forward",
            "",
            "time",
            "",
            "per device",
        ]
        text = "forward of one micro-batch by module; FLOP on all tensor ranks, time on one"
        return f"{text}\n{aligned([head, *table], left=2)}"


def show_flops(number: float) -> str:
    """Format with three digits and a unit: 1.31 GFLOP."""
    for letter, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{three(number / size)} {letter}FLOP"
    return f"{three(number)} FLOP"


def _position(name: str) -> int:
    """Return the position of the layer in `layers.<position>...`; 0 for a whole model."""
    parts = name.split(".")
    return int(parts[1]) if parts[0] == "layers" and len(parts) > 1 and parts[1].isdigit() else 0


def _times_tensor(cost: ModuleCost, tensor: int) -> ModuleCost:
    return replace(cost, flops=tensor * cost.flops, timed_flops=tensor * cost.timed_flops)


def _shares(number: float, whole: float, show: Callable[[float], str]) -> list[str]:
    return [show(number) if number else "0", percent(number / whole) if whole else ""]


def _largest(rows: Sequence[tuple[int | None, ModuleCost]], count: int) -> str:
    """Return the classes of modules with the most parameters, FLOPs and time, by level."""
    sums: dict[int, dict[str, list[float]]] = {}
    for _, cost in rows:
        of_class = sums.setdefault(cost.level, {}).setdefault(cost.kind, [0.0, 0.0, 0.0])
        for index, number in enumerate((cost.parameters, cost.flops, cost.seconds)):
            of_class[index] += number
    shows = (("parameters", show_count), ("forward", show_flops), ("time", show_time))
    table = []
    for level, classes in sorted(sums.items()):
        for index, (what, show) in enumerate(shows):
            ranked = sorted(classes.items(), key=lambda item: item[1][index], reverse=True)
            texts = [f"{kind} {show(numbers[index])}" for kind, numbers in ranked[:count]]
            table.append(["" if index else str(level), what, ", ".join(texts)])
    plural = "class" if count == 1 else f"{count} classes"
    title = f"largest {plural} of modules at each level"
    head = ["level", "", "sum over the modules of the class"]
    return f"{title}\n{aligned([head, *table], left=3)}"


_LayerSource = tuple[Mapping[int, ProfiledLayer], Sequence[Stage | VocabularyShard]]
"""Layers by position, and what reports them to an observer."""


def _layer_sources(model: LocalModel) -> list[_LayerSource]:
    """Return the layers of the local stages and of the local shard of the vocabulary."""
    stages = list(model.stages.values())
    layers = {
        position: ProfiledLayer(
            stage.layers[str(position)], f"layers.{position}", stage.name_of(position), 1
        )
        for stage in stages
        for position in range(stage.start, stage.stop)
    }
    shard = model.vocabulary
    return [(layers, stages), *([] if shard is None else [(_shard_layers(shard), [shard])])]


def _shard_layers(shard: VocabularyShard) -> dict[int, ProfiledLayer]:
    """Return the embedding and the head, of whose FLOPs each shard has an equal part."""
    part = shard.split.token_loss.vocab_size / (shard.pipeline.size * shard.tensor.size)
    # S also computes a product of the backward, so its operations differ from the forward.
    formulas = {shard.start: None, shard.stop - 1: lambda x: 2.0 * x.numel() * part}
    found = {}
    for position, formula in formulas.items():
        layer, name = shard.layers[str(position)], f"layers.{position}"
        found[position] = ProfiledLayer(layer, name, shard.name_of(position), 1, formula)
    return found


def _whole_model(model: LocalModel) -> list[_LayerSource]:
    """Return the one layer of a loop of the caller, who calls it himself."""
    (stage,) = model.stages.values()
    layer = stage.layers["0"]
    return [({0: ProfiledLayer(layer, "", type(layer).__name__, 0)}, [])]


class FlopsProfiler(StepFeature):
    """Measures one step on all ranks; the result is of data and tensor rank 0.

    All ranks, because a stage that reports its layers computes whole logits, with collectives of
    the tensor ranks. Counting FLOPs takes time, so they are counted in the step before, if there is
    one.

    Args:
        section: `flops_profiler`, which selects the step.
        batch: the sizes of a step.
        model: the stages of this rank.
        timers: the timers of the engine; they run during the step.
        num_parameters: number of parameters of the model.
        in_loop: the caller runs the one layer of the model, within `forward`.

    Attributes:
        profile: the profile of the step; on rank 0, after the step.
    """

    def __init__(
        self,
        section: FlopsProfilerSection,
        mesh: Mesh,
        batch: Batch,
        model: LocalModel,
        timers: MultiTimer,
        num_parameters: int,
        in_loop: bool,
    ) -> None:
        self._section, self._mesh, self._batch = section, mesh, batch
        self._timers, self._num_parameters = timers, num_parameters
        self._step = max(1, section.profile_step)
        clock = step_clock(mesh.device)
        self._profilers = [
            (ModuleProfiler(layers, clock, section.module_depth), modules)
            for layers, modules in (_whole_model(model) if in_loop else _layer_sources(model))
        ]
        self._is_counting = False
        self._finish: Callable[[], RankProfile] | None = None
        self.profile: FlopsProfile | None = None

    def start(self, step: int) -> None:
        """Start to count in the step before the one of the config, and to time in that one."""
        if step not in (self._step - 1, self._step):
            return
        if not self._is_counting:
            self._is_counting = True
            for profiler, modules in self._profilers:
                profiler.start()
                for module in modules:
                    module.observer = profiler
        if step == self._step and self._finish is None:
            self._finish = self._start_times()

    def cancel_counting(self) -> None:
        """Count in the step of the config itself, because the stages may change before it."""
        if self._is_counting and self._finish is None:
            self._is_counting = False
            self._stop()

    def _stop(self) -> tuple[ModuleCost, ...]:
        """Stop measuring layers; return their costs."""
        for _, modules in self._profilers:
            for module in modules:
                module.observer = None
        return tuple(cost for profiler, _ in self._profilers for cost in profiler.stop())

    def _start_times(self) -> Callable[[], RankProfile]:
        """Start the times of the step; return what ends them."""
        timers, was_enabled, before = self._timers, self._timers.enabled, self._timers.totals()
        timers.enabled = True
        were_counted = [profiler.restart_times() for profiler, _ in self._profilers]
        started = time.perf_counter()

        def finish() -> RankProfile:
            modules = self._stop()
            timers.enabled = was_enabled
            seconds = {name: s - before.get(name, 0.0) for name, s in timers.totals().items()}
            return RankProfile(modules, seconds, time.perf_counter() - started, all(were_counted))

        return finish

    @contextmanager
    def forward(self, step: int) -> Iterator[None]:
        """Measure a forward of layer 0 that the caller runs in the block, for this step."""
        self.start(step)
        if not self._is_counting:
            yield
            return
        ((profiler, _),) = self._profilers
        with profiler.measure(0, None):
            yield

    def before_step(self, step: TrainStep) -> None:
        self.start(step.number)

    def after_step(self, step: TrainStep) -> None:
        if self._finish is None:
            return
        own, self._finish, self._step, self._is_counting = self._finish(), None, -1, False
        ranks = gather_objects(own, self._mesh.pipeline)
        if self._mesh.rank > 0:
            return
        self.profile = FlopsProfile(
            step.number,
            tuple(ranks),
            self._mesh.tensor.size,
            self._mesh.data.size,
            step.plan.num_microbatches,
            self._batch.micro_batch_size,
            self._num_parameters,
        )
        self._write(step.number, self.profile.text(self._section))

    def _write(self, step: int, text: str) -> None:
        if not self._section.output_file:
            print_table(text)
            return
        path, log = Path(self._section.output_file), get_logger(self._mesh.rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            log.warning(
                "flops_profiler.output_file cannot be written (%s): the table is printed", error
            )
            print_table(text)
        else:
            log.info("the flops profile of step %d is in %s", step, path)
