"""The reference: HF's model, unsplit, in one process, in float64."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.hf_check.float64 import KeepFloat64
from pipemega.hf_check.random_batch import IGNORED, RandomBatch, token_loss


@dataclass(frozen=True)
class Gradients:
    """The result of one step.

    Args:
        loss: mean over the labels that count.
        by_name: HF's name of each parameter -> gradient; zeros for a parameter without one.
    """

    loss: float
    by_name: dict[str, Tensor]


def random_model(config: Any, model_class: Any) -> Any:
    """Return HF's model in float64 with random weights, without dropout.

    Every parameter and every saved buffer is random: values such as 1 for a norm or 0 for a bias
    would hide errors.
    """
    build = getattr(model_class, "from_config", None) or model_class._from_config
    torch.manual_seed(0)
    model = build(config, dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    saved = model.state_dict(keep_vars=True)
    with torch.no_grad():
        for parameter in model.parameters():
            mean = 0.5 if parameter.dim() == 1 else 0.0
            parameter.normal_(mean, 0.2, generator=generator)
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point():
                buffer.add_(torch.rand(buffer.shape, generator=generator, dtype=torch.float64) / 8)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def reference_gradients(model: Any, batch: RandomBatch) -> Gradients:
    """Return loss and gradients of one step."""
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    with KeepFloat64():
        for inputs, labels in batch.documents:
            total = total + token_loss(forward(model, inputs).logits, labels)
    loss = total / (batch.labels != IGNORED).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    by_name = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    return Gradients(loss.item(), by_name)


def forward(model: Any, inputs: dict[str, Tensor]) -> Any:
    """Call HF's model, without a key-value cache."""
    if "use_cache" in inspect.signature(model.forward).parameters:
        return model(**inputs, use_cache=False)
    return model(**inputs)
