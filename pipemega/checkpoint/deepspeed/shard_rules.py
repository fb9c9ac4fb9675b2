"""How the tensor-parallel shards of a parameter form the whole parameter.

The rules, in the order in which they are tried:

1. the patterns that the user gives
2. `parameter_with_sub_params` of `universal_checkpoint_info`
3. for fused attention weights what the files say of their writer: shard_rules.py
4. the names of Megatron-LM, Megatron-DeepSpeed and GPT-NeoX, below
5. `universal_checkpoint_info`, which Megatron-DeepSpeed stores for DeepSpeed's own converter

Sources: Shoeybi et al. 2019, arXiv:1909.08053, section 3 (which linears are column- or
row-parallel); DeepSpeed's docs of universal checkpoints (the keys of `universal_checkpoint_info`).

The order of the rows of a fused `query_key_value` weight, as far as the files say it.

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

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pipemega.checkpoint.deepspeed.deepspeed_folder import LeftOut, Piece, StoredTensor
from pipemega.errors import CheckpointError

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
        module: one of `FUSED`; `key_value` is the module of cross attention.
        rows, columns: the sizes of the whole weight.
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


Rule = Literal["rows", "columns", "halves", "thirds", "blocks", "replicated", "mean"]
RULES: Mapping[Rule, str] = {
    "rows": "the shards are consecutive rows (a column-parallel linear, a vocabulary)",
    "columns": "the shards are consecutive columns (the weight of a row-parallel linear)",
    "halves": "each shard has rows of both halves (gate and up of SwiGLU), the first half first",
    "thirds": "each shard has its queries, then its keys, then its values (not head by head)",
    "blocks": "as thirds, for grouped queries, if the whole query weight is square",
    "replicated": "each shard is the whole parameter",
    "mean": "each shard is the whole parameter, but the values differ: take the mean",
}

_PARTS: Mapping[Rule, int] = {"halves": 2, "thirds": 3}
_VECTORS = ("weight", "bias")

# Names of modules.
_ROWS = {
    "query", "key", "value", "dense_h_to_4h", "word_embeddings", "lm_head", "final_linear",
    "output_layer", "linear_qkv", "linear_fc1", "linear1", "w1", "w3",
}  # fmt: skip
_COLUMNS = {"dense", "dense_4h_to_h", "linear_proj", "linear_fc2", "linear2", "w2"}
_REPLICATED = re.compile(r"norm|(^|\.)ln_|position_embeddings|tokentype|rotary|inv_freq")
# SwiGLU: the two halves of this module's output are the two inputs of a product.
_GATED = {"dense_h_to_4h": "dense_4h_to_h", "linear_fc1": "linear_fc2", "linear1": "linear2"}
# Key of universal_checkpoint_info -> the rule of the names that match one of its patterns.
_UNIVERSAL: tuple[tuple[str, Rule], ...] = (
    ("tp_replicated_parameter_patterns", "replicated"),
    ("parameter_to_average_patterns", "mean"),
    ("parameter_with_row_parallelism_patterns", "columns"),
    ("parameter_with_2_sub_params_cat_dim_0", "halves"),
)


@dataclass(frozen=True)
class ShardRules:
    """Forms parameters from their shards.

    Args:
        given: regular expression of DeepSpeed's names -> rule.
        state: the entries of mp_rank_00_model_states.pt; {} if there is no such file.
    """

    given: Mapping[str, Rule] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)

    @property
    def universal(self) -> Mapping[str, Any]:
        """`universal_checkpoint_info` of the checkpoint, or {}."""
        found = self.state.get("universal_checkpoint_info")
        return found if isinstance(found, dict) else {}

    def join(
        self, name: str, shards: Sequence[StoredTensor], layer: Mapping[str, StoredTensor]
    ) -> StoredTensor:
        """Return the parameter.

        Args:
            name: DeepSpeed's name of the parameter: "3.mlp.dense_h_to_4h.weight".
            shards: one shard from each tensor rank.
            layer: the first shard of the parameters with the same prefix; by name.

        Raises:
            CheckpointError: no rule is known, or the shards do not fit the rule.
        """
        if len(shards) == 1:
            return shards[0]
        rule = self._rule(name, shards, layer)
        if rule in ("replicated", "mean"):
            return _replicated(name, shards, rule)
        dim = 1 if rule == "columns" else 0
        if len(shards[0].shape) <= dim:
            raise CheckpointError(
                f"{name} {list(shards[0].shape)} has no dim {dim}, and its shards are joined by "
                f"the rule {rule!r}: name another one with --shards"
            )
        return join_along(name, shards, dim, self._parts(name, rule, shards, layer))

    def _parts(
        self,
        name: str,
        rule: Rule | tuple[int, ...],
        shards: Sequence[StoredTensor],
        layer: Mapping[str, StoredTensor],
    ) -> tuple[int, ...]:
        """Return the sizes, in each shard, of the parts that are sharded one by one; () for one."""
        if isinstance(rule, tuple):
            return rule
        length = shards[0].shape[0]
        if rule != "blocks":
            return (length // _PARTS[rule],) * _PARTS[rule] if rule in _PARTS else ()
        weight = layer.get(_weight_of(name), shards[0])
        queries = weight.shape[-1] // len(shards)
        rest = length - queries
        if len(weight.shape) < 2 or rest <= 0 or rest % 2:
            raise CheckpointError(
                f"{name} has shards of {length} rows, which do not fit the rule 'blocks': "
                f"{queries} rows of queries (columns / {len(shards)}), then equal numbers of rows "
                f"for keys and values. Name another rule with --shards"
            )
        return (queries, rest // 2, rest // 2)

    def _rule(
        self, name: str, shards: Sequence[StoredTensor], layer: Mapping[str, StoredTensor]
    ) -> Rule | tuple[int, ...]:
        """Return a rule, or the sizes of the parts of each shard."""
        for pattern, rule in self.given.items():
            if re.fullmatch(pattern, name):
                return rule
        if (parts := self._sub_parameters(name, shards)) is not None:
            return parts
        if (module := _module_of(name)) in FUSED:
            return self._attention_rule(name, module, shards, layer)
        known = _rule_of_name(name, layer)
        if known is not None:
            return known
        for key, universal in _UNIVERSAL:
            if self._matches(key, name):
                return universal
        if self.universal and not self._has_parts(name):
            # As in DeepSpeed's converter.
            return "rows"
        if len(shards[0].shape) < 2 and all(shards[0].equals(other) for other in shards[1:]):
            inner = name.partition(".")[2]
            if inner in _VECTORS:
                # A layer that is a norm.
                return "replicated"
        rules = "; ".join(f"{rule}: {meaning}" for rule, meaning in RULES.items())
        raise CheckpointError(
            f"{name} has {len(shards)} shards of shape {list(shards[0].shape)}, and its name does "
            f"not say how they form the parameter: say it with pipemega checkpoint "
            f"import-deepspeed --shards 'PATTERN=RULE' ({rules})"
        )

    def _attention_rule(
        self,
        name: str,
        module: str,
        shards: Sequence[StoredTensor],
        layer: Mapping[str, StoredTensor],
    ) -> Rule:
        weight = layer.get(_weight_of(name), shards[0])
        rule = attention_rule(module, weight.shape[0] * len(shards), weight.shape[-1], self.state)
        if rule is not None and len(weight.shape) == 2:
            return rule
        rules = "; ".join(
            f"{rule}: {meaning}: {VERSIONS[rule]}"
            for rule, meaning in RULES.items()
            if rule in VERSIONS
        )
        raise CheckpointError(
            f"{name} has {len(shards)} shards of shape {list(shards[0].shape)}, and the files do "
            f"not say in which order its rows are (mp_rank_00_model_states.pt has no 'args' with "
            f"'checkpoint_version', or they do not fit the shape). Say it with pipemega checkpoint "
            f"import-deepspeed --shards '.*{module}.*=RULE' ({rules})"
        )

    def _sub_parameters(self, name: str, shards: Sequence[StoredTensor]) -> tuple[int, ...] | None:
        """Return the sizes, in each shard, of the rows that `parameter_with_sub_params` names."""
        for entry in self.universal.get("parameter_with_sub_params") or ():
            patterns = entry.get("patterns", ()) if isinstance(entry, dict) else ()
            if not any(re.match(str(pattern), name) for pattern in patterns):
                continue
            shape, rows = entry.get("shape") or (0,), shards[0].shape[0] * len(shards)
            sizes = shape[0] if entry.get("partition_dim") == 0 else 0
            if isinstance(sizes, int):
                # Older versions: the number of equal parts.
                sizes = (rows // sizes,) * sizes if sizes > 0 else ()
            if sum(sizes) == rows and not any(size % len(shards) for size in sizes):
                return tuple(size // len(shards) for size in sizes)
        return None

    def _has_parts(self, name: str) -> bool:
        """Return whether the parameter is several that are sharded one by one, in some order."""
        kinds = [*(self.universal.get("parameter_with_sub_params") or ())]
        patterns = [p for kind in kinds if isinstance(kind, dict) for p in kind.get("patterns", ())]
        return bool(kinds) and (not patterns or any(re.match(str(p), name) for p in patterns))

    def _matches(self, key: str, name: str) -> bool:
        """Return whether a pattern matches; the patterns of tied modules have no position."""
        inner = name.partition(".")[2]
        patterns = [re.compile(str(pattern)) for pattern in self.universal.get(key, ())]
        return any(p.match(n) for p in patterns for n in (name, f"tied_modules.embed.{inner}"))


def _module_of(name: str) -> str:
    return name.split(".")[-2] if "." in name else ""


def _weight_of(name: str) -> str:
    return f"{name.rpartition('.')[0]}.weight"


def _rule_of_name(name: str, layer: Mapping[str, StoredTensor]) -> Rule | None:
    *path, last = name.split(".")
    module = _module_of(name)
    if module == "dense" and (len(path) < 2 or "attention" not in path[-2]):
        # Megatron's BERT has replicated linears of this name; other models any.
        return None
    if _REPLICATED.search(name):
        return "replicated"
    if module in _COLUMNS:
        return "columns" if last == "weight" else "replicated"
    if module not in _ROWS:
        return None
    if module in _GATED:
        down = layer.get(".".join([*path[:-1], _GATED[module], "weight"]))
        up = layer.get(".".join([*path, "weight"]))
        if down is not None and up is not None and up.shape[0] == 2 * down.shape[1]:
            return "halves"
    return "rows"


def _replicated(name: str, shards: Sequence[StoredTensor], rule: Rule) -> StoredTensor:
    first = shards[0]
    if rule == "mean":
        total = torch.stack([shard.full().float() for shard in shards]).mean(0)
        return StoredTensor.whole(total.to(first.dtype))
    for rank, other in enumerate(shards[1:], 1):
        if not first.equals(other):
            raise CheckpointError(
                f"{name} {list(first.shape)} is replicated on the tensor ranks, and its values on "
                f"ranks 0 and {rank} differ: take their mean with --shards '{re.escape(name)}=mean'"
                f", or name another rule"
            )
    return first


def join_along(
    name: str, shards: Sequence[StoredTensor], dim: int, parts: Sequence[int] = ()
) -> StoredTensor:
    """Concatenate along `dim`; with parts: the first parts of all shards, then the second parts.

    Args:
        parts: sizes of the parts of each shard; () if the shards are no parts.
    """
    pieces: list[Piece] = []
    total = sum(shard.shape[dim] for shard in shards)
    start = 0
    others = {(*shard.shape[:dim], *shard.shape[dim + 1 :]) for shard in shards}
    uneven = parts and any(shard.shape[dim] != sum(parts) for shard in shards)
    if len(others) > 1 or uneven:
        shapes = " and ".join(str(list(shard.shape)) for shard in shards)
        into = f" of parts {list(parts)}" if parts else ""
        raise CheckpointError(
            f"the shards of {name} cannot be joined along dim {dim}{into}: {shapes}; name "
            f"another rule with pipemega checkpoint import-deepspeed --shards"
        )
    for rank, shard in enumerate(shards):
        segments, first = [], 0
        for length in parts:
            segments.append((first, length, first * len(shards) + rank * length))
            first += length
        length = shard.shape[dim]
        pieces += shard.placed(dim, segments or [(0, length, start)])
        start += length
    shape = (*shards[0].shape[:dim], total, *shards[0].shape[dim + 1 :])
    return StoredTensor(shape, shards[0].dtype, tuple(pieces), len(parts) or 1)
