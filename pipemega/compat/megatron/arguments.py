"""The arguments of Megatron-LM and Megatron-DeepSpeed that have keys here.

The arguments of one launch: read from words, with the types that their values must have.

The table of all arguments, docs/megatron.md: made from the tables that the conversion uses.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipemega.compat.megatron.absent import ABSENT, absent
from pipemega.compat.megatron.shell_words import names_of_unknown, shown
from pipemega.config.name_suggestions import did_you_mean, nearest

Kind = Literal["flag", "int", "float", "text", "list"]


class Argument(NamedTuple):
    """An argument with a counterpart.

    Args:
        name: without `--`, with `-` for `_`.
        kind: number and type of its values.
        keys: config keys that it sets, separated by spaces; empty: another argument needs it.
        note: how the value is converted, for the table.
        aliases: names in other versions and forks.
    """

    name: str
    kind: Kind
    keys: str
    note: str = ""
    aliases: tuple[str, ...] = ()


A = Argument

SECTIONS: Mapping[str, tuple[Argument, ...]] = {
    "Model": (
        A("num-layers", "int", "model.num_layers", "", ("decoder-num-layers",)),
        A("hidden-size", "int", "model.hidden_size"),
        A("num-attention-heads", "int", "model.num_attention_heads"),
        A("ffn-hidden-size", "int", "model.ffn_hidden_size",
          "written out, because the default with `--swiglu` differs: Megatron rounds 8/3 of the "
          "hidden size down to a multiple of 64, pipemega up"),
        A("group-query-attention", "flag", "model.num_query_groups",
          "with `--num-query-groups`, whose default is 1"),
        A("num-query-groups", "int", "model.num_query_groups", "if `--group-query-attention`",
          ("num-key-value-heads", "num-attention-heads-kv")),
        A("attention-head-type", "text", "model.num_query_groups", "`multiquery`: 1"),
        A("kv-channels", "int", "model.kv_channels"),
        A("seq-length", "int", "model.seq_length", "",
          ("decoder-seq-length", "encoder-seq-length")),
        A("max-position-embeddings", "int", "model.max_position_embeddings",
          "if it differs from `--seq-length` and positions are learned"),
        A("position-embedding-type", "text", "model.position_embedding_type",
          "`learned_absolute`, `rope`, `rotary`; other values are refused (for `alibi`, use "
          '`model.type` `"hf"` with a BLOOM config)'),
        A("use-rotary-position-embeddings", "flag", "model.position_embedding_type"),
        A("no-position-embedding", "flag", "",
          "no effect with rotary positions (older versions of Megatron needed it); else refused"),
        A("rotary-base", "float", "model.rotary_base", "",
          ("rotary-position-embeddings-theta", "rope-theta")),
        A("rotary-percent", "float", "model.rotary_percent"),
        A("rotary-seq-len-interpolation-factor", "float", "model.rope_scaling",
          '`{"rope_type": "linear", "factor": N}`'),
        A("use-rope-scaling", "flag", "model.rope_scaling",
          '`"rope_type": "llama3"` with Llama 3.1\'s original length 8192 and factors 1 and 4'),
        A("rope-scaling-factor", "float", "model.rope_scaling", "with `--use-rope-scaling`"),
        A("normalization", "text", "model.normalization"),
        A("use-rms-norm", "flag", "model.normalization"),
        A("norm-epsilon", "float", "model.norm_epsilon", "", ("layernorm-epsilon",)),
        A("swiglu", "flag", "model.swiglu"),
        A("glu-activation", "text", "model.swiglu", "`swiglu`; other values are refused"),
        A("squared-relu", "flag", "model.squared_relu"),
        A("disable-bias-linear", "flag", "model.add_bias_linear"),
        A("add-qkv-bias", "flag", "model.add_qkv_bias"),
        A("qk-layernorm", "flag", "model.qk_layernorm"),
        A("embed-layernorm", "flag", "model.embedding_norm"),
        A("untie-embeddings-and-output-weights", "flag",
          "model.untie_embeddings_and_output_weights", "", ("no-tie-embed-logits",)),
        A("attention-dropout", "float", "model.attention_dropout"),
        A("hidden-dropout", "float", "model.hidden_dropout"),
        A("init-method-std", "float", "model.init_method_std"),
        A("make-vocab-size-divisible-by", "int", "model.make_vocab_size_divisible_by"),
        A("no-pad-vocab-size", "flag", "model.make_vocab_size_divisible_by", "1",
          ("disable-pad-vocab-size",)),
        A("pad-vocab-size-to", "int", "model.pad_vocab_size_to", "", ("padded-vocab-size",)),
        A("vocab-size", "int", "model.vocab_size",
          "with `--tokenizer-type NullTokenizer` one more, for the end-of-document token"),
        A("recompute-activations", "flag", "model.recompute", '`"selective"`'),
        A("recompute-granularity", "text", "model.recompute"),
        A("recompute-method", "text", "model.recompute_method"),
        A("recompute-num-layers", "int", "model.recompute_num_layers", "",
          ("checkpoint-num-layers", "activations-checkpoint-num-layers")),
        A("checkpoint-activations", "flag", "model.recompute", '`"full"`'),
        A("activations-checkpoint-method", "text", "model.recompute model.recompute_method",
          '`"full"`, and this method; the older name of `--recompute-method`'),
    ),
    "Parallelism": (
        A("tensor-model-parallel-size", "int", "mesh.tensor", "", ("model-parallel-size",)),
        A("pipeline-model-parallel-size", "int", "mesh.pipeline",
          "stages take about the same time; `pipeline.partition` sets other bounds"),
        A("no-pipeline-parallel", "flag", "mesh.pipeline", "1"),
        A("sequence-parallel", "flag", "mesh.sequence_parallel", "no effect on one tensor rank"),
        A("num-layers-per-virtual-pipeline-stage", "int", "pipeline.schedule pipeline.chunks",
          "`interleaved`, with the chunks that result"),
        A("num-virtual-stages-per-pipeline-rank", "int", "pipeline.schedule pipeline.chunks"),
        A("enable-zbh1-pipeline", "flag", "pipeline.schedule", "`zb-h1`",
          ("enable-zbh1-exact-semantics",)),
        A("decoder-first-pipeline-num-layers", "int", "pipeline.partition"),
        A("decoder-last-pipeline-num-layers", "int", "pipeline.partition"),
        A("account-for-embedding-in-pipeline-split", "flag", "pipeline.partition"),
        A("account-for-loss-in-pipeline-split", "flag", "pipeline.partition"),
        A("pipeline-model-parallel-layout", "text", "pipeline.partition"),
        A("pp-partition-method", "text", "pipeline.partition",
          "`transformer` and `embedding` in `type:` become the names of pipemega's layers"),
        A("use-distributed-optimizer", "flag", "zero_optimization.stage", "1"),
        A("zero-stage", "int", "zero_optimization.stage",
          "with `--deepspeed`; `zero_optimization` in the file of `--deepspeed_config` "
          "overrides it"),
        A("overlap-param-gather", "flag", "zero_optimization.overlap_comm",
          "with `--use-distributed-optimizer`", ("overlap-grad-reduce",)),
        A("optimizer-cpu-offload", "flag", "zero_optimization.offload_optimizer.device", '`"cpu"`',
          ("cpu-optimizer",)),
        A("distributed-timeout-minutes", "float", "mesh.timeout_seconds"),
        A("distributed-backend", "text", "mesh.device", '`gloo`: `"cpu"`'),
    ),
    "Batch and length": (
        A("micro-batch-size", "int", "train_micro_batch_size_per_gpu", "", ("batch-size",)),
        A("global-batch-size", "int", "train_batch_size",
          "without it: `gradient_accumulation_steps` 1"),
        A("rampup-batch-size", "list", "training.rampup_batch_size"),
        A("train-iters", "int", "training.train_steps"),
        A("train-samples", "int", "training.train_samples"),
        A("train-tokens", "int", "training.train_samples",
          "divided by `--seq-length`; if `--train-samples` or `--train-iters` is also given, the "
          "shorter run is used"),
        A("exit-interval", "int", "training.exit_interval"),
        A("exit-duration-in-mins", "float", "training.exit_after_minutes"),
        A("kill-switch-path", "text", "training.kill_switch_path", "", ("kill-switch-file",)),
        A("eval-interval", "int", "training.eval_interval", "default 1000"),
        A("eval-iters", "int", "training.eval_steps", "0: no evaluation"),
        A("calculate-per-token-loss", "flag", "training.loss_reduction",
          '`"token"`; without it `"micro_batch"`, Megatron\'s default'),
        A("no-check-for-nan-in-loss-and-grad", "flag", "training.on_nonfinite.policy",
          '`"stop"`, as in Megatron, if neither this argument nor fp16 nor `--deepspeed` is given'),
        A("deterministic-mode", "flag", "training.deterministic_mode"),
        A("seed", "int", "seed"),
    ),
    "Optimizer": (
        A("optimizer", "text", "optimizer.type", "`adam`: AdamW; `sgd`: SGD"),
        A("lr", "float", "optimizer.params.lr"),
        A("adam-beta1", "float", "optimizer.params.betas"),
        A("adam-beta2", "float", "optimizer.params.betas"),
        A("adam-eps", "float", "optimizer.params.eps"),
        A("sgd-momentum", "float", "optimizer.params.momentum"),
        A("weight-decay", "float",
          "optimizer.params.weight_decay training.weight_decay_norms_and_biases",
          "0.01 if it is not given; norms and biases are not decayed"),
        A("start-weight-decay", "float", "optimizer.params.weight_decay",
          "if `--end-weight-decay` is equal"),
        A("end-weight-decay", "float", "optimizer.params.weight_decay"),
        A("clip-grad", "float", "gradient_clipping"),
        A("lr-decay-style", "text", "scheduler.type", "`linear` if it is not given"),
        A("min-lr", "float", "scheduler.params.min_lr"),
        A("lr-warmup-init", "float", "scheduler.params.warmup_init_lr"),
        A("lr-warmup-fraction", "float", "scheduler.params.warmup_fraction", "", ("warmup",)),
        A("lr-warmup-iters", "int", "scheduler.params.warmup_steps"),
        A("lr-warmup-samples", "int", "scheduler.params.warmup_samples"),
        A("lr-warmup-tokens", "int", "scheduler.params.warmup_samples",
          "divided by `--seq-length`"),
        A("lr-decay-iters", "int", "scheduler.params.decay_steps"),
        A("lr-decay-samples", "int", "scheduler.params.decay_samples"),
        A("lr-decay-tokens", "int", "scheduler.params.decay_samples", "divided by `--seq-length`"),
        A("lr-wsd-decay-style", "text", "scheduler.params.wsd_decay_style"),
        A("lr-wsd-decay-iters", "int", "scheduler.params.wsd_decay_steps"),
        A("lr-wsd-decay-samples", "int", "scheduler.params.wsd_decay_samples"),
        A("override-opt-param-scheduler", "flag", "checkpoint.override_opt_param_scheduler", "",
          ("override-lr-scheduler",)),
        A("use-checkpoint-opt-param-scheduler", "flag",
          "checkpoint.use_checkpoint_opt_param_scheduler", "", ("use-checkpoint-lr-scheduler",)),
    ),
    "Precision": (
        A("bf16", "flag", "bf16.enabled"),
        A("fp16", "flag", "fp16.enabled"),
        A("loss-scale", "float", "fp16.loss_scale"),
        A("initial-loss-scale", "float", "fp16.initial_scale_power",
          "its logarithm to base 2; 32 if it is not given"),
        A("min-loss-scale", "float", "fp16.min_loss_scale"),
        A("loss-scale-window", "float", "fp16.loss_scale_window"),
        A("hysteresis", "int", "fp16.hysteresis"),
        A("grad-reduce-in-bf16", "flag", "data_types.grad_accum_dtype", '`"bf16"`'),
    ),
    "Data": (
        A("data-path", "list", "data.data_path"),
        A("data-args-path", "text", "data.data_path", "the file is read"),
        A("train-data-path", "list", "data.train_data_path"),
        A("valid-data-path", "list", "data.valid_data_path"),
        A("test-data-path", "list", "data.test_data_path"),
        A("per-split-data-args-path", "text",
          "data.train_data_path data.valid_data_path data.test_data_path", "the file is read"),
        A("train-weighted-split-paths", "list", "data.train_data_path",
          "one group; several groups are refused"),
        A("valid-weighted-split-paths", "list", "data.valid_data_path"),
        A("test-weighted-split-paths", "list", "data.test_data_path"),
        A("train-weighted-split-paths-path", "text", "data.train_data_path", "the file is read"),
        A("valid-weighted-split-paths-path", "text", "data.valid_data_path"),
        A("test-weighted-split-paths-path", "text", "data.test_data_path"),
        A("split", "text", "data.split"),
        A("mock-data", "flag", "data.mock"),
        A("data-cache-path", "text", "data.cache_path"),
        A("num-workers", "int", "data.num_workers", "2 if it is not given"),
        A("dataloader-type", "text", "data.dataloader_type", "`single` and `cyclic`"),
        A("no-data-sharding", "flag", "data.data_sharding", "with `cyclic`"),
        A("eod-mask-loss", "flag", "data.eod_mask_loss"),
        A("reset-position-ids", "flag", "data.reset_position_ids"),
        A("reset-attention-mask", "flag", "data.reset_attention_mask"),
        A("tokenizer-type", "text", "data.tokenizer"),
        A("vocab-file", "text", "data.tokenizer", "of `GPT2BPETokenizer`"),
        A("merge-file", "text", "data.tokenizer", "`VOCAB.json,MERGES.txt`"),
        A("tokenizer-model", "text", "data.tokenizer", "", ("tokenizer-name-or-path",
          "tokenizer-file")),
        A("null-tokenizer-eod-id", "int", "data.eod_id"),
    ),
    "Checkpoints": (
        A("save", "text", "checkpoint.save"),
        A("load", "text", "checkpoint.load training.resume",
          "`training.resume` if the folder is that of `--save`; only checkpoints of pipemega load"),
        A("pretrained-checkpoint", "text", "checkpoint.load checkpoint.load_module_only"),
        A("save-interval", "int", "checkpoint.interval", "if `--save` is given",
          ("persistent-save-interval",)),
        A("save-retain-interval", "int", "checkpoint.keep_every checkpoint.keep_last"),
        A("finetune", "flag", "checkpoint.load_module_only"),
        A("no-load-optim", "flag", "checkpoint.load_optimizer_states"),
        A("no-load-lr-state", "flag", "checkpoint.load_lr_scheduler_states"),
        A("async-save", "flag", "checkpoint.async"),
        A("load-tag", "text", "checkpoint.load_tag"),
    ),
    "Logging": (
        A("log-interval", "int", "steps_per_print", "100 if it is not given"),
        A("log-params-norm", "flag", "monitor.log_params_norm"),
        A("log-num-zeros-in-grad", "flag", "monitor.log_num_zeros_in_grad"),
        A("timing-log-level", "int", "wall_clock_breakdown", "from level 1 on"),
        A("log-timers-to-tensorboard", "flag", "wall_clock_breakdown"),
        A("log-memory-to-tensorboard", "flag", "memory_breakdown"),
        A("tensorboard-dir", "text", "tensorboard.enabled tensorboard.output_path"),
        A("wandb-project", "text", "wandb.enabled wandb.project"),
        A("wandb-exp-name", "text", "wandb.name"),
        A("wandb-entity", "text", "wandb.team"),
        A("wandb-save-dir", "text", "wandb.dir"),
    ),
    "DeepSpeed": (
        A("deepspeed", "flag", "", "the settings are in the file of `--deepspeed_config`"),
        A("deepspeed-config", "text", "",
          "the keys of the JSON file override arguments; but its `optimizer` and `scheduler` are "
          "ignored, and batch sizes in the arguments override those of the file"),
    ),
}  # fmt: skip

ARGUMENTS: Mapping[str, Argument] = {
    name: argument
    for section in SECTIONS.values()
    for argument in section
    for name in (argument.name, *argument.aliases)
}


def normalized(option: str) -> str:
    """Return the name of an option without `--`, and with `-` for `_`."""
    return option.lstrip("-").replace("_", "-")


_OPTION = re.compile(r"--?[A-Za-z][\w\-.]*(=.*)?", re.DOTALL)
Level = Literal["note", "changed", "ignored", "refused", "unknown"]


class Remark(NamedTuple):
    """A line about an argument, or about the whole launch (`argument` is empty).

    Args:
        level: "refused" and "unknown" mean that the config is not that of the launch.
    """

    level: Level
    argument: str
    text: str

    def __str__(self) -> str:
        return f"{self.level}: {self.argument}{': ' if self.argument else ''}{self.text}"


@dataclass
class Given:
    """The arguments of a launch by name, and what there is to say about them."""

    values: dict[str, list[str]]
    remarks: list[Remark] = field(default_factory=list)
    written: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of_words(cls, words: Sequence[str]) -> "Given":
        """Read `--name value ...` and `--name=value`; the last one of a name counts."""
        given, stray = cls({}), []
        name: str | None = None
        for word in (_unquoted(word) for word in words if word.strip()):
            if _OPTION.fullmatch(word):
                option, equals, value = word.partition("=")
                name = _main_name(normalized(option))
                given.values[name] = [value] if equals else []
                given.written[name] = "--" + option.lstrip("-")
            elif name is None or not given._takes_more(name):
                stray.append(word)
            else:
                given.values[name].append(word)
        if stray:
            text = " ".join(dict.fromkeys(map(shown, stray)))
            given.say("note", "", f"words that belong to no argument were left out: {text}")
        return given

    def _takes_more(self, name: str) -> bool:
        known = ARGUMENTS.get(name)
        if known is None or known.kind == "list":
            return True
        return known.kind != "flag" and not self.values[name]

    def say(self, level: Level, name: str, text: str) -> None:
        """Add a line about the argument `name`."""
        shown_name = self.written.get(name, f"--{name}") if name else ""
        value = shown(" ".join(self.values.get(name, ()))) if name else ""
        value = value if len(value) <= 60 else value[:57] + "..."
        self.remarks.append(Remark(level, f"{shown_name} {value}".strip(), text))

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def flag(self, name: str) -> bool:
        """Return whether the flag is given; `--flag false` is not."""
        values = self.values.get(name)
        return values is not None and [v.lower() for v in values] not in (["false"], ["0"])

    def text(self, name: str, default: Any = None) -> Any:
        """Return the value as text; a part that the script does not determine as `$NAME`."""
        values = self.values.get(name)
        if not values:
            return default
        return shown(values[0])

    def number(self, name: str, default: Any = None) -> Any:
        """Return the value as int or float; the default if it cannot be read."""
        values = self.values.get(name)
        if values is None:
            return default
        kind: Callable[[str], float] = int if ARGUMENTS[name].kind == "int" else float
        try:
            return kind(values[0])
        except (ValueError, IndexError):
            self._unreadable(name, values)
            return default

    def numbers(self, name: str) -> list[int] | None:
        """Return the values as integers; None if the argument is not given."""
        values = self.values.get(name)
        try:
            return None if values is None else [int(value) for value in values]
        except ValueError:
            self._unreadable(name, values or [])
            return None

    def _unreadable(self, name: str, values: list[str]) -> None:
        missing = [found for value in values for found in names_of_unknown(value)]
        if missing:
            set_it = [f"--var {text.lstrip('$')}=VALUE" for text in missing if text[1:].isalnum()
                      or text[1:].replace("_", "").isalnum()]  # fmt: skip
            way = f": give {' '.join(set_it)}" if set_it else ": give a script with its value"
            self.say("unknown", name, f"{', '.join(missing)} has no value in the script{way}")
        else:
            kind = "an integer" if ARGUMENTS[name].kind in ("int", "list") else "a number"
            self.say("refused", name, f"the value must be {kind}")

    def differs(self, name: str, harmless: Iterable[str]) -> bool:
        """Return whether the argument is given with a value that is not in `harmless`."""
        values = self.values.get(name)
        if values is None or [value.lower() for value in values] == ["false"]:
            return False
        return not values or any(value not in harmless for value in values)

    def report_absent(self) -> None:
        """Say what happens to each argument that has no counterpart."""
        for name in self.values:
            if name in ARGUMENTS:
                continue
            entry = absent(name)
            if entry is None:
                near = did_you_mean(name, ARGUMENTS) if nearest(name, ARGUMENTS) else ""
                self.say("ignored", name, f"not an argument of Megatron-LM or its forks{near}")
            elif not self.differs(name, entry.harmless):
                self.say("ignored", name, "this value is what pipemega does")
            elif entry.effect == "refused":
                self.say("refused", name, entry.why)
            else:
                self.say("changed" if entry.effect == "differs" else "ignored", name, entry.why)


def _unquoted(word: str) -> str:
    """Remove quotes around a word, which stay in words from `ARGS="--a 'b'"; cmd $ARGS`."""
    for mark in "'\"":
        if len(word) >= 2 and word[0] == word[-1] == mark:
            return word[1:-1]
    return word


def _main_name(name: str) -> str:
    known = ARGUMENTS.get(name)
    return known.name if known is not None else name


_HEAD = Path(__file__).with_name("argument_page.md")
_EFFECTS = {
    "refused": ("Refused", "`from-megatron` cannot convert these arguments. It prints the reason, "
                "which may name an alternative, and its exit code is 1."),
    "differs": ("Without a key: a detail of the training differs", "The training is the same, "
                "except for the detail that the reason names."),
    "none": ("Without a key, because none is needed", "The results do not depend on these."),
}  # fmt: skip


def argument_page() -> str:
    """Return the page as Markdown."""
    lines = [_HEAD.read_text(encoding="utf-8").rstrip()]
    for title, arguments in SECTIONS.items():
        lines += ["", f"## {title}", "", "| argument | key | value |", "| --- | --- | --- |"]
        lines += map(_row, arguments)
    for effect, (title, text) in _EFFECTS.items():
        lines += ["", f"## {title}", "", text, "", "| arguments | because |", "| --- | --- |"]
        lines += _absent_rows(effect)
    return "\n".join(lines) + "\n"


def _row(argument: Argument) -> str:
    names = ", ".join(f"`--{name}`" for name in (argument.name, *argument.aliases))
    keys = ", ".join(f"`{key}`" for key in argument.keys.split()) or "-"
    return f"| {names} | {keys} | {_escaped(argument.note)} |"


def _absent_rows(effect: str) -> Iterator[str]:
    for entry in ABSENT:
        if entry.effect == effect:
            names = ", ".join(f"`--{name}`" for name in entry.names.split())
            why = entry.why
            if entry.harmless:
                why += f" (accepted: {', '.join(f'`{value}`' for value in entry.harmless)})"
            yield f"| {names} | {_escaped(why)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
