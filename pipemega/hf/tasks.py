"""Tasks: which class of transformers builds the model, and which loss it is trained with.

Losses of the tasks, over logits of this rank's slice of the vocabulary.

The loss of SAM, which transformers does not have.

SpecialModel: models that are not one stack of layers, or an encoder and a decoder.

Blip2    vision encoder, Q-Former and language model: three stacks, or four with T5
SAM      vision encoder; prompt encoder and mask decoder run behind it; outputs masks

Shapes of main inputs that are no tokens, by their names in transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError, DataError
from pipemega.hf.placeholders import import_transformers
from pipemega.pipeline.microbatch_loss import WeightedLoss
from pipemega.tensor_parallel import DeferredLogits, cross_entropy_sum


class TokenLoss(nn.Module):
    """Cross entropy of tokens; labels stand at the position that predicts them, -100 is ignored.

    transformers shifts the labels of causal models in the model; here the data do it.

    Shape:
        logits [batch, sequence, padded vocabulary / T], labels [batch, sequence]
        ->  WeightedLoss: the sum over tokens and their number, both divided by the sequence length,
        so that they fit fp16

    Args:
        vocab_size, axis: size of the vocabulary, and the ranks that it is sharded over.
        has_auxiliary_losses: layers have losses that are weighted as this one.
    """

    takes_deferred_logits = True

    def __init__(self, vocab_size: int, axis: Axis, has_auxiliary_losses: bool = False) -> None:
        super().__init__()
        self._vocab_size, self._axis = vocab_size, axis
        self.weight_of_labels = _token_weight if has_auxiliary_losses else None

    def forward(self, logits: Tensor | DeferredLogits, labels: Tensor) -> WeightedLoss:
        length = labels.shape[-1]
        total = cross_entropy_sum(
            logits, labels, axis=self._axis, vocab_size=self._vocab_size, factor=1 / length
        )
        return WeightedLoss(total, _token_weight(labels).to(total.dtype))


def _token_weight(labels: Tensor) -> Tensor:
    return (labels != -100).sum() / labels.shape[-1]


def class_loss(logits: Tensor, labels: Tensor) -> WeightedLoss:
    """Cross entropy of classes; -100 is ignored.

    Shape:
        logits [batch, classes] or [batch, sequence, classes], labels without the last dim
    """
    loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return WeightedLoss(loss, (labels != -100).sum().to(loss.dtype))


# Weight of the focal loss, beside the dice loss and the error of the predicted overlap.
_FOCAL = 20.0
_GAMMA, _ALPHA = 2.0, 0.25


def mask_loss(output: tuple[Tensor, Tensor], labels: Tensor) -> WeightedLoss:
    """Return 20 x focal loss + dice loss of the best mask + squared error of the predicted overlap.

    A prompt has several masks; only the one with the smallest focal and dice loss is trained, and
    the overlap (intersection over union) is predicted for each. Logits of another size than the
    labels are interpolated.

    Shape:
        output: pred_masks [batch, prompts, masks, h, w], iou_scores [batch, prompts, masks]
        labels: [batch, prompts, height, width], 0 or 1
        ->  WeightedLoss: the sum over prompts, and their number

    Raises:
        DataError: the labels have another shape.

    Source: Kirillov et al. 2023, arXiv:2304.02643, appendix A.
    """
    logits, scores = output
    if labels.dim() != 4 or labels.shape[:2] != logits.shape[:2]:
        raise DataError(
            f"labels of masks have shape [batch, prompts, height, width] = "
            f"[{logits.shape[0]}, {logits.shape[1]}, ...], not {list(labels.shape)}"
        )
    if logits.shape[-2:] != labels.shape[-2:]:
        prompts = logits.flatten(0, 1)
        prompts = F.interpolate(prompts, size=labels.shape[-2:], mode="bilinear")
        logits = prompts.reshape(*labels.shape[:2], *prompts.shape[1:])
    targets = labels.unsqueeze(2).to(logits.dtype).expand_as(logits)
    per_mask = _FOCAL * _focal(logits, targets) + _dice(logits, targets)
    with torch.no_grad():
        inside, wanted = logits > 0, targets > 0.5
        union = (inside | wanted).sum((-2, -1)).clamp(min=1)
        overlap = (inside & wanted).sum((-2, -1)) / union
    errors = (scores - overlap.to(scores.dtype)).square().mean(-1)
    losses = per_mask.min(-1).values + errors
    return WeightedLoss(losses.sum(), losses.numel())


def _focal(logits: Tensor, targets: Tensor) -> Tensor:
    """Source: Lin et al. 2017, arXiv:1708.02002."""
    entropy = F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    # entropy is -log of the probability of the target.
    missing = 1 - torch.exp(-entropy)
    weight = _ALPHA * targets + (1 - _ALPHA) * (1 - targets)
    return (weight * missing**_GAMMA * entropy).mean((-2, -1))


def _dice(logits: Tensor, targets: Tensor) -> Tensor:
    """Source: Milletari et al. 2016, arXiv:1606.04797; with 1 added, for empty masks."""
    inside = logits.sigmoid()
    common = (inside * targets).sum((-2, -1))
    total = inside.sum((-2, -1)) + targets.sum((-2, -1))
    return 1 - (2 * common + 1) / (total + 1)


@dataclass(frozen=True)
class SpecialModel:
    """What the adapter cannot find out by running the model.

    Args:
        stacks: names of the lists of layers, in the order in which they run; a name that ends with
            "." stands for the stacks of that submodule.
        segments: module or parameter -> the only segment that has it. For parameters of modules
            that contain layers, and for modules whose parameters are read from outside.
        probe: config -> inputs besides the main one of the run that finds the segments, one sample.
        constants: arguments of every forward.
        float_inputs: inputs in floating point that every stage gets, without gradients.
        output: output of HF's model -> output of the last layer.
        loss: function of (output, labels); None: the loss of tokens, or of classes if the model
            has no head over a vocabulary.
    """

    stacks: tuple[str, ...] = ()
    segments: Mapping[str, int] = field(default_factory=dict)
    probe: Callable[[Any], dict[str, Tensor]] = lambda config: {}
    constants: Mapping[str, Any] = field(default_factory=dict)
    float_inputs: tuple[str, ...] = ()
    output: Callable[[Any], Any] = lambda output: output.logits
    loss: Callable[[Any, Any], Any] | None = None


def _blip2_tokens(config: Any) -> dict[str, Tensor]:
    """Return a sample: the places of the image, then two tokens."""
    image = torch.full((1, config.num_query_tokens), config.image_token_index)
    tokens = {"input_ids": torch.cat([image, torch.zeros(1, 2, dtype=torch.long)], 1)}
    if config.is_encoder_decoder:
        tokens["decoder_input_ids"] = torch.zeros(1, 2, dtype=torch.long)
    return tokens


SPECIAL_MODELS: dict[str, SpecialModel] = {
    "Blip2ForConditionalGeneration": SpecialModel(
        stacks=("vision_model.encoder.layers", "qformer.encoder.layer", "language_model."),
        # Read by the forward of the whole model, behind the vision encoder.
        segments={"query_tokens": 1},
        probe=_blip2_tokens,
        constants={"use_cache": False},
    ),
    "SamModel": SpecialModel(
        stacks=("vision_encoder.layers",),
        segments={
            "vision_encoder.pos_embed": 0,
            # Read outside of their own forward.
            "shared_image_embedding": 1,
            "prompt_encoder": 1,
            "mask_decoder": 1,
        },
        probe=lambda config: {"input_points": torch.zeros(1, 1, 1, 2)},
        float_inputs=("input_points", "input_boxes", "input_masks"),
        output=lambda output: (output.pred_masks, output.iou_scores),
        loss=mask_loss,
    ),
}


def special_model(class_name: str) -> SpecialModel:
    """Return the entry of a class of transformers; an ordinary model has an empty one."""
    return SPECIAL_MODELS.get(class_name, _ORDINARY)


_ORDINARY = SpecialModel()


# Task -> Auto classes of transformers.
TASKS: dict[str, tuple[str, ...]] = {
    "causal-lm": ("AutoModelForCausalLM",),
    "seq2seq": ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq"),
    "masked-lm": ("AutoModelForMaskedLM",),
    "sequence-classification": ("AutoModelForSequenceClassification",),
    "token-classification": ("AutoModelForTokenClassification",),
    "image-classification": ("AutoModelForImageClassification",),
    "image-text-to-text": ("AutoModelForImageTextToText",),
    "mask-generation": ("AutoModelForMaskGeneration",),
}
# Of these tasks, only the models of SPECIAL_MODELS.
_SPECIAL_TASKS = ("image-text-to-text", "mask-generation")
# Nearly every family has models for these: they are no default.
TEXT_CLASSIFICATION = ("sequence-classification", "token-classification")


def model_class_of(config: Any, task: str | None) -> Any:
    """Return the class that builds the model of `config` for `task`.

    Args:
        task: a key of TASKS; None: the task of `config.architectures`, or the only one that the
            family has.

    Raises:
        ConfigError: the task is unknown, the family has no model for it, or it is not clear.
    """
    if task is not None and task not in TASKS:
        raise ConfigError(
            f"unknown task {task!r}; the tasks are {', '.join(TASKS)}", on_every_rank=True
        )
    classes = {name: found for name in TASKS if (found := _class_for(config, name)) is not None}
    if task is None:
        task = _default_task(config, classes)
    if task not in classes:
        raise ConfigError(
            f"transformers has no model of the family {config.model_type!r} for task {task!r}; "
            f"it has one for: {', '.join(classes) or 'no task that pipemega trains'}",
            on_every_rank=True,
        )
    return classes[task]


def task_of(config: Any, model_class: Any) -> str:
    """Return the task of a class that `model_class_of` has chosen."""
    return next(task for task in TASKS if _class_for(config, task) is model_class)


def _class_for(config: Any, task: str) -> Any:
    transformers = import_transformers()
    for name in TASKS[task]:
        mapping = getattr(transformers, name)._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            found = found[0] if isinstance(found, tuple) else found
            if task not in _SPECIAL_TASKS or found.__name__ in SPECIAL_MODELS:
                return found
    return None


def _default_task(config: Any, classes: dict[str, Any]) -> str | None:
    for architecture in config.architectures or ():
        for task, found in classes.items():
            if found.__name__ == architecture:
                return task
    if getattr(config, "is_encoder_decoder", False) and "seq2seq" in classes:
        return "seq2seq"
    defaults = [task for task in classes if task not in TEXT_CLASSIFICATION]
    if len(defaults) == 1:
        return defaults[0]
    if classes:
        named = ", ".join(config.architectures or ()) or "no architecture"
        raise ConfigError(
            f"the config of family {config.model_type!r} names {named}, which is no class of a "
            f"task that pipemega trains; the family has models for {', '.join(classes)}: set the "
            f"task (model.task)",
            on_every_rank=True,
        )
    return None


FLOAT_INPUT_SHAPES: dict[str, Callable[[Any], tuple[int, ...]]] = {
    "pixel_values": lambda c: _image_shape(getattr(c, "vision_config", c)),
    "input_features": lambda c: (c.num_mel_bins, 2 * c.max_source_positions),
}


def _image_shape(config: Any) -> tuple[int, int, int]:
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return getattr(config, "num_channels", 3), height, width
