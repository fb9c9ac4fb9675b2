"""Training scripts in the style of DeepSpeed's users, as functions that run on each rank.

They use only names that a DeepSpeed script uses: `deepspeed` is the package under test.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import pipemega.compat.deepspeed as deepspeed

WIDTH, CLASSES, MICRO, STEPS = 6, 5, 2, 3


class Embedding(nn.Module):
    """Its tied weight is a property, as in Megatron-DeepSpeed's EmbeddingPipe."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(CLASSES, WIDTH)

    @property
    def word_embeddings_weight(self) -> Tensor:
        return self.inner.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids)


class SixTensors(nn.Module):
    """Takes and returns six tensors, one of them of integers, as qlora-pipe's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> tuple[Tensor, ...]:
        x, mask, positions, cos, sin, labels = given
        y = torch.tanh(self.linear(x)) * cos + x * sin
        return y, mask, positions, cos, sin + y.mean(), labels


class Loaded(nn.Module):
    """Loads its weights in the constructor, which cannot run on the meta device."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        state = torch.load(path, weights_only=True)
        self.linear.load_state_dict(state)
        assert float(self.linear.weight.sum()) == float(state["weight"].sum())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class LossLayer(nn.Module):
    """The last layer of a model without loss_fn: its output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        x, *_, labels = given
        return nn.functional.cross_entropy(self.head(x), labels)


class Case(NamedTuple):
    """A model of a script.

    Args:
        layers: returns the layers of the model, for DeepSpeed's PipelineModule.
        loss_fn: None: the last layer returns the loss.
        sample: generator -> one (inputs, labels).
        arguments: further arguments of PipelineModule.
    """

    layers: Callable[[], list[Any]]
    loss_fn: Any
    sample: Callable[[torch.Generator], Any]
    arguments: Mapping[str, Any] = MappingProxyType({})


def vision_layers() -> list[Any]:
    """Layers of a built network with activations in place, as DeepSpeed's AlexNet example."""
    torch.manual_seed(3)
    features = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)]
    classifier = [nn.Dropout(0.0), nn.Linear(16, WIDTH), nn.ReLU(inplace=True)]
    head = [nn.Linear(WIDTH, CLASSES)]
    return [*features, nn.AdaptiveAvgPool2d(2), lambda x: torch.flatten(x, 1), *classifier, *head]


def image(generator: torch.Generator) -> Any:
    return torch.randn(3, 8, 8, generator=generator), torch.randint(
        CLASSES, (), generator=generator
    )


def tied_layers() -> list[Any]:
    from pipemega.compat.deepspeed.pipeline_module import PipeLayerSpec, PipeTiedLayerSpec

    def tied(**options: Any) -> Any:
        return PipeTiedLayerSpec(
            "embed", Embedding, tied_weight_attr="word_embeddings_weight", **options
        )

    middle = [PipeLayerSpec(nn.Linear, WIDTH, WIDTH), torch.tanh] * 2
    return [tied(), *middle, tied(forward_fn=lambda e, x: x @ e.word_embeddings_weight.t())]


def token(generator: torch.Generator) -> Any:
    return tuple(torch.randint(CLASSES, (), generator=generator) for _ in range(2))


def six_tensor_layers() -> list[Any]:
    specs = deepspeed.pipe.LayerSpec
    return [specs(SixTensors), specs(SixTensors), specs(SixTensors), specs(LossLayer)]


def six_tensors(generator: torch.Generator) -> Any:
    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    ids = torch.arange(WIDTH)
    label = torch.randint(CLASSES, (), generator=generator)
    return (draw(WIDTH), draw(WIDTH) > 0, ids, draw(WIDTH), draw(WIDTH), label), torch.zeros(1)


def frozen_layers() -> list[Any]:
    """The whole first half is frozen, as under LoRA."""
    torch.manual_seed(4)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    for layer in layers[:2]:
        layer.requires_grad_(False)
    return [*layers, nn.ReLU(inplace=True), nn.Linear(WIDTH, CLASSES)]


def vector(generator: torch.Generator) -> Any:
    return torch.randn(WIDTH, generator=generator), torch.randint(CLASSES, (), generator=generator)


CASES = {
    "vision": Case(vision_layers, nn.CrossEntropyLoss(), image, {"partition_method": "uniform"}),
    "tied": Case(tied_layers, nn.CrossEntropyLoss(), token, {"seed_layers": True}),
    "six tensors": Case(
        six_tensor_layers, None, six_tensors, {"activation_checkpoint_interval": 1}
    ),
    "frozen": Case(frozen_layers, nn.CrossEntropyLoss(), vector, {"partition_method": "uniform"}),
}


def samples(case: Case, count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(7)
    return [case.sample(generator) for _ in range(count)]


def ds_config(**changes: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    } | changes


def script_states(
    name: str, num_stages: int, config: dict[str, Any], subset: int = 0
) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Train some steps of a case in fp64 on the training data of initialize.

    Args:
        subset: 1: give initialize a torch optimizer over groups of parameters.

    Returns:
        the losses, and the parameters before and after.
    """
    torch.set_default_dtype(torch.float64)
    deepspeed.init_distributed(dist_backend="nccl")
    case = CASES[name]
    net = deepspeed.pipe.PipelineModule(
        layers=case.layers(), loss_fn=case.loss_fn, num_stages=num_stages, **case.arguments
    )
    arguments: Mapping[str, Any] = MappingProxyType({})
    parameters = [p for p in net.parameters() if p.requires_grad]
    if subset:
        flat = [p for p in parameters if p.dim() < 2]
        groups = [{"params": [p for p in parameters if p.dim() >= 2]}, {"params": flat}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        arguments = {"optimizer": optimizer, "lr_scheduler": scheduler}
        config = {key: value for key, value in config.items() if key != "optimizer"}
    engine, *_ = deepspeed.initialize(
        model=net,
        model_parameters=parameters,
        training_data=samples(case, 8 * STEPS),
        config_params=config,
        **arguments,
    )
    before = engine.parameter_state()
    losses = [engine.train_batch().item() for _ in range(STEPS)]
    return losses, before, engine.parameter_state()


def unsplit_states(
    name: str, before: dict[str, Tensor], data_size: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Train the same steps with the unsplit model in one process: the losses, the parameters."""
    torch.set_default_dtype(torch.float64)
    try:
        return _unsplit(CASES[name], before, data_size)
    finally:
        torch.set_default_dtype(torch.float32)


def _unsplit(
    case: Case, before: dict[str, Tensor], data_size: int
) -> tuple[list[float], dict[str, Tensor]]:
    named: dict[str, nn.Parameter] = {}
    tied: dict[str, nn.Module] = {}
    functions: list[Callable[[Any], Any]] = []
    for position, layer in enumerate(case.layers()):
        module, function = layer, layer
        if hasattr(layer, "build"):
            key = getattr(layer, "key", None)
            module = function = tied.get(key) or layer.build()
            if key is not None:
                tied[key] = module
            if layer.forward_fn is not None:
                function = _bound(layer.forward_fn, module)
        if isinstance(module, nn.Module):
            for parameter_name, parameter in module.named_parameters():
                logical = f"layers.{position}.{parameter_name}"
                if logical in before:
                    parameter.data.copy_(before[logical])
                    named[logical] = parameter
        functions.append(function)
    trained = [p for p in named.values() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1)
    data, losses = samples(case, 8 * STEPS), []
    for batch in _batches(data, data_size):
        loss = torch.stack([_loss(functions, case.loss_fn, pair) for pair in batch]).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach() for name, p in named.items()}


def _bound(function: Any, module: nn.Module) -> Callable[[Any], Any]:
    return lambda x: function(module, x)


def _batches(data: list[Any], data_size: int) -> Iterator[list[Any]]:
    """Yield the micro-batches of each step: data rank d reads the samples d, d + size, ..."""
    shares = [data[rank::data_size] for rank in range(data_size)]
    per_step = 8 // data_size
    for start in range(0, len(shares[0]), per_step):
        yield [
            torch.utils.data.default_collate(share[at : at + MICRO])
            for share in shares
            for at in range(start, start + per_step, MICRO)
        ]


def _loss(functions: list[Callable[[Any], Any]], loss_fn: Any, pair: Any) -> Tensor:
    x, labels = pair
    x = x.clone() if isinstance(x, Tensor) else tuple(x)
    for function in functions:
        x = function(x)
    return x if loss_fn is None else loss_fn(x, labels)


def loaded_weights(folder: str) -> tuple[list[Any], list[float]]:
    """Train a model whose layers load their weights; return the first values and the losses."""
    deepspeed.init_distributed()
    spec = deepspeed.pipe.LayerSpec
    paths = [str(Path(folder) / f"{number}.pt") for number in range(4)]
    net = deepspeed.pipe.PipelineModule(
        [spec(Loaded, path) for path in paths], num_stages=2, loss_fn=nn.functional.mse_loss
    )
    engine, *_ = deepspeed.initialize(model=net, config=ds_config())
    state = engine.parameter_state()
    batch = torch.ones(MICRO, WIDTH), torch.zeros(MICRO, WIDTH)
    losses = [engine.train_batch(iter([batch] * 4)).item() for _ in range(2)]
    return [state[f"layers.{i}.linear.weight"] for i in range(4)], losses
