"""The table of arguments agrees with the schema, with the conversion and with docs/megatron.md."""

import re
from pathlib import Path
from typing import Any

import pytest

from pipemega.compat.megatron.arguments import ABSENT, ARGUMENTS, SECTIONS, absent, argument_page
from pipemega.config.reference_pages import schema

ROOT = Path(__file__).parents[4]
SOURCES = [*(ROOT / "pipemega/compat/megatron").glob("*_keys.py"),
           ROOT / "pipemega/compat/megatron/conversion.py"]  # fmt: skip

# Arguments of pretrain_gpt.py that users expect, and those that real scripts use most.
EXPECTED = """
num-layers hidden-size ffn-hidden-size num-attention-heads group-query-attention num-query-groups
kv-channels seq-length max-position-embeddings position-embedding-type rotary-base rotary-percent
normalization norm-epsilon swiglu squared-relu disable-bias-linear add-qkv-bias qk-layernorm
untie-embeddings-and-output-weights make-vocab-size-divisible-by attention-dropout hidden-dropout
init-method-std apply-query-key-layer-scaling tensor-model-parallel-size
pipeline-model-parallel-size num-layers-per-virtual-pipeline-stage
num-virtual-stages-per-pipeline-rank decoder-first-pipeline-num-layers
decoder-last-pipeline-num-layers pipeline-model-parallel-layout sequence-parallel
context-parallel-size use-distributed-optimizer overlap-grad-reduce overlap-param-gather
microbatch-group-size-per-virtual-pipeline-stage micro-batch-size global-batch-size
rampup-batch-size step-batch-size-schedule decrease-batch-size-if-needed train-iters train-samples
eval-iters eval-interval exit-interval exit-duration-in-mins exit-signal-handler log-interval
optimizer lr min-lr weight-decay start-weight-decay end-weight-decay weight-decay-incr-style
clip-grad adam-beta1 adam-beta2 adam-eps sgd-momentum lr-decay-style lr-decay-iters
lr-decay-samples lr-warmup-iters lr-warmup-samples lr-warmup-fraction lr-warmup-init
lr-wsd-decay-style lr-wsd-decay-iters lr-wsd-decay-samples override-opt-param-scheduler
use-checkpoint-opt-param-scheduler fp16 bf16 loss-scale initial-loss-scale min-loss-scale
loss-scale-window hysteresis accumulate-allreduce-grads-in-fp32 fp32-residual-connection
attention-softmax-in-fp32 calculate-per-token-loss no-check-for-nan-in-loss-and-grad
recompute-granularity recompute-method recompute-num-layers recompute-modules
distribute-saved-activations save load save-interval save-retain-interval no-save-optim no-save-rng
no-load-optim no-load-rng finetune ckpt-format async-save ckpt-step data-path split data-cache-path
mock-data num-workers dataloader-type tokenizer-type tokenizer-model vocab-file merge-file
eod-mask-loss reset-position-ids reset-attention-mask tensorboard-dir log-timers-to-tensorboard
log-params-norm log-num-zeros-in-grad log-throughput timing-log-level wandb-project wandb-exp-name
wandb-entity wandb-save-dir seed train-tokens lr-decay-tokens lr-warmup-tokens num-experts
expert-model-parallel-size expert-tensor-parallel-size moe-router-topk moe-layer-freq
moe-router-load-balancing-type moe-grouped-gemm moe-token-dispatcher-type moe-expert-capacity-factor
overlap-moe-expert-parallel-comm embed-layernorm pad-vocab-size-to kill-switch-path
kill-switch-file deterministic-mode enable-cuda-graph cuda-graph-impl fp8-format
train-weighted-split-paths-path deepspeed deepspeed-config zero-stage transformer-impl
checkpoint-activations distributed-backend use-flash-attn attention-backend
deepspeed-activation-checkpointing
"""


@pytest.mark.parametrize("name", EXPECTED.split())
def test_an_argument_of_megatron_has_a_key_or_a_reason(name: str) -> None:
    entry = absent(name)
    assert name in ARGUMENTS or (entry is not None and entry.why)


def test_no_argument_has_both_a_key_and_a_reason() -> None:
    # The patterns of the reasons are for names without a key of their own.
    exact = {name for entry in ABSENT for name in entry.names.split() if "*" not in name}
    assert exact & set(ARGUMENTS) == set()


def properties(node: Any, key: str) -> list[Any]:
    """Return the schemas of `key` in an object, in any of its alternatives."""
    found = [node["properties"][key]] if key in node.get("properties", {}) else []
    for word in ("anyOf", "oneOf", "allOf"):
        found += [one for part in node.get(word, ()) for one in properties(part, key)]
    for word in ("then", "else", "if"):
        found += properties(node[word], key) if isinstance(node.get(word), dict) else []
    return found


def test_every_key_of_the_table_is_in_the_schema() -> None:
    root = schema()

    def resolve(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return resolve(root["$defs"][node["$ref"].rsplit("/", 1)[-1]])
            return {key: resolve(value) for key, value in node.items() if key != "$defs"}
        return [resolve(part) for part in node] if isinstance(node, list) else node

    whole = resolve(root)
    for argument in (one for section in SECTIONS.values() for one in section):
        for key in argument.keys.split():
            nodes = [whole]
            for part in key.split("."):
                nodes = [one for node in nodes for one in properties(node, part)]
            assert nodes, (argument.name, key)


def test_the_conversion_reads_every_argument_of_the_table_and_no_other() -> None:
    text = "\n".join(path.read_text() for path in SOURCES)
    quoted = set(re.findall(r'"([a-z][a-z0-9-]*)"', text))
    composed = {
        *(f"{split}-{rest}" for split in ("train", "valid", "test")
          for rest in ("data-path", "weighted-split-paths", "weighted-split-paths-path")),
        *(f"lr-{what}-{unit}" for what in ("decay", "warmup", "wsd-decay")
          for unit in ("iters", "samples", "tokens")),
        *(f"account-for-{part}-in-pipeline-split" for part in ("embedding", "loss")),
        *(argument.name for argument in SECTIONS["Mixtures of experts"]),
        *(f"wandb-{name}" for name in ("project", "exp-name", "entity", "save-dir")),
    }  # fmt: skip
    names = {argument.name for section in SECTIONS.values() for argument in section}
    assert names - quoted - composed == set()


def test_the_page_of_arguments_is_the_output_of_the_command() -> None:
    assert (ROOT / "docs/megatron.md").read_text(encoding="utf-8") == argument_page()
