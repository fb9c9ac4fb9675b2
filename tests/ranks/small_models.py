"""Models that are not a GPT, trained on any mesh; run by test_pipeline.py in the pool's ranks."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipemega import LayerSpec, PipelineModule, TiedLayerSpec, initialize
from pipemega.engine import Engine

WIDTH = 6


class TreeLayer(nn.Module):
    """Takes and gives a tree with everything that may cross a boundary."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            tree = {"x": tree, "skip": (tree * 2, None), "mask": tree > 0, "ids": tree.long()}
        assert tree["mask"].dtype == torch.bool
        assert tree["ids"].dtype == torch.int64
        assert tree.get("layers", self.number) == self.number
        first, none = tree["skip"]
        assert none is None
        x = torch.tanh(self.linear(tree["x"])) + first * tree["mask"]
        return {
            "x": x,
            "skip": (first + x.mean(), None),
            "mask": ~tree["mask"],
            "ids": tree["ids"] + 1,
            "layers": self.number + 1,
            "name": "a constant",
        }


def tree_model(depth: int = 4) -> PipelineModule:
    layers: list[Any] = [LayerSpec(TreeLayer, number) for number in range(depth)]
    return PipelineModule([*layers, lambda tree: tree["x"] + tree["skip"][0]], squares)


def tied_thrice(depth: int = 4) -> PipelineModule:
    """One matrix at the first, a middle and the last layer, beside biases of their own."""
    layers: list[Any] = []
    for number in range(depth):
        if number in (0, depth // 2, depth - 1):
            layers.append(TiedLayerSpec("matrix", nn.Linear, WIDTH, WIDTH))
        else:
            layers.append(LayerSpec(nn.Linear, WIDTH, WIDTH))
        layers.append(torch.tanh)
    return PipelineModule(layers, squares)


def plain(depth: int = 5) -> PipelineModule:
    layers: list[Any] = []
    for _ in range(depth):
        layers += [LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh]
    return PipelineModule(layers, squares)


class Frozen(nn.Linear):
    """A linear whose weight is not trained."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.weight.requires_grad_(False)


def partly_frozen() -> PipelineModule:
    return PipelineModule(
        [
            LayerSpec(Frozen, WIDTH, WIDTH),
            torch.tanh,
            LayerSpec(nn.Linear, WIDTH, WIDTH),
            torch.tanh,
            LayerSpec(Frozen, WIDTH, WIDTH),
            LayerSpec(nn.LayerNorm, WIDTH),
        ],
        squares,
    )


def built_by_the_user() -> PipelineModule:
    """Modules that differ between ranks, as those of a user who did not seed."""
    torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
    return PipelineModule([nn.Linear(WIDTH, WIDTH), torch.tanh, nn.Linear(WIDTH, WIDTH)], squares)


def squares(output: Tensor, labels: Tensor) -> Tensor:
    return ((output - labels) ** 2).mean()


def microbatches(step: int, count: int, rows: int = 3, length: int = 2) -> Iterator[Any]:
    for place in range(count):
        generator = torch.Generator().manual_seed(100 * step + place)
        x = torch.randn(rows, length, WIDTH, generator=generator, dtype=torch.float64)
        yield x, x.flip(-1)


def engine_of(net: PipelineModule, **config: Any) -> Engine:
    settings = {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine, *_ = initialize(net, settings | config)
    return engine


def train(model: str, steps: int = 2, **config: Any) -> dict[str, Any]:
    """Losses and parameters of `model`, a function above."""
    torch.set_default_dtype(torch.float64)
    try:
        engine = engine_of(globals()[model](), **config)
        count = engine.batch.num_microbatches
        losses = [engine.train_batch(microbatches(s, count)) for s in range(steps)]
        parameters = {n: p.numpy() for n, p in engine.parameter_state().items()}
        return {"loss": losses, "parameters": parameters}
    finally:
        torch.set_default_dtype(torch.float32)


def train_and_evaluate(**config: Any) -> dict[str, Any]:
    """Training steps with evaluations of other sizes between them, and without."""
    torch.set_default_dtype(torch.float64)
    try:
        alone = engine_of(plain(), **config)
        without = [alone.train_batch(microbatches(s, 4)) for s in range(3)]
        engine = engine_of(plain(), **config)
        evaluations = [engine.eval_batch(microbatches(50, 2, rows=5), 2)]
        losses = []
        for step in range(3):
            losses.append(engine.train_batch(microbatches(step, 4)))
            # The last micro-batch is a partial one.
            batches = [*microbatches(60, 2, rows=4), *microbatches(61, 1, rows=1)]
            evaluations.append(engine.eval_batch(iter(batches), 3))
        loss, outputs = engine.eval_batch(microbatches(50, 3), 3, return_outputs=True)
        shapes = None if outputs is None else [tuple(o.shape) for o in outputs]
        return {
            "losses": losses,
            "without": without,
            "evaluations": evaluations,
            "shapes": shapes,
            "loss": loss,
        }
    finally:
        torch.set_default_dtype(torch.float32)


def changing_lengths(**config: Any) -> list[float]:
    """Each micro-batch with a length of its own."""
    torch.set_default_dtype(torch.float64)
    try:
        engine = engine_of(plain(), **config)
        lengths = (1, 4, 2, 3)
        return [
            engine.train_batch(
                next(microbatches(10 * step + m, 1, length=length))
                for m, length in enumerate(lengths)
            )
            for step in range(2)
        ]
    finally:
        torch.set_default_dtype(torch.float32)


def declared(**config: Any) -> list[float]:
    torch.set_default_dtype(torch.float64)
    try:
        net = plain()
        boundary = torch.empty(3, 2, WIDTH, device="meta", requires_grad=True)
        net = PipelineModule(net.specs, squares, boundary=boundary)
        engine = engine_of(net, pipeline={"shapes": "declared"}, **config)
        return [engine.train_batch(microbatches(s, 4)) for s in range(2)]
    finally:
        torch.set_default_dtype(torch.float32)


def user_streams(**config: Any) -> tuple[list[float], list[float]]:
    """Numbers that the user draws before, between and after steps; with and without the steps."""

    def draws(steps: bool) -> list[float]:
        engine = engine_of(
            PipelineModule([LayerSpec(nn.Linear, WIDTH, WIDTH), nn.Dropout(0.5)], squares), **config
        )
        torch.manual_seed(5)
        drawn = [torch.rand(()).item()]
        for step in range(2):
            if steps:
                engine.train_batch((a.float(), b.float()) for a, b in microbatches(step, 4))
                engine.eval_batch(((a.float(), b.float()) for a, b in microbatches(step, 4)))
            drawn.append(torch.rand(()).item())
        return drawn

    return draws(True), draws(False)


class SlowLayer(nn.Linear):
    """Takes 20 ms, which a busy machine does not take from another layer by chance."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return super().forward(x)


def bounds_by_time(**config: Any) -> tuple[int, ...]:
    """Where `profile` cuts a model whose last layers are much slower."""
    slow = [LayerSpec(SlowLayer)] * 4
    quick = [LayerSpec(nn.Linear, WIDTH, WIDTH)] * 8
    dataset = [(torch.ones(WIDTH), torch.ones(WIDTH))] * 64
    engine, *_ = initialize(
        PipelineModule([*quick, *slow], squares),
        {
            "train_micro_batch_size_per_gpu": 32,
            "gradient_accumulation_steps": 2,
            "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
            "pipeline": {"partition": "profile"},
            **config,
        },
        dataset,
    )
    engine.train_batch()
    return engine._model.bounds


def kept_between(schedule: str) -> tuple[int, bool]:
    """Most micro-batches alive on this rank, and whether an output outlives its sending."""
    import weakref

    engine = engine_of(plain(6), pipeline={"schedule": schedule}, mesh={"pipeline": 2})
    executor = engine._executor
    alive: list[int] = []
    outputs: list[Any] = []
    (stage,) = engine.module
    stage.register_forward_hook(
        lambda _m, _a, output: (
            (
                alive.append(1 + len(executor._flying)),
                outputs.append(weakref.ref(output)),
            )[:0]
            or None
        )
    )
    engine.train_batch((a.float(), b.float()) for a, b in microbatches(0, 4))
    return max(alive), any(reference() is not None for reference in outputs)
