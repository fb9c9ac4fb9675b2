"""The runs of test_event_order.py; each function runs on every rank and is recorded.

All layers are `Layer`, which records its passes. A sample has its index and a fault, which the
layers pass on, so that each pass knows its micro-batch, and the faults depend on the data only.
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import pipemega.compat.deepspeed as deepspeed
from pipemega import LayerSpec, PipelineModule, TiedLayerSpec, Trainer, from_pretrained, initialize
from tests.ranks.engine.event_recorder import RecordedCallback, Recorder, record, recording
from tests.ranks.lora.hf_runs import config_of
from tests.ranks.training.long_runs import handlers_restored

WIDTH, LAYERS, MICRO, GAS = 4, 4, 2, 4

# Faults of a sample: nan in a forward, a gradient that is inf or large, SIGTERM.
NAN, INF, LARGE, SIGTERM = 1, 2, 3, 4
FACTORS = {INF: float("inf"), LARGE: 1e4}

Faults = Mapping[int, int]
Changes = Mapping[str, Any]


class Watch(torch.autograd.Function):
    """The identity; its backward records an event, and multiplies the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, event: str, factor: float) -> Tensor:
        ctx.event, ctx.factor = event, factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        record(ctx.event)
        return gradients[0] * ctx.factor, None, None


class Layer(nn.Module):
    """A linear layer that records its passes.

    Args:
        position: position of the layer in the model, for the records.
        width: width of an inner layer, which makes the layer slower for `pipeline.partition`.
    """

    def __init__(self, position: int, width: int = 0) -> None:
        super().__init__()
        self.position, self.linear = position, nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Linear(WIDTH, width, bias=False) if width else None

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mark = inputs
        y = self.linear(x.to(self.linear.weight.dtype))
        if self.inner is not None:
            y = y + self.inner(x).sum(-1, keepdim=True)
        if not (x.is_meta or x.numel() == 0):
            y = self._watched(y, mark.view(-1, 2))
        return torch.tanh(y), mark

    def _watched(self, y: Tensor, mark: Tensor) -> Tensor:
        """Record the forward now and the backward later, and inject the faults of layer 1."""
        name = f"m{int(mark[0, 0])}: "
        record(f"{name}{'F' if torch.is_grad_enabled() else 'f'}{self.position}")
        fault = int(mark[:, 1].max()) if self.position == 1 else 0
        if fault == SIGTERM:
            os.kill(os.getpid(), signal.SIGTERM)
        if fault == NAN:
            y = y * float("nan")
        watched: Tensor = Watch.apply(y, f"{name}B{self.position}", FACTORS.get(fault, 1.0))
        return watched


class Samples(torch.utils.data.Dataset[Any]):
    """Random samples in their own order; records each that is read.

    Args:
        faults: index of a sample -> its fault.
    """

    already_shuffled = True

    def __init__(self, size: int = 64, faults: Faults | None = None, name: str = "read") -> None:
        self._size, self._faults, self._name = size, dict(faults or {}), name

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        if index >= self._size:
            raise IndexError(index)
        record(f"{self._name} {index}")
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return (x, torch.tensor([[index, self._faults.get(index, 0)]])), x.flip(0)


class Stream(torch.utils.data.IterableDataset[Any]):
    """The same samples, one after the other."""

    def __init__(self, size: int) -> None:
        self._samples = Samples(size)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._samples)


def micro_batches(count: int, faults: Faults | None = None, start: int = 0) -> Iterator[Any]:
    """Yield `count` micro-batches, as the caller's own iterator."""
    samples = Samples(1000, faults)
    for at in range(start, start + count):
        yield torch.utils.data.default_collate([samples[MICRO * at + i] for i in range(MICRO)])


def loss_fn(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return F.mse_loss(outputs[0], labels.to(outputs[0].dtype))


def model(widths: Sequence[int] = (0,) * LAYERS, *, tied: bool = False) -> PipelineModule:
    layers: list[Any] = [LayerSpec(Layer, at, width) for at, width in enumerate(widths)]
    if tied:
        for at in (0, LAYERS - 1):
            layers[at] = TiedLayerSpec("tied", Layer, at, tied_weight_attr="linear.weight")
    return PipelineModule(layers, loss_fn)


def config(folder: Path, **changes: Any) -> dict[str, Any]:
    """Return a config; a change such as mesh={"tensor": 2} is merged into its section."""
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": GAS,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "training": {"train_steps": 4, "progress": False},
        "checkpoint": {"save": str(folder), "interval": 2},
        "steps_per_print": None,
    }
    for key, value in changes.items():
        settings[key] = {**settings.get(key, {}), **value} if isinstance(value, dict) else value
    return {key: value for key, value in settings.items() if value != {"save": None}}


def in_loop(
    recorder: Recorder,
    changes: Changes,
    *,
    steps: int = 2,
    net: Callable[[], PipelineModule] = model,
    data: Callable[[], Any] = Samples,
    between: Callable[[Recorder, Any], None] | None = None,
    **arguments: Any,
) -> None:
    """Train in a loop of the user, without files unless `changes` has them.

    Args:
        data: returns the training data of `initialize`.
        between: called after each step.
    """
    settings = config(recorder.folder, **{"checkpoint": {"save": None, "interval": 0}, **changes})
    engine, *_ = initialize(net(), settings, data(), **arguments)
    recorder.start(engine)
    with_events = steps_of_loop(recorder, engine, steps, between)
    recorder.call("settle", engine.settle)
    recorder.reports(engine)
    if with_events:
        recorder.call("close", engine.close)


def steps_of_loop(
    recorder: Recorder,
    engine: Any,
    steps: int,
    between: Callable[[Recorder, Any], None] | None = None,
    *args: Any,
) -> bool:
    """Train until a step raises; return whether none did."""
    for _ in range(steps):
        result = recorder.call("train_batch", engine.train_batch, *args)
        recorder.reports(engine)
        if isinstance(result, BaseException):
            return False
        if between is not None:
            between(recorder, engine)
    return True


def with_iterator(
    recorder: Recorder,
    changes: Changes,
    *,
    count: int,
    steps: int,
    net: Callable[[], PipelineModule] = model,
) -> None:
    """Train with the caller's iterator over `count` micro-batches."""
    settings = config(recorder.folder, checkpoint={"save": None, "interval": 0}, **changes)
    engine, *_ = initialize(net(), settings)
    recorder.start(engine)
    steps_of_loop(recorder, engine, steps, None, micro_batches(count))


def with_batches(recorder: Recorder, changes: Changes) -> None:
    """Train with whole batches, and read outputs, evaluations and inferences between them."""
    settings = config(recorder.folder, checkpoint={"save": None, "interval": 0}, **changes)
    engine, *_ = initialize(model(), settings)
    recorder.start(engine)
    for step in range(2):
        start = MICRO * GAS * step
        samples = [Samples(1000)[start + at] for at in range(MICRO * GAS)]
        batch = torch.utils.data.default_collate(samples)
        recorder.call("train_batch", engine.train_batch, batch=batch, return_outputs=True)
        recorder.call("eval_batch", engine.eval_batch, batch=batch)
        recorder.call("infer", engine.infer, [batch[0]])


def fit(
    recorder: Recorder,
    changes: Changes,
    *,
    data: Callable[[], Any] = Samples,
    does: Mapping[str, Callable[[Any], object]] | None = None,
    valid: bool = False,
    **arguments: Any,
) -> None:
    """Train with a Trainer."""
    settings = config(recorder.folder, **changes)
    resumes = "resume" in settings["training"]
    if resumes:
        recorder.add("initialize")
    engine, *_ = initialize(model(), settings, data())
    (recorder.use if resumes else recorder.start)(engine)
    sets = Samples(8, name="valid") if valid else None
    trainer = Trainer(engine, sets, callbacks=[RecordedCallback(does)], **arguments)
    recorder.call("fit", trainer.fit)
    recorder.add(f"stopped: {trainer.stopped or 'no'}")
    recorder.add(f"steps {engine.global_steps}, samples {engine.consumed_samples}")


def resumed(recorder: Recorder, changes: Changes, **arguments: Any) -> None:
    """Train two steps of four; record the others, in another engine that loads the checkpoint."""
    training = changes.get("training", {})
    half = {**changes, "training": {**training, "exit_interval": 2}}
    fit(recorder, half, **arguments)
    recorder.clear()
    fit(recorder, {**changes, "training": {**training, "resume": "auto"}}, **arguments)


def saves_and_loads(recorder: Recorder, engine: Any) -> None:
    """Save after the first step, and load after the second."""
    folder = str(recorder.folder / "own")
    if engine.global_steps == 1:
        recorder.call("save_checkpoint", engine.save_checkpoint, folder)
    else:
        recorder.call("load_checkpoint", engine.load_checkpoint, folder)


def evaluates(recorder: Recorder, engine: Any) -> None:
    recorder.call("eval_batch", engine.eval_batch, micro_batches(2, start=90), 2)
    recorder.call("evaluate", engine.evaluate, Samples(8, name="valid"))


def freezes(recorder: Recorder, engine: Any) -> None:
    """Freeze the first layer after the first step, and release it after the second."""
    frozen = engine.global_steps == 1
    recorder.add("freeze layer 0" if frozen else "release layer 0")
    for module in engine.local_stages.modules():
        if isinstance(module, Layer) and module.position == 0:
            module.requires_grad_(not frozen)


def raises(_: Any) -> None:
    raise ValueError("from the callback")


def saves(trainer: Any) -> None:
    trainer.save("own")
    trainer.save()


def stops(trainer: Any) -> None:
    if trainer.engine.global_steps == 2:
        trainer.stop("enough")


def csv_rows(recorder: Recorder, changes: Changes) -> None:
    """Train with CSV files, and record their rows at the end: a thread writes them."""
    fit(recorder, {**changes, "csv_monitor": {"enabled": True}}, valid=True)
    for file in sorted(recorder.folder.glob("csv/**/*.csv")) if dist.get_rank() == 0 else ():
        recorder.add(f"{file.name}: {len(file.read_text().splitlines())} lines")


class ShimNet(nn.Module):
    """A module that is no pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(at) for at in range(LAYERS))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def shim_config(**changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "steps_per_print": 1000,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        **changes,
    }


def shim_loop(recorder: Recorder, changes: Changes) -> None:
    """DeepSpeed's loop: engine(x), backward, step; a checkpoint between the steps."""
    torch.manual_seed(1)
    engine, *_ = deepspeed.initialize(model=ShimNet(), config=shim_config(**changes))
    recorder.start(engine.pipemega_engine)
    folder = str(recorder.folder / "own")
    for at, (x, y) in enumerate(micro_batches(6, start=100 * dist.get_rank())):
        output = recorder.call("engine", engine, x)
        recorder.call("backward", engine.backward, loss_fn(output, y))
        recorder.call("step", engine.step)
        if at == 1:
            recorder.call("save_checkpoint", engine.save_checkpoint, folder)
        if at == 3:
            recorder.call("load_checkpoint", engine.load_checkpoint, folder)


def shim_pipeline(recorder: Recorder, changes: Changes) -> None:
    """DeepSpeed's PipelineEngine."""
    deepspeed.init_distributed()
    torch.manual_seed(1)
    specs = [deepspeed.pipe.LayerSpec(Layer, at) for at in range(LAYERS)]
    net = deepspeed.pipe.PipelineModule(
        layers=specs, loss_fn=loss_fn, num_stages=2, partition_method="uniform"
    )
    engine, *_ = deepspeed.initialize(model=net, config=shim_config(**changes))
    recorder.start(engine.pipemega_engine)
    for step in range(2):
        data = micro_batches(2, start=2 * step)
        recorder.call("train_batch", engine.train_batch, data_iter=data)
        recorder.call("eval_batch", engine.eval_batch, micro_batches(2, start=20))
    folder = str(recorder.folder / "own")
    recorder.call("save_checkpoint", engine.save_checkpoint, folder)
    recorder.call("load_checkpoint", engine.load_checkpoint, folder)


def hf(recorder: Recorder, changes: Changes) -> None:
    """A model of transformers, whose layers are watched by hooks."""
    net = from_pretrained(config_of("qwen3"), pretrained=False)
    settings = config(recorder.folder, checkpoint={"save": None, "interval": 0}, **changes)
    engine, *_ = initialize(net, settings, TokenSamples())
    recorder.start(engine)
    for stage in engine.local_stages:
        for position, layer in stage.layers.items():
            if isinstance(layer, nn.Module):
                layer.register_forward_pre_hook(lambda *_, at=position: record(f"forward {at}"))
    steps_of_loop(recorder, engine, 2)


class TokenSamples(torch.utils.data.Dataset[Any]):
    """Random tokens for the model of `hf`."""

    already_shuffled = True

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        record(f"read {index}")
        generator = torch.Generator().manual_seed(index)
        ids, labels = torch.randint(48, (2, 8), generator=generator)
        return ids, labels


def torch_loader() -> Any:
    return torch.utils.data.DataLoader(Samples(), MICRO)


class Run(NamedTuple):
    """A run of the test.

    Args:
        world_size: number of ranks.
        function: (recorder, changes of the config).
        changes: changes to the config.
    """

    world_size: int
    function: Callable[[Recorder, Changes], None]
    changes: Changes = MappingProxyType({})


def schedule(name: str, **keys: Any) -> Run:
    changes = {"mesh": {"pipeline": 2}, "pipeline": {"schedule": name, "partition": "uniform"}}
    changes["pipeline"] |= keys
    return Run(2, in_loop, changes)


PP2, DP2 = {"mesh": {"pipeline": 2}}, {"mesh": {"data": 2}}
HAND_CUT = {"mesh": {"pipeline": 2}, "pipeline": {"partition": "uniform"}}
ZERO: dict[str, Any] = {"zero_optimization": {"stage": 1}}
OVERLAP = {"zero_optimization": {"stage": 1, "overlap_comm": True, "reduce_bucket_size": 30}}
VALIDATED = {
    "mesh": {"pipeline": 2},
    "pipeline": {
        "schedule": "zb-h1",
        "partition": "uniform",
        "optimizer_sync": "post_validate",
        "optimizer_sync_after": 0,
    },
}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
# The first sample of step 2 without data ranks.
SECOND = MICRO * GAS


def faulty(fault: int, at: int = SECOND) -> Callable[[], Samples]:
    return partial(Samples, 64, {at: fault})


def policy(name: str) -> dict[str, Any]:
    return {**HAND_CUT, "training": {"on_nonfinite": {"policy": name}}}


LOOP3 = partial(in_loop, steps=3)
EVALUATION = {"training": {"eval_interval": 2, "eval_steps": 1}}

RUNS: dict[str, Run] = {
    "one_rank": Run(1, in_loop),
    "one_rank_tracing": Run(1, in_loop, {"monitor": {"trace": [2]}, "checkpoint": {"interval": 0}}),
    "schedule_1f1b": schedule("1f1b"),
    "schedule_gpipe": schedule("gpipe"),
    "schedule_interleaved": schedule("interleaved", chunks=2),
    "schedule_zb_h1": schedule("zb-h1"),
    "schedule_zb_v": schedule("zb-v"),
    "schedule_auto": schedule("auto"),
    "data": Run(2, in_loop, DP2),
    "data_and_pipeline": Run(4, in_loop, {**HAND_CUT, **DP2, "mesh": {"pipeline": 2, "data": 2}}),
    "tensor": Run(2, in_loop, {"mesh": {"tensor": 2}}),
    "zero": Run(2, in_loop, {**DP2, **ZERO}),
    "zero_overlapping": Run(2, in_loop, {**DP2, **OVERLAP}),
    "zero_overlapping_pipeline": Run(
        4, in_loop, {**HAND_CUT, **OVERLAP, "mesh": {"pipeline": 2, "data": 2}}
    ),
    "bf16": Run(2, in_loop, {**DP2, **ZERO, "bf16": {"enabled": True}}),
    "post_validation": Run(2, LOOP3, {**VALIDATED, "gradient_clipping": 1000.0}),
    "post_validation_undone": Run(
        2, partial(in_loop, steps=4, data=faulty(LARGE)), {**VALIDATED, "gradient_clipping": 100.0}
    ),
    "post_validation_rollback": Run(
        2,
        partial(fit, data=faulty(NAN, 2 * SECOND)),
        {**VALIDATED, "training": {"on_nonfinite": {"policy": "rollback"}}},
    ),
    "fp16_overflow": Run(2, partial(LOOP3, data=faulty(INF)), {**HAND_CUT, **FP16}),
    "trainer_fp16_overflow": Run(2, partial(fit, data=faulty(INF)), {**HAND_CUT, **FP16}),
    "nonfinite_default": Run(2, partial(LOOP3, data=faulty(NAN)), HAND_CUT),
    "nonfinite_stop": Run(2, partial(fit, data=faulty(NAN)), policy("stop")),
    "nonfinite_skip": Run(2, partial(fit, data=faulty(NAN)), policy("skip")),
    "nonfinite_rollback": Run(2, partial(fit, data=faulty(NAN, 2 * SECOND)), policy("rollback")),
    "nonfinite_rollback_in_loop": Run(
        2,
        partial(in_loop, steps=4, data=faulty(NAN, 2 * SECOND)),
        {**policy("rollback"), "checkpoint": {"interval": 2}},
    ),
    "evaluation_save_and_stop": Run(
        2, partial(fit, valid=True, does={"after_evaluation": stops}), {**HAND_CUT, **EVALUATION}
    ),
    "stop_after_step": Run(2, partial(fit, does={"after_step": stops}), HAND_CUT),
    "exit_interval": Run(2, fit, {**HAND_CUT, "training": {"exit_interval": 3}}),
    "iterator_ends_in_a_step": Run(2, partial(with_iterator, count=GAS + 2, steps=3), HAND_CUT),
    "iterator_ends_after_a_step": Run(2, partial(with_iterator, count=GAS, steps=3), HAND_CUT),
    "whole_batches": Run(2, with_batches, HAND_CUT),
    "sigterm": Run(2, partial(fit, data=faulty(SIGTERM)), HAND_CUT),
    "sigterm_in_loop": Run(
        2,
        partial(in_loop, steps=4, data=faulty(SIGTERM)),
        {**HAND_CUT, "checkpoint": {"interval": 0}},
    ),
    "moved_stages": Run(
        2,
        partial(
            with_iterator,
            count=3 * GAS,
            steps=3,
            net=partial(model, (0, 0, 0, 512)),
        ),
        PP2,
    ),
    "trainer": Run(2, partial(fit, valid=True), {**HAND_CUT, **EVALUATION}),
    "trainer_epochs": Run(
        2,
        partial(fit, valid=True, epochs=2, data=partial(Samples, 13)),
        {
            **HAND_CUT,
            "training": {"train_steps": None},
            "checkpoint": {"by": "epoch", "interval": 1},
        },
    ),
    "trainer_saves_in_callback": Run(
        2,
        partial(fit, valid=True, does={"after_step": saves}),
        {**HAND_CUT, "training": {"eval_interval": 2, "eval_steps": 1, "train_steps": 2}},
    ),
    "trainer_data": Run(2, fit, DP2),
    "callback_raises": Run(2, partial(fit, does={"after_step": raises}), HAND_CUT),
    "callback_raises_before_save": Run(2, partial(fit, does={"before_save": raises}), HAND_CUT),
    "async_save": Run(2, fit, {**HAND_CUT, "checkpoint": {"async": True}}),
    "csv_and_jsonl": Run(1, csv_rows, EVALUATION),
    "resume": Run(2, partial(resumed, valid=True), {**HAND_CUT, **EVALUATION}),
    "save_and_load_in_loop": Run(2, partial(LOOP3, between=saves_and_loads), {**DP2, **ZERO}),
    "deepspeed_loop": Run(2, shim_loop, ZERO),
    "deepspeed_pipeline": Run(2, shim_pipeline),
    "tied": Run(2, partial(in_loop, net=partial(model, tied=True)), HAND_CUT),
    "recompute": Run(
        2,
        in_loop,
        {**HAND_CUT, "pipeline": {"partition": "uniform", "activation_checkpoint_interval": 1}},
    ),
    "partial_last_step": Run(
        2,
        partial(LOOP3, data=partial(Samples, 2 * SECOND + 3)),
        {**HAND_CUT, "training": {"train_steps": None, "epochs": 1}},
    ),
    "torch_loader": Run(1, partial(in_loop, data=torch_loader)),
    "iterable": Run(2, partial(LOOP3, data=partial(Stream, 2 * SECOND + 3)), DP2),
    "evaluations_between_steps": Run(2, partial(in_loop, between=evaluates), HAND_CUT),
    "lora": Run(2, in_loop, {**HAND_CUT, "lora": {"r": 2}}),
    "hf": Run(2, hf, HAND_CUT),
    "hf_lora": Run(2, hf, {**HAND_CUT, "lora": {"r": 2}}),
    "freezing_between_steps": Run(2, partial(LOOP3, between=freezes), HAND_CUT),
    "replica_checks": Run(
        2, partial(in_loop, steps=2), {**DP2, "training": {"check_replicas_every": 2}}
    ),
}


def run(name: str, folder: str, limit: int | None = None) -> list[str]:
    """Run on this rank; return the list of its events."""
    chosen, path = RUNS[name], Path(folder)
    os.environ["XDG_CACHE_HOME"] = str(path / "cache")
    torch.manual_seed(0)
    try:
        with handlers_restored(), recording(path / "run", (WIDTH, WIDTH)) as recorder:
            chosen.function(recorder, chosen.changes)
            return recorder.text()
    finally:
        del os.environ["XDG_CACHE_HOME"]
