"""Trains models whose shapes are known at `initialize`, or only with the first micro-batch."""

import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pipemega import LayerSpec, PipelineModule, TiedLayerSpec, initialize
from pipemega.engine.engine import Engine
from pipemega.errors import PipemegaError
from pipemega.hf.hf_module import from_pretrained
from tests.ranks.lora.hf_runs import config_of
from tests.ranks.lora.hf_runs import microbatch as hf_microbatch
from tests.ranks.small_models import squared_error

WIDTH, WIDE, STEPS = 8, 512, 3


class Block(nn.Module):
    """A layer with dropout and a buffer."""

    def __init__(self, width: int = WIDTH, inner: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.norm(x + self.dropout(self.down(torch.tanh(self.up(x)))))


def _specs() -> PipelineModule:
    blocks = [LayerSpec(Block) for _ in range(5)]
    tied = TiedLayerSpec("tied", nn.Linear, WIDTH, WIDTH)
    return PipelineModule([tied, *blocks, LayerSpec(Block, inner=WIDE), tied], squared_error)


def _modules() -> list[nn.Module]:
    torch.manual_seed(7)
    return [*(Block() for _ in range(5)), nn.Tanh(), Block(inner=WIDE)]


def _built() -> PipelineModule:
    return PipelineModule(_modules(), squared_error)


def _uneven() -> PipelineModule:
    """Return a model whose best placement is a V."""
    sizes = [(8, 64), (64, 64), (64, 64), (64, 4096), (4096, 8)]
    layers = [layer for size in sizes for layer in (LayerSpec(nn.Linear, *size), torch.tanh)]
    return PipelineModule(layers[:-1], squared_error)


def _hf() -> PipelineModule:
    config = config_of("qwen3")
    config.num_hidden_layers, config.layer_types = 4, ["full_attention"] * 4
    return from_pretrained(config, pretrained=False)


NETS: Mapping[str, Callable[[], PipelineModule]] = {
    "specs": _specs,
    "built": _built,
    "from_module": lambda: PipelineModule.from_module(
        lambda: nn.Sequential(*_modules()), torch.zeros(2, WIDTH), loss_fn=squared_error
    ),
    "from_built": lambda: PipelineModule.from_module(
        nn.Sequential(*_modules()), torch.zeros(2, WIDTH), loss_fn=squared_error
    ),
    "uneven": _uneven,
    "hf": _hf,
}


def config(pipeline: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "mesh": {"pipeline": 2},
        **changes,
        "pipeline": dict(pipeline),
    }


def batches(net: str, start: int = 0) -> Iterator[tuple[Any, Any]]:
    for number in itertools.count(start):
        if net == "hf":
            yield hf_microbatch(0, number)
            continue
        generator = torch.Generator().manual_seed(number)
        yield tuple(torch.randn(2, 2, WIDTH, generator=generator))


class Samples(torch.utils.data.Dataset[Any]):
    """Map-style data with the shapes of `batches`."""

    def __init__(self, net: str) -> None:
        self._net = net

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        pair = next(batches(self._net, index))
        return torch.utils._pytree.tree_map(lambda tensor: tensor[0], pair)


def built(net: str, source: str, settings: Mapping[str, Any], **arguments: Any) -> Engine:
    """Return an engine whose shapes come from `source`: "data", "example", "iterator"."""
    if source == "data":
        arguments["training_data"] = Samples(net)
    elif source == "example":
        arguments["example"] = next(batches(net))
    return initialize(NETS[net](), settings, **arguments)[0]


def layout(engine: Engine) -> tuple[Any, ...]:
    """Return the plan of every rank, and the bounds of the stages."""
    return engine.plan, engine.steps.model.bounds


def trained(engine: Engine, net: str, steps: int = STEPS) -> dict[str, Any]:
    """Train with the caller's iterator; return losses and the state of the run."""
    data, found = batches(net), dict[str, Any]()
    for step in range(steps):
        found[f"loss {step}"] = engine.train_batch(data)
    found |= engine.parameter_state()
    found |= {f"buffer {name}": value for name, value in engine.buffer_state().items()}
    assert engine.optimizer is not None
    found["rates"] = [group["lr"] for group in engine.optimizer.param_groups]
    engine.check_replicas()
    return found


def compared(net: str, pipeline: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return what differs between the sources of the shapes, and from the same cut by hand."""
    settings = config(pipeline, changes)
    whole = built(net, "data", settings)
    known = layout(whole)
    example = built(net, "example", settings)
    same = {"example": layout(example) == known}
    engine = built(net, "iterator", settings)
    first = layout(engine)
    found = trained(engine, net)
    same["iterator"] = layout(engine) == known
    late = built(net, "iterator", settings)
    data = batches(net)
    step = [next(data) for _ in range(engine.batch.num_microbatches)]
    inputs, labels = (
        torch.utils._pytree.tree_map(lambda *x: torch.cat(x), *p) for p in zip(*step, strict=True)
    )
    same["batch loss"] = late.train_batch(batch=(inputs, labels)) == found["loss 0"]
    same["batch"] = layout(late) == known
    by_hand = config({**pipeline, "partition": list(known[1])}, changes)
    hand = trained(built(net, "iterator", by_hand, plan=known[0]), net)
    expected = trained(example, net)
    return {
        "same": same,
        "moved": first[1] != known[1],
        "different": [*differences(found, expected), *differences(found, hand)],
        "compared": len(found),
        "limits": first[1:],
    }


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    def equal(one: Any, other: Any) -> bool:
        return torch.equal(one, other) if isinstance(one, Tensor) else one == other

    keys = sorted({*found, *wanted})
    return [key for key in keys if not equal(found.get(key), wanted.get(key))]


def all_compared(cases: list[tuple[str, dict[str, Any], dict[str, Any]]]) -> list[Any]:
    return [compared(*case) for case in cases]


def resumed(folder: str, changes: Mapping[str, Any]) -> list[str]:
    """Load a checkpoint, which the move takes along; return what differs from the cut by hand."""
    saving = built("built", "iterator", config({"partition": "parameters"}, changes))
    data = batches("built")
    for _ in range(2):
        saving.train_batch(data)
    saving.save_checkpoint(folder)
    found = []
    known = layout(built("built", "example", config({}, changes)))[1]
    for pipeline in ({}, {"partition": list(known)}):
        engine = built("built", "iterator", config(pipeline, changes))
        engine.load_checkpoint(folder)
        found.append(trained(engine, "built"))
        assert engine.global_steps == 2 + STEPS
        assert layout(engine)[1] == known
    return differences(*found)


@contextmanager
def warnings_logged() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pipemega").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("pipemega").removeHandler(handler)


def held(case: str) -> tuple[list[str], bool, float]:
    """Return the warnings of a run whose stages the caller holds on to, and if they stay."""
    modules = _modules()
    net = PipelineModule(modules, squared_error)
    arguments: dict[str, Any] = {}
    engine = initialize(net, config({}, {}), **arguments)[0]
    before = layout(engine)[1]
    local = modules[0] if engine.mesh.pipeline.rank == 0 else modules[-1]
    if case == "module":
        parameters = list(engine.module.parameters())
    elif case == "hook":
        local.up.weight.register_hook(lambda grad: grad)
    elif case == "frozen":
        local.up.weight.requires_grad_(False)
    data = batches("built")
    with warnings_logged() as lines:
        engine.train_batch(data)
        loss = engine.train_batch(data)
    if case == "module":
        assert all(parameter.numel() for parameter in parameters)
    return lines, layout(engine)[1] == before, loss


def without_labels(case: str) -> tuple[int, ...]:
    """Return the placement of schedule `auto` if the first rank reads no labels."""
    settings = config({"schedule": "auto", "chunks": 2, "memory_limit": 10**9}, {})
    engine = built("uneven", "iterator", settings)
    data = batches("uneven")
    if case == "none" and engine.mesh.pipeline.rank == 0:
        data = ((x, None) for x, _ in data)
    engine.train_batch(data)
    return engine.plan.rank_of_stage


def limited(limit: int) -> str:
    """Return the error of a memory limit that the first step cannot keep; "" if it can."""
    settings = config({"schedule": "auto", "memory_limit": limit}, {})
    engine = built("built", "iterator", settings)
    try:
        engine.train_batch(batches("built"))
    except PipemegaError as error:
        return str(error)
    return ""
