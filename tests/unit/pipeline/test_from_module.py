"""Modules as pipelines in one process: traces, cuts, execution sequences, factories, errors."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega import SPLIT, PipelineModule, module_state_dict
from pipemega.distributed.mesh import Axis
from pipemega.errors import CheckpointError, ConfigError, PipelineError
from pipemega.pipeline.model.module import BuildOptions, build_stages
from tests.optional_packages import imported
from tests.ranks.small_models import engine_of
from tests.ranks.traced_models import (
    RESNET_SEQUENCE,
    SmallResNet,
    SmallVit,
    TiedText,
    image_loss,
    microbatches,
)

from_module = PipelineModule.from_module
IMAGES = torch.randn(2, 3, 8, 8)


def layers_of(net: PipelineModule, seed: int = 1) -> nn.ModuleList:
    """Build all layers in one stage."""
    options = BuildOptions(Axis("tensor"), torch.device("cpu"), seed)
    (stage,) = build_stages(net, [0, len(net)], [0], options).values()
    return nn.ModuleList(stage.layers.values())


def run(layers: nn.ModuleList, x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


class Wide(nn.Module):
    """Has a large and a small part, so that the small part may be one call."""

    def __init__(self, small: nn.Module) -> None:
        super().__init__()
        self.small, self.large = small, nn.Linear(4, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.large(self.small(x))


class Unet(nn.Module):
    """All skips are open in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = torch.relu(layer(x))
            skips.append(x)
        for layer in self.up:
            x = layer(x) + skips.pop()
        return x


def resnet50() -> nn.Module:
    return imported("torchvision.models").resnet50(num_classes=10)


def vit() -> nn.Module:
    return imported("timm").create_model("vit_tiny_patch16_224", img_size=32, num_classes=10)


class TwiceNormed(nn.Module):
    """One BatchNorm is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layers[0](x))
        x = self.norm(self.layers[2](self.layers[1](x)))
        return self.layers[3](x)


def test_small_blocks_stay_whole_and_layers_without_parameters_follow_others() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 4, 1)
            self.body = nn.Sequential(*(SmallResNet().layer1[0] for _ in range(5)))
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.body(self.stem(x))).mean((2, 3)))

    net = from_module(Deep(), IMAGES)
    assert net.layer_names == ["Conv2d", *["Residual"] * 5, "Linear"]


def test_a_large_block_is_cut_where_several_values_cross() -> None:
    net = from_module(Unet(), torch.ones(2, 4))
    assert len(net) == 6
    layers = layers_of(net)
    x: Any = torch.ones(2, 4)
    crossing = []
    for layer in layers:
        x = layer(x)
        crossing.append(len(x) if isinstance(x, tuple) else 1)
    assert crossing == [1, 2, 3, 3, 2, 1]


def test_running_statistics_are_in_one_layer() -> None:
    net = from_module(TwiceNormed(), torch.randn(3, 4))
    with_norm = [any("norm" in n for n, _ in layer.named_buffers()) for layer in net.meta_layers]
    assert sum(with_norm) == 1


@pytest.mark.parametrize("build", [SmallResNet, partial(SmallVit, 0.5), TiedText])
def test_train_and_eval_mode_and_all_names_are_those_of_the_module(
    build: Callable[[], nn.Module],
) -> None:
    module = build().double()
    inputs = microbatches("text" if build is TiedText else "image", 0)[0][0]
    net = from_module(module, inputs)
    layers = layers_of(net)
    several = inputs if isinstance(inputs, tuple) else (inputs,)
    for mode in (True, False, True):
        module.train(mode)
        layers.train(mode)
        torch.manual_seed(3)
        want = module(*several)
        torch.manual_seed(3)
        assert torch.equal(run(layers, inputs), want)
    assert net.origin is not None
    names = net.origin.state_names()
    assert list(names) == list(module.state_dict())
    for name in dict(module.named_parameters()):
        assert net.module_name(net.origin.logical_name(name)) == name
    assert net.num_parameters() == sum(p.numel() for p in module.parameters())


RESNET50_SEQUENCE = [
    "conv1", "bn1", "relu", "maxpool", "layer1", "layer2", SPLIT, "layer3", "layer4", "avgpool",
    (partial(torch.flatten, start_dim=1), "behind"), "fc",
]  # fmt: skip


@pytest.mark.parametrize(
    ("build", "num_layers", "exec_seq"),
    [(resnet50, 26, None), (resnet50, 22, RESNET50_SEQUENCE), (vit, 29, None)],
)
def test_models_of_torchvision_and_timm_have_the_same_gradients(
    build: Callable[[], nn.Module], num_layers: int, exec_seq: Any
) -> None:
    module = build().double()
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    net = from_module(module, x, exec_seq)
    assert len(net) == num_layers
    want = torch.autograd.grad(module(x).square().mean(), [*module.parameters()])
    got = torch.autograd.grad(run(layers_of(net), x).square().mean(), [*module.parameters()])
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_inputs_may_be_a_tuple_or_a_dict_of_arguments() -> None:
    tokens, mask = microbatches("text", 0)[0][0]
    torch.manual_seed(0)
    module = TiedText()
    want = module(tokens, mask.float())
    for example in ((tokens, mask.float()), {"mask": mask.float(), "tokens": tokens}):
        layers = layers_of(from_module(module, example))
        assert torch.equal(run(layers, example), want)
    layers = layers_of(from_module(module))
    with pytest.raises(
        PipelineError, match=r"takes 'mask' as argument 2, but .* are a tuple of 1: give a tuple"
    ):
        layers[0]((tokens,))
    with pytest.raises(PipelineError, match=r"takes 'mask'.* a dict with the keys tokens"):
        layers[0]({"tokens": tokens})


class ByValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


class ByShape(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 2:
            x = x * 2
        return self.layer(x)


class WithoutGradient(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.abs().mean()
        return x / scale


class WithAutocast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ x.T @ x).float()


class WithNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(4) if self.training else x


class ByMode(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


class OnlyNoise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(4)


NOT_TRACED = [ByValue, ByMode, WithoutGradient, WithAutocast, WithNoise, OnlyNoise]


@pytest.mark.parametrize("small", NOT_TRACED)
def test_a_small_submodule_that_cannot_be_traced_is_one_call(
    small: Callable[[], nn.Module],
) -> None:
    module = Wide(small())
    x = torch.randn(3, 4)
    layers = layers_of(from_module(module))
    for sign in (1, -1):
        torch.manual_seed(0)
        want = module(sign * x)
        torch.manual_seed(0)
        got = run(layers, sign * x)
        assert torch.equal(got, want)
        assert [g is None for g in torch.autograd.grad(got.sum(), [*module.parameters()])] == [
            False,
            False,
        ]


@pytest.mark.parametrize(
    ("root", "message"),
    [
        (ByValue, r"test_from_module.py:\d+: 'if x.sum\(\) > 0:': symbolically traced"),
        (
            WithoutGradient,
            r"'scale = x.abs\(\).mean\(\)': it changes the gradient or autocast mode",
        ),
        (WithAutocast, r"'return \(x @ x.T @ x\)"),
        (WithNoise, "it draws random numbers whose shape"),
        (
            ByMode,
            r"'return 2 \* x if self.training else x': train\(\) and eval\(\) make diff",
        ),
        (OnlyNoise, r"it draws random numbers whose shape does not depend on the input"),
    ],
)
def test_a_root_that_cannot_be_traced_names_the_line_and_the_way_out(
    root: Callable[[], nn.Module], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        from_module(root())
    text = str(raised.value)
    assert text.startswith(f"from_module cannot trace {root.__name__}.forward: ")  # type: ignore[attr-defined]
    assert re.search(message, text)
    assert "move this code into a submodule" in text
    assert "pass exec_seq=[...]: the names of the submodules in the order of their calls" in text
    assert raised.value.on_every_rank


def test_a_condition_on_shapes_needs_examples_and_is_checked_later() -> None:
    with pytest.raises(ConfigError, match="or give example_inputs if it depends on shapes only"):
        from_module(ByShape())
    module = ByShape()
    layers = layers_of(from_module(module, torch.ones(3, 4)))
    assert torch.equal(run(layers, torch.ones(5, 4)), module(torch.ones(5, 4)))
    with pytest.raises(
        PipelineError,
        match=r"'if x.shape\[0\] > 2:': this condition was True for the example .* is False for",
    ):
        run(layers, torch.ones(2, 4))


def test_layers_that_differ_from_the_module_on_the_example_are_refused() -> None:
    class ByType(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if isinstance(x, Tensor) else -self.layer(x)

    with pytest.raises(ConfigError, match=r"what ByType.forward returns, but values that differ"):
        from_module(ByType(), torch.ones(2, 4))
    incomplete = ["conv1", "bn1", *RESNET_SEQUENCE[3:]]
    with pytest.raises(ConfigError, match=r"values that differ by up to .* check exec_seq"):
        from_module(SmallResNet(), IMAGES, incomplete)
    module = SmallResNet()
    module.fc.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"float32 \[2, 8, 1, 1\] instead of float32 \[2, 5\]"):
        from_module(module, IMAGES, RESNET_SEQUENCE[:-2])
    with pytest.raises(ConfigError, match="SmallResNet fails on the example inputs: Runt"):
        from_module(SmallResNet(), torch.ones(2, 4, 8, 8))


def test_the_arguments_of_forward_are_checked() -> None:
    class Variadic(nn.Module):
        def forward(self, *xs: Tensor) -> Tensor:
            return xs[0]

    tokens, mask = microbatches("text", 0)[0][0]
    with pytest.raises(ConfigError, match=r"forward of Variadic needs inputs; .*\(\*xs: .*\*args"):
        from_module(Variadic())
    with pytest.raises(ConfigError, match=r"has no 'masks'; its arguments are \(tokens: .*mask"):
        from_module(TiedText(), {"tokens": tokens, "masks": mask})
    with pytest.raises(ConfigError, match="forward of TiedText needs mask"):
        from_module(TiedText(), (tokens,))
    with pytest.raises(ConfigError, match="has no 'argument 3'"):
        from_module(TiedText(), (tokens, mask, mask))


def test_an_execution_sequence_has_functions_in_front_and_behind_and_splits() -> None:
    def normalized(x: Tensor) -> Tensor:
        return x / 2

    module = SmallResNet()
    sequence = [(normalized, "front"), *RESNET_SEQUENCE, torch.tanh]
    net = from_module(module, exec_seq=sequence)
    assert net.layer_names == [
        "Conv2d", "BatchNorm2d", "ReLU", "Residual", "Residual", "Residual", "Residual",
        "AdaptiveAvgPool2d", "Linear", "tanh",
    ]  # fmt: skip
    assert net.origin is not None
    assert net.origin.splits == (5,)
    assert torch.equal(run(layers_of(net), IMAGES), torch.tanh(module(IMAGES / 2)))


weight = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("sequence", "message"),
    [
        (["conv"], r"exec_seq\[0\]: SmallResNet has no submodule 'conv'; did you mean 'conv1'"),
        (["conv1", SPLIT], r"exec_seq\[1\]: SPLIT must be between two layers"),
        ([SPLIT, "conv1"], r"exec_seq\[0\]: SPLIT must be between"),
        (["conv1", SPLIT, SPLIT, "bn1"], r"exec_seq\[2\]: SPLIT must be between"),
        ([(torch.tanh, "behind"), "conv1"], r"exec_seq\[0\]: 'behind' needs a layer"),
        (["conv1", (torch.tanh, "front")], "a 'front' function, and no layer follows: write 'beh"),
        (
            ["conv1", (torch.tanh, "before")],
            r"exec_seq\[1\] is \(.*'before'\): an entry is the nam",
        ),
        (["conv1", 3], r"exec_seq\[1\] is 3: an entry is the name of a submodule, a function"),
        (
            ["conv1", lambda x: weight(x)],
            r"exec_seq\[1\] is a function that uses weight \(Linear\)",
        ),
        (["conv1", "bn1"], r"leaves out trainable parameters of SmallResNet: layer1.0.conv1.weig"),
        ([], "exec_seq is empty"),
        ("conv1", "exec_seq is 'conv1': give a list"),
    ],
)
def test_a_wrong_execution_sequence_is_refused(sequence: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as raised:
        from_module(SmallResNet(), exec_seq=sequence)
    assert raised.value.on_every_rank


def test_a_factory_keeps_only_local_parameters_and_gives_them_the_same_values() -> None:
    net = from_module(SmallVit, IMAGES)
    assert net.origin is not None
    every = [name for name, _ in SmallVit().named_parameters()]
    net.origin.prepare(range(len(net)), seed=5)
    whole = dict(net.origin._source.module(None).named_parameters())
    for position in range(len(net)):
        net.origin.prepare([position], seed=5)
        local = dict(net.origin._source.module(None).named_parameters())
        layer = net.meta_layers[position]
        names = {net.module_name(f"layers.0.{n}") for n, _ in layer.named_parameters()}
        assert {name for name in every if not local[name].is_meta} == names
        for name in names:
            assert torch.equal(local[name], whole[name]), name
    assert whole["pos_embed"].detach().std() == pytest.approx(0.02, rel=0.3), (
        "initialized as by the module"
    )
    net.origin.prepare([0], seed=6)
    other = dict(net.origin._source.module(None).named_parameters())
    assert not torch.equal(other["patch.weight"], whole["patch.weight"])


def changing_factory(sizes: list[int] = [4, 5]) -> nn.Module:  # noqa: B006
    return nn.Sequential(nn.Linear(4, sizes.pop(0)))


BUILT = nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: BUILT, r"<lambda>\(\) returned a module with parameters from before the call"),
        (lambda: 3, r"<lambda>\(\) returned int, not an nn.Module"),
        (nn.Linear, r"Linear\(\) failed: TypeError: .*: use functools.partial for arguments"),
        (3, "takes an nn.Module or a function that builds one, not int"),
    ],
)
def test_a_wrong_factory_is_refused(factory: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_module(factory)


def test_a_factory_that_builds_another_module_in_each_call_is_refused() -> None:
    net = from_module(changing_factory)
    message = r"in each call: 0.bias was \[4\] in the first call and is another one, \[5\], in"
    with pytest.raises(ConfigError, match=message):
        layers_of(net)


def test_the_state_of_the_module_is_read_from_a_checkpoint(tmp_path: Path) -> None:
    net = from_module(TiedText, loss_fn=lambda y, labels: F.cross_entropy(y.flatten(0, 1), labels))
    engine = engine_of(net)
    batches = [
        ((tokens, mask.float()), y.flatten()) for (tokens, mask), y in microbatches("text", 0)
    ]
    engine.train_batch(iter(batches))
    engine.save_checkpoint(tmp_path)
    state = module_state_dict(net, tmp_path)
    module = TiedText()
    module.load_state_dict(state)
    assert module.head.weight is module.words.weight
    layers = nn.ModuleList(engine.module[0].layers.values())
    assert torch.equal(run(layers, batches[0][0]), module(*batches[0][0]))
    for name, tensor in module_state_dict(net, engine).items():
        assert torch.equal(state[name], tensor)
    with pytest.raises(CheckpointError, match=r"has no layers.0.conv1.weight \(conv1.weight\)"):
        module_state_dict(from_module(SmallResNet), tmp_path)
    with pytest.raises(ConfigError, match=r"not made by PipelineModule.from_module.*parameter_st"):
        module_state_dict(PipelineModule([nn.Linear(4, 4)]), tmp_path)


def test_a_copy_for_the_meta_device_has_the_ties_and_does_not_use_the_module() -> None:
    module = SmallVit()
    net = from_module(module, loss_fn=image_loss).on_meta()
    assert all(p.is_meta for layer in net.meta_layers for p in layer.parameters())
    assert not any(p.is_meta for p in module.parameters())
    out = run(nn.ModuleList(net.meta_layers), IMAGES.to("meta"))
    assert out.shape == (2, 5)
    tied = from_module(TiedText()).on_meta()
    assert [t.key for t in tied.tied_parameters] == ["encoder.shared.weight", "words.weight"]
