"""From a folder onto a mesh, a training step, and out again: logits of transformers' own model."""

import json
import math
import re

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="Hugging Face models need transformers")

import transformers
from safetensors.torch import load_file

from pipemega.errors import CheckpointError
from pipemega.hf.weights.checkpoint_model import export_checkpoint
from pipemega.hf_check.split_run import KeepFloat64
from tests.ranks.hf import tiny_models
from tests.ranks.hf.tiny_models import EXPERTS
from tests.ranks.hf.weight_runs import (
    LEARNING_RATE,
    built_in_gpt,
    built_in_gpt_round_trip,
    load_step_and_save,
)
from tests.ranks.pool import RanksFailed

# Below the norms of all families.
CLIPPED = {"zero_optimization": {"stage": 1}, "gradient_clipping": 0.1}
# (pipeline, tensor, data, expert)
EXPERT_MESHES = [(1, 1, 2, 2), (2, 1, 2, 2), (1, 2, 2, 2), (1, 1, 4, 2)]
CASES = [
    ("llama-tied", (2, 2, 1), {}),
    ("mixtral", (1, 2, 2, 2), CLIPPED),
    pytest.param("mixtral", (1, 2, 2), CLIPPED, marks=pytest.mark.sweep),
    pytest.param("gpt2", (2, 2, 1), {"pipeline": {"schedule": "zb-v"}}, marks=pytest.mark.sweep),
]


def cases():
    yield from CASES
    for family in tiny_models.CONFIGS:
        yield pytest.param(family, (2, 2, 1), {}, marks=pytest.mark.sweep)
    for family in EXPERTS:
        for mesh in EXPERT_MESHES:
            yield pytest.param(family, mesh, CLIPPED, marks=pytest.mark.sweep)


def stepped_model(family, folder, steps=1, clipping=0.0):
    """Save the model in fp64; return it after steps of SGD."""
    transformers.utils.logging.disable_progress_bar()
    config = tiny_models.config_of(family)
    torch.set_default_dtype(torch.float64)
    try:
        model = tiny_models.whole_model(config)
        model.save_pretrained(folder, max_shard_size="60KB")
        inputs, labels = tiny_models.batch_of(config)
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        for _ in range(steps):
            optimizer.zero_grad()
            with KeepFloat64():
                logits = tiny_models.logits_of(model, inputs)
                tiny_models.token_loss(logits, labels).backward()
            if clipping:
                norm = nn.utils.clip_grad_norm_(model.parameters(), clipping)
                assert norm > clipping
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    return model


def logits_of(model, inputs):
    # The other implementations of experts have no fp64.
    model.config._experts_implementation = "eager"
    torch.set_default_dtype(torch.float64)
    try:
        with KeepFloat64(), torch.no_grad():
            return model.eval()(**inputs).logits
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("family", "mesh", "keys"), list(cases()))
def test_a_step_on_a_mesh_and_its_export_give_the_logits_of_transformers(
    family, mesh, keys, pool, tmp_path
):
    """Two steps with ZeRO and clipping, which need the whole norm of the gradients."""
    steps = 2 if keys is CLIPPED else 1
    model = stepped_model(family, tmp_path / "source", steps, keys.get("gradient_clipping", 0.0))
    checkpoint, out = str(tmp_path / "checkpoint"), tmp_path / "out"
    source = str(tmp_path / "source")
    arguments = (source, family, mesh, checkpoint, keys, steps)
    pool.run(math.prod(mesh[:3]), load_step_and_save, *arguments)
    export_checkpoint(checkpoint, out, max_shard_size="60KB")
    exported, info = type(model).from_pretrained(
        out, dtype="auto", attn_implementation="eager", output_loading_info=True
    )
    assert exported.dtype == torch.float64
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    computed = {n: b for n, b in model.named_buffers() if n not in model.state_dict()}
    for name, buffer in exported.named_buffers():
        if name in computed:
            # Frequencies, which transformers computes in fp32 if the default dtype is fp32.
            buffer.data = computed[name]
    torch.set_default_dtype(torch.float64)
    inputs, _ = tiny_models.batch_of(tiny_models.config_of(family))
    torch.set_default_dtype(torch.float32)
    difference = logits_of(exported, inputs) - logits_of(model, inputs)
    assert difference.abs().max() < 1e-12


def test_each_of_four_ranks_reads_about_a_quarter_of_the_weights(pool, tmp_path):
    stepped_model("llama", tmp_path / "source")
    total = sum(path.stat().st_size for path in (tmp_path / "source").glob("*.safetensors"))
    read = pool.run(
        4, load_step_and_save, str(tmp_path / "source"), "llama", (2, 2, 1), str(tmp_path / "c")
    )
    assert all(0.2 * total < each < 0.3 * total for each in read)


def test_a_rank_reads_its_own_experts_only(pool, tmp_path):
    stepped_model("mixtral", tmp_path / "source")
    total = experts = 0
    for path in (tmp_path / "source").glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            total += tensor.nbytes
            experts += tensor.nbytes * (".experts." in name)
    mesh, checkpoint = (1, 1, 2, 2), str(tmp_path / "c")
    read = pool.run(2, load_step_and_save, str(tmp_path / "source"), "mixtral", mesh, checkpoint)
    assert 2 * experts > total
    assert read == [total - experts // 2] * 2


def test_a_missing_file_is_an_error_with_the_same_text_on_every_rank(pool, tmp_path):
    stepped_model("llama", tmp_path / "source")
    index = json.loads((tmp_path / "source/model.safetensors.index.json").read_text())
    file = index["weight_map"]["lm_head.weight"]
    (tmp_path / "source" / file).unlink()
    with pytest.raises(RanksFailed) as failed:
        pool.run(
            2, load_step_and_save, str(tmp_path / "source"), "llama", (2, 1, 1), str(tmp_path / "c")
        )
    for error, _ in failed.value.errors.values():
        assert CheckpointError.__name__ in error
        assert f"missing: {file}" in error


def test_the_built_in_gpt_has_the_same_weights_of_a_folder_on_every_mesh(pool, tmp_path):
    transformers.utils.logging.disable_progress_bar()
    tiny_models.whole_model(tiny_models.config_of("llama-tied", mlp_bias=True)).save_pretrained(
        tmp_path
    )
    (whole,) = pool.run(1, built_in_gpt, str(tmp_path), (1, 1))
    for parameters in pool.run(4, built_in_gpt, str(tmp_path), (2, 2)):
        assert parameters.keys() == whole.keys()
        for name, value in whole.items():
            assert (parameters[name] == value).all(), name


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 1},
        {"data": 2, "expert": 2},
        {"tensor": 2},
        pytest.param({"tensor": 2, "data": 2, "expert": 2}, marks=pytest.mark.sweep),
    ],
)
def test_the_built_in_gpt_takes_and_returns_the_experts_of_a_folder(family, mesh, pool, tmp_path):
    config = tiny_models.config_of(family)
    torch.set_default_dtype(torch.float64)
    try:
        tiny_models.whole_model(config).save_pretrained(tmp_path / "source")
    finally:
        torch.set_default_dtype(torch.float32)
    theta = config.rope_parameters["rope_theta"]
    want = tiny_models.oracle(config, rotary_base=theta)["logits"]
    ranks = mesh.get("tensor", 1) * mesh.get("data", 1)
    arguments = (str(tmp_path / "source"), family, mesh, str(tmp_path / "checkpoint"))
    reads = []
    for got in pool.run(ranks, built_in_gpt_round_trip, *arguments):
        assert abs(got["logits"] - want).max() < 1e-12
        numbers = {re.search(r"experts\.(\d)\.", name) for name in got["read"]}
        reads.append({int(found[1]) for found in numbers if found})
    parts = [{0, 1}, {2, 3}] if "expert" in mesh else [{0, 1, 2, 3}]
    # Tensor ranks follow each other.
    assert reads == [part for part in parts for _ in range(mesh.get("tensor", 1))]
    export_checkpoint(str(tmp_path / "checkpoint"), tmp_path / "out")
    before, after = (load_file(tmp_path / f / "model.safetensors") for f in ("source", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    exported = type(config).from_pretrained(tmp_path / "out")
    kept = ("num_experts_per_tok", "num_experts", "moe_intermediate_size", "norm_topk_prob")
    for key in ("rope_parameters", "mlp_only_layers", "intermediate_size", *kept):
        assert getattr(exported, key, None) == getattr(config, key, None), key
