"""Refuses configs that would train something else than transformers does."""

from collections.abc import Container
from typing import Any

from pipemega.errors import ConfigError
from pipemega.hf.families import family_of, styles_of
from pipemega.parameters import even_share


def refuse_unknown_family(folder: object, config: dict[str, Any], families: Container[str]) -> None:
    """Refuse the content of a config.json whose family transformers does not have.

    Raises:
        ConfigError: the model is code of the folder, or of a newer transformers.
    """
    family = config.get("model_type")
    if family in families:
        return
    if "auto_map" in config:
        raise ConfigError(
            f"{folder}: the model {family!r} is Python code in the folder (auto_map in "
            f"config.json, trust_remote_code), which pipemega does not run: use a family of "
            f"transformers, or write the model as LayerSpecs",
            on_every_rank=True,
        )
    raise ConfigError(
        f"{folder}: config.json has model_type {family!r}, which the installed transformers does "
        f"not know: install a newer one, or give the folder of a model of transformers",
        on_every_rank=True,
    )


def refuse_settings(config: Any) -> None:
    """Refuse quantised weights and losses or layers that a pipeline does not carry.

    Raises:
        ConfigError: names the key and the way out.
    """
    text = config.get_text_config()
    for owner in {id(c): c for c in (config, text)}.values():
        if getattr(owner, "quantization_config", None) is not None:
            raise ConfigError(
                "the config has quantization_config: quantised weights cannot be trained; give "
                "the folder of the unquantised model",
                on_every_rank=True,
            )
        if getattr(owner, "output_router_logits", False):
            raise ConfigError(
                "the config has output_router_logits = true: the auxiliary loss of the routers "
                "(router_aux_loss_coef) is not carried through the pipeline; set "
                "output_router_logits to false to train without it",
                on_every_rank=True,
            )
        for key in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
            rate = getattr(owner, key, None)
            if rate:
                raise ConfigError(
                    f"the config has {key} = {rate}: layers are skipped at random, and the ranks "
                    f"of a pipeline cannot skip them; set {key} to 0",
                    on_every_rank=True,
                )
        if getattr(owner, "apply_spec_augment", False):
            raise ConfigError(
                "the config has apply_spec_augment = true: transformers masks audio with numpy's "
                "random numbers, which differ on tensor ranks and after a resume; set it to false, "
                "and mask in the data",
                on_every_rank=True,
            )


def refuse_other_class_loss(config: Any) -> None:
    """Refuse a classifier for which transformers has another loss than cross entropy.

    Raises:
        ConfigError: names the key and the way out.
    """
    problem = getattr(config, "problem_type", None)
    if problem is None and config.num_labels == 1:
        problem = "regression"
    if problem not in (None, "single_label_classification"):
        raise ConfigError(
            f"the config has num_labels = {config.num_labels}, problem_type = {problem!r}: "
            f"pipemega has the loss of single_label_classification; for another one give "
            f"from_pretrained(..., loss_fn=f)",
            on_every_rank=True,
        )


def check_tensor_ranks(config: Any, ranks: int, sequence_parallel: bool) -> None:
    """Check that the layers can be sharded over the tensor ranks.

    Raises:
        ConfigError: there is no plan, or a number of heads does not fit; names both.
    """
    styles = styles_of(config)
    if not styles:
        raise ConfigError(
            f"transformers has no plan for the family {config.model_type!r} to shard its layers "
            f"(base_model_tp_plan), and pipemega has none: use mesh.tensor = 1 with more pipeline "
            f"ranks",
            on_every_rank=True,
        )
    if getattr(config, "slow_but_exact", False):
        raise ConfigError(
            "the config has slow_but_exact = true: it multiplies slices of whole weights, which "
            "tensor ranks do not have; set it to false, which computes the same",
            on_every_rank=True,
        )
    attention = [name for name in styles if "att" in name.lower()]
    if attention:
        even_share(config.num_attention_heads, ranks, "num_attention_heads")
    reason = family_of(config).no_sequence_parallelism
    if not attention:
        reason = reason or "transformers has no plan for its attention"
    if sequence_parallel and reason:
        raise ConfigError(
            f"mesh.sequence_parallel does not work for the family {config.model_type!r}: {reason}; "
            f"set it to false",
            on_every_rank=True,
        )
    if not any(name.split(".")[-1] in KEY_VALUE for name in attention):
        return
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if groups % ranks and ranks % groups:
        raise ConfigError(
            f"num_key_value_heads ({groups}) must be a multiple of the tensor ranks (mesh.tensor "
            f"= {ranks}), or divide them: each rank needs whole heads",
            on_every_rank=True,
        )


KEY_VALUE = ("k_proj", "v_proj")
"""Linears of keys and values, whose heads may be fewer than the tensor ranks."""
