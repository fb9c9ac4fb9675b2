"""Which layers are recomputed in backward."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from pipemega.config import load
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError
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
