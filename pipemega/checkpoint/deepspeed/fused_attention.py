"""The order of the rows of a fused `query_key_value` weight, as far as the files say it.

    by heads     [ q1 k1 v1 q2 k2 v2 ]    Megatron-LM with checkpoint_version 1.0 and later,
                                          BigScience, Megatron-DeepSpeed until November 2024 (with
                                          grouped queries: by groups), GPT-NeoX
    thirds       [ q1 q2 k1 k2 v1 v2 ]    Megatron-DeepSpeed since December 2024, Megatron-LM with
                                          checkpoint_version 0
    blocks       [ q1 q2 q3 q4 k1 v1 ]    GPT-NeoX with grouped queries

The names and, without grouped queries, the shapes are the same. All versions of Megatron-DeepSpeed
write checkpoint_version 3.0; the version that changed the order also added arguments, which are in
the stored `args`.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pipemega.checkpoint.deepspeed.torch_files import LeftOut

FUSED = ("query_key_value", "key_value")
"""Names of modules that are several linears."""
_NEWER_ARGUMENT = "ds_sequence_parallel_fpdt"

VERSIONS = {
    "rows": "Megatron-LM with checkpoint_version 1.0 and later, BigScience, Megatron-DeepSpeed "
    "until November 2024, GPT-NeoX without grouped queries",
    "thirds": "Megatron-DeepSpeed since December 2024, Megatron-LM with checkpoint_version 0",
    "blocks": "GPT-NeoX with grouped queries",
}
"""Rule -> the versions that wrote rows in this order."""


def attention_rule(
    module: str, rows: int, columns: int, state: Mapping[str, Any]
) -> Literal["rows", "halves", "thirds", "blocks"] | None:
    """Return how the shards of a fused weight form it; None: the files do not say it.

    Args:
        module: one of `FUSED`; `key_value` is that of cross attention.
        rows, columns: of the whole weight.
        state: the entries of mp_rank_00_model_states.pt.
    """
    stored, version = state.get("args"), state.get("checkpoint_version")
    has_groups = module == "query_key_value" and rows != 3 * columns
    if isinstance(stored, dict) and "make_vocab_size_divisible_by" in stored:
        # GPT-NeoX stores a dict.
        return "blocks" if has_groups else "rows"
    arguments = stored.state if isinstance(stored, LeftOut) else {}
    if "num_attention_heads" not in arguments or not isinstance(version, int | float):
        return None
    if version < 1:
        return "halves" if module == "key_value" else "thirds"
    if version < 2 or module == "key_value" or _NEWER_ARGUMENT not in arguments:
        return "rows"
    # That version cannot train grouped queries: it splits the rows into equal thirds.
    return None if has_groups else "thirds"
