"""The check: shrinks the config, computes the gradients of both models, compares them.

Compares the gradients of the split model with the gradients of the unsplit model.
"""

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError
from pipemega.hf.hf_module import HFPipelineModule, from_pretrained
from pipemega.hf.tasks import special_model
from pipemega.hf_check.shrink import Change, Needs, shrink
from pipemega.hf_check.split_run import (
    Gradients,
    KeepFloat64,
    RunRanks,
    SplitSettings,
    forward,
    launch_ranks,
    random_batches,
    random_model,
    reference_gradients,
    split_gradients,
)
from pipemega.pipeline.schedules import find_schedule

# In float64 only the order of sums differs.
TOLERANCE = 1e-10
# A gradient below this fraction of the largest one is rounding error.
_SMALL = 1e-5


@dataclass(frozen=True)
class Difference:
    """One parameter.

    Args:
        name: HF's name.
        relative: largest difference, relative to the largest value of this gradient.
        why: if the gradients cannot be compared.
    """

    name: str
    relative: float
    why: str = ""


@dataclass(frozen=True)
class GradientComparison:
    """The result for one batch.

    Args:
        kind: the kind of the batch; see `RandomBatch`.
        loss, reference_loss: the loss of the split and of the unsplit model.
        differences: the difference of each parameter's gradients, the largest first.
    """

    kind: str
    loss: float
    reference_loss: float
    differences: tuple[Difference, ...]

    @property
    def loss_difference(self) -> float:
        difference = abs(self.loss - self.reference_loss) / max(1.0, abs(self.reference_loss))
        return difference if math.isfinite(difference) else math.inf

    @property
    def unequal(self) -> tuple[Difference, ...]:
        return tuple(d for d in self.differences if not d.relative <= TOLERANCE)

    @property
    def is_equal(self) -> bool:
        return self.loss_difference <= TOLERANCE and not self.unequal


def compare(kind: str, split: Gradients, reference: Gradients) -> GradientComparison:
    """Compare every parameter that either model has."""
    largest = max((_largest(g) for g in reference.by_name.values()), default=0.0)
    differences = [
        _difference(name, split.by_name.get(name), reference.by_name.get(name), largest)
        for name in sorted({*split.by_name, *reference.by_name})
    ]
    differences.sort(key=lambda d: -d.relative)
    return GradientComparison(kind, split.loss, reference.loss, tuple(differences))


def _difference(
    name: str, mine: Tensor | None, reference: Tensor | None, largest: float
) -> Difference:
    if mine is None:
        return Difference(name, math.inf, "the split model does not have it")
    if reference is None:
        return Difference(name, math.inf, "only the split model has it")
    if mine.shape != reference.shape:
        shapes = f"{list(mine.shape)}, not {list(reference.shape)}"
        return Difference(name, math.inf, f"the split model has shape {shapes}")
    scale = max(_largest(reference), _SMALL * largest)
    if scale == 0.0:
        return Difference(name, _largest(mine))
    relative = _largest(mine - reference) / scale
    return Difference(name, relative if math.isfinite(relative) else math.inf)


def _largest(tensor: Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


# Samples of a micro-batch.
_SAMPLES = 2
# A larger model takes minutes, and gigabytes in float64 on every rank.
MAX_PARAMETERS = 50_000_000


class NoSmallModel(ConfigError):
    """transformers itself runs no small model of this config."""


@dataclass(frozen=True)
class CheckResult:
    """What was compared, and the differences.

    Args:
        class_name: the class of the transformers model.
        parameters: number of parameters of the user's model.
        small_parameters: number of parameters of the small model, which was compared.
        changes: the changes from the user's config to the config of the small model.
        comparisons: one comparison for each batch that pipemega does not refuse.
        refused: kind of batch -> message with which pipemega refuses it.
    """

    class_name: str
    parameters: int
    small_parameters: int
    changes: Sequence[Change]
    comparisons: Sequence[GradientComparison]
    refused: dict[str, str]

    @property
    def is_equal(self) -> bool:
        return bool(self.comparisons) and all(c.is_equal for c in self.comparisons)


def check_model(config: Any, split: SplitSettings, launch: RunRanks | None = None) -> CheckResult:
    """Compare loss and gradients of the model of `config` on several ranks with the unsplit model.

    Args:
        config: a `PretrainedConfig`.
        split: how to split the model; its `folder` is replaced by the folder of the small model.
        launch: runs the ranks; None: in processes of its own.

    Raises:
        ConfigError: the model cannot be split in this way.
        NoSmallModel: transformers cannot run a small model.
    """
    full = from_pretrained(
        config,
        task=split.task,
        pretrained=False,
        sequence_parallel=split.sequence_parallel,
        attn_implementation=split.attn_implementation,
    )
    parameters = _split_on_meta(full, split)
    model_class = type(full.description.model)
    stages = split.pipeline * find_schedule(split.schedule).default_chunks
    split = replace(split, num_microbatches=max(4, 2 * split.pipeline))
    small, changes = small_model(
        full.description.config, model_class, Needs(max(2, stages), split.tensor, split.expert)
    )
    batches = random_batches(small, split.num_microbatches * split.expert * _SAMPLES)
    with tempfile.TemporaryDirectory() as folder:
        small.save_pretrained(folder)
        split = replace(split, folder=folder)
        results = (launch or launch_ranks)(split.world_size, split_gradients, split, batches)[0]
    comparisons, refused = [], {}
    for batch, result in zip(batches, results, strict=True):
        if isinstance(result, str):
            refused[batch.kind] = result
        else:
            comparisons.append(compare(batch.kind, result, reference_gradients(small, batch)))
    count = sum(p.numel() for p in small.parameters())
    return CheckResult(model_class.__name__, parameters, count, changes, comparisons, refused)


def _split_on_meta(net: HFPipelineModule, split: SplitSettings) -> int:
    """Build every layer of the user's sizes on the meta device as the last rank has it.

    Returns the number of parameters.

    Raises:
        ConfigError: a size does not divide by the tensor or expert ranks.
    """
    tensor = Axis("tensor", tuple(range(split.tensor)), split.tensor - 1)
    expert = Axis("expert", tuple(range(split.expert)), split.expert - 1)
    for spec in net.specs:
        spec.on_expert_axis(expert).build(tensor, "meta")
    d = net.description
    return sum(p.numel() for module in (d.model, *d.layers) for p in module.parameters())


def small_model(config: Any, model_class: Any, needs: Needs) -> tuple[Any, Sequence[Change]]:
    """Return a small model of the same family, with random weights, and what was changed.

    Raises:
        NoSmallModel: transformers itself cannot run a small model.
    """
    reasons: list[str] = []
    # Classifiers of tokens use 0.1 if the config of the family has no such key.
    config.classifier_dropout = 0.0

    def is_valid(candidate: Any) -> bool:
        candidate._attn_implementation = config._attn_implementation
        # The others have no kernels for float64.
        candidate._experts_implementation = "eager"
        try:
            if _size_on_meta(candidate, model_class) <= MAX_PARAMETERS:
                _run(random_model(candidate, model_class))
        except Exception as error:
            # Each family fails in its own way.
            reasons.append(f"{type(error).__name__}: {error}")
            return False
        # Above the limit: the next changes make it smaller.
        return True

    small, changes = shrink(config, needs, is_valid)
    if small is None:
        raise NoSmallModel(
            f"transformers cannot run a small model of type {config.model_type!r} with this "
            f"config: {reasons[0]}"
        )
    size = _size_on_meta(small, model_class)
    if size > MAX_PARAMETERS:
        raise NoSmallModel(
            f"the smallest model of type {config.model_type!r} that the check could make of this "
            f"config has {size:,} parameters, more than {MAX_PARAMETERS:,}: give the check a "
            f"smaller config of the same family ({'; '.join(reasons)})"
        )
    return random_model(small, model_class), changes


def _size_on_meta(config: Any, model_class: Any) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in model_class._from_config(config).parameters())


def _run(model: Any) -> None:
    """Run the unsplit model once.

    Raises:
        ConfigError: its outputs are not finite.
    """
    with torch.no_grad(), KeepFloat64():
        inputs = random_batches(model, _SAMPLES)[0].inputs
        output = special_model(type(model).__name__).output(forward(model, inputs))
    if not all(bool(part.isfinite().all()) for part in pytree.tree_leaves(output)):
        raise ConfigError("its outputs are inf or nan")
