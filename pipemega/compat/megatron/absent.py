"""What is said about an argument without a key.

All arguments of Megatron-LM and Megatron-DeepSpeed that have no key, and why.

Arguments of the model, the precision and the mesh that have no key, and why.

Arguments of the training, the data, checkpoints and logging that have no key, and why.
"""

import fnmatch
from typing import Literal, NamedTuple

Effect = Literal["none", "differs", "refused"]


class Absent(NamedTuple):
    """Arguments without a counterpart.

    Args:
        effect: "none": the training is the same without it; "differs": the same training, but a
            detail that the reason names; "refused": the config would train something else.
        why: no key is needed, or what to use.
        names: separated by spaces, with `*` for any text.
        harmless: values with which the argument changes nothing.
    """

    effect: Effect
    why: str
    names: str
    harmless: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        """Return whether the argument `name` is one of these."""
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.names.split())


R = Absent

ABSENT_OF_MODEL: tuple[Absent, ...] = (
    # Other models.
    R(
        "refused",
        "there are no mixture-of-experts layers in the GPT; model.type 'hf' trains those of "
        "transformers",
        "num-experts",
        ("0", "1"),
    ),
    R(
        "none",
        "it configures experts, see --num-experts",
        "moe-* expert-* topk use-tutel disable-moe-* create-moe-param-group expert-interval "
        "mlp-type enable-expert-tensor-parallelism num-experts-switch "
        "overlap-moe-expert-parallel-comm *-shared-expert* use-upcycling "
        "high-priority-a2a-comm-stream overlap-dispatch-backward-with-experts-wgrad "
        "delay-wgrad-compute ep-overlap-* log-moe-* moe delay-offload-until-cuda-graph",
    ),
    R(
        "refused",
        "there is no multi-latent attention; use model.type 'hf' with a DeepSeek config",
        "multi-latent-attention",
    ),
    R(
        "none",
        "it configures multi-latent attention, see --multi-latent-attention",
        "q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim rotary-scaling-factor "
        "mscale mscale-all-dim cache-mla-latents mla-*",
    ),
    R(
        "refused",
        "the GPT has only attention layers; model.type 'hf' has Mamba and hybrid models",
        "is-hybrid-model hybrid-* experimental-attention-variant linear-attention-freq "
        "heterogeneous-layers-config-*",
    ),
    R(
        "none",
        "it configures Mamba or another kind of attention, which the GPT does not have",
        "mamba-* gdp-* disable-mamba-mem-eff-path linear-conv-* linear-key-* linear-value-* "
        "linear-num-* dsa-* no-dsa-* disable-dsa-*",
    ),
    R(
        "refused",
        "there is no multi-token prediction",
        "mtp-num-layers",
        ("0",),
    ),
    R(
        "none",
        "it configures multi-token prediction, see --mtp-num-layers",
        "mtp-*",
    ),
    R(
        "refused",
        "only the GPT is built in; models of other kinds come from model.type 'hf' or a "
        "PipelineModule of your own",
        "encoder-num-layers encoder-hidden-size retro-* bert-* ict-* biencoder-* img-h img-w "
        "img-dim num-classes patch-dim vision-* dino-* swin-* mask-* num-channels titles-data-path "
        "block-data-path embedding-path evidence-data-path query-in-block-prob use-one-sent-docs "
        "retriever-* indexer-* classes-fraction data-per-class-fraction "
        "head-lr-mult iter-per-epoch short-seq-prob output-bert-embeddings "
        "allow-transformer-engine-* adapter-* mrope-section enable-mhc-connections mhc-*",
    ),
    R(
        "refused",
        "the activation must be GELU, SwiGLU or squared ReLU",
        "quick-geglu glu-linear-offset activation-func-clamp-value",
        ("0", "0.0"),
    ),
    R(
        "refused",
        "attention is always full and causal, with the plain softmax",
        "window-size window-attn-skip-freq softmax-type attention-output-gate qk-l2-norm qk-clip",
        ("vanilla",),
    ),
    R(
        "refused",
        "use --group-query-attention with --num-query-groups 1",
        "multi-query-attention",
    ),
    R(
        "none",
        "it configures --qk-clip",
        "qk-clip-*",
    ),
    R(
        "refused",
        "the residual stream is that of GPT-2: norms before the blocks",
        "apply-residual-connection-post-layernorm use-post-ln parallel-attn parallel-layernorm "
        "no-parallel-layernorm use-sandwich-norm",
    ),
    R(
        "refused",
        "the rotary positions are those of GPT-NeoX, the same in each layer; YaRN has keys in "
        "model.rope_scaling",
        "rotary-interleaved no-rope-freq yarn-* no-yarn-* relative-attention-* rope-type",
    ),
    R(
        "refused",
        "the layers are those of the built-in GPT",
        "spec",
        ("local",),
    ),
    R(
        "refused",
        "there is no muP",
        "use-mup mup mup-*",
    ),
    R(
        "differs",
        "the GELU here is the exact one: --openai-gelu approximates it",
        "openai-gelu",
    ),
    R(
        "none",
        "the GELU here is the exact one, as without Megatron's fused kernels",
        "no-bias-gelu-fusion",
    ),
    R(
        "differs",
        "residuals have the dtype of the computation",
        "fp32-residual-connection",
    ),
    R(
        "none",
        "training is equal: Megatron stores the weight minus 1, and norms are not decayed",
        "apply-layernorm-1p",
    ),
    R(
        "refused",
        "all weights are initialized with --init-method-std",
        "embedding-init-method-std init-method-xavier-uniform",
    ),
    R(
        "none",
        "the same numbers in another order of operations, or another kernel",
        "apply-query-key-layer-scaling no-query-key-layer-scaling attention-softmax-in-fp32 "
        "attention-backend transformer-impl use-mcore-models use-legacy-models "
        "no-masked-softmax-fusion no-bias-dropout-fusion no-bias-swiglu-fusion no-rope-fusion "
        "use-flash-attn* use-flashinfer-* no-persist-layer-norm no-gradient-accumulation-fusion "
        "disable-mem-efficient-ln cross-entropy-loss-fusion cross-entropy-fusion-impl "
        "fp16-lm-cross-entropy flash-* abort-on-unmet-fused-kernel-constraints bias-* "
        "masked-softmax-fusion disable-jit-fuser use-fused-* fused-* use-te-activation-func "
        "use-transformer-engine-op-fuser no-clone-scatter-* disable-clone-scatter-* "
        "use-kitchen-attention kitchen-* disable-bf16-reduced-precision-matmul batch-invariant-* "
        "use-grouped-gemm-* mlp-chunks-* symmetric-ar-type ds-fused-adam embedding-weights-in-fp32 "
        "split-transformers scattered-embeddings memory-centric-tiled-linear tile-factor onnx-safe "
        "no-async-tensor-* use-sdp* use-hpu-* accumulate-allreduce-grads-in-fp32 "
        "no-contiguous-buffers-in-local-ddp use-contiguous-buffers-in-ddp ddp-impl DDP-impl "
        "no-scatter-gather-tensors-in-pipeline profile-backward synchronize-each-layer "
        "sync-tp-duplicated-parameters output-logit-dtype",
    ),
    # Precision.
    R(
        "refused",
        "there is no fp8 or fp4: use --bf16",
        "fp8-format fp8-e4m3 fp8-hybrid fp4-format te-precision-config-file",
    ),
    R(
        "none",
        "it configures fp8 or fp4",
        "fp8-* no-fp8-* disable-fp8-* fp4-* first-last-layers-bf16 num-layers-at-*-in-bf16 "
        "keep-fp8-* reuse-grad-buf-*",
    ),
    R(
        "differs",
        "master weights and optimizer state are fp32",
        "use-precision-aware-optimizer main-grads-dtype main-params-dtype exp-avg-dtype "
        "exp-avg-sq-dtype",
    ),
    # Parallelism.
    R(
        "refused",
        "there is no context or sequence parallelism over a mesh axis of its own; "
        "--sequence-parallel shards the sequence over the tensor ranks",
        "context-parallel-size ds-sequence-parallel-size force-ds-sequence-parallel "
        "hierarchical-context-parallel-sizes hybrid-context-parallel ds-sequence-parallel-fpdt "
        "max-seqlen-per-dp-cp-rank",
        ("1",),
    ),
    R(
        "none",
        "it configures context parallelism",
        "cp-comm-type ds-sequence-parallel-fpdt-*",
    ),
    R(
        "refused",
        "there is no FSDP: ZeRO stage 1 (--use-distributed-optimizer) shards the optimizer, and "
        "the pipeline shards the weights",
        "use-megatron-fsdp use-torch-fsdp2",
    ),
    R(
        "none",
        "it configures FSDP",
        "megatron-fsdp-* data-parallel-sharding-strategy outer-dp-* fsdp-* torch-fsdp2-* "
        "init-model-with-meta-device create-all-gather-group enable-full-sharding-in-hsdp "
        "suggested-communication-unit-size no-gradient-reduce-div-fusion",
    ),
    R(
        "none",
        "how ranks communicate: pipemega has one way, or torch decides",
        "tp-comm-* no-tp-comm-* disable-tp-comm-* *-p2p-communication* no-overlap-p2p-* ddp-* "
        "use-ring-exchange-p2p nccl-* use-nccl-ub use-sharp sharp-* use-tp-pp-dp-mapping "
        "disable-gloo-process-groups high-priority-stream-groups no-align-* "
        "disable-align-grad-reduce overlap-param-gather-with-optimizer-step "
        "disable-symmetric-registration local-rank lazy-mpu-init "
        "pipeline-model-parallel-comm-backend num-distributed-optimizer-instances "
        "microbatch-group-size-per-virtual-pipeline-stage defer-embedding-wgrad-compute "
        "wgrad-deferral-limit standalone-embedding-stage pipeline-model-parallel-split-rank "
        "distributed-timeout-seconds-after-init fake-process-group gtp-* "
        "tensor-parallel-num-weight-* zero-reduce-* zero-contigious-gradients "
        "zero-allgather-bucket-size remote-device use-pin-memory no-use-layer-wise-* "
        "flight-recorder-* no-flight-* disable-flight-* node-rank nnodes nproc-per-node "
        "master-addr master-port rank world-size no-delay-grad-reduce delay-grad-reduce "
        "delay-param-gather",
    ),
    R(
        "none",
        "memory: pipemega has its own ways, or does not need it",
        "distribute-saved-activations distribute-checkpointed-activations "
        "deepspeed-activation-checkpointing partition-activations contigious-checkpointing "
        "checkpoint-in-cpu empty-unused-memory-level cpu-offloading* fine-grained-* "
        "offload-modules min-offloaded-* delta-offload-* activation-offload-* "
        "use-cpu-initialization no-pin-cpu-* use-torch-optimizer-for-cpu-offload "
        "overlap-cpu-optimizer-* optimizer-offload-fraction cpu-torch-adam ds-inference",
    ),
    R(
        "differs",
        "selective recomputation recomputes attention",
        "recompute-modules",
        ("core_attn",),
    ),
    R(
        "none",
        "there are no CUDA graphs; results do not depend on them",
        "cuda-graph-* enable-cuda-graph external-cuda-graph optimizer-cuda-graph te-rng-tracker "
        "inference-cuda-graph-*",
    ),
)


ABSENT_OF_RUN: tuple[Absent, ...] = (
    # Batch and length.
    R(
        "refused",
        "training.rampup_batch_size grows by a constant step; steps of other sizes have no key",
        "step-batch-size-schedule",
    ),
    R(
        "differs",
        "the batch size must be a multiple of micro-batch size x data ranks",
        "decrease-batch-size-if-needed",
    ),
    R(
        "differs",
        "steps cannot be skipped by number; training.on_nonfinite skips steps with inf or nan",
        "iterations-to-skip skip-train-iteration-range",
    ),
    R(
        "refused",
        "`pipemega evaluate` evaluates a trained model",
        "skip-train eval-only inference test-mode",
    ),
    R(
        "none",
        "a SIGTERM always saves a checkpoint and ends the run",
        "exit-signal-handler* exit-signal adlr-autoresume*",
    ),
    R(
        "differs",
        "evaluations use eval_steps batches of the training's size and one validation set",
        "full-validation multiple-validation-sets validation-set-names eval-global-batch-size "
        "eval-micro-batch-size start-eval-at-iter",
    ),
    R(
        "refused",
        "curriculum learning, random-LTD, distillation and reinforcement learning are not "
        "supported",
        "data-efficiency-curriculum-learning random-ltd curriculum-learning perform-rl-step mos kd "
        "load-teacher compression-training sft phase-transition-iterations logits-load-dir",
    ),
    R(
        "none",
        "it configures a training that is not supported",
        "rl-* no-rl-* grpo-* langrl-* kd-* *-teacher sft-* logits-* refit-method return-data-index",
    ),
    # Optimizer.
    R(
        "refused",
        "there is no key for these rates; optimizer.groups gives some parameters another rate",
        "decoupled-lr decoupled-min-lr",
    ),
    R(
        "refused",
        "the weight decay is constant",
        "weight-decay-incr-style",
        ("constant",),
    ),
    R(
        "none",
        "it configures an optimizer that is not used",
        "muon-* lion-* soap-* adaptive-muon-* use-bnb-optimizer",
    ),
    R(
        "differs",
        "norms are not decayed; optimizer.groups can decay them",
        "apply-wd-to-qk-layernorm no-weight-decay-cond-type",
    ),
    R(
        "refused",
        "train a part of the model with `lora` or with your own script",
        "freeze-all-layers",
    ),
    R(
        "none",
        "checks and retries: see training.on_nonfinite, training.stragglers and "
        "training.check_replicas_every",
        "check-for-* rerun-mode error-injection-* result-rejected-* log-straggler straggler-* "
        "disable-straggler-* check-weight-hash-* inprocess-* enable-ft-package calc-ft-timeouts "
        "ft-* fault-injector-* gpu-sniff-* run-workload-inspector-server train-sync-interval "
        "accumulate-*",
    ),
    # Data.
    R(
        "refused",
        "fill-in-the-middle is not supported",
        "fim-data fim-rate",
        ("0", "0.0"),
    ),
    R(
        "none",
        "it configures fill-in-the-middle",
        "fim-*",
    ),
    R(
        "refused",
        "the loss counts all tokens, or with data.format the answers",
        "loss-on-targets-only reweight-loss-based-on-position-frequency noise-density "
        "mean-noise-span-length",
    ),
    R(
        "refused",
        "without data.format a sample can contain parts of several documents; use "
        "--reset-position-ids and --reset-attention-mask",
        "dataloader-inter-document-masking",
    ),
    R(
        "refused",
        "a tokenizer's vocabulary cannot be extended: prepare one that has these tokens",
        "tokenizer-special-tokens",
        ("0",),
    ),
    R(
        "differs",
        "the vocabulary is that of the tokenizer; model.vocab_size sets a larger one",
        "vocab-extra-ids extra-vocab-size",
        ("0",),
    ),
    R(
        "none",
        "the files of the tokenizer determine it",
        "tiktoken-* tokenizer-sentencepiece-* no-tokenizer-sentencepiece-* disable-tokenizer-* "
        "tokenizer-hf-* trust-remote-code null-tokenizer-pad-id tokenizer-metadata use-gigatoken "
        "legacy-tokenizer allow-ambiguous-pad-tokens patch-tokenizer-type chat-template",
    ),
    R(
        "none",
        "how samples are read: pipemega maps the files into memory",
        "data-impl mmap-warmup no-mmap-bin-files dataloader-fast-* dataloader-defer-* "
        "num-dataset-builder-threads object-storage-cache-path per-dataset-sequences-path "
        "mid-level-dataset-surplus no-create-attention-mask-in-dataloader "
        "create-attention-mask-in-dataloader valid-num-workers repeated-dataloader sample-rate "
        "s3-cache-path defer-npy-index-mmap train-data-exact-num-epochs train-idx-path "
        "train-desc-path train-doc-idx-path train-sample-idx-path train-shuffle-idx-path "
        "use-dataset-only aml-data-download-path",
    ),
    # Checkpoints.
    R(
        "none",
        "every checkpoint is torch.distributed.checkpoint's, loads on every mesh, and contains the "
        "random state",
        "ckpt-* no-ckpt-* disable-ckpt-* dist-ckpt-* auto-detect-ckpt-format use-dist-ckpt async-* "
        "use-persistent-ckpt-worker no-save-rng no-load-rng universal-checkpoint replication* "
        "verify-integrity distrib-optim-* no-strict-fsdp-* disable-strict-fsdp-* "
        "load-main-params-from-ckpt no-save-tokenizer-assets disable-save-tokenizer-assets "
        "use-mp-args-from-checkpoint-args no-use-tokenizer-model-from-checkpoint-args "
        "disable-use-tokenizer-model-* no-initialization exit-on-missing-checkpoint "
        "save-params-interval save-activations-interval save-tokens-* save-wgrads-interval "
        "save-dgrads-interval use-checkpoint-args reset-iteration reset-progress",
    ),
    R(
        "differs",
        "checkpoints always have the optimizer state",
        "no-save-optim",
    ),
    R(
        "differs",
        "only checkpoint.save is written; checkpoint.load_tag names the checkpoint to load",
        "non-persistent-* ckpt-step override-ckpt-iteration",
    ),
    # Logging.
    R(
        "none",
        "it is always recorded, or has its own tool (docs/monitoring.md)",
        "log-throughput log-progress log-*-to-tensorboard no-log-* disable-log-* tensorboard-* "
        "timing-log-option log-level log-level-replica log-energy log-memory-interval "
        "log-device-memory-used logging-level log-max-attention-logit no-barrier-* codecarbon-dir "
        "log-path one-logger-* no-one-logger enable-one-logger app-tag-* otel-* config-logger-dir "
        "log-loss-* log-batch-* wandb-* moe-routing-trace-* dump-param-* enable-msc disable-msc "
        "enable-experimental test-name",
    ),
    R(
        "differs",
        "monitor.trace times single steps",
        "profile profile-* use-pytorch-profiler pytorch-profiler-* nvtx-ranges record-shapes "
        "record-memory-history memory-snapshot-path",
    ),
    R(
        "none",
        "Python's garbage collection is left alone",
        "manual-gc manual-gc-* no-manual-gc-* disable-manual-gc-*",
    ),
    R(
        "none",
        "it is about text generation: see `pipemega generate`",
        "inference-* no-inference-* max-tokens-to-oom enable-chunked-prefill "
        "num-speculative-tokens decode-only-* use-legacy-static-engine use-same-sampling-seed-* "
        "temperature top-k top-p num-tokens-to-generate out-seq-length nccl-all-reduce-for-prefill",
    ),
    R(
        "differs",
        "each data rank has the same initial weights",
        "data-parallel-random-init",
    ),
    R(
        "refused",
        "the arguments are read from the command line only",
        "yaml-cfg use-yaml-cfg",
    ),
)


ABSENT: tuple[Absent, ...] = (*ABSENT_OF_MODEL, *ABSENT_OF_RUN)


def absent(name: str) -> Absent | None:
    """Return the first entry that has the argument; None if it is not known at all."""
    return next((entry for entry in ABSENT if entry.has(name)), None)
