"""Which Hugging Face models compute head and loss together: those that return their head's output.

Logits that are scaled, capped or masked after the head are computed as they are.
"""

from typing import Any

import pytest

pytest.importorskip("transformers", reason="Hugging Face models need transformers")

import pipemega
from tests.ranks.hf import tiny_models

FUSED = [
    "llama", "llama-tied", "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe", "gemma3", "olmo2",
    "gpt-neox", "phi3", "glm4", "deepseek-v2", "deepseek-v3", "gpt-oss", "gpt2", "gptj", "bloom",
    "falcon", "falcon-7b", "falcon-alibi", "opt", "mt5", "t5", "t5-untied", "whisper", "electra",
    "qwen2-moe", "olmoe", "phimoe",
]  # fmt: skip
WITH_LOGITS = ["gemma2", "cohere", "bert", "roberta", "vit", "granitemoe"]


def returns_head(config: Any) -> bool:
    net: Any = pipemega.from_pretrained(config, pretrained=False, attn_implementation="eager")
    return bool(net.description.returns_head)


def test_the_lists_are_complete() -> None:
    assert sorted(FUSED + WITH_LOGITS) == sorted(tiny_models.CONFIGS)


@pytest.mark.parametrize("family", ["gptj", "electra", "gemma2"])
def test_some_families(family: str) -> None:
    assert returns_head(tiny_models.config_of(family)) == (family in FUSED)


@pytest.mark.sweep
@pytest.mark.parametrize("family", sorted(tiny_models.CONFIGS))
def test_all_families(family: str) -> None:
    assert returns_head(tiny_models.config_of(family)) == (family in FUSED)


CHANGED: dict[str, tuple[str, dict[str, Any], bool]] = {
    "gemma2 without a cap": ("Gemma2Config", {"final_logit_softcapping": None}, True),
    "gemma3 with a cap": ("Gemma3TextConfig", {"final_logit_softcapping": 5.0}, False),
    "granite": ("GraniteConfig", {"logits_scaling": 4.0}, False),
    "phi, with a bias": ("PhiConfig", {}, True),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", CHANGED)
def test_the_config_decides_what_follows_the_head(name: str) -> None:
    kind, changes, fused = CHANGED[name]
    assert returns_head(tiny_models._sized(kind, **changes)()) == fused


def test_logits_that_the_model_changes_in_place_are_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a model does that masks tokens which it must not generate (Chameleon)."""
    from transformers import LlamaForCausalLM

    forward = LlamaForCausalLM.forward

    def masked(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output["logits"][..., :2] = -1e4
        return output

    config = tiny_models.config_of("llama")
    assert returns_head(config)
    monkeypatch.setattr(LlamaForCausalLM, "forward", masked)
    assert not returns_head(config)
