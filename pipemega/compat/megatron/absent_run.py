"""Arguments of the training, the data, checkpoints and logging that have no key, and why."""

from pipemega.compat.megatron.absent import Absent

R = Absent

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
