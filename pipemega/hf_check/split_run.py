"""One rank of the check: the split model computes the gradients of one step."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipemega.engine.initialize import initialize
from pipemega.errors import ConfigError
from pipemega.hf.load_model import from_pretrained
from pipemega.hf.weight_source import is_transposed
from pipemega.hf_check.float64 import KeepFloat64
from pipemega.hf_check.random_batch import RandomBatch
from pipemega.hf_check.reference import Gradients

# Parameters after the step are `before - RATE * gradient`. A large rate keeps the digits of a
# small gradient.
RATE = 1024.0


@dataclass(frozen=True)
class SplitSettings:
    """How the model is split, and run.

    Args:
        folder: of the model; of the small model, when a rank runs.
        task: see `pipemega.from_pretrained`.
        attn_implementation: None: that of transformers.
    """

    folder: str = ""
    task: str | None = None
    pipeline: int = 2
    tensor: int = 1
    schedule: str = "1f1b"
    sequence_parallel: bool = False
    attn_implementation: str | None = None
    num_microbatches: int = 4
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.pipeline * self.tensor

    def config(self, samples: int) -> dict[str, Any]:
        """Return the config of a run of one step with `samples` samples."""
        return {
            "train_batch_size": samples,
            "train_micro_batch_size_per_gpu": samples // self.num_microbatches,
            "gradient_clipping": 0.0,
            "mesh": {
                "pipeline": self.pipeline,
                "tensor": self.tensor,
                "data": 1,
                "device": "cpu",
                "sequence_parallel": self.sequence_parallel,
            },
            "pipeline": {"schedule": self.schedule, "partition": "uniform"},
            "training": {"loss_reduction": "token"},
            "optimizer": {"type": "SGD", "params": {"lr": RATE}},
            **self.extra,
        }


def split_gradients(split: SplitSettings, batches: list[RandomBatch]) -> list[Gradients | str]:
    """Return the gradients for each batch, or the message with which it was refused; collective."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    try:
        return [_gradients_or_message(split, batch) for batch in batches]
    finally:
        torch.set_default_dtype(torch.float32)


def _gradients_or_message(split: SplitSettings, batch: RandomBatch) -> Gradients | str:
    try:
        return _gradients(split, batch)
    except ConfigError as error:
        if not error.on_every_rank:
            raise
        return str(error)


def _gradients(split: SplitSettings, batch: RandomBatch) -> Gradients:
    net = from_pretrained(
        split.folder,
        task=split.task,
        sequence_parallel=split.sequence_parallel,
        attn_implementation=split.attn_implementation,
    )
    if batch.kind == "packed" and not net.follows_positions:
        raise ConfigError(
            "the position_ids restart within a sample (packed documents), but the layers of this "
            "family do not keep documents separate",
            on_every_rank=True,
        )
    engine, *_ = initialize(net, split.config(len(batch.labels)))
    try:
        before = engine.parameter_state()
        with KeepFloat64():
            loss = engine.train_batch(iter(batch.microbatches(split.num_microbatches)))
        after = engine.parameter_state()
    finally:
        engine.close()
    transposed = {
        f"layers.{position}.{name}"
        for position, layer in enumerate(net.meta_layers)
        for name, parameter in layer.named_parameters()
        if is_transposed(parameter)
    }
    by_name: dict[str, Tensor] = {}
    for name, value in before.items():
        gradient = (value - after[name]) / RATE
        by_name[net.hf_name(name)] = gradient.T if name in transposed else gradient
    return Gradients(loss, by_name)
