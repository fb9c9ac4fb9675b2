"""The config sections `model`, `mesh` and `pipeline` from Megatron's arguments."""

import re
from itertools import pairwise
from typing import Any

from pipemega.compat.megatron.arguments import SECTIONS, Argument, Given

_LLAMA3 = {
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_ROTARY = ("rope", "rotary")
# Pipeline layers before the blocks (embedding, positions) and after them (norm, head).
_BEFORE, _AFTER = 2, 2
_EXPERTS = SECTIONS["Mixtures of experts"]
_SCORES = ("softmax", "sigmoid")
_BALANCE = ("aux_loss", "seq_aux_loss", "none")
# Without the second argument the first has no effect in Megatron; here its key would be an error.
_NEEDS = {
    "moe-router-num-groups": "moe-router-group-topk",
    "moe-shared-expert-gate": "moe-shared-expert-intermediate-size",
}


def model_section(given: Given) -> dict[str, Any]:
    """Return the section `model`; keys that equal the default of both are left out."""
    hidden, heads = given.number("hidden-size"), given.number("num-attention-heads")
    model: dict[str, Any] = {
        "num_layers": given.number("num-layers"),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "ffn_hidden_size": _feed_forward(given, hidden),
        "seq_length": given.number("seq-length"),
        "init_method_std": given.number("init-method-std", 0.02),
        "attention_dropout": given.number("attention-dropout", 0.1),
        "hidden_dropout": given.number("hidden-dropout", 0.1),
        "kv_channels": given.number("kv-channels"),
        "norm_epsilon": given.number("norm-epsilon"),
        **_query_groups(given),
        **_positions(given),
        **_activation(given),
        **_experts(given),
        **_vocabulary(given),
        **_recompute(given),
    }
    if "rms" in given.text("normalization", "").lower() or given.flag("use-rms-norm"):
        model["normalization"] = "RMSNorm"
    flags = {
        "add-qkv-bias": "add_qkv_bias",
        "qk-layernorm": "qk_layernorm",
        "embed-layernorm": "embedding_norm",
        "untie-embeddings-and-output-weights": "untie_embeddings_and_output_weights",
    }
    model |= {key: True for name, key in flags.items() if given.flag(name)}
    if given.flag("disable-bias-linear"):
        model["add_bias_linear"] = False
    for name in ("num-layers", "hidden-size", "num-attention-heads", "seq-length"):
        if name not in given:
            given.say("unknown", name, "it is missing: the config needs it")
    return {key: value for key, value in model.items() if value is not None}


def _feed_forward(given: Given, hidden: int | None) -> int | None:
    size: int | None = given.number("ffn-hidden-size")
    if size is not None or hidden is None:
        return size
    # As int((4 * h * 2 / 3) / 64) * 64 in Megatron; bigscience's --glu-activation keeps 4 * h.
    return 8 * hidden // 3 // 64 * 64 if given.flag("swiglu") else 4 * hidden


def _query_groups(given: Given) -> dict[str, Any]:
    groups = given.number("num-query-groups")
    if given.text("attention-head-type", "multihead") != "multihead":
        return {"num_query_groups": 1}
    # Forks without --group-query-attention have another name for the number.
    own_name = given.written.get("num-query-groups", "").replace("_", "-") != "--num-query-groups"
    if given.flag("group-query-attention") or (groups is not None and own_name):
        return {"num_query_groups": 1 if groups is None else groups}
    if groups not in (None, 1):
        given.say("note", "num-query-groups", "no effect without --group-query-attention")
    return {}


def _positions(given: Given) -> dict[str, Any]:
    kind = given.text("position-embedding-type", "learned_absolute").lower()
    if given.flag("use-rotary-position-embeddings") or kind in _ROTARY:
        found = {"position_embedding_type": "rope", "rotary_base": given.number("rotary-base")}
        return found | {"rotary_percent": given.number("rotary-percent")} | _rope_scaling(given)
    if kind not in ("learned_absolute", "absolute"):
        text = "positions must be learned_absolute or rope"
        way = {
            "alibi": "; a BLOOM config with model.type 'hf' has ALiBi",
            "yarn": "; use --position-embedding-type rope, and write model.rope_scaling with "
            "transformers' keys of yarn",
        }
        given.say("refused", "position-embedding-type", text + way.get(kind, ""))
    elif given.flag("no-position-embedding"):
        given.say("refused", "no-position-embedding", "the GPT needs learned or rotary positions")
    for name in ("rotary-base", "rotary-percent", "use-rope-scaling"):
        if name in given:
            given.say("note", name, "no effect without rotary positions")
    size = given.number("max-position-embeddings")
    return {"max_position_embeddings": None if size == given.number("seq-length") else size}


def _rope_scaling(given: Given) -> dict[str, Any]:
    factor = given.number("rotary-seq-len-interpolation-factor")
    if given.flag("use-rope-scaling"):
        scaling = given.number("rope-scaling-factor", 8.0)
        return {"rope_scaling": {"rope_type": "llama3", "factor": scaling, **_LLAMA3}}
    if factor not in (None, 1):
        return {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    return {}


def _activation(given: Given) -> dict[str, Any]:
    activation = given.text("glu-activation")
    if activation not in (None, "swiglu"):
        given.say("refused", "glu-activation", "the gated activation must be swiglu")
    if given.flag("swiglu") or activation == "swiglu":
        return {"swiglu": True}
    if given.flag("squared-relu"):
        return {"squared_relu": True}
    if not given.flag("no-bias-gelu-fusion"):
        given.say("note", "", "GELU is exact here; Megatron's fused kernel approximates it by tanh")
    return {}


def _experts(given: Given) -> dict[str, Any]:
    """Return the keys of experts that are given; none for a model without experts."""
    if (given.number("num-experts") or 0) <= 1:
        for argument in _EXPERTS[1:]:
            if argument.name in given:
                given.say("note", argument.name, "no effect without --num-experts")
        return {}
    _check_layout(given)
    found: dict[str, Any] = {}
    for argument in _EXPERTS:
        name, other = argument.name, _NEEDS.get(argument.name)
        if other is not None and name in given and other not in given:
            given.say("note", name, f"no effect without --{other}")
        elif name in given:
            found[argument.keys.removeprefix("model.")] = _expert_key(given, argument)
    _check_scores(given, found)
    return found | _balance(given)


def _expert_key(given: Given, argument: Argument) -> Any:
    readers = {"flag": given.flag, "text": given.text, "list": given.text, "pattern": given.pattern}
    return readers.get(argument.kind, given.number)(argument.name)


def _check_layout(given: Given) -> None:
    if given.flag("deepspeed"):
        given.say("refused", "num-experts", "with --deepspeed these are DeepSpeed's experts, which "
                  "drop tokens: use Megatron-LM's arguments, without --deepspeed")  # fmt: skip
    tensor = given.number("tensor-model-parallel-size", 1)
    if given.number("expert-tensor-parallel-size", tensor) != tensor:
        given.say("refused", "expert-tensor-parallel-size", "mesh.tensor cuts experts like other "
                  f"layers: set it to --tensor-model-parallel-size, {tensor}")  # fmt: skip


def _check_scores(given: Given, found: dict[str, Any]) -> None:
    kind, topk = found.get("moe_router_score_function", "softmax"), found.get("moe_router_topk", 2)
    if kind not in _SCORES:
        del found["moe_router_score_function"]
        given.say("refused", "moe-router-score-function", f"it must be {' or '.join(_SCORES)}")
    # With one expert of each group, logits and probabilities give the same order.
    several = found.get("moe_router_group_topk", topk) != topk
    if several and kind == "softmax" and not found.get("moe_router_pre_softmax"):
        given.say("changed", "moe-router-group-topk", "groups are chosen by sums of probabilities; "
                  "Megatron adds logits, without --moe-router-pre-softmax")  # fmt: skip


def _balance(given: Given) -> dict[str, Any]:
    """Return the auxiliary loss; None for its keys if there is none."""
    name = "moe-router-load-balancing-type"
    kind, coefficient = given.text(name, "aux_loss"), given.number("moe-aux-loss-coeff")
    if kind not in _BALANCE or len(given.values.get(name, ())) > 1:
        given.say("refused", name, f"it must be one of {', '.join(_BALANCE)}: use seq_aux_loss, or "
                  "--moe-router-enable-expert-bias")  # fmt: skip
        coefficient = None
    used = bool(coefficient) and kind != "none"
    return {
        "moe_router_load_balancing_type": kind if used else None,
        "moe_aux_loss_coeff": coefficient if used else None,
    }


def _vocabulary(given: Given) -> dict[str, Any]:
    found: dict[str, Any] = {
        "make_vocab_size_divisible_by": given.number("make-vocab-size-divisible-by", 128),
        "pad_vocab_size_to": given.number("pad-vocab-size-to"),
    }
    if given.flag("no-pad-vocab-size"):
        found["make_vocab_size_divisible_by"] = 1
    size = given.number("vocab-size")
    # Megatron's NullTokenizer adds the end-of-document token.
    null = "null" in given.text("tokenizer-type", "").lower()
    return found | {"vocab_size": None if size is None else size + null}


def _recompute(given: Given) -> dict[str, Any]:
    kind = given.text("recompute-granularity")
    method, layers = given.text("recompute-method"), given.number("recompute-num-layers")
    if given.flag("recompute-activations"):
        kind = "selective"
    elif given.flag("checkpoint-activations") or "activations-checkpoint-method" in given:
        method = given.text("activations-checkpoint-method") or method
        kind, method = "full", method or "uniform"
    if kind != "full":
        return {"recompute": kind}
    if method == "block" or (layers or 1) > 1:
        return {
            "recompute": "full",
            "recompute_method": method or "uniform",
            "recompute_num_layers": layers or 1,
        }
    return {"recompute": "full"}


def mesh_section(given: Given) -> dict[str, Any]:
    """Return the section `mesh`."""
    tensor = given.number("tensor-model-parallel-size", 1)
    pipeline = given.number("pipeline-model-parallel-size", 1)
    if given.flag("no-pipeline-parallel"):
        pipeline = 1
    mesh: dict[str, Any] = {"tensor": tensor, "pipeline": pipeline}
    if (expert := given.number("expert-model-parallel-size", 1)) > 1:
        mesh["expert"] = expert
    if given.flag("sequence-parallel") and tensor > 1:
        mesh["sequence_parallel"] = True
        if given.flag("tp-comm-overlap"):
            mesh["overlap_sequence_parallel"] = True
    minutes = given.number("distributed-timeout-minutes")
    if minutes is not None:
        mesh["timeout_seconds"] = 60 * minutes
    if given.text("distributed-backend") == "gloo":
        mesh["device"] = "cpu"
    return mesh


def pipeline_section(given: Given, model: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Return the section `pipeline`, empty without a pipeline."""
    if ranks == 1:
        return {}
    layers = model.get("num_layers")
    chunks = _chunks(given, layers, ranks)
    found: dict[str, Any] = {"schedule": "1f1b"}
    if given.flag("enable-zbh1-pipeline"):
        found["schedule"] = "zb-h1"
    elif chunks > 1:
        found |= {"schedule": "interleaved", "chunks": chunks}
    method = given.text("pp-partition-method")
    bounds = _bounds(given, layers, ranks, chunks)
    if bounds is not None:
        found["partition"] = bounds
    elif method is not None:
        # The names of Megatron's layers: ParallelTransformerLayerPipe, EmbeddingPipe.
        method = re.sub("(?i)(parallel)?transformer(layer(pipe)?)?", "Block", method)
        found["partition"] = re.sub("(?i)embedding(pipe)?", "Embedding", method)
    return found


def _chunks(given: Given, layers: int | None, ranks: int) -> int:
    chunks = given.number("num-virtual-stages-per-pipeline-rank")
    each = given.number("num-layers-per-virtual-pipeline-stage")
    if chunks is None and each and layers:
        counted = layers + sum(
            given.flag(f"account-for-{part}-in-pipeline-split") for part in ("embedding", "loss")
        )
        if counted % (ranks * each):
            given.say(
                "refused",
                "num-layers-per-virtual-pipeline-stage",
                f"{counted} layers do not divide into {ranks} ranks x {each} layers",
            )
        chunks = counted // (ranks * each)
    layout = given.text("pipeline-model-parallel-layout")
    if chunks is None and layout is not None:
        chunks = len(_expanded(layout).split("|")) // ranks
    return chunks or 1


def _bounds(given: Given, layers: int | None, ranks: int, chunks: int) -> list[int] | None:
    """Return `pipeline.partition` if the arguments determine the blocks of each stage."""
    layout = given.text("pipeline-model-parallel-layout")
    blocks: list[int] | None = None
    if layout is not None:
        stages = _expanded(layout).split("|")
        if set("".join(stages)) - set("EtL"):
            given.say(
                "refused",
                "pipeline-model-parallel-layout",
                "a layout may have E (embedding), t (block), L (loss) and | only",
            )
            return None
        blocks = [stage.count("t") for stage in stages]
    elif layers is not None:
        blocks = _uneven(given, layers, ranks, chunks)
    if blocks is None or (layers is not None and sum(blocks) != layers):
        return None
    bounds = [0]
    for number, count in enumerate(blocks):
        edge = _BEFORE * (number == 0) + _AFTER * (number == len(blocks) - 1)
        bounds.append(bounds[-1] + count + edge)
    if any(a == b for a, b in pairwise(bounds)):
        given.say("changed", "pipeline-model-parallel-layout",
                  "stages without a layer are not possible: stages get equal numbers of "
                  "parameters")  # fmt: skip
        return None
    return bounds


def _uneven(given: Given, layers: int, ranks: int, chunks: int) -> list[int] | None:
    first = given.number("decoder-first-pipeline-num-layers")
    last = given.number("decoder-last-pipeline-num-layers")
    embedding = given.flag("account-for-embedding-in-pipeline-split")
    loss = given.flag("account-for-loss-in-pipeline-split")
    if first is None and last is None and not (embedding or loss):
        return None
    stages = ranks * chunks
    if embedding or loss:
        each = (layers + embedding + loss) // stages
        blocks = [each] * stages
        blocks[0] -= embedding
        blocks[-1] -= loss
        return blocks
    # The first and the last rank have fewer or more blocks; the others share the rest.
    others = ranks - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if others <= 0 or rest % others:
        return None
    of_ranks = [rest // others] * others
    of_ranks = [first] * (first is not None) + of_ranks + [last] * (last is not None)
    if any(count is None or count % chunks for count in of_ranks):
        return None
    return [(count or 0) // chunks for _ in range(chunks) for count in of_ranks]


def _expanded(layout: str) -> str:
    """Write out the repetitions of a layout: "Et*2|(tt|)*2L" becomes "Ett|tt|tt|L"."""
    text = re.sub(r"[, \\]", "", layout)
    pattern = re.compile(r"(?:\(([^()]*)\)|(\w|\|))\*(\d+)")
    while found := pattern.search(text):
        repeated = (found[1] or found[2]) * min(int(found[3]), 10_000)
        text = text[: found.start()] + repeated + text[found.end() :]
    return text.replace("(", "").replace(")", "")
