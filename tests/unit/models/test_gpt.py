"""The built-in GPT against independent implementations in plain torch."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.pipeline_cpu.model import Sizes, build_layers, initial_state, loss_fn
from benchmarks.pipeline_cpu.ours import _gpt_config, _their_name
from pipemega.config import load
from pipemega.distributed.mesh import Axis, Mesh
from pipemega.errors import ConfigError, DataError
from pipemega.models import GPTConfig, gpt
from pipemega.pipeline.model.module import BuildOptions
from pipemega.pipeline.model.stages import LocalModel, build_local_model

SIZES = Sizes(vocab=128, hidden=16, layers=2, heads=4, seq=8)

LLAMA = GPTConfig(
    vocab_size=100,
    seq_length=8,
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    ffn_hidden_size=24,
    num_query_groups=2,
    kv_channels=4,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    untie_embeddings_and_output_weights=True,
)


@pytest.fixture(autouse=True)
def _fp64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def build(config: GPTConfig) -> LocalModel:
    mesh, net = Mesh.single(), gpt(config)
    build_options = BuildOptions(mesh.tensor, mesh.device, seed=1)
    return build_local_model(net, mesh, [0, len(net)], [0], build_options)


def tokens(vocab: int, rows: int = 3, length: int = 8) -> Tensor:
    return torch.randint(vocab, (rows, length + 1), generator=torch.Generator().manual_seed(0))


def loss_of(model: LocalModel, inputs: Any, labels: Tensor) -> Tensor:
    assert model.loss_fn is not None
    loss = model.loss_fn(model.stages[0](inputs), labels)
    assert isinstance(loss, tuple)
    return loss[0] / loss[1]


def test_gpt2_style_has_the_loss_and_gradients_of_a_plain_torch_model() -> None:
    model = build(_gpt_config(SIZES))
    state = initial_state(SIZES)
    with torch.no_grad():
        for name, parameter in model.parameters.items():
            parameter.copy_(state[_their_name(name, SIZES)])
    reference = build_layers(SIZES, 0, SIZES.num_units)
    data = tokens(SIZES.vocab)
    loss = loss_of(model, data[:, :-1], data[:, 1:])
    expected_loss = loss_fn(reference(data[:, :-1]), data[:, 1:])
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-13)
    loss.backward()
    expected_loss.backward()
    gradients = {f"layers.{n}": p.grad for n, p in reference.named_parameters()}
    for name, parameter in model.parameters.items():
        torch.testing.assert_close(
            parameter.grad, gradients[_their_name(name, SIZES)], rtol=1e-10, atol=1e-13
        )


def test_llama_style_has_the_loss_of_the_explicit_formulas() -> None:
    model = build(LLAMA)
    data = tokens(LLAMA.vocab_size)
    got = loss_of(model, data[:, :-1], data[:, 1:])
    expected = _llama_loss({n: p.detach() for n, p in model.parameters.items()}, data)
    assert got.item() == pytest.approx(expected.item(), rel=1e-12)


def _llama_loss(w: dict[str, Tensor], data: Tensor) -> Tensor:
    """Return the loss, computed per position and head; shares no code with the model."""
    x = w["layers.0.weight"][data[:, :-1]]
    for layer in (2, 3):
        p = f"layers.{layer}."
        qkv = _rms(x, w[p + "attention_norm.weight"]) @ w[p + "attention.qkv.weight"].T
        q, k, v = qkv[..., :16], qkv[..., 16:24], qkv[..., 24:]
        heads = []
        for head in range(4):
            group = head // 2
            qh = _rotate(q[..., 4 * head : 4 * head + 4])
            kh = _rotate(k[..., 4 * group : 4 * group + 4])
            scores = qh @ kh.transpose(1, 2) / 2.0
            scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf)
            heads.append(scores.softmax(-1) @ v[..., 4 * group : 4 * group + 4])
        x = x + torch.cat(heads, -1) @ w[p + "attention.output.weight"].T
        gate, up = (_rms(x, w[p + "mlp_norm.weight"]) @ w[p + "mlp.up.weight"].T).chunk(2, -1)
        x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "mlp.down.weight"].T
    # The padding rows are after the 100 tokens of the vocabulary.
    logits = _rms(x, w["layers.4.norm.weight"]) @ w["layers.5.weight"][:100].T
    return F.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())


def test_megatrons_options_have_the_gradients_of_the_explicit_formulas() -> None:
    """Norms of embeddings, queries and keys; squared ReLU; more positions than tokens."""
    config = replace(
        LLAMA, num_layers=1, num_query_groups=4, normalization="LayerNorm", swiglu=False,
        position_embedding_type="learned_absolute", max_position_embeddings=11,
        embedding_norm=True, qk_layernorm=True, squared_relu=True,
    )  # fmt: skip
    model = build(config)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.parameters.items():
        # Norms start at 1 and 0, where a wrong order could not be seen.
        if "norm" in name:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) / 4)
    copies = {n: p.detach().clone().requires_grad_() for n, p in model.parameters.items()}
    assert copies["layers.1.weight"].shape == (11, 16)
    assert copies["layers.2.attention.key_norm.bias"].shape == (4,)
    data = tokens(config.vocab_size)
    loss = loss_of(model, data[:, :-1], data[:, 1:])
    expected = _megatron_loss(copies, data)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    loss.backward()
    expected.backward()
    for name, parameter in model.parameters.items():
        torch.testing.assert_close(parameter.grad, copies[name].grad, rtol=1e-10, atol=1e-14)


def _megatron_loss(w: dict[str, Tensor], data: Tensor) -> Tensor:
    def norm(x: Tensor, name: str) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        scaled = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    p = "layers.2."
    x = norm(w["layers.0.weight"][data[:, :-1]], "layers.1.norm") + w["layers.1.weight"][:8]
    q, k, v = (norm(x, p + "attention_norm") @ w[p + "attention.qkv.weight"].T).chunk(3, -1)
    heads = []
    for head in range(4):
        channels = slice(4 * head, 4 * head + 4)
        qh = norm(q[..., channels], p + "attention.query_norm")
        kh = norm(k[..., channels], p + "attention.key_norm")
        scores = (qh @ kh.transpose(1, 2) / 2.0).masked_fill(
            torch.ones(8, 8).triu(1).bool(), -math.inf
        )
        heads.append(scores.softmax(-1) @ v[..., channels])
    x = x + torch.cat(heads, -1) @ w[p + "attention.output.weight"].T
    up = norm(x, p + "mlp_norm") @ w[p + "mlp.up.weight"].T
    x = x + (up * up * (up > 0)) @ w[p + "mlp.down.weight"].T
    logits = norm(x, "layers.3.norm") @ w["layers.4.weight"][:100].T
    return F.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())


def test_norms_of_queries_and_keys_come_before_the_rotation() -> None:
    """A norm after the rotation would not commute with it: its weights differ by channel."""
    model = build(replace(LLAMA, qk_layernorm=True, num_layers=1))
    attention = model.stages[0].layers["2"].attention
    attention.query_norm.weight.data.copy_(torch.tensor([1.0, 2.0, 3.0, 4.0]))
    x = torch.randn(1, 8, 16, generator=torch.Generator().manual_seed(1))
    q, k, v = attention.qkv(x).split([16, 8, 8], -1)
    heads = []
    for head in range(4):
        group = slice(4 * (head // 2), 4 * (head // 2) + 4)
        qh = _rotate(_rms(q[..., 4 * head : 4 * head + 4], attention.query_norm.weight))
        kh = _rotate(_rms(k[..., group], attention.key_norm.weight))
        scores = (qh @ kh.transpose(1, 2) / 2).masked_fill(
            torch.ones(8, 8).triu(1).bool(), -math.inf
        )
        heads.append(scores.softmax(-1) @ v[..., group])
    expected = torch.cat(heads, -1) @ attention.output.weight.T
    torch.testing.assert_close(attention(x), expected, rtol=1e-10, atol=1e-14)


def test_the_vocabulary_is_padded_to_the_size_of_the_key() -> None:
    keys = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8}
    config = load(
        {
            "train_batch_size": 1,
            "mesh": {"tensor": 2},
            "model": {**keys, "vocab_size": "auto", "pad_vocab_size_to": 130},
        }
    )
    found = GPTConfig.of(config, 100)
    axis = Axis("tensor", (0, 1), 1)
    with torch.device("meta"):
        for spec in (gpt(found).specs[0], gpt(found).specs[-1]):
            assert spec.build(axis).weight.shape == (65, 8)
    with pytest.raises(ConfigError, match=r"pad_vocab_size_to \(130\) must be .* \(131\)"):
        GPTConfig.of(config, 131)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def _rotate(x: Tensor) -> Tensor:
    """x [batch, seq, 4]: channel i and i + 2 are a pair."""
    out = torch.empty_like(x)
    for position in range(x.shape[1]):
        for pair in range(2):
            angle = position * 10000.0 ** (-pair / 2)
            a, b = x[:, position, pair], x[:, position, pair + 2]
            out[:, position, pair] = a * math.cos(angle) - b * math.sin(angle)
            out[:, position, pair + 2] = b * math.cos(angle) + a * math.sin(angle)
    return out


@pytest.mark.parametrize("kind", ["learned_absolute", "rope"])
def test_explicit_positions_from_zero_equal_the_default_positions(kind: Any) -> None:
    model = build(replace(LLAMA, position_embedding_type=kind))
    data = tokens(LLAMA.vocab_size)
    counted = torch.arange(8).expand(3, 8)
    plain = loss_of(model, data[:, :-1], data[:, 1:])
    given = loss_of(model, (data[:, :-1], counted), data[:, 1:])
    assert given.item() == pytest.approx(plain.item(), rel=1e-13)
    restarted = loss_of(model, (data[:, :-1], counted % 3), data[:, 1:])
    assert restarted.item() != pytest.approx(plain.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "recompute"),
    [("learned_absolute", "none"), ("rope", "none"), ("rope", "selective"), ("rope", "full")],
)
def test_packed_documents_have_the_loss_and_gradients_of_separate_ones(
    kind: Any, recompute: Any
) -> None:
    model = build(replace(LLAMA, position_embedding_type=kind, recompute=recompute))
    lengths = (3, 1, 4)
    rows = [tokens(LLAMA.vocab_size, rows=1, length=n) + 7 * n for n in lengths]
    rows = [row % LLAMA.vocab_size for row in rows]
    separate = sum(
        loss_of(model, row[:, :-1], row[:, 1:]) * n for row, n in zip(rows, lengths, strict=True)
    )
    (separate / sum(lengths)).backward()
    expected = {name: p.grad.clone() for name, p in model.parameters.items() if p.grad is not None}
    for parameter in model.parameters.values():
        parameter.grad = None
    inputs = {
        "input_ids": torch.cat([row[:, :-1] for row in rows], dim=1),
        "position_ids": torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0),
    }
    loss = loss_of(model, inputs, torch.cat([row[:, 1:] for row in rows], dim=1))
    assert loss.item() == pytest.approx(separate.item() / sum(lengths), rel=1e-13)
    loss.backward()
    for name, parameter in model.parameters.items():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("side", ["left", "right"])
def test_tokens_do_not_see_padding(side: str) -> None:
    model = build(LLAMA)
    data = tokens(LLAMA.vocab_size, rows=2, length=6)
    plain = loss_of(model, data[:, :-1], data[:, 1:])
    pad = (2, 0) if side == "left" else (0, 2)
    inputs = {
        "input_ids": F.pad(data[:, :-1], pad, value=5),
        "attention_mask": F.pad(torch.ones(2, 6, dtype=torch.int64), pad),
    }
    padded = loss_of(model, inputs, F.pad(data[:, 1:], pad, value=-100))
    assert padded.item() == pytest.approx(plain.item(), rel=1e-12)
    leaky = loss_of(model, inputs["input_ids"], F.pad(data[:, 1:], pad, value=-100))
    assert (leaky.item() == pytest.approx(plain.item(), rel=1e-12)) == (side == "right")


def test_inputs_that_the_gpt_does_not_know_are_an_error_with_their_names() -> None:
    inputs = {"input_ids": tokens(100)[:, :-1], "token_type_ids": tokens(100)[:, :-1]}
    with pytest.raises(Exception, match="this batch are input_ids, token_type_ids") as caught:
        build(LLAMA).stages[0](inputs)
    assert isinstance(caught.value.__cause__, DataError)


def test_initial_output_projections_are_scaled_down_by_the_depth() -> None:
    config = replace(LLAMA, hidden_size=128, kv_channels=32, ffn_hidden_size=512, num_layers=8)
    parameters = build(config).parameters
    small = 0.02 / math.sqrt(16)
    assert parameters["layers.2.mlp.up.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert parameters["layers.2.mlp.down.weight"].std().item() == pytest.approx(small, rel=0.02)


def test_a_sample_longer_than_seq_length_is_an_error_with_both_lengths() -> None:
    model = build(replace(LLAMA, position_embedding_type="learned_absolute"))
    with pytest.raises(Exception, match=r"12 tokens, and the model has .* 8") as caught:
        model.stages[0](tokens(100, length=12)[:, :-1])
    assert isinstance(caught.value.__cause__, DataError)


def test_a_config_without_a_model_section_is_an_error() -> None:
    config = load({"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1})
    with pytest.raises(ConfigError, match="section 'model' is missing"):
        GPTConfig.of(config, 100)
