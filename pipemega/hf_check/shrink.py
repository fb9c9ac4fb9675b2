"""A small config of the same family: fewer layers, heads, experts, positions, tokens, narrower.

What selects the code that runs is kept: kinds of layers, groups of heads, ties, activations,
biases, RoPE scaling, norms. Widths are divided so that equations such as `hidden_size =
num_attention_heads * head_dim` still hold:

    heads        64, 8   ->  16, 2       divided by H, which divides every count
    head_dim        128  ->  16          divided by E
    hidden_size    8192  ->  256         divided by H * E, as every other width
"""

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

# Sizes of the small config.
VOCABULARY = 61
POSITIONS = 64
WINDOW = 4
MAX_LAYERS = 12
MIN_HEAD_DIM = 8
MIN_WIDTH = 8

_LAYERS = re.compile(
    r"(num_(hidden_|encoder_|decoder_)?layers|n_layers?|(encoder|decoder)_layers|depth|num_blocks)$"
)
_HEADS = re.compile(r"(.*_)?(n_|num_)?heads?(_count)?$|n_head_kv$|num_query_groups$|n_mamba_heads$")
_HEAD_DIM = re.compile(
    r".*head_?dim$|dim_head$|d_head$|.*_d_head$|d_kv$|kv_channels$|rotary_dim$|attention_head_size$"
    r"|query_pre_attn_scalar$"
)
_WIDTH = re.compile(
    r"hidden_size.*|.*_hidden_size|d_model|n_embd|n_inner|d_inner|d_ff|dff|dim_ff|.*ffn_dim|mlp_dim"
    r"|(.*_)?intermediate_size(_mlp)?|.*lora_rank|(.*_)?embed(ding)?_?(dim|size|proj_dim)|emb_dim"
    r"|feed_forward_size|dim_model_base|lru_width|mamba_d_ssm|mamba_dt_rank|time_step_rank"
    r"|.*_(input|output|proj)_(dim|size)|laurel_rank"
)
_VOCABULARY = re.compile(r"(.*_)?vocab_size(_.*)?|codebook_size")
_TOKEN = re.compile(r".*_(id|index)$")
_POSITIONS = re.compile(
    r".*max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|context_length"
    r"|max_(source|target)_positions|max_sequence_length|seq_length"
)
_WINDOW = re.compile(
    r"sliding_window(_size)?|attention_chunk_size|local_attention|attention_window_size|window_size"
    r"|index_topk|keep_window_size|(mamba_)?chunk_size"
)
_EXPERTS = re.compile(r"(num|moe_num|n)_((local|routed)_)?experts|num_experts")
_TOP_K = re.compile(r"num_experts_per_tok(en)?|moe_topk|moe_top_k|moe_k|top_k_experts|topk_experts")
_EXPERT_GROUPS = re.compile(r"n_group|num_expert_group")
_GROUPS_PER_TOKEN = re.compile(r"topk_group")
_PERIOD = re.compile(
    r".*(period|interval|pattern|_every_.*|frequency|first_k.*|offset|layer_freq|dense_layers)$"
)
_LAYER_INDICES = re.compile(r".*(idxs?|indexes|indices|layer_ids|_layers)$")
_IMAGE = re.compile(r"image_size|image_embedding_size")
_DROPOUT = re.compile(r".*(dropout|pdrop|drop_rate|drop_path).*")
_SECTION = re.compile(r".*section$")
_FACTORS = re.compile(r"(short|long)_factor$")


class Change(NamedTuple):
    """One changed value: key with dots, such as "text_config.hidden_size", before and after."""

    key: str
    old: Any
    new: Any


@dataclass(frozen=True)
class Needs:
    """What the small model must still allow.

    Args:
        layers: the smallest number of layers of a stack.
        tensor: tensor ranks; a size is divisible by them if the user's is.
        expert: expert ranks, of which the number of experts remains a multiple.
    """

    layers: int = 2
    tensor: int = 1
    expert: int = 1


# Their widths are equal to the widths of other nested configs (SAM).
_SAME_WIDTH = ("prompt_encoder_config", "mask_decoder_config")

# Groups of keys that are shrunk together; `shrink` leaves a group out if the model fails with it.
GROUPS = ("layers", "vocabulary", "positions", "windows", "experts", "images", "widths")


def shrink(
    config: Any, needs: Needs, is_valid: Callable[[Any], bool]
) -> tuple[Any, Sequence[Change]]:
    """Return a small config and the changes; (None, ()) if none is valid.

    Args:
        config: a config of transformers; it is not changed.
        is_valid: whether a model of this config can be built and run.
    """
    small = _changed(config, needs, GROUPS)
    if small is not None and is_valid(small[0]):
        return small
    best: tuple[Any, Sequence[Change]] = (None, ())
    kept: list[str] = []
    for group in (None, *GROUPS):
        groups = [*kept, group] if group is not None else kept
        small = _changed(config, needs, groups)
        if small is not None and is_valid(small[0]):
            kept, best = groups, small
    return best


def _changed(config: Any, needs: Needs, groups: Sequence[str]) -> tuple[Any, list[Change]] | None:
    """Return the config with the edits of `groups`; None if transformers refuses it."""
    values = copy.deepcopy(config.to_dict())
    changes = list(edits(values, needs, groups))
    try:
        return type(config).from_dict(values), changes
    except Exception:
        # Each family validates its sizes with errors of its own.
        return None


def edits(
    values: dict[str, Any], needs: Needs, groups: Sequence[str] = GROUPS, prefix: str = ""
) -> Iterator[Change]:
    """Change `values`, a config as nested dicts, in place; yield the changes."""
    for key, value in values.items():
        if isinstance(value, dict) and "model_type" in value:
            inner = [g for g in groups if g != "widths"] if key in _SAME_WIDTH else groups
            yield from edits(value, needs, inner, f"{prefix}{key}.")
    new = _new_values(values, needs, groups)
    for key, value in new.items():
        if values[key] != value:
            yield Change(f"{prefix}{key}", values[key], value)
            values[key] = value


def _new_values(values: Mapping[str, Any], needs: Needs, groups: Sequence[str]) -> dict[str, Any]:
    # Random masks differ between the split and the unsplit model.
    new: dict[str, Any] = {
        k: 0.0 for k, v in values.items() if _DROPOUT.fullmatch(k) and type(v) is float
    }
    if "layers" in groups:
        new |= _layers(values, needs.layers)
    if "vocabulary" in groups:
        new |= _vocabulary(values)
    if "positions" in groups:
        new |= _positions(values)
    if "windows" in groups:
        new |= {k: min(v, WINDOW) for k, v in _sizes(values, _WINDOW)}
    if "experts" in groups:
        new |= _experts(values, needs.expert)
    if "images" in groups:
        new |= _images(values)
    if "widths" in groups:
        new |= _widths(values, needs.tensor)
    return new


def _sizes(values: Mapping[str, Any], pattern: re.Pattern[str]) -> list[tuple[str, int]]:
    """Return the whole numbers above 0 whose key matches."""
    return [
        (key, value)
        for key, value in values.items()
        if pattern.fullmatch(key) and type(value) is int and value > 0
    ]


# Layers


def _layers(values: Mapping[str, Any], least: int) -> dict[str, Any]:
    counts = dict(_sizes(values, _LAYERS))
    if not counts:
        return {}
    old = max(counts.values())
    lists = {
        key: value
        for key, value in values.items()
        if isinstance(value, list | tuple) and len(value) == old and "token" not in key
    }
    number = max(least, _layers_of_all_kinds(list(lists.values())), _longest_period(values, old))
    for key, value in values.items():
        if _LAYER_INDICES.fullmatch(key) and isinstance(value, list) and _are_indices(value, old):
            number = max(number, min(value) + 1)
    number = min(number, max(least, MAX_LAYERS), old)
    new: dict[str, Any] = {key: min(count, number) for key, count in counts.items()}
    new |= {key: list(value[:number]) for key, value in lists.items()}
    for key, value in values.items():
        if _LAYER_INDICES.fullmatch(key) and isinstance(value, list) and _are_indices(value, old):
            new[key] = [index for index in value if index < number]
        elif key.endswith("layer_end_index") and type(value) is int:
            new[key] = min(value, number - 1)
        elif key.endswith("shared_layers") and type(value) is int:
            new[key] = min(value, number // 2)
    return new


def _layers_of_all_kinds(lists: Sequence[Sequence[Any]]) -> int:
    """Return how many layers contain one of each kind that occurs."""
    kinds = [repr(kind) for kind in zip(*lists, strict=True)]
    return max((kinds.index(kind) + 1 for kind in set(kinds)), default=0)


def _longest_period(values: Mapping[str, Any], layers: int) -> int:
    """Return how many layers show what recurs every few layers, or begins after the first few."""
    return max((v + 1 for _, v in _sizes(values, _PERIOD) if 1 < v < layers), default=0)


def _are_indices(value: Sequence[Any], layers: int) -> bool:
    return bool(value) and all(type(v) is int and 0 <= v < layers for v in value)


# Tokens, positions, experts, images


def _vocabulary(values: Mapping[str, Any]) -> dict[str, Any]:
    # Odd: the rows do not divide by the tensor ranks, and the table is padded.
    sizes = {k: min(v, VOCABULARY) for k, v in _sizes(values, _VOCABULARY) if v > VOCABULARY}
    nested = [v for v in values.values() if isinstance(v, dict) and "model_type" in v]
    if not sizes and not any(_sizes(inner, _VOCABULARY) for inner in nested):
        return {}
    new: dict[str, Any] = dict(sizes)
    ids: dict[int, int] = {}

    def small(token: Any) -> Any:
        """Return an id in the small vocabulary; different ids remain different."""
        if type(token) is not int or token < VOCABULARY:
            return token
        return ids.setdefault(token, max(0, VOCABULARY - 1 - len(ids)))

    for key, value in values.items():
        if _TOKEN.fullmatch(key):
            new[key] = [small(v) for v in value] if isinstance(value, list) else small(value)
    return new


def _positions(values: Mapping[str, Any]) -> dict[str, Any]:
    new: dict[str, Any] = {key: min(value, POSITIONS) for key, value in _sizes(values, _POSITIONS)}
    rope = values.get("rope_parameters") or values.get("rope_scaling")
    if isinstance(rope, dict):
        name = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
        scaled = _rope_positions(rope)
        if scaled != rope:
            new[name] = scaled
    return new


def _rope_positions(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the scaling, with positions of a short sequence."""
    new: dict[str, Any] = {}
    for key, value in rope.items():
        if isinstance(value, dict):
            new[key] = _rope_positions(value)
        elif key == "original_max_position_embeddings" and type(value) is int:
            new[key] = min(value, POSITIONS // 2)
        else:
            new[key] = value
    return new


def _experts(values: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    grouped = any(v > 1 for _, v in _sizes(values, _EXPERT_GROUPS))
    least = math.lcm(8 if grouped else 4, ranks)
    new = {key: min(value, least) for key, value in _sizes(values, _EXPERTS)}
    new |= {key: min(value, 2) for key, value in _sizes(values, _TOP_K)}
    new |= {key: min(value, 2) for key, value in _sizes(values, _EXPERT_GROUPS)}
    new |= {key: 1 for key, _ in _sizes(values, _GROUPS_PER_TOKEN)}
    return new


def _images(values: Mapping[str, Any]) -> dict[str, Any]:
    """Leave a grid of 4 x 4 patches."""
    sizes, patch = dict(_sizes(values, _IMAGE)), values.get("patch_size")
    image = sizes.get("image_size")
    if image is None or type(patch) is not int or image // patch <= 4:
        return {}
    factor = max(f for f in range(1, image // patch // 4 + 1) if image // patch % f == 0)
    return {key: size // factor for key, size in sizes.items()}


# Heads and widths


def _widths(values: Mapping[str, Any], tensor: int) -> dict[str, Any]:
    heads, dims, widths = (dict(_sizes(values, p)) for p in (_HEADS, _HEAD_DIM, _WIDTH))
    by_heads = _heads_factor([count for count in heads.values() if count > 1], tensor)
    by_dim = _dim_factor(values, heads, dims, widths) if heads else _plain_factor(widths)
    new: dict[str, Any] = {k: v // by_heads for k, v in heads.items() if v > 1}
    new |= {k: v // by_dim for k, v in dims.items()}
    factor = by_heads * by_dim
    new |= {k: _narrow(v, factor, tensor) for k, v in widths.items() if k not in new}
    rope = values.get("rope_parameters") or values.get("rope_scaling")
    if isinstance(rope, dict) and by_dim > 1:
        name = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
        new[name] = _rope_dims(rope, by_dim)
    return new


def _heads_factor(counts: Sequence[int], tensor: int) -> int:
    """Return the largest divisor of all counts that leaves enough heads, groups included."""
    common = math.gcd(*counts) if counts else 1
    for factor in range(common, 1, -1):
        left = [count // factor for count in counts]
        if (
            common % factor == 0
            and min(left) >= 2
            and max(left) >= min(max(counts), max(4, 2 * tensor))
            and all((c % tensor == 0) == (c // factor % tensor == 0) for c in counts)
        ):
            return factor
    return 1


def _dim_factor(
    values: Mapping[str, Any],
    heads: Mapping[str, int],
    dims: Mapping[str, int],
    widths: Mapping[str, int],
) -> int:
    """Return the largest divisor of all sizes of a head that leaves `MIN_HEAD_DIM`."""
    sizes = list(dims.values())
    width = next((widths[k] for k in ("hidden_size", "d_model", "n_embd") if k in widths), None)
    if "head_dim" not in dims and width is not None and width % max(heads.values()) == 0:
        sizes.append(width // max(heads.values()))
    if not sizes:
        return 1
    common = math.gcd(*sizes, *_sections(values))
    fits = (f for f in range(common, 0, -1) if common % f == 0 and min(sizes) // f >= MIN_HEAD_DIM)
    return next(fits, 1)


def _plain_factor(widths: Mapping[str, int]) -> int:
    """Return the factor of a model without heads (state-space models)."""
    common = math.gcd(*widths.values()) if widths else 1
    fits = (f for f in range(common, 1, -1) if common % f == 0)
    return next((f for f in fits if min(widths.values()) // f >= 4 * MIN_WIDTH), 1)


def _sections(values: Mapping[str, Any]) -> Iterator[int]:
    """Yield the numbers of rotary channels per kind of position (multimodal RoPE)."""
    for key, value in values.items():
        if isinstance(value, dict) and key.startswith("rope"):
            yield from _sections(value)
        elif isinstance(value, list) and _SECTION.fullmatch(key):
            yield from value


def _rope_dims(rope: Mapping[str, Any], factor: int) -> dict[str, Any]:
    new: dict[str, Any] = {}
    for key, value in rope.items():
        if isinstance(value, dict):
            new[key] = _rope_dims(value, factor)
        elif isinstance(value, list) and _SECTION.fullmatch(key):
            new[key] = [channels // factor for channels in value]
        elif isinstance(value, list) and _FACTORS.fullmatch(key):
            new[key] = value[: len(value) // factor]
        else:
            new[key] = value
    return new


def _narrow(width: int, factor: int, tensor: int) -> int:
    """Return the width divided by `factor`; if it does not divide, rounded up to a multiple."""
    step = tensor if width % tensor == 0 else 1
    if width % factor == 0 and width // factor % step == 0:
        return width // factor
    step = math.lcm(step, 4)
    return min(width, max(MIN_WIDTH, math.ceil(width / factor / step) * step))
