"""The model type "hf" of the config: what its section delegates to."""

from collections.abc import Iterator
from typing import Any

import torch

from pipemega.config.model_hf import LONGEST_DEFAULT, HFSection
from pipemega.hf.float_inputs import FLOAT_INPUT_SHAPES
from pipemega.hf.hf_module import HFPipelineModule
from pipemega.hf.load_model import from_pretrained, read_config
from pipemega.hf.position_tables import (
    declared_positions,
    refuse_missing_positions,
    untrained_rotary_positions,
)
from pipemega.hf.tasks import TEXT_CLASSIFICATION, model_class_of, task_of
from pipemega.models.build_model import ModelContext


def build(section: HFSection, context: ModelContext) -> HFPipelineModule:
    """Return the model of the folder; without its weights on the meta device."""
    mesh = context.config.mesh
    net = from_pretrained(
        section.folder,
        task=section.task,
        pretrained=section.pretrained and context.device.type != "meta",
        sequence_parallel=mesh.sequence_parallel and context.tensor > 1,
        attn_implementation=section.attn_implementation,
        num_labels=section.num_labels,
    )
    refuse_missing_positions(net.description, _sequence_length(section, net.hf_config))
    return net


def remarks(section: HFSection) -> Iterator[str]:
    """Yield warnings for the log."""
    config = _hf_config(section)
    warning = untrained_rotary_positions(config, _sequence_length(section, config))
    if warning is not None:
        yield warning


def sample(section: HFSection, context: ModelContext) -> tuple[Any, Any] | None:
    """Return (inputs, labels) of one micro-batch; None: token ids are the only input."""
    config, size = _hf_config(section), context.micro_batch_size
    model_class = model_class_of(config, section.task)
    main_input, task = model_class.main_input_name, task_of(config, model_class)
    shape = FLOAT_INPUT_SHAPES.get(main_input)
    tokens = torch.empty(size, _sequence_length(section, config), dtype=torch.int64)
    if task == "token-classification":
        return tokens, tokens.clone()
    if shape is not None and not config.is_encoder_decoder:
        return {main_input: torch.empty(size, *shape(config))}, tokens[:, 0]
    if not config.is_encoder_decoder:
        return (tokens, tokens[:, 0]) if task in TEXT_CLASSIFICATION else None
    main = tokens if shape is None else torch.empty(size, *shape(config))
    return {main_input: main, "decoder_input_ids": tokens.clone()}, tokens.clone()


def sample_tokens(section: HFSection) -> int | None:
    """Return `seq_length`, or its default; None for a model whose data are not token ids alone."""
    config = _hf_config(section)
    model_class = model_class_of(config, section.task)
    is_text = model_class.main_input_name == "input_ids" and not config.is_encoder_decoder
    trains_on_text = is_text and task_of(config, model_class) not in TEXT_CLASSIFICATION
    return _sequence_length(section, config) if trains_on_text else None


def vocabulary(section: HFSection) -> int | None:
    """Return the vocabulary size of the model; None if it has none."""
    return getattr(_hf_config(section).get_text_config(), "vocab_size", None)


def _sequence_length(section: HFSection, config: Any) -> int:
    if section.seq_length is not None:
        return section.seq_length
    return min([LONGEST_DEFAULT, *declared_positions(config).values()])


def _hf_config(section: HFSection) -> Any:
    _, config = read_config(section.folder)
    return config
