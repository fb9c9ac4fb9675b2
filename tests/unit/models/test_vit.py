"""The ViT against a plain torch model, its initial weights, its errors and torchvision's names."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from pipemega.config import load
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.errors import ConfigError, DataError, PipelineError
from pipemega.models import ViTConfig, vit
from pipemega.models.transformer_block import DropPath, drop_path_rate
from pipemega.models.vit import (
    ClassificationLoss,
    ViTBlock,
    vit_from_torchvision,
    vit_to_torchvision,
)
from pipemega.pipeline.model.module import BuildOptions, PipelineModule
from pipemega.pipeline.model.stages import LocalModel, build_local_model
from tests.optional_packages import imported
from tests.unit.models.vit_reference import ReferenceViT

MODEL = {
    "type": "vit", "num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "image_size": 8,
    "patch_size": 4, "num_channels": 3, "num_classes": 5,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _fp64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def config_of(**model: Any) -> Any:
    return load({"train_batch_size": 4, "model": {**MODEL, **model}})


def net_of(**model: Any) -> PipelineModule:
    return vit(ViTConfig.of(config_of(**model)))


def built(net: PipelineModule) -> LocalModel:
    mesh = Mesh.single()
    options = BuildOptions(mesh.tensor, mesh.device, seed=1)
    return build_local_model(net, mesh, [0, len(net)], [0], options)


def images(rows: int = 3, size: int = 8) -> Tensor:
    return torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("pool", ["class", "mean"])
def test_a_vit_has_the_loss_and_gradients_of_a_plain_torch_model(pool: str) -> None:
    reference = ReferenceViT(config_of(pool=pool).model)
    model = built(vit_from_torchvision(net_of(pool=pool), reference.state_dict()))
    labels = torch.tensor([0, 4, 2])
    logits, expected = model.stages[0](images()), reference(images())
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    assert model.loss_fn is not None
    loss = model.loss_fn(logits, labels)
    assert isinstance(loss, Tensor)
    loss.backward()
    F.cross_entropy(expected, labels).backward()
    theirs = {n: p.grad for n, p in reference.named_parameters()}
    ours = {n: p.grad for n, p in model.parameters.items() if p.grad is not None}
    if pool == "mean":
        assert len(ours) == len(theirs)
        return
    for name, gradient in vit_to_torchvision(ours).items():
        torch.testing.assert_close(gradient, theirs.pop(name), rtol=1e-10, atol=1e-13)
    assert not theirs


def test_weights_with_torchvisions_names_are_loaded_and_returned_unchanged() -> None:
    state = ReferenceViT(config_of().model).state_dict()
    first = {
        name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): tensor
        for name, tensor in state.items()
    }
    for given in (state, first):  # the names of torchvision's two versions
        model = built(vit_from_torchvision(net_of(), given))
        returned = vit_to_torchvision({n: p.detach() for n, p in model.parameters.items()})
        assert returned.keys() == state.keys()
        assert all(torch.equal(returned[name], state[name]) for name in state)


def test_a_new_head_is_initialized_and_the_other_weights_are_loaded() -> None:
    state = ReferenceViT(config_of(num_classes=7).model).state_dict()
    with pytest.raises(
        ConfigError, match=r"layers.3.linear.weight has the shape \[7, 16\], and \["
    ):
        vit_from_torchvision(net_of(), state)
    model = built(vit_from_torchvision(net_of(init="torch"), state, new_head=True))
    own = built(net_of(init="torch"))
    assert torch.equal(
        model.parameters["layers.3.linear.weight"], own.parameters["layers.3.linear.weight"]
    )
    assert torch.equal(model.parameters["layers.0.class_token"], state["class_token"])


def test_weights_that_do_not_fit_are_refused_by_name() -> None:
    state = ReferenceViT(config_of().model).state_dict()
    del state["class_token"]
    with pytest.raises(ConfigError, match=r"1 tensors are only in the model: layers.0.class_token"):
        vit_from_torchvision(net_of(), state)
    with pytest.raises(ConfigError, match=r"2 tensors are only in the values: a, layers.1.b"):
        vit_from_torchvision(
            net_of(pool="mean"),
            {**state, "a": images(), "encoder.layers.encoder_layer_0.b": images()},
        )
    parameters = dict(built(net_of(pool="mean")).parameters)
    with pytest.raises(ConfigError, match="has a class token, and this ViT has none"):
        vit_to_torchvision(parameters)
    with pytest.raises(ConfigError, match="not the parameters of a ViT"):
        vit_to_torchvision({})


def test_a_vit_has_the_names_and_the_logits_of_torchvisions() -> None:
    torchvision = imported("torchvision")
    theirs = torchvision.models.VisionTransformer(8, 4, 2, 4, 16, 64, num_classes=5)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model = built(vit_from_torchvision(net_of(), theirs.state_dict()))
    torch.testing.assert_close(model.stages[0](images()), theirs(images()), rtol=1e-12, atol=1e-12)
    theirs.load_state_dict(vit_to_torchvision(dict(model.parameters)))
    large = torchvision.models.vit_b_16
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in large().state_dict().items()}
    net = vit(ViTConfig.of(load({"train_batch_size": 1, "model": {"type": "vit"}})))
    ours = {
        f"layers.{position}.{name}": tensor
        for position, layer in enumerate(net.meta_layers)
        for name, tensor in layer.state_dict().items()
    }
    assert {n: t.shape for n, t in vit_to_torchvision(ours).items()} == shapes


def test_initial_weights_have_the_distributions_of_jax_or_torch() -> None:
    sizes = {"hidden_size": 64, "image_size": 32, "num_classes": 50}
    jax = {n: p.detach() for n, p in built(net_of(**sizes)).parameters.items()}
    patches = jax["layers.0.projection.weight"]
    assert patches.std().item() == pytest.approx(1 / math.sqrt(48), rel=0.05)
    assert patches.abs().max() < 2 / math.sqrt(48) / 0.879
    assert not jax["layers.0.projection.bias"].any()
    assert jax["layers.0.positions"].std().item() == pytest.approx(0.02, rel=0.05)
    # Xavier: query, key and value are three matrices of 64 x 64.
    for name, fans in (("attention.qkv", 128), ("attention.output", 128), ("mlp.up", 320)):
        bound = math.sqrt(6 / fans)
        assert bound * 0.98 < jax[f"layers.1.{name}.weight"].abs().max() <= bound
        assert 0 < jax[f"layers.1.{name}.bias"].abs().max() < 1e-5
    assert not jax["layers.3.linear.weight"].any()
    assert not jax["layers.0.class_token"].any()
    torchs = {n: p.detach() for n, p in built(net_of(**sizes, init="torch")).parameters.items()}
    for name, fan_in in (
        ("layers.0.projection", 48), ("layers.1.attention.qkv", 64), ("layers.2.mlp.down", 256),
        ("layers.3.linear", 64),
    ):  # fmt: skip
        bound = 1 / math.sqrt(fan_in)
        for part in ("weight", "bias"):
            assert bound * 0.8 < torchs[f"{name}.{part}"].abs().max() <= bound
    assert not torchs["layers.0.positions"].any()


def test_the_rate_of_stochastic_depth_grows_with_the_block_of_the_whole_model() -> None:
    assert [drop_path_rate(0.3, i, 4) for i in range(4)] == pytest.approx([0, 0.1, 0.2, 0.3])
    assert drop_path_rate(0.3, 0, 1) == 0.3
    net = net_of(num_layers=4, drop_path=0.3)
    mesh = Mesh.single()
    options = BuildOptions(Axis("tensor"), mesh.device, seed=1)
    stages = build_local_model(net, mesh, [0, 3, 6], [0, 0], options).stages
    rates = {}
    for stage in stages.values():
        for name, module in stage.named_modules():
            if isinstance(module, ViTBlock):
                paths = [m.p for m in module.modules() if isinstance(m, DropPath)]
                rates[name] = paths
    assert [rate for paths in rates.values() for rate in paths] == pytest.approx([0.1, 0.2, 0.3])


def test_stochastic_depth_skips_whole_samples_and_keeps_the_mean() -> None:
    path, x = DropPath(0.25), torch.ones(4000, 2, 3)
    torch.manual_seed(0)
    y = path(x)
    kept = y[:, 0, 0] > 0
    assert torch.equal(y, kept.view(-1, 1, 1) * x / 0.75)
    assert kept.double().mean().item() == pytest.approx(0.75, abs=0.03)
    assert path.eval()(x) is x


def test_the_loss_takes_class_ids_and_probabilities() -> None:
    logits, ids = torch.randn(4, 5), torch.tensor([0, 3, 4, 1])
    loss = ClassificationLoss(5, label_smoothing=0.1)
    smooth = F.one_hot(ids, 5) * 0.9 + 0.1 / 5
    expected = -(smooth * logits.log_softmax(-1)).sum(-1).mean()
    torch.testing.assert_close(loss(logits, ids), expected)
    torch.testing.assert_close(loss(logits, F.one_hot(ids, 5).float()), expected)
    torch.testing.assert_close(loss(logits, ids.int()), expected)
    half = loss(logits.bfloat16(), ids)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, loss(logits.bfloat16().float(), ids))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (torch.tensor([0, 5]), r"a label is class 5, and the model has the classes 0 to 4: set"),
        (torch.tensor([-1, 0]), r"a label is class -1, and the model has the classes 0 to 4"),
        (torch.zeros(3).long(), r"the class ids of a micro-batch must have the shape \[2\], and"),
        (torch.zeros(2, 4), r"the soft labels of a micro-batch must have the shape \[2, 5\], and"),
    ],
)
def test_wrong_labels_are_refused(labels: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        ClassificationLoss(5)(torch.zeros(2, 5), labels)


def test_wrong_images_are_refused() -> None:
    layer = built(net_of()).stages[0]
    with pytest.raises(
        PipelineError, match=r"takes images \[batch, 3, 8, 8\] .* are \[2, 3, 9, 9\]"
    ):
        layer(images(2, 9))
    with pytest.raises(PipelineError, match="those of this batch are uint8: scale and normalize"):
        layer(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
