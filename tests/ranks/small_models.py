"""Small models other than GPT, trained on any mesh; test_pipeline.py runs them on the pool."""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pipemega import LayerSpec, PipelineModule, TiedLayerSpec, initialize
from pipemega.engine.engine import Engine

WIDTH = 6


def squared_error(output: Tensor, labels: Tensor) -> Tensor:
    """mse_loss in the dtype of the output: torch 2.11 has no backward for that of two dtypes."""
    return nn.functional.mse_loss(output, labels.to(output.dtype))


class TreeLayer(nn.Module):
    """Takes and returns a tree of everything that may be sent between stages."""

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


def linear_of_the_cpu() -> nn.Linear:
    """Return a linear with the initial values of the CPU on every device."""
    device = torch.get_default_device()
    with torch.device("cpu"):
        layer = nn.Linear(WIDTH, WIDTH)
    return layer.to(device)


def tied_thrice(depth: int = 4) -> PipelineModule:
    """One matrix tied over the first, a middle and the last layer; each has its own bias."""
    layers: list[Any] = []
    for number in range(depth):
        if number in (0, depth // 2, depth - 1):
            layers.append(TiedLayerSpec("matrix", linear_of_the_cpu))
        else:
            layers.append(LayerSpec(linear_of_the_cpu))
        layers.append(torch.tanh)
    return PipelineModule(layers, squares)


def plain(depth: int = 5) -> PipelineModule:
    layers: list[Any] = []
    for _ in range(depth):
        layers += [LayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh]
    return PipelineModule(layers, squares)


class Mixing(nn.Module):
    """Makes a message of several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, tree: Any) -> Any:
        if isinstance(tree, Tensor):
            tree = tree, tree * 0.5, None, (tree * 4).long()
        x, skip, _, ids = tree
        y = self.linear(x)
        skip = skip + y
        return y, skip, skip, ids


class Changing(nn.Module):
    """Changes all tensors of a message, in place or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, tree: Any) -> Any:
        x, skip, same, ids = tree
        if self.in_place:
            skip.mul_(1.5)
            return x.relu_(), skip + same, None, ids.add_(1)
        return x.relu(), (skip + skip) * 1.5, None, ids + 1


def changing_inputs(in_place: bool) -> PipelineModule:
    """The stages start with layers that change their input, if cut at 2, 4 and 6."""
    layers: list[Any] = [LayerSpec(nn.LeakyReLU, 0.1, inplace=in_place)]
    for _ in range(3):
        layers += [LayerSpec(Mixing), LayerSpec(Changing, in_place)]
    return PipelineModule([*layers, lambda tree: tree[0] + tree[1] * tree[3]], squares)


def train_in_place(configs: list[dict[str, Any]]) -> list[tuple[Any, Any]]:
    """Train with layers in place and out of place; check that the caller's data do not change."""

    def run(in_place: bool, config: dict[str, Any]) -> Any:
        engine = engine_of(changing_inputs(in_place), **config)
        data = [(x, x) for x, _ in microbatches(0, 4)]
        copies = [x.clone() for x, _ in data]
        losses = [engine.train_batch(iter(data)) for _ in range(3)]
        losses.append(engine.eval_batch(data))
        assert all(torch.equal(x, copy) for (x, _), copy in zip(data, copies, strict=True))
        return losses, {n: p.numpy() for n, p in engine.parameter_state().items()}

    torch.set_default_dtype(torch.float64)
    try:
        return [(run(True, config), run(False, config)) for config in configs]
    finally:
        torch.set_default_dtype(torch.float32)


class CountingLayer(nn.Linear):
    """Returns a buffer that each forward changes, alone or in a tuple."""

    def __init__(self, alone: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.alone, self.calls = alone, torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.calls if self.alone else (super().forward(x), self.calls)


class UsesCount(nn.Linear):
    """Collects the counts that it receives."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.counts: list[float] = []

    def forward(self, received: Any) -> Tensor:
        x, calls = (received, received) if isinstance(received, Tensor) else received
        self.counts.append(calls[0].item())
        return super().forward(x)


def changes_sent_output(alone: bool) -> list[float]:
    """Return the counts that the second stage received in one step."""
    net = PipelineModule([LayerSpec(CountingLayer, alone), LayerSpec(UsesCount)], squares)
    engine = engine_of(net, mesh={"pipeline": 2}, pipeline={"partition": [0, 1, 2]})
    engine.train_batch((a.float(), b.float()) for a, b in microbatches(0, 4))
    return [count for m in engine.module.modules() for count in getattr(m, "counts", ())]


def sum_of_two() -> PipelineModule:
    """The two outputs of the first stage have the same gradient, which is one tensor."""
    return PipelineModule(
        [
            LayerSpec(nn.Linear, WIDTH, WIDTH),
            lambda x: (torch.tanh(x), torch.sigmoid(x)),
            lambda pair: pair[0] + pair[1],
            LayerSpec(nn.Linear, WIDTH, WIDTH),
        ],
        squares,
    )


class Complex(nn.Linear):
    """A linear layer with complex numbers, of real ones or complex ones."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.complex128))


def conjugated() -> PipelineModule:
    """Has an output (cut at 3) and a gradient (cut at 2) that torch conjugates at a read."""
    return PipelineModule(
        [
            LayerSpec(Complex),
            LayerSpec(Complex),
            torch.conj,
            LayerSpec(Complex),
            lambda z: z.real + 2 * z.imag,
        ],
        squares,
    )


class Frozen(nn.Linear):
    """A linear layer with a frozen weight."""

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
    """Modules with different initial values per rank, as if the user set no seed."""
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
    """Train `model`, the name of a function above; return losses and parameters."""
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
    """Train with evaluations of other sizes between the steps, and without evaluations."""
    torch.set_default_dtype(torch.float64)
    try:
        alone = engine_of(plain(), **config)
        without = [alone.train_batch(microbatches(s, 4)) for s in range(3)]
        engine = engine_of(plain(), **config)
        evaluations = [engine.eval_batch(microbatches(50, 2, rows=5), 2)]
        losses = []
        for step in range(3):
            losses.append(engine.train_batch(microbatches(step, 4)))
            # The last micro-batch is smaller.
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
    """Train with micro-batches of different sequence lengths."""
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


def declared(rows: int = 3, **config: Any) -> tuple[list[float], list[float]]:
    """Train, evaluate and infer with declared shapes; micro-batches have 3 rows."""
    torch.set_default_dtype(torch.float64)
    try:
        boundary = torch.empty(rows, 2, WIDTH, device="meta", requires_grad=True)
        net = PipelineModule(plain().specs, squares, boundary=boundary)
        engine = engine_of(net, pipeline={"shapes": "declared"}, **config)
        results = [engine.eval_batch(microbatches(8, 2), 2)]
        results += [engine.train_batch(microbatches(s, 4)) for s in range(2)]
        # In evaluation micro-batches may have any size.
        results.append(engine.eval_batch(microbatches(9, 2, rows=1), 2))
        outputs = engine.infer([x for x, _ in microbatches(9, 2, rows=1)])
        results.append(engine.train_batch(microbatches(3, 4)))
        return results, [float(y.sum()) for y in outputs or ()]
    finally:
        torch.set_default_dtype(torch.float32)


def user_streams(**config: Any) -> tuple[list[float], list[float]]:
    """Return random numbers drawn between steps by the user, with and without the steps."""

    def drawn_numbers(steps: bool) -> list[float]:
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

    return drawn_numbers(True), drawn_numbers(False)


class SlowLayer(nn.Linear):
    """Takes 20 ms, far more than another layer takes even on a busy machine."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.02)
        return super().forward(x)


def bounds_by_time(**config: Any) -> tuple[int, ...]:
    """Return the stage bounds that `profile` chooses if the last layers are much slower."""
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
    return engine.steps.model.bounds


def kept_between(schedule: str) -> tuple[int, bool]:
    """Return the most micro-batches in flight, and whether an output is kept after its send."""
    import weakref

    engine = engine_of(plain(6), pipeline={"schedule": schedule}, mesh={"pipeline": 2})
    executor = engine.steps.executor
    alive: list[int] = []
    outputs: list[Any] = []
    (stage,) = engine.module
    stage.register_forward_hook(
        lambda _m, _a, output: (
            (
                alive.append(1 + len(executor._run.in_flight)),
                outputs.append(weakref.ref(output)),
            )[:0]
            or None
        )
    )
    engine.train_batch((a.float(), b.float()) for a, b in microbatches(0, 4))
    return max(alive), any(reference() is not None for reference in outputs)
