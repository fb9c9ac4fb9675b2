"""SpecialModel: models that are not one stack of layers, or an encoder and a decoder.

Blip2    vision encoder, Q-Former and language model: three stacks, or four with T5
SAM      vision encoder; prompt encoder and mask decoder run behind it; outputs masks
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipemega.hf.mask_loss import mask_loss


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
        loss: of (output, labels); None: that of tokens or classes.
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
