"""Which layers are recomputed in backward."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pipemega.config import load
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError, PipelineError
from pipemega.models import GPTConfig, gpt
from pipemega.pipeline.model.module import BuildOptions, build_stages
from pipemega.pipeline.model.recompute import ActivationCheckpoints
from tests.ranks.training_runs import build, data, settings


def test_checkpoints_are_shared_as_drawn() -> None:
    def drawn(start: int, stop: int, **options: Any) -> list[tuple[int, int, bool]]:
        return ActivationCheckpoints(2, 8, **options).segments(start, stop)

    assert drawn(0, 5, size=2) == [(0, 2, False), (2, 4, True), (4, 5, True)]
    assert drawn(5, 10, size=2) == [(5, 7, True), (7, 8, True), (8, 10, False)]
    assert drawn(0, 5, most=2) == [(0, 2, False), (2, 3, True), (3, 4, True), (4, 5, False)]
    assert drawn(5, 10, most=2) == [(5, 6, True), (6, 7, True), (7, 10, False)]
    assert drawn(8, 10) == [(8, 10, False)]
    assert drawn(3, 4, size=9, most=9) == [(3, 4, True)]


def trained(recompute: dict[str, Any], **changes: Any) -> tuple[Counter[int], dict[str, Tensor]]:
    """Return how often each layer ran in a step of two micro-batches, and the parameters."""
    model = {"num_layers": 4, "attention_dropout": 0.2, **recompute}
    batch = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
    engine = build(settings(model=model, **batch, **changes))
    runs: Counter[int] = Counter()
    for stage in engine.steps.model.stages.values():
        stage.register_layer_hook(lambda position: runs.update([position]))
    engine.train_batch(data(engine, 0))
    state = engine.parameter_state()
    engine.close()
    return runs, state


FULL = {"recompute": "full"}
UNIFORM = FULL | {"recompute_method": "uniform"}
BLOCK = FULL | {"recompute_method": "block"}


@pytest.mark.parametrize(
    ("keys", "again"),
    [
        ({"recompute": "none"}, set()),
        (FULL, {2, 3, 4, 5}),
        (UNIFORM | {"recompute_num_layers": 3}, {2, 3, 4, 5}),
        (BLOCK | {"recompute_num_layers": 3}, {2, 3, 4}),
        (BLOCK, {2}),
        (BLOCK | {"recompute_num_layers": 9}, {2, 3, 4, 5}),
    ],
    ids=str,
)
def test_the_chosen_blocks_run_again_in_backward_with_the_same_dropout(
    keys: dict[str, Any], again: set[int]
) -> None:
    runs, state = trained(keys)
    assert runs == Counter({p: 4 if p in again else 2 for p in range(8)})
    _, expected = trained({"recompute": "none"})
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def test_the_first_blocks_of_each_stage_are_recomputed() -> None:
    net = gpt(GPTConfig.of(load(settings(model={"num_layers": 4, **BLOCK})), 50))
    options = BuildOptions(Axis("tensor"), torch.device("cpu"), seed=1)
    stages = build_stages(net, [0, 4, 8], [0, 1], options)
    x: Any = torch.arange(8).unsqueeze(0)
    again = []
    for stage in stages.values():
        runs: Counter[int] = Counter()
        stage.register_layer_hook(lambda position, runs=runs: runs.update([position]))
        y = stage(x)
        y.sum().backward()
        again += [position for position, count in runs.items() if count == 2]
        x = y.detach().requires_grad_()
    assert again == [2, 4]


def test_activation_checkpoints_of_all_layers_replace_those_of_the_model() -> None:
    runs, _ = trained(FULL, pipeline={"activation_checkpoint_interval": 4})
    # The loss computes the logits of the head, which has nothing to compute again.
    assert runs == Counter(dict.fromkeys(range(7), 4)) + Counter({7: 2})


@pytest.mark.parametrize(
    "other",
    [
        {"pipeline": {"activation_checkpoint_interval": 2}},
        {"activation_checkpointing": {"number_checkpoints": 2}},
    ],
)
def test_two_choices_of_layers_are_refused(other: dict[str, Any]) -> None:
    expected = r"model.recompute_method 'block' chooses the blocks to recompute, and activation"
    with pytest.raises(ConfigError, match=expected):
        load(settings(model=BLOCK, **other))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.runs: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.runs[func._overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


ROPE = {"position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True}


def packed(keys: dict[str, Any], **changes: Any) -> tuple[Counter[str], dict[str, Tensor]]:
    """Return the operators of a step, and the parameters; samples of several documents."""
    batch = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
    engine = build(settings(model={"num_layers": 2, **ROPE, **keys}, **batch, **changes))
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 0, 1, 2]])
    batches = (
        ({"input_ids": tokens, "position_ids": positions.clone()}, labels)
        for tokens, labels in data(engine, 0)
    )
    with _Operators() as operators:
        engine.train_batch(batches)
    state = engine.parameter_state()
    engine.close()
    return operators.runs, state


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    ("keep", "again"),
    [
        (["attention"], ["addmm", "silu"]),
        (["linear"], [ATTENTION, "silu"]),
        (["attention", "linear"], ["silu"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_selective_recomputation_keeps_the_results_of_the_chosen_operators(
    keep: list[str], again: list[str], schedule: str
) -> None:
    """The tables of positions and the masks of documents belong to the micro-batch."""
    split = {"pipeline": {"schedule": schedule}}
    plain, expected = packed({"recompute": "none"}, **split)
    runs, state = packed({"recompute": "selective", "recompute_keep": keep}, **split)
    assert [name for name in (ATTENTION, "addmm", "silu") if runs[name] > plain[name]] == again
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


def test_a_result_that_is_kept_may_not_be_changed_in_place() -> None:
    keys = {"recompute": "selective", "recompute_keep": ["linear"], "hidden_dropout": 0.0}
    engine = build(settings(model=keys))
    block: Any = engine.local_stages[0].layers["2"]
    block.attention.qkv.register_forward_hook(lambda module, args, y: y.add_(1))
    with pytest.raises(PipelineError, match="has been mutated"):
        engine.train_batch(data(engine, 0))
    engine.close()


@pytest.mark.parametrize(
    ("keys", "other", "message"),
    [
        ({"recompute": "full"}, {}, r"\['linear'\] says what selective recomputation keeps"),
        ({}, {}, "and model.recompute is 'none': set it to 'selective'"),
        ({"recompute": "selective", "recompute_keep": []}, {}, "set model.recompute to 'full'"),
        (
            {"recompute": "selective"},
            {"pipeline": {"activation_checkpoint_interval": 1}},
            r"model.recompute_keep \['linear'\] chooses the operators to recompute",
        ),
    ],
)
def test_recompute_keep_is_for_selective_recomputation_of_blocks(
    keys: dict[str, Any], other: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(settings(model={"recompute_keep": ["linear"], **keys}, **other))
