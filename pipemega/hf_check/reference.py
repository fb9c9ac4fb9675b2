"""The reference: HF's model, unsplit, in one process, in float64."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipemega.hf.special_models import special_model
from pipemega.hf_check.float64 import KeepFloat64
from pipemega.hf_check.random_batch import RandomBatch, token_loss


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
            elif name in saved and buffer.dim() > 1 and not bool(buffer.any()):
                # A table that is 0 until it is loaded: the experts of a token, in hash routing.
                buffer.copy_(torch.randint(2, buffer.shape, generator=generator))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def reference_gradients(model: Any, batch: RandomBatch) -> Gradients:
    """Return loss and gradients of one step."""
    model.zero_grad(set_to_none=True)
    special = special_model(type(model).__name__)
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    default = torch.get_default_dtype()
    # Forwards of transformers create tensors of the default dtype.
    torch.set_default_dtype(torch.float64)
    try:
        with KeepFloat64():
            for inputs, labels in batch.documents:
                output = special.output(forward(model, inputs))
                loss = (special.loss or token_loss)(output, labels)
                total, count = total + loss.sum, count + float(loss.weight)
    finally:
        torch.set_default_dtype(default)
    mean = total / count
    mean.backward()  # type: ignore[no-untyped-call]
    # A tied parameter has the name under which transformers saves it.
    tied = model.all_tied_weights_keys
    by_name = {
        tied.get(name, name): torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    return Gradients(mean.item(), by_name)


def forward(model: Any, inputs: dict[str, Tensor]) -> Any:
    """Call HF's model, without a key-value cache."""
    inputs = {**inputs, **special_model(type(model).__name__).constants}
    if "use_cache" in inspect.signature(model.forward).parameters:
        return model(**inputs, use_cache=False)
    return model(**inputs)
