"""A GPT with experts trains on every mesh like the unsharded model in one process (the oracle).

Meshes are (pipeline, data, tensor, expert). Losses, gradients, norms and parameters are compared,
and the biases of the routers, which are exact.
"""

from functools import cache
from pathlib import Path
from typing import Any

import numpy
import pytest

from tests.ranks import training_runs
from tests.ranks.engine import expert_runs as runs
from tests.ranks.engine.test_matrix import assert_bitwise, largest_difference
from tests.ranks.nccl_like import LAZY
from tests.ranks.pool import RankPool
from tests.ranks.training_runs import settings
from tests.sampling import some, some_cases

Mesh = tuple[int, int, int, int]
MESHES: list[Mesh] = [
    (1, 4, 1, 1), (1, 4, 1, 2), (1, 4, 1, 4), (1, 2, 1, 2), (1, 1, 2, 1), (1, 2, 2, 2),
    (2, 2, 1, 2), (2, 1, 2, 1), (2, 2, 1, 1), (1, 2, 2, 1), (1, 1, 4, 1), (4, 1, 1, 1),
]  # fmt: skip

# With ignored labels, unequal numbers of tokens, dropout and tied embeddings.
EXPERTS = {
    "num_layers": 2,
    "num_experts": 4,
    "moe_ffn_hidden_size": 12,
    "moe_aux_loss_coeff": 0.3,
    "moe_z_loss_coeff": 0.05,
}
ZERO = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 700}}
CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"gradient_clipping": 0.05},
    "ZeRO": ZERO | {"gradient_clipping": 0.05},
    "ZeRO, overlapped": {"zero_optimization": ZERO["zero_optimization"] | {"overlap_comm": True}},
    "shared expert, SwiGLU": {
        "model": {
            "swiglu": True,
            "add_bias_linear": False,
            "moe_shared_expert_intermediate_size": 8,
            "moe_shared_expert_gate": True,
        }
    },
    "like DeepSeek-V3": {
        "model": {
            "num_experts": 8,
            "moe_router_topk": 4,
            "moe_router_score_function": "sigmoid",
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_topk_scaling_factor": 2.5,
            "moe_router_enable_expert_bias": True,
            "moe_router_bias_update_rate": 0.01,
            "moe_shared_expert_intermediate_size": 8,
            "moe_layer_freq": [0, 1],
        }
    },
    "softmax before the choice": {"model": {"moe_router_topk": 1, "moe_router_pre_softmax": True}},
    "recompute": {"model": {"recompute": "full"}},
    "recompute, expert bias": {
        "model": {"recompute": "full", "moe_router_enable_expert_bias": True}
    },
    "recompute selective": {"model": {"recompute": "selective"}},
    "recompute, keep linears": {"model": {"recompute": "selective", "recompute_keep": ["linear"]}},
    "fused gradients": {"gradient_accumulation_fusion": True},
    "predivided": {"prescale_gradients": False, "gradient_predivide_factor": 2.0},
    "prescaled": {"prescale_gradients": True},
    "mean of micro-batches": {"training": {"loss_reduction": "micro_batch"}},
    "sequence parallel": {
        "mesh": {"sequence_parallel": True},
        "model": {"moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True},
    },
    "vocabulary parallel": {"pipeline": {"vocabulary": "parallel"}},
    "partial step": {"training": {"epochs": 3}},
    "post-validated": {"pipeline": {"optimizer_sync": "post_validate"}, "gradient_clipping": 0.05},
}
# One of each kind, on several stages and data ranks.
SOME = (
    "plain", "ZeRO, overlapped", "shared expert, SwiGLU", "softmax before the choice",
    "recompute, expert bias", "predivided", "vocabulary parallel", "partial step", "post-validated",
)  # fmt: skip
# Measured on all meshes: gradients 9e-14, losses and norms 4e-16, parameters 6e-13: AdamW makes
# large steps of small gradients.
GRADIENTS, SUMS, TOLERANCE = 1e-12, 1e-13, 1e-10


def config_of(mesh: Mesh, choice: str, schedule: str = "1f1b") -> dict[str, Any]:
    pipeline, data, tensor, expert = mesh
    config = settings(**CHOICES[choice])
    config["model"] |= EXPERTS | CHOICES[choice].get("model", {})
    axes = {"pipeline": pipeline, "data": data, "tensor": tensor, "expert": expert}
    config["mesh"] = axes | config.get("mesh", {})
    config["pipeline"] = {"schedule": schedule} | config.get("pipeline", {})
    if choice != "partial step":
        config["train_batch_size"] = 8 * training_runs.MICRO
    return config


def run_all(pool: RankPool, mesh: Mesh, cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Return the results of (choice, schedule) cases; check that all ranks agree."""
    pipeline, data, tensor, _ = mesh
    configs = [(config_of(mesh, *case), "float64") for case in cases]
    by_rank = pool.run(pipeline * data * tensor, training_runs.train_all, configs, timeout=300.0)
    for results in zip(*by_rank, strict=True):
        for other in results[1:]:
            for key in ("loss", "norm", "eval"):
                assert other[key] == results[0][key]
    return list(by_rank[0])


@pytest.fixture(scope="module")
def oracle(pool: RankPool) -> Any:
    """Train the unsharded model in one process."""

    @cache
    def train(choice: str) -> dict[str, Any]:
        config = config_of((1, 1, 1, 1), choice, "sequential")
        for key in [key for key in config["model"] if key.startswith("recompute")]:
            del config["model"][key]
        (result,) = pool.run(1, training_runs.train, config)
        return result

    return train


def assert_like_the_oracle(got: Any, want: Any) -> None:
    for key in ("loss", "norm"):
        assert got[key] == pytest.approx(want[key], rel=SUMS), key
    assert got["eval"] == pytest.approx(want["eval"], rel=SUMS)
    for mine, theirs in zip(got["gradients"], want["gradients"], strict=True):
        assert largest_difference(mine, theirs) < GRADIENTS
    assert largest_difference(got["parameters"], want["parameters"]) < TOLERANCE


@pytest.mark.parametrize(
    ("mesh", "chosen"),
    some_cases(
        [
            ((1, 2, 2, 2), ("sequence parallel", "like DeepSeek-V3", "ZeRO")),
            ((2, 2, 1, 2), SOME),
            *((mesh, tuple(CHOICES)) for mesh in MESHES),
        ],
        0,
        1,
    ),
    ids=lambda value: "-".join(map(str, value)) if isinstance(value[0], int) else str(len(value)),
)
def test_every_mesh_with_experts_trains_like_one_process(
    pool: RankPool, oracle: Any, mesh: Mesh, chosen: tuple[str, ...]
) -> None:
    choices = [
        choice
        for choice in chosen
        if not (choice == "sequence parallel" and mesh[2] == 1)
        and not (choice in ("vocabulary parallel", "post-validated") and mesh[0] == 1)
    ]
    for choice, result in zip(
        choices, run_all(pool, mesh, [(choice, "1f1b") for choice in choices]), strict=True
    ):
        assert_like_the_oracle(result, oracle(choice))


@pytest.mark.parametrize("run", [runs.train_packed, runs.train_scaled])
@pytest.mark.parametrize("mesh", some(MESHES, MESHES.index((2, 2, 1, 2))), ids=str)
def test_packed_documents_and_a_loss_scale_train_like_one_process(
    pool: RankPool, oracle: Any, mesh: Mesh, run: Any
) -> None:
    """Padding counts in no auxiliary loss; the gradients of auxiliary losses are scaled too."""
    if run is runs.train_scaled:
        want = oracle("clipped")
    else:
        (want,) = pool.run(1, run, config_of((1, 1, 1, 1), "clipped"))
    for got in pool.run(mesh[0] * mesh[1] * mesh[2], run, config_of(mesh, "clipped")):
        assert_like_the_oracle(got, want)


@pytest.mark.parametrize(("mesh", "changes"), some_cases([((2, 2, 1, 2), {}), ((2, 1, 2, 1), {}),
    ((2, 2, 1, 2), {"fused": True}), ((4, 1, 1, 1), {})], 0), ids=str)  # fmt: skip
def test_all_schedules_and_recomputations_with_experts_give_the_same_bits(
    pool: RankPool, mesh: Mesh, changes: dict[str, bool]
) -> None:
    schedules = ("1f1b", "gpipe", "zb-h1")
    if mesh[0] == 2:
        schedules += ("interleaved", "zb-v")
    plain = "fused gradients" if changes else "plain"
    cases = [(plain, schedule) for schedule in schedules]
    if not changes:
        cases += [("recompute", "zb-h1"), ("recompute selective", "1f1b")]
        cases += [("recompute, keep linears", "zb-v" if mesh[0] == 2 else "zb-h1")]
    assert_bitwise(run_all(pool, mesh, cases))


FILLED: list[tuple[Mesh, str, str]] = [
    ((2, 2, 1, 2), "zb-h1", "ZeRO, overlapped"), ((2, 2, 1, 2), "zb-v", "recompute"),
    ((1, 2, 2, 2), "zb-h1", "sequence parallel"), ((2, 2, 1, 2), "interleaved-zb", "plain"),
    ((2, 2, 1, 2), "zb-h1", "fused gradients"), ((2, 2, 1, 2), "zb-h1", "partial step"),
    ((2, 2, 1, 2), "zb-h1", "post-validated"), ((2, 2, 1, 2), "zb-h1", "vocabulary parallel"),
    ((1, 4, 1, 4), "zb-h1", "like DeepSeek-V3"), ((2, 2, 1, 2), "zb-h2", "recompute selective"),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "schedule", "choice"), some_cases(FILLED, 0, 2), ids=str)
def test_w_within_exchanges_change_no_bit(
    pool: RankPool, mesh: Mesh, schedule: str, choice: str
) -> None:
    config = config_of(mesh, choice, schedule)
    filled = config | {"pipeline": config["pipeline"] | {"fill_waits": True}}
    for plain, result, jobs in pool.run(mesh[0] * mesh[1] * mesh[2], runs.filled, config, filled):
        assert_bitwise([plain, result])
        assert jobs >= 10


@pytest.mark.parametrize(("mesh", "schedule", "choice"), some_cases(FILLED[1:3]), ids=str)
def test_w_within_exchanges_end_in_the_order_of_nccl(
    pool: RankPool, mesh: Mesh, schedule: str, choice: str
) -> None:
    """W may gather over the tensor ranks while an exchange is on its way."""
    config = config_of(mesh, choice, schedule)
    filled = config | {"pipeline": config["pipeline"] | {"fill_waits": True}}
    want, got = (
        pool.run(4, runs.filled, config, filled, backend=backend, timeout=200.0)
        for backend in (None, LAZY)
    )
    for (*results, jobs), (*others, same_jobs) in zip(want, got, strict=True):
        assert_bitwise([*results, *others])
        assert jobs == same_jobs >= 10


@pytest.mark.parametrize(("mesh", "chosen"), some_cases([((1, 4, 1, 4), "first"),
    ((1, 2, 2, 2), "last"), ((1, 4, 1, 2), "last"), ((1, 2, 1, 2), "first")], 0, 1))  # fmt: skip
def test_ranks_whose_experts_get_no_token_take_part(
    pool: RankPool, mesh: Mesh, chosen: str
) -> None:
    (want,) = pool.run(1, runs.train_with_choices, config_of((1, 1, 1, 1), "clipped"), chosen)
    ranks = mesh[0] * mesh[1] * mesh[2]
    for got in pool.run(ranks, runs.train_with_choices, config_of(mesh, "clipped"), chosen):
        assert_like_the_oracle(got, want)
    experts = want["gradients"][0]["layers.2.mlp.experts.up.weight"]
    assert [bool(e.any()) for e in experts] == [chosen == "first"] * 2 + [chosen == "last"] * 2


@pytest.mark.parametrize("mesh", some([(2, 2, 1, 2), (1, 4, 1, 2), (1, 2, 2, 2)], 0), ids=str)
def test_the_exchanges_end_in_the_order_of_nccl_and_give_the_same_bits(
    pool: RankPool, mesh: Mesh
) -> None:
    # The two reduce-scatters over four ranks sum in different orders.
    second = "ZeRO, overlapped" if mesh[1] == 2 else "clipped"
    cases = (("plain", "zb-h1"), (second, "1f1b"), ("recompute", "1f1b"))
    configs = [(config_of(mesh, *case), "float64") for case in cases]
    ranks = mesh[0] * mesh[1] * mesh[2]
    want = pool.run(ranks, training_runs.train_all, configs, timeout=300.0)[0]
    for got in pool.run(ranks, training_runs.train_all, configs, backend=LAZY, timeout=300.0):
        for one, other in zip(got, want, strict=True):
            assert_bitwise([one, other])


# Each changes less than the tolerance of a comparison in fp32.
MUTANTS: dict[str, Mesh] = {
    "experts averaged over all data ranks": (1, 4, 1, 2),
    "norm of the experts of data rank 0": (1, 2, 1, 2),
    "experts counted on tensor rank 0": (1, 1, 2, 1),
    "auxiliary losses without the share of ignored labels": (1, 2, 1, 2),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_comparison_finds_the_faults_of_other_engines(
    pool: RankPool, oracle: Any, name: str
) -> None:
    mesh, choice = MUTANTS[name], "clipped"
    if name == "experts counted on tensor rank 0":
        mesh = (1, 2, 2, 2)  # with one expert rank, no parameter is known to be of experts
    if name.startswith("auxiliary"):
        choice = "plain"
    ranks = mesh[0] * mesh[1] * mesh[2]
    got = pool.run(ranks, runs.train_mutant, config_of(mesh, choice), name)[0]
    with pytest.raises(AssertionError):
        assert_like_the_oracle(got, oracle(choice))


@pytest.mark.parametrize("mesh", some([(1, 2, 1, 2), (2, 2, 1, 2), (1, 2, 2, 2)], 1), ids=str)
def test_the_biases_of_routers_are_the_same_numbers_on_every_mesh(
    pool: RankPool, mesh: Mesh
) -> None:
    """Recomputed forwards, evaluations and skipped steps do not count."""
    changes = {"training": {"on_nonfinite": {"policy": "skip"}}}
    found = []
    for choice, sizes in (("like DeepSeek-V3", (1, 1, 1, 1)), ("like DeepSeek-V3", mesh)):
        config = config_of(sizes, choice) | changes
        if sizes == mesh:
            config["model"] |= {"recompute": "full"}
        ranks = sizes[0] * sizes[1] * sizes[2]
        found.append(pool.run(ranks, runs.biases_after, config, 4, 1)[0])
    assert found[0] == found[1]
    (bias,) = found[0].values()
    assert any(bias)
    # Three steps that count, of four.
    assert {round(abs(b) * 100) for b in bias} <= {0, 1, 2, 3}


RESHARDED: list[Mesh] = [(1, 1, 1, 1), (1, 4, 1, 2), (2, 2, 1, 2), (1, 2, 2, 2), (1, 2, 1, 1)]


@pytest.mark.parametrize("choice", some(["like DeepSeek-V3", "ZeRO"], 0), ids=str)
@pytest.mark.parametrize("source", some(RESHARDED, 3), ids=str)
def test_a_checkpoint_with_experts_loads_on_every_mesh(
    pool: RankPool, tmp_path: Path, source: Mesh, choice: str
) -> None:
    folder, steps = str(tmp_path), 2
    zero = ZERO if source[1] > 1 else {}

    def config(mesh: Mesh, *, zero: dict[str, Any]) -> dict[str, Any]:
        return config_of(mesh, choice) | zero

    ranks = source[0] * source[1] * source[2]
    want = pool.run(ranks, runs.train_and_save, config(source, zero=zero), folder, steps)[0]
    for number, mesh in enumerate(RESHARDED, RESHARDED.index(source)):
        ranks = mesh[0] * mesh[1] * mesh[2]
        # Also from ZeRO to whole parameters, and back.
        loaded = config(mesh, zero=ZERO if mesh[1] > 1 and number % 2 else {})
        got = pool.run(ranks, runs.resume, loaded, folder, steps)[0]
        for name, value in want["before"].items():
            assert numpy.array_equal(got["before"][name], value), name
        for name in got["biases"].keys() & want["biases"].keys():
            assert got["biases"][name] == want["biases"][name]
        assert got["loss"] == pytest.approx(want["loss"], rel=TOLERANCE)
        assert largest_difference(got["parameters"], want["parameters"]) < TOLERANCE


@pytest.mark.parametrize("mesh", some(RESHARDED[1:], 2), ids=str)
def test_the_initial_values_of_experts_do_not_depend_on_the_mesh(
    pool: RankPool, mesh: Mesh
) -> None:
    (want,) = pool.run(1, runs.initial_values, config_of((1, 1, 1, 1), "like DeepSeek-V3"))
    config = config_of(mesh, "like DeepSeek-V3")
    got = pool.run(mesh[0] * mesh[1] * mesh[2], runs.initial_values, config)[0]
    for name, value in want.items():
        assert numpy.array_equal(got[name], value), name


@pytest.mark.parametrize("chosen", ["any", "first", "one"])
@pytest.mark.parametrize("sizes", [(2, 1, 2), (4, 1, 2), (4, 1, 4), (2, 2, 2), (1, 2, 1)], ids=str)
def test_dispatched_tokens_get_the_results_and_gradients_of_one_process(
    pool: RankPool, sizes: tuple[int, int, int], chosen: str
) -> None:
    """Data ranks have other numbers of tokens, and some experts have none."""
    assert max(pool.run(sizes[0] * sizes[1], runs.dispatched, sizes, chosen)) < 1e-12


def test_an_exchange_keeps_no_buffer_after_its_wait(pool: RankPool) -> None:
    """Each all-to-all has two: counts and rows, then the results, then the gradients of both."""
    for found in pool.run(2, runs.kept_buffers):
        assert found == [4, 0, 6, 0, 10, 0]


def test_a_recomputation_makes_the_choices_of_the_forward_also_at_a_tie(pool: RankPool) -> None:
    """Rounding would send the tokens elsewhere; the ranks do not exchange their numbers again."""
    for (first, again), fresh, counts in pool.run(2, runs.choices_at_a_tie):
        assert first == again != fresh
        assert counts == 1


def test_a_replica_of_experts_is_compared_with_the_ranks_that_have_the_same_ones(
    pool: RankPool,
) -> None:
    for error in pool.run(4, runs.replica_error, config_of((1, 4, 1, 2), "plain")):
        assert error.startswith(
            "parameter layers.2.mlp.experts.up.weight (experts 0 to 1) differs from rank 0: on "
            "rank 2 in 1 of 384 elements, by up to 1."
        )


RECORDED: dict[str, tuple[Mesh, ...]] = {
    "plain": ((1, 2, 1, 2), (2, 2, 1, 2), (1, 1, 2, 1)),
    "recompute": ((2, 2, 1, 2),),
    "recompute, expert bias": ((1, 2, 1, 2),),
    "recompute selective": ((1, 2, 2, 2),),
    "like DeepSeek-V3": ((2, 2, 1, 2),),
    "sequence parallel": ((1, 2, 2, 2),),
    "partial step": ((2, 2, 1, 2),),
    "post-validated": ((2, 2, 1, 2),),
}


@pytest.mark.parametrize("choice", some(list(RECORDED), 1), ids=str)
def test_the_recorded_loads_of_experts_are_those_of_one_process(
    pool: RankPool, tmp_path: Path, choice: str
) -> None:
    """Loads are exact; recomputed forwards and evaluations do not count."""
    plain = config_of((1, 1, 1, 1), choice, "sequential")
    plain["model"].pop("recompute", None)
    (want,) = pool.run(1, runs.recorded, plain, str(tmp_path / "one"), 3)
    layers = ("3",) if choice == "like DeepSeek-V3" else ("2", "3")
    names = {f"moe/load/layer_{layer}" for layer in layers} | {"moe/max_load"}
    for loss in ("balance_loss", "z_loss"):
        names |= {f"moe/{loss}", *(f"moe/{loss}/layer_{layer}" for layer in layers)}
    for mesh in RECORDED[choice]:
        ranks = mesh[0] * mesh[1] * mesh[2]
        folder = str(tmp_path / str(ranks))
        got = pool.run(ranks, runs.recorded, config_of(mesh, choice), folder, 3)[0]
        assert len(got["numbers"]) == len(want["numbers"]) == 3
        for mine, theirs in zip(got["numbers"], want["numbers"], strict=True):
            assert mine.keys() == theirs.keys() == names
            for name in names:
                if "load" in name:
                    assert mine[name] == theirs[name] > 1
                assert mine[name] == pytest.approx(theirs[name], rel=TOLERANCE), name
        assert got["kinds"].count("picture") == 1


@pytest.mark.parametrize("choice", some(["like DeepSeek-V3", "plain", "post-validated"], 0))
def test_recording_the_loads_needs_no_collective(
    pool: RankPool, tmp_path: Path, choice: str
) -> None:
    config = config_of((2, 2, 1, 2), choice)
    plain = pool.run(4, runs.calls_in_a_step, config, "")
    assert pool.run(4, runs.calls_in_a_step, config, str(tmp_path)) == plain
    assert "all_reduce" in plain[0]


def test_a_recorded_load_is_the_largest_number_of_tokens_over_the_mean(
    pool: RankPool, tmp_path: Path
) -> None:
    config = config_of((1, 1, 1, 1), "plain", "sequential")
    ((numbers, tokens),) = pool.run(1, runs.tokens_in_records, config, str(tmp_path), 2)
    for recorded, by_layer in zip(numbers, tokens, strict=True):
        loads = [max(layer) / (sum(layer) / len(layer)) for layer in by_layer]
        assert [recorded[f"moe/load/layer_{n}"] for n in (2, 3)] == loads
        assert recorded["moe/max_load"] == max(loads)
        assert sum(map(sum, by_layer)) == 2 * 2 * 8 * training_runs.MICRO * training_runs.LENGTH
