"""Random micro-batches for a model of transformers: plain, padded and packed.

plain     tokens, or images, or audio; some labels do not count
padded    the last tokens are padding, which attention_mask marks
packed    two documents in each sequence, which position_ids mark
"""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipemega.hf.float_inputs import FLOAT_INPUT_SHAPES
from pipemega.hf.special_models import special_model
from pipemega.hf.tasks import task_of
from pipemega.pipeline.microbatch_loss import WeightedLoss

# Even, so that sequence parallelism can shard them.
LENGTH, DECODER_LENGTH, PADDING, FIRST_DOCUMENT = 12, 8, 3, 7
IGNORED = -100


@dataclass(frozen=True)
class RandomBatch:
    """The samples of one step.

    Args:
        kind: "plain", "padded" or "packed".
        inputs: by HF's names; the first dim of each tensor is the sample.
        labels: at the position that predicts them; -100 does not count.
    """

    kind: str
    inputs: dict[str, Tensor]
    labels: Tensor

    def microbatches(self, number: int) -> list[tuple[dict[str, Tensor], Tensor]]:
        """Return `number` micro-batches of equal size, in order."""
        size = len(self.labels) // number
        cuts = [slice(m * size, (m + 1) * size) for m in range(number)]
        return [({k: v[cut] for k, v in self.inputs.items()}, self.labels[cut]) for cut in cuts]

    @property
    def documents(self) -> list[tuple[dict[str, Tensor], Tensor]]:
        """Return batches for the unsplit model: of packed samples, each document for itself."""
        if self.kind != "packed":
            return [(self.inputs, self.labels)]
        cuts = (slice(0, FIRST_DOCUMENT), slice(FIRST_DOCUMENT, None))
        return [
            ({name: value[:, cut] for name, value in self.inputs.items()}, self.labels[:, cut])
            for cut in cuts
        ]


def random_batches(model: Any, number: int) -> list[RandomBatch]:
    """Return the batches of the kinds that the model has inputs for, `number` samples each."""
    accepted = set(inspect.signature(model.forward).parameters)
    task = task_of(model.config, type(model))
    generator = torch.Generator().manual_seed(3)
    plain = _plain(model, number, task, generator)
    batches = [plain]
    if task == "image-classification" or model.main_input_name != "input_ids":
        return batches
    if "attention_mask" in accepted:
        batches.append(_padded(plain, is_decoder=task == "causal-lm"))
    if "position_ids" in accepted and task == "causal-lm":
        batches.append(_packed(plain))
    return batches


def _plain(model: Any, number: int, task: str, generator: torch.Generator) -> RandomBatch:
    config = model.config
    main = _main_input(model, number, generator)
    if task == "image-classification":
        labels = torch.randint(config.num_labels, (number,), generator=generator)
        return RandomBatch("plain", main, labels)
    if task == "mask-generation":
        return _masks(main, generator)
    length = DECODER_LENGTH if task == "seq2seq" else LENGTH
    tokens = _tokens(config, number, length + 1, generator)
    labels = tokens[:, 1:].clone()
    if task == "seq2seq":
        main["decoder_input_ids"] = tokens[:, :-1]
    elif task == "causal-lm":
        main["input_ids"] = tokens[:, :-1]
    elif task == "image-text-to-text":
        places = special_model(type(model).__name__).probe(config)["input_ids"][:, :-2]
        # The text has no places of an image.
        tokens[tokens == config.image_token_index] = 0
        main["input_ids"] = torch.cat([places.expand(number, -1), tokens[:, :-1]], 1)
        if config.is_encoder_decoder:
            main["decoder_input_ids"] = tokens[:, :-1]
        else:
            labels = F.pad(labels, (places.shape[1], 0), value=IGNORED)
    if "classification" in task:
        labels = torch.randint(config.num_labels, labels.shape, generator=generator)
    if task == "sequence-classification":
        return RandomBatch("plain", main, labels[:, 0].contiguous())
    # The number of labels differs between samples: the mean of the means is not the mean.
    for sample in range(number):
        labels[sample, : sample % 4] = IGNORED
    return RandomBatch("plain", main, labels)


def _main_input(model: Any, number: int, generator: torch.Generator) -> dict[str, Tensor]:
    config, name = model.config, model.main_input_name
    if name not in FLOAT_INPUT_SHAPES:
        return {"input_ids": _tokens(config, number, LENGTH, generator)}
    shape = (number, *FLOAT_INPUT_SHAPES[name](config))
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64)}


def _masks(main: dict[str, Tensor], generator: torch.Generator) -> RandomBatch:
    """Return images with two points each; a label of a point says whether it is inside."""
    pixels = main["pixel_values"]
    number, size = len(pixels), pixels.shape[-1]
    points = torch.rand(number, 2, 1, 2, generator=generator, dtype=torch.float64) * size
    inside = torch.randint(2, (number, 2, 1), generator=generator)
    masks = torch.randint(2, (number, 2, size // 2, size // 2), generator=generator)
    return RandomBatch("plain", {**main, "input_points": points, "input_labels": inside}, masks)


def _tokens(config: Any, number: int, length: int, generator: torch.Generator) -> Tensor:
    # Not the first ids, which are often special tokens.
    vocabulary = config.get_text_config().vocab_size
    return torch.randint(min(5, vocabulary // 2), vocabulary, (number, length), generator=generator)


def _padded(plain: RandomBatch, is_decoder: bool) -> RandomBatch:
    mask = torch.ones_like(plain.inputs["input_ids"])
    mask[:, -PADDING:] = 0
    labels = plain.labels
    if labels.shape == mask.shape:
        labels = labels.masked_fill(mask == 0, IGNORED)
        if is_decoder:
            # The last token before the padding predicts padding.
            labels = labels.clone()
            labels[:, -PADDING - 1] = IGNORED
    return RandomBatch("padded", {**plain.inputs, "attention_mask": mask}, labels)


def _packed(plain: RandomBatch) -> RandomBatch:
    tokens = plain.inputs["input_ids"]
    first = torch.arange(FIRST_DOCUMENT)
    positions = torch.cat([first, torch.arange(tokens.shape[1] - FIRST_DOCUMENT)])
    labels = plain.labels.clone()
    # The last token of a document predicts nothing.
    labels[:, FIRST_DOCUMENT - 1] = IGNORED
    inputs = {**plain.inputs, "position_ids": positions.expand_as(tokens).contiguous()}
    return RandomBatch("packed", inputs, labels)


def token_loss(logits: Tensor, labels: Tensor) -> WeightedLoss:
    """Return the sum over the labels that count, and their number."""
    losses = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return WeightedLoss(losses, (labels != IGNORED).sum())
