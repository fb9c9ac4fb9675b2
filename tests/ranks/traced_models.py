"""Modules without a list of layers, trained as pipelines of `from_module`, and by a plain loop."""

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega import SPLIT, PipelineModule, module_state_dict
from tests.ranks.small_models import engine_of

WIDTH, CLASSES, WORDS = 8, 5, 11
RATE = 0.1


class Residual(nn.Module):
    """A residual block with BatchNorm and in-place ReLUs, as in a ResNet."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.down = None
        if stride > 1 or inputs != outputs:
            self.down = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.down is None else self.down(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += identity
        return self.relu(y)


class SmallResNet(nn.Module):
    """Initialized as torchvision's, by a loop over all modules."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = nn.Sequential(Residual(4, 4), Residual(4, 4))
        self.layer2 = nn.Sequential(Residual(4, WIDTH, 2), Residual(WIDTH, WIDTH))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(WIDTH, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer2(self.layer1(x))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class Attention(nn.Module):
    """Its forward depends on `self.training`, so it cannot be traced through."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(rows, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        return self.proj(y.transpose(1, 2).reshape(rows, length, -1))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = Attention(dropout)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attn(self.norm1(x)), self.dropout, training=self.training)
        return x + self.mlp(self.norm2(x))


class SmallVit(nn.Module):
    """Has parameters of its own, and a buffer that is not persistent."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 2, 2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH), persistent=False)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        nn.init.trunc_normal_(self.cls_token, std=0.02)

    def forward(self, x: Tensor, scaled: bool = True) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], 1) + self.pos_embed
        if scaled:
            x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class Encoder(nn.Module):
    """Nested, with a projection that is called for each layer."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, tokens: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = self.table(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * mask.unsqueeze(-1)
            x = x + self.shared(x)
        return {"hidden": x, "mask": mask}


class TiedText(nn.Module):
    """Two arguments, and three ties: a module under two names, a weight of two modules, a module
    that is called several times."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = Encoder(self.words)
        self.decoder = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        encoded = self.encoder(tokens, mask)
        x = torch.tanh(self.decoder(encoded["hidden"]))
        x = x + F.linear(x, self.encoder.shared.weight)
        return self.head(x) * encoded["mask"].unsqueeze(-1)


RESNET_SEQUENCE = [
    "conv1", "bn1", "relu", "layer1", SPLIT, "layer2", "avgpool",
    (partial(torch.flatten, start_dim=1), "behind"), "fc",
]  # fmt: skip
MODELS = {"resnet": SmallResNet, "vit": SmallVit, "text": TiedText}


def image_loss(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output, labels)


def text_loss(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def microbatches(model: str, step: int, places: Iterable[int] = range(4)) -> list[Any]:
    """Return the micro-batches at `places` of a global batch."""
    batches = []
    for place in places:
        generator = torch.Generator().manual_seed(100 * step + place)
        if model == "text":
            tokens = torch.randint(WORDS, (3, 6), generator=generator)
            inputs: Any = tokens, (tokens > 2).double()
            labels = tokens.roll(-1, 1)
        else:
            inputs = torch.randn(3, 3, 8, 8, generator=generator, dtype=torch.float64)
            labels = torch.randint(CLASSES, (3,), generator=generator)
        batches.append((inputs, labels))
    return batches


def pipeline_of(model: str, built: bool, exec_seq: Any = None, **arguments: Any) -> PipelineModule:
    """Return the pipeline of a factory, or of a module that each rank builds with other values."""
    module: Any = partial(MODELS[model], **arguments)
    if built:
        torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0)
        module = module()
    loss = text_loss if model == "text" else image_loss
    example = microbatches(model, 0)[0][0]
    return PipelineModule.from_module(module, example, exec_seq, loss)


def train(
    model: str, built: bool, options: dict[str, Any], config: dict[str, Any]
) -> dict[str, Any]:
    """Train two steps; return the losses and the state of the module at the start and the end."""
    torch.set_default_dtype(torch.float64)
    try:
        net = pipeline_of(model, built, **options)
        engine = engine_of(net, **config)
        start = module_state_dict(net, engine)
        mine = range(4 * engine.mesh.data.rank, 4 * engine.mesh.data.rank + 4)
        losses = [engine.train_batch(iter(microbatches(model, s, mine))) for s in range(2)]
        losses.append(engine.eval_batch(microbatches(model, 9, mine)))
        end = module_state_dict(net, engine)
        return {"losses": losses, "start": start, "end": end, "bounds": engine.steps.model.bounds}
    finally:
        torch.set_default_dtype(torch.float32)


def train_all(cases: list[tuple[str, bool, dict[str, Any], dict[str, Any]]]) -> list[Any]:
    return [train(*case) for case in cases]


def train_plain(model: str, start: dict[str, Tensor], data_ranks: int = 1) -> dict[str, Any]:
    """Train the module itself from the state `start`, one micro-batch after the other."""
    torch.set_default_dtype(torch.float64)
    try:
        module = MODELS[model]()
        module.load_state_dict(start)
        loss_fn = text_loss if model == "text" else image_loss

        def losses_of(step: int) -> list[Tensor]:
            batches = microbatches(model, step, range(4 * data_ranks))
            inputs = [x if isinstance(x, tuple) else (x,) for x, _ in batches]
            return [
                loss_fn(module(*x), labels) / len(batches)
                for x, (_, labels) in zip(inputs, batches, strict=True)
            ]

        losses = []
        optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
        for step in range(2):
            optimizer.zero_grad()
            parts = losses_of(step)
            torch.autograd.backward(parts)
            optimizer.step()
            losses.append(sum(part.item() for part in parts))
        module.eval()
        with torch.no_grad():
            losses.append(sum(part.item() for part in losses_of(9)))
        return {"losses": losses, "end": module.state_dict()}
    finally:
        torch.set_default_dtype(torch.float32)


def assert_like_the_module(
    results: Sequence[dict[str, Any]], model: str, data_ranks: int = 1
) -> None:
    """Compare the results of all ranks with those of the module itself."""
    plain = train_plain(model, results[0]["start"], data_ranks)
    for result in results:
        # Each data rank has its own running statistics, which evaluation uses.
        compared = 3 if data_ranks == 1 or model != "resnet" else 2
        assert result["losses"][:compared] == pytest.approx(plain["losses"][:compared], rel=1e-10)
        assert list(result["end"]) == list(plain["end"])
        for name, want in plain["end"].items():
            if data_ranks == 1 or not re.search("running|num_batches", name):
                torch.testing.assert_close(
                    result["end"][name], want, rtol=1e-10, atol=1e-12, msg=name
                )
