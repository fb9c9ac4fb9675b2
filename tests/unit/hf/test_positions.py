"""Positions of Hugging Face models: documents of token data, and sequences that are too long."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="Hugging Face models need transformers")

import transformers

import pipemega
from pipemega.data.sample_reader import stack_samples
from pipemega.data.tokens.gpt_dataset import GPTDataset, SampleFormat, Split
from pipemega.data.tokens.token_files import IndexedDataset, IndexedWriter
from pipemega.distributed.mesh import Axis
from pipemega.errors import ConfigError
from pipemega.hf.description import ModelDescription
from pipemega.hf.hf_module import unsplit_model
from pipemega.hf.model_facts import refuse_missing_positions, untrained_rotary_positions
from pipemega.hf.tasks import model_class_of
from tests.ranks.hf import tiny_models

EOD = 2


@pytest.fixture
def samples(tmp_path: Path) -> Any:
    """Inputs [2, 8] of token files, whose documents end within the samples."""
    generator = torch.Generator().manual_seed(4)
    with IndexedWriter(tmp_path / "text", "int32") as writer:
        for length in (3, 5, 1, 7, 4, 6):
            text = torch.randint(5, tiny_models.VOCAB, (length,), generator=generator)
            writer.add_document([*text.tolist(), EOD])
    form = SampleFormat(
        8, tiny_models.VOCAB, eod=EOD, reset_position_ids=True, reset_attention_mask=True
    )
    split = Split("train", range(6))
    data = GPTDataset(
        IndexedDataset(tmp_path / "text"), split, sample_format=form, num_samples=None, seed=1
    )
    inputs, _ = stack_samples([data[0], data[1]])
    return inputs


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_documents_of_token_data_do_not_see_each_other(samples, family):
    """The logits of each document are those of the document alone."""
    torch.set_default_dtype(torch.float64)
    try:
        # Layers that are built one by one do not share a tied weight.
        config = tiny_models.config_of(family, tie_word_embeddings=False)
        net = pipemega.from_pretrained(config, pretrained=False)
        layers = {i: spec.build(Axis("tensor"), "cpu").eval() for i, spec in enumerate(net.specs)}
        x: Any = samples
        with torch.no_grad():
            for position in range(len(layers)):
                x = layers[position](x)
        model = unsplit_model(net, layers)
        documents = 0
        for tokens, positions, logits in zip(
            samples["input_ids"], samples["position_ids"], x, strict=True
        ):
            starts = [*positions.eq(0).nonzero().flatten().tolist(), len(tokens)]
            documents += len(starts) - 1
            for first, last in pairwise(starts):
                alone = model(tokens[None, first:last], use_cache=False).logits[0]
                # transformers rounds rotary positions to fp32, and how depends on the place of a
                # number in the vector; a document that saw another one would differ by 1e-2.
                torch.testing.assert_close(logits[first:last], alone, rtol=0, atol=1e-6)
        assert documents == 4
    finally:
        torch.set_default_dtype(torch.float32)


def roberta() -> Any:
    """Its table begins after the padding id."""
    return transformers.RobertaConfig(
        vocab_size=37, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=64, pad_token_id=1, is_decoder=True,
        architectures=["RobertaForCausalLM"],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "positions"),
    [("gpt2", 64), ("opt", 64), ("bert", 64), ("gptj", 64), ("roberta", 62)],
)
def test_a_table_has_the_positions_that_transformers_can_compute(family, positions):
    config = roberta() if family == "roberta" else tiny_models.config_of(family)
    description = ModelDescription(config, model_class_of(config, None))
    refuse_missing_positions(description, positions)
    with pytest.raises(ConfigError, match=f"length is {positions + 1}.*table of {positions} pos"):
        refuse_missing_positions(description, positions + 1)
    model = tiny_models.whole_model(config)
    model(torch.full((1, positions), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, positions + 1), 5))


@pytest.mark.parametrize("family", ["llama", "t5", "bloom"])
def test_positions_without_a_table_have_no_end(family):
    config = tiny_models.config_of(family)
    refuse_missing_positions(ModelDescription(config, model_class_of(config, None)), 1000)


def test_rotary_positions_above_those_of_the_config_are_a_warning():
    config = tiny_models.config_of("llama")
    assert untrained_rotary_positions(config, 64) is None
    assert "max_position_embeddings 64" in str(untrained_rotary_positions(config, 65))
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = tiny_models.config_of("llama", rope_parameters=rope | {"rope_theta": 10000.0})
    assert untrained_rotary_positions(config, 256) is None
    assert "is 257" in str(untrained_rotary_positions(config, 257))
