"""Every mesh, schedule and setting trains like the unsharded model in one process (the oracle).

Losses, gradients, norms and parameters are compared. By default each mesh runs with each kind of
schedule, and each other setting on some meshes; `pytest -m sweep` runs all combinations.
"""

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy
import pytest

from tests.ranks import small_models, traced_models, training_runs
from tests.ranks.pool import RankPool
from tests.ranks.training_runs import settings
from tests.sampling import some, some_cases

MESHES = [
    (data, tensor, pipeline)
    for data, tensor, pipeline in itertools.product((1, 2, 3, 4), (1, 2, 4), (1, 2, 3, 4))
    if data * tensor * pipeline <= 4
]
SCHEDULES = ("sequential", "gpipe", "1f1b")
# Split backward, one stage per rank.
SPLIT = ("zb-h1", "zb-h2")
# Two stages per rank, with full or split backwards.
TWO_STAGES_PER_RANK = (
    "interleaved",
    "looped-bfs",
    "interleaved-zb",
    "zb-v",
    "v-half",
    "v-min",
    "1f1b-v",
    "dualpipe-v",
)

# Changes to the plain config, and the default dtype of the run.
Choice = tuple[dict[str, Any], str]
# For low precision: Adam turns a gradient that is only rounding error into a full step.
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
RAMP_UP = {
    "training": {"rampup_batch_size": [8, 8, 16]},
    "scheduler": {
        "type": "cosine",
        "params": {"warmup_init_lr": 0.004, "warmup_samples": 8, "decay_samples": 60},
    },
}
CHOICES: dict[str, Choice] = {
    "plain": ({}, "float64"),
    "clipped": ({"gradient_clipping": 0.05}, "float64"),
    "untied": ({"model": {"untie_embeddings_and_output_weights": True}}, "float64"),
    "sequence parallel": ({"mesh": {"sequence_parallel": True}}, "float64"),
    "overlapped sequence parallel": (
        {"mesh": {"sequence_parallel": True, "overlap_sequence_parallel": True}},
        "float64",
    ),
    "overlapped sequence parallel, fused gradients": (
        {
            "mesh": {"sequence_parallel": True, "overlap_sequence_parallel": True},
            "gradient_accumulation_fusion": True,
        },
        "float64",
    ),
    "overlapped sequence parallel, bf16": (
        SGD
        | {
            "mesh": {"sequence_parallel": True, "overlap_sequence_parallel": True},
            "bf16": {"enabled": True},
            "model": {"recompute": "full"},
        },
        "float32",
    ),
    "recompute full": ({"model": {"recompute": "full"}}, "float64"),
    "recompute selective": ({"model": {"recompute": "selective"}}, "float64"),
    "recompute, keep linears": (
        {"model": {"recompute": "selective", "recompute_keep": ["linear"]}},
        "float64",
    ),
    "recompute, keep attention and linears, sequence parallel": (
        {
            "model": {
                "recompute": "selective",
                "recompute_keep": ["attention", "linear"],
                "position_embedding_type": "rope",
                "swiglu": True,
            },
            "mesh": {"sequence_parallel": True},
        },
        "float64",
    ),
    "recompute, keep linears, LoRA, compiled": (
        {
            "model": {"recompute": "selective", "recompute_keep": ["linear"]},
            "lora": {"r": 4, "alpha": 8.0, "dropout": 0.1},
            "compile": {"enabled": True, "backend": "aot_eager"},
        },
        "float64",
    ),
    "recompute, keep attention, bf16": (
        SGD
        | {
            "model": {"recompute": "selective", "recompute_keep": ["attention"]},
            "bf16": {"enabled": True},
        },
        "float32",
    ),
    # Ranks on CPUs move them, too; see `offload_on_cpus`.
    "activations on the host": (
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        "float64",
    ),
    "activations on the host, sequence parallel, recompute full": (
        {
            "activation_checkpointing": {"cpu_checkpointing": True},
            "model": {"recompute": "full"},
            "mesh": {"sequence_parallel": True},
        },
        "float64",
    ),
    "activations on the host, compiled, bf16": (
        SGD
        | {
            "activation_checkpointing": {"cpu_checkpointing": True},
            "bf16": {"enabled": True},
            "compile": {"enabled": True, "backend": "aot_eager"},
        },
        "float32",
    ),
    "checkpoint every 2 layers": ({"pipeline": {"activation_checkpoint_interval": 2}}, "float64"),
    "number of checkpoints": ({"activation_checkpointing": {"number_checkpoints": 3}}, "float64"),
    "mean of micro-batches": ({"training": {"loss_reduction": "micro_batch"}}, "float64"),
    "llama style": (
        {
            "model": {
                "position_embedding_type": "rope",
                "normalization": "RMSNorm",
                "swiglu": True,
                "add_bias_linear": False,
                "num_attention_heads": 8,
                "num_query_groups": 4,
                "untie_embeddings_and_output_weights": True,
            }
        },
        "float64",
    ),
    "LoRA": ({"lora": {"r": 4, "alpha": 8.0, "dropout": 0.1}}, "float64"),
    "LoRA, sequence parallel": (
        {"lora": {"r": 4, "rslora": True, "dropout": 0.1}, "mesh": {"sequence_parallel": True}},
        "float64",
    ),
    "LoRA, recompute full": ({"lora": {"r": 2}, "model": {"recompute": "full"}}, "float64"),
    "LoRA, declared shapes": (
        {"lora": {"r": 2, "targets": ["attention.qkv"]}, "pipeline": {"shapes": "declared"}},
        "float64",
    ),
    "LoRA, head trained": (
        {
            "lora": {"r": 2, "targets": r".*\.mlp\.\w+", "train_also": ["layers.5"]},
            "model": {"swiglu": True, "add_bias_linear": False},
        },
        "float64",
    ),
    "recompute uniform": (
        {
            "model": {
                "num_layers": 5,
                "recompute": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 2,
            }
        },
        "float64",
    ),
    "recompute block": (
        {"model": {"num_layers": 5, "recompute": "full", "recompute_method": "block"}},
        "float64",
    ),
    "norms of embeddings": ({"model": {"embedding_norm": True}}, "float64"),
    "Megatron's GPT options, sequence parallel": (
        {
            "model": {
                "embedding_norm": True,
                "qk_layernorm": True,
                "squared_relu": True,
                "max_position_embeddings": 13,
                "pad_vocab_size_to": 60,
            },
            "mesh": {"sequence_parallel": True},
        },
        "float64",
    ),
    "norms of queries and keys": (
        {
            "model": {
                "qk_layernorm": True,
                "position_embedding_type": "rope",
                "normalization": "RMSNorm",
                "num_attention_heads": 8,
                "num_query_groups": 4,
                "recompute": "selective",
            }
        },
        "float64",
    ),
    "squared ReLU": ({"model": {"squared_relu": True}}, "float64"),
    "more positions": ({"model": {"max_position_embeddings": 13}}, "float64"),
    "padded vocabulary": ({"model": {"pad_vocab_size_to": 60}}, "float64"),
    "label smoothing, z-loss": (
        {"model": {"label_smoothing": 0.1, "z_loss": 0.01, "pad_vocab_size_to": 60}},
        "float64",
    ),
    "compiled": ({"compile": {"enabled": True, "backend": "aot_eager"}}, "float64"),
    "compiled by inductor, bf16": (
        SGD
        | {"compile": {"enabled": True}, "bf16": {"enabled": True}, "model": {"recompute": "full"}},
        "float32",
    ),
    "exchanged shapes": ({"pipeline": {"shapes": "exchanged"}}, "float64"),
    "declared shapes": ({"pipeline": {"shapes": "declared"}}, "float64"),
    "layers seeded one by one": ({"pipeline": {"seed_layers": True}}, "float64"),
    "cut evenly": ({"pipeline": {"partition": "uniform"}}, "float64"),
    "cut by type": ({"pipeline": {"partition": "type:block|norm|head"}}, "float64"),
    "SGD": (SGD, "float64"),
    "LAMB": ({"optimizer": {"type": "Lamb", "params": {"lr": 0.01}}}, "float64"),
    "partial step": ({"training": {"epochs": 1}}, "float64"),
    "partial step, declared shapes": (
        {"training": {"epochs": 1}, "pipeline": {"shapes": "declared"}},
        "float64",
    ),
    "partial step, post-validation": (
        {
            "training": {"epochs": 1},
            "pipeline": {"optimizer_sync": "post_validate", "optimizer_sync_after": 0},
        },
        "float64",
    ),
    # Steps of 8, 16 and 24 samples; the learning rate counts samples.
    "ramp-up": (RAMP_UP, "float64"),
    "ramp-up, post-validation": (
        RAMP_UP | {"pipeline": {"optimizer_sync": "post_validate", "optimizer_sync_after": 0}},
        "float64",
    ),
    "ramp-up, declared shapes": (RAMP_UP | {"pipeline": {"shapes": "declared"}}, "float64"),
    "prescaled": (
        {"prescale_gradients": True, "gradient_allreduce_op": "mean"},
        "float64",
    ),
    # Ranks on CPUs replay recorded operations; see `graphs_on_cpus`.
    "CUDA graphs": (
        {"compile": {"enabled": False, "cuda_graphs": True}, "model": {"hidden_dropout": 0.0}},
        "float64",
    ),
    "CUDA graphs, fused gradients, sequence parallel": (
        {
            "compile": {"enabled": False, "cuda_graphs": True},
            "model": {"hidden_dropout": 0.0},
            "gradient_accumulation_fusion": True,
            "mesh": {"sequence_parallel": True},
        },
        "float64",
    ),
    "CUDA graphs, compiled": (
        {
            "compile": {"enabled": True, "backend": "aot_eager", "cuda_graphs": True},
            "model": {"hidden_dropout": 0.0},
        },
        "float64",
    ),
    "fused gradients": ({"gradient_accumulation_fusion": True}, "float64"),
    "fused gradients, sequence parallel": (
        {"gradient_accumulation_fusion": True, "mesh": {"sequence_parallel": True}},
        "float64",
    ),
    "fp32": (training_runs.ADAMW_FP32, "float32"),
    "bf16": (SGD | {"bf16": {"enabled": True}}, "float32"),
    "fp16": (SGD | {"fp16": {"enabled": True, "initial_scale_power": 8}}, "float32"),
}


def with_zero(choice: str, **keys: Any) -> Choice:
    """Add ZeRO with small buckets: several of them, and parameters larger than a bucket."""
    changes, dtype = CHOICES[choice]
    zero = {"stage": 1, "reduce_bucket_size": 1500, **keys}
    return changes | {"zero_optimization": zero}, dtype


OVERLAPPING = ("plain", "bf16", "LAMB", "ramp-up", "fused gradients")
CHOICES |= {
    f"{name}, ZeRO": with_zero(name, overlap_comm=name in OVERLAPPING)
    for name in (
        "plain", "clipped", "untied", "sequence parallel", "overlapped sequence parallel",
        "llama style", "LAMB", "SGD",
        "prescaled", "ramp-up", "bf16", "fp16", "fused gradients", "CUDA graphs", "LoRA",
        "LoRA, sequence parallel", "LoRA, head trained", "norms of queries and keys",
    )
}  # fmt: skip
CHOICES["offloaded, ZeRO"] = with_zero("plain", offload_optimizer={"device": "cpu"})

# With ZeRO, norms are sums over shards: the last bit differs between placements.
BY_NORMS = ("clipped, ZeRO", "LAMB, ZeRO")

# Relative to the largest value: the order of sums differs between meshes. Masters are fp32.
TOLERANCE = {"float64": 1e-10, "float32": 2e-5, "bf16": 6e-2, "fp16": 1e-2}
LIKE_BF16 = (
    "compiled by inductor, bf16", "overlapped sequence parallel, bf16",
    "recompute, keep attention, bf16", "activations on the host, compiled, bf16",
)  # fmt: skip
TOLERANCE |= dict.fromkeys(LIKE_BF16, TOLERANCE["bf16"])


# Some steps are larger than others, or the last one is smaller.
UNEQUAL_STEPS = ("ramp-up", "partial step")


def config_of(
    mesh: tuple[int, int, int], schedule: str, choice: str, data_ranks: int | None = None
) -> dict[str, Any]:
    """Return a config; `data_ranks`: another number of them that has the same batch."""
    changes, _ = CHOICES[choice]
    data, tensor, pipeline = mesh
    config = settings(**changes)
    if not choice.startswith(UNEQUAL_STEPS) and (data_ranks or data) != 3:
        config["train_batch_size"] = 8 * training_runs.MICRO
    # Six layers: four stages, on two ranks or on four.
    config["model"]["num_layers"] = changes.get("model", {}).get("num_layers", 2)
    config["mesh"] = {"tensor": tensor, "pipeline": pipeline, "data": data} | config.get("mesh", {})
    config["pipeline"] = {"schedule": schedule} | config.get("pipeline", {})
    # Each stage needs a matching layer.
    if choice == "cut by type" and pipeline > 3:
        config["pipeline"]["partition"] = "type:.*"
    return config


Oracle = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def oracle(pool: RankPool) -> Oracle:
    """Train the unsharded model in one process, for each choice and batch."""

    @cache
    def train(choice: str, data_ranks: int) -> dict[str, Any]:
        config = config_of((1, 1, 1), "sequential", choice, data_ranks)
        config.pop("compile", None)
        # An error of a recomputation may depend on nothing that a mesh changes.
        for key in [key for key in config["model"] if key.startswith("recompute")]:
            del config["model"][key]
        (result,) = pool.run(1, training_runs.train, config, CHOICES[choice][1])
        return result

    def run(choice: str, data_ranks: int = 1) -> dict[str, Any]:
        return train(choice, 3 if data_ranks == 3 else 1)

    return run


def run_all(pool: RankPool, mesh: tuple[int, int, int], cases: list[tuple[str, str]]) -> list[Any]:
    """Return the results of (schedule, choice) cases on a mesh; check that all ranks agree."""
    configs = [(config_of(mesh, s, choice), CHOICES[choice][1]) for s, choice in cases]
    data, tensor, pipeline = mesh
    by_rank = pool.run(data * tensor * pipeline, training_runs.train_all, configs, timeout=300.0)
    for results in zip(*by_rank, strict=True):
        for other in results[1:]:
            assert other["loss"] == results[0]["loss"], "the loss is the same float on every rank"
            assert other["norm"] == results[0]["norm"]
            assert other["eval"] == results[0]["eval"]
    return list(by_rank[0])


def largest_difference(got: dict[str, Any], want: dict[str, Any]) -> float:
    """Return the largest difference of a logical tensor, relative to its largest element."""
    assert set(got) == set(want)
    return max(
        float(numpy.abs(got[n] - want[n]).max() / max(numpy.abs(want[n]).max(), 1e-3)) for n in want
    )


def assert_like_the_oracle(got: Any, want: Any, choice: str) -> None:
    kind = choice.removesuffix(", ZeRO")
    tolerance = TOLERANCE[kind if kind in TOLERANCE else CHOICES[choice][1]]
    for key in ("loss", "norm"):
        assert got[key] == pytest.approx(want[key], rel=tolerance), key
    assert got["eval"] == pytest.approx(want["eval"], rel=tolerance)
    assert got["skipped"] == want["skipped"]
    for mine, theirs in zip(got["gradients"], want["gradients"], strict=True):
        assert largest_difference(mine, theirs) < tolerance
    assert largest_difference(got["parameters"], want["parameters"]) < tolerance


def assert_bitwise(results: list[Any], *, norm: bool = True) -> None:
    """Compare bit for bit; `norm=False`: the norm to rounding (with ZeRO shards differ)."""
    first = results[0]
    for other in results[1:]:
        assert other["norm"] == (first["norm"] if norm else pytest.approx(first["norm"], rel=1e-12))
        for key in ("loss", "eval", "scale"):
            assert other[key] == first[key]
        for name, value in first["parameters"].items():
            assert numpy.array_equal(other["parameters"][name], value), name
        for mine, theirs in zip(other["gradients"], first["gradients"], strict=True):
            for name, value in theirs.items():
                assert numpy.array_equal(mine[name], value), name


@pytest.mark.parametrize("mesh", some(MESHES, 0, 1, 3, 5, 9, 10), ids=str)
def test_every_mesh_trains_like_one_process_and_all_schedules_give_the_same_bits(
    pool: RankPool, oracle: Oracle, mesh: tuple[int, int, int]
) -> None:
    # Without a pipeline: one rank alone sums the gradients of a tied weight in one sum with one
    # stage, and in two sums with two stages.
    schedules = SCHEDULES + SPLIT * (mesh[2] > 1) + TWO_STAGES_PER_RANK * (mesh[2] == 2)
    if mesh[0] * mesh[1] > 1:
        # One of each kind; meshes with a pipeline axis alone compare all of them.
        schedules = ("1f1b",) + ("gpipe", "zb-h1", "interleaved", "zb-v") * (mesh[2] > 1)
    results = run_all(pool, mesh, [(schedule, "plain") for schedule in schedules])
    assert_bitwise(results)
    assert_like_the_oracle(results[0], oracle("plain", mesh[0]), "plain")


# These settings depend on the tensor axis.
WITH_TENSOR_RANKS = (
    "clipped", "untied", "sequence parallel", "overlapped sequence parallel",
    "recompute full", "llama style",
    "label smoothing, z-loss", "LAMB", "bf16", "fp16", "LoRA, sequence parallel",
    "LoRA, head trained", "Megatron's GPT options, sequence parallel",
    "fused gradients, sequence parallel", "norms of queries and keys",
    "recompute, keep linears", "recompute, keep attention and linears, sequence parallel",
    "activations on the host, sequence parallel, recompute full",
    "CUDA graphs, fused gradients, sequence parallel",
)  # fmt: skip


# These run with several schedules.
OVERLAPPED = ("overlapped sequence parallel, fused gradients", "overlapped sequence parallel, bf16")

# Other settings combine these.
ONLY_SWEPT = (
    "LoRA", "LoRA, recompute full", "norms of embeddings", "squared ReLU", "more positions",
    "padded vocabulary", "ramp-up, declared shapes", "compiled", "compiled by inductor, bf16",
    "LoRA, head trained", "number of checkpoints", "cut evenly",
    "recompute, keep linears, LoRA, compiled", "recompute, keep attention, bf16",
    "activations on the host, compiled, bf16", "CUDA graphs, compiled",
    "recompute, keep linears", "LoRA, declared shapes", "CUDA graphs", "fused gradients",
    "activations on the host", "overlapped sequence parallel", "recompute uniform", "prescaled",
    "ramp-up", "fused gradients, sequence parallel",
)  # fmt: skip


def _some() -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Return each choice on one mesh, where it matters most."""
    for choice in CHOICES:
        if choice == "plain" or choice.endswith("ZeRO") or choice.startswith("partial step, "):
            continue
        if choice in ONLY_SWEPT + OVERLAPPED:
            continue
        if choice in ("mean of micro-batches", "prescaled", "fp32", "partial step", "ramp-up"):
            yield choice, (2, 1, 2)
        elif choice in ("sequence parallel", "LAMB", "clipped"):
            yield choice, (2, 2, 1)
        elif choice == "exchanged shapes":
            yield choice, (1, 1, 4)
        else:
            yield choice, (1, 2 if choice in WITH_TENSOR_RANKS else 1, 2)


@pytest.mark.parametrize(("choice", "mesh"), list(_some()), ids=str)
def test_every_setting_trains_like_one_process(
    pool: RankPool, oracle: Oracle, choice: str, mesh: tuple[int, int, int]
) -> None:
    # With two stages per rank the partition of the setting has the wrong number of stages.
    cut = choice.startswith("cut")
    split = "zb-v" if mesh[2] == 2 and not cut else "zb-h1" if mesh[2] > 1 else "sequential"
    (result,) = run_all(pool, mesh, [(split, choice)])
    assert_like_the_oracle(result, oracle(choice, mesh[0]), choice)


# Bitwise equal where no order of a sum changes: two data ranks, and no clipping by the norm.
@pytest.mark.parametrize(
    ("mesh", "schedules", "choices"),
    [
        ((2, 1, 2), ("zb-h1",), ("plain", "plain, ZeRO", "bf16, ZeRO", "clipped, ZeRO")),
        ((2, 1, 2), ("zb-v", "interleaved"), ("plain, ZeRO", "ramp-up, ZeRO")),
        ((2, 1, 2), ("1f1b", "zb-h1"), ("fused gradients, ZeRO",)),
        ((2, 1, 2), ("1f1b",), ("untied, ZeRO", "LAMB, ZeRO", "offloaded, ZeRO")),
        ((2, 2, 1), ("1f1b",), ("plain, ZeRO", "sequence parallel, ZeRO", "LAMB, ZeRO")),
        ((2, 2, 1), ("1f1b",), ("overlapped sequence parallel, ZeRO",)),
        ((3, 1, 1), ("1f1b",), ("plain, ZeRO", "prescaled, ZeRO")),
    ],
    ids=str,
)
def test_zero_trains_like_one_process_on_every_kind_of_mesh(
    pool: RankPool,
    oracle: Oracle,
    mesh: tuple[int, int, int],
    schedules: tuple[str, ...],
    choices: tuple[str, ...],
) -> None:
    cases = [(schedule, choice) for choice in choices for schedule in schedules]
    results = dict(zip(cases, run_all(pool, mesh, cases), strict=True))
    for schedule, choice in cases:
        assert_like_the_oracle(results[schedule, choice], oracle(choice, mesh[0]), choice)
    for choice in choices:
        if choice not in BY_NORMS:
            assert_bitwise([results[schedule, choice] for schedule in schedules], norm=False)
    if "plain" in choices:
        pair = [results[schedules[0], choice] for choice in ("plain", "plain, ZeRO")]
        assert_bitwise(pair, norm=False)


@pytest.mark.sweep
@pytest.mark.parametrize("fused", [False, True])
def test_reductions_beside_compiled_layers_change_no_bit(pool: RankPool, fused: bool) -> None:
    """In a plan without I and W, hooks report the gradients that the queue has added."""
    configs = []
    for overlap in (False, True):
        zero = {"stage": 1, "reduce_bucket_size": 1500, "overlap_comm": overlap}
        config = config_of((2, 1, 2), "1f1b", "compiled")
        config |= {"zero_optimization": zero, "gradient_accumulation_fusion": fused}
        configs.append((config, "float64"))
    results, *_ = pool.run(4, training_runs.train_all, configs, timeout=300.0)
    assert_bitwise(results)


RECOMPUTATIONS: tuple[dict[str, Any], ...] = (
    {"recompute": "none"},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"recompute": "selective", "recompute_keep": ["attention", "linear"]},
)


@pytest.mark.parametrize("schedule", some(("zb-v", "1f1b", "interleaved", "zb-h1"), 0))
def test_activations_on_the_host_change_no_bit(pool: RankPool, schedule: str) -> None:
    configs = []
    for keys in RECOMPUTATIONS:
        for moves in (False, True):
            config = config_of((1, 1, 2), schedule, "plain")
            config["model"] |= keys
            config["activation_checkpointing"] = {"cpu_checkpointing": moves}
            configs.append((config, "float64"))
    results, *_ = pool.run(2, training_runs.train_all, configs, timeout=300.0)
    assert_bitwise(results)


@pytest.mark.parametrize("schedule", some(("zb-v", "1f1b", "interleaved", "gpipe", "zb-h1"), 0))
def test_graphs_of_layers_change_no_bit(pool: RankPool, schedule: str) -> None:
    configs = []
    changes = [{}, {"gradient_accumulation_fusion": True}, {"compile": {"enabled": True}}]
    for keys in changes[: 2 if schedule == "zb-v" else 3]:
        for graphs in (False, True):
            config = config_of((1, 1, 2), schedule, "plain") | keys
            config["model"]["hidden_dropout"] = 0.0
            config["compile"] = config["compile"] | {"backend": "aot_eager", "cuda_graphs": graphs}
            configs.append((config, "float64"))
    results, *_ = pool.run(2, training_runs.train_all, configs, timeout=300.0)
    for pair in zip(results[::2], results[1::2], strict=True):
        assert_bitwise(list(pair))


@pytest.mark.parametrize(
    ("choice", "schedules"),
    some_cases(
        [
            (OVERLAPPED[0], ("1f1b", "zb-v")),
            *((choice, ("1f1b", "gpipe", "zb-h1", "interleaved", "zb-v")) for choice in OVERLAPPED),
        ],
        0,
    ),
)
def test_overlapped_products_train_like_one_process_with_the_same_bits_under_all_schedules(
    pool: RankPool, oracle: Oracle, choice: str, schedules: tuple[str, ...]
) -> None:
    results = run_all(pool, (1, 2, 2), [(schedule, choice) for schedule in schedules])
    assert_bitwise(results)
    assert_like_the_oracle(results[0], oracle(choice), choice)


@pytest.mark.sweep
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_every_setting_on_every_mesh_trains_like_one_process(
    pool: RankPool, oracle: Oracle, choice: str, mesh: tuple[int, int, int]
) -> None:
    if choice.startswith("ramp-up") and mesh[0] == 3:
        pytest.skip("8 samples are no whole micro-batches of 2 samples for 3 data ranks")
    schedules = SCHEDULES + SPLIT * (mesh[2] > 1)
    schedules += TWO_STAGES_PER_RANK * (mesh[2] == 2 and not choice.startswith("cut"))
    results = run_all(pool, mesh, [(schedule, choice) for schedule in schedules])
    if choice in BY_NORMS:
        for result in results:
            assert_like_the_oracle(result, oracle(choice, mesh[0]), choice)
        return
    assert_bitwise(results, norm=not choice.endswith("ZeRO"))
    assert_like_the_oracle(results[0], oracle(choice, mesh[0]), choice)


CUT_BEFORE_IN_PLACE = {2: [0, 2, 8], 4: [0, 2, 4, 6, 8]}


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (1, [("1f1b", 0), ("zb-h1", 1), ("1f1b", 2)]),
        (2, [("1f1b", 0), ("zb-h1", 2), ("zb-v", 0), ("zb-v", 1)]),
        (4, [("1f1b", 0), ("zb-h1", 1)]),
    ],
)
def test_layers_that_change_their_input_in_place_at_a_cut_give_the_bits_of_other_layers(
    pool: RankPool, ranks: int, cases: list[tuple[str, int]]
) -> None:
    """Each case is a schedule and the number of layers per activation checkpoint."""
    configs: list[dict[str, Any]] = []
    for schedule, interval in cases:
        bounds = CUT_BEFORE_IN_PLACE.get(ranks * (2 if schedule == "zb-v" else 1))
        section = {"schedule": schedule, "activation_checkpoint_interval": interval}
        section |= {} if bounds is None else {"partition": bounds}
        configs.append({"mesh": {"pipeline": ranks}, "pipeline": section})
    ((_, one_process),) = pool.run(1, small_models.train_in_place, [{}])[0]
    for results in pool.run(ranks, small_models.train_in_place, configs):
        for (losses, parameters), (want_losses, want) in results:
            assert losses == want_losses
            assert losses == pytest.approx(one_process[0], rel=1e-12)
            for name, value in want.items():
                assert numpy.array_equal(parameters[name], value), name


@pytest.mark.sweep
@pytest.mark.parametrize("model", traced_models.MODELS)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_traced_module_on_every_mesh_and_schedule_trains_like_itself(
    pool: RankPool, mesh: tuple[int, int, int], model: str
) -> None:
    data, tensor, pipeline = mesh
    schedules = SCHEDULES + SPLIT * (pipeline > 1) + TWO_STAGES_PER_RANK * (pipeline == 2)
    sizes = {"mesh": {"data": data, "tensor": tensor, "pipeline": pipeline}}
    cases = [(model, True, {}, sizes | {"pipeline": {"schedule": s}}) for s in schedules]
    by_rank = pool.run(data * tensor * pipeline, traced_models.train_all, cases, timeout=300.0)
    for results in zip(*by_rank, strict=True):
        traced_models.assert_like_the_module(results, model, data_ranks=data)
