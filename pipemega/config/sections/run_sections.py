"""`training`: length of the run, evaluation, and what the Trainer does on errors and spikes.

Config section `checkpoint`: where and when checkpoints are saved, and what is loaded.

`lora`: low-rank adapters for the linear layers of a frozen model, with peft's meaning.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import create_model

from pipemega.config.declarations import (
    Count,
    Fraction,
    Name,
    NotNegative,
    Positive,
    Section,
    Whole,
    honoured,
    ignored,
    own,
    rule,
    section,
)
from pipemega.errors import ConfigError

Rampup = tuple[Count, Count, Count]

_FOLDER_NAME = re.compile(r"\w[\w.\-]*")

_EVAL_STEPS = 10


class NonFiniteSection(Section):
    """What to do if the loss or a gradient is inf or nan; see docs/long_runs.md."""

    policy: Literal["skip", "stop", "rollback"] | None = own(
        None,
        "skip: do not update, continue with the next batch; stop: end the run with an error; "
        "rollback: load the newest checkpoint of checkpoint.save and continue with the batch after "
        "the one with inf or nan. "
        "null: stop with fp32, and with bf16 if bf16.check_grad_overflow is false, otherwise skip. "
        "In fp16 the loss scaler handles gradient overflows; the policy applies only if the loss "
        "is not finite either.",
    )
    budget: Count = own(
        10,
        "Largest number of steps with inf or nan that `skip` and `rollback` allow in the whole "
        "run; the next one ends the run.",
    )


class LossSpikesSection(Section):
    """Warn if the loss jumps."""

    window: Whole = own(100, "Compare the loss with this many previous losses; 0: no check.")
    factor: Positive = own(
        10.0,
        "Warn if the loss is this many standard deviations (1.4826 * median absolute deviation) "
        "above the median.",
    )


class StragglersSection(Section):
    """Log ranks that compute more slowly than the other ranks of their stage."""

    factor: NotNegative = own(
        1.5, "Warn of ranks slower than this times the median of the ranks of their stage; 0: off."
    )
    checks: Count = own(3, "Warn if a rank is slow in this many checks in a row.")
    interval: Count | None = own(None, "Steps per check; null: steps_per_print.")


class TrainingSection(Section):
    """The training loop."""

    run_name: Name | None = own(
        None,
        "Without checkpoint.save: name of the run folder in `runs`; null: name of the config file "
        "and time.",
    )
    train_steps: Count | None = own(
        None,
        "Optimizer steps of the whole run; `pretrain_gpt.py` needs this key, `training.epochs` or "
        "`training.train_samples`.",
    )
    train_samples: Count | None = own(
        None,
        "Instead of `train_steps`: samples of the whole run. As in Megatron-LM, the run ends before"
        " the step that would exceed it, and a schedule of Megatron's types counts samples, unless "
        "one of its lengths is in steps.",
    )
    epochs: Count | None = own(
        None,
        "Instead of `train_steps`: passes over the training data of the whole run. The last step "
        "of an epoch may then be partial; `dataloader_drop_last` drops it.",
    )
    rampup_batch_size: Rampup | None = own(
        None,
        "`[start, increment, samples]`, as in Megatron-LM: the first steps have `start` samples; "
        "the size grows by `increment` at equal intervals of consumed samples, and is "
        "train_batch_size after `samples` samples. Only the number of micro-batches changes.",
    )
    eval_interval: Whole | None = own(
        None,
        "Steps (or epochs, see `eval_by`) between evaluations; 0: never; null: after each epoch if "
        "the run has epochs, else never.",
    )
    eval_by: Literal["step", "epoch"] = own("step", "Unit of eval_interval.")
    eval_on_start: bool = own(
        True, "With `eval_interval` in steps: also evaluate before the first step."
    )
    eval_steps: Count | None = own(
        None,
        f"Global batches per evaluation; null: with `epochs` the whole validation set, else "
        f"{_EVAL_STEPS}.",
    )
    loss_reduction: Literal["token", "micro_batch"] = own(
        "token", "Mean over all tokens of the global batch, or mean of the micro-batch means."
    )
    weight_decay_norms_and_biases: bool = own(
        True,
        "Also decay parameters with one dim, as torch and DeepSpeed do; false: as Megatron-LM.",
    )
    generate_tokens: Whole = own(
        0,
        "Tokens to generate after each evaluation, except the one before the first step; each text "
        "is recorded, and the last one is printed after training; 0: none.",
    )
    generate_prompt: str = own("", "Prompt of the generated text.")
    generate_temperature: NotNegative = own(
        0.0, "Sampling temperature; 0: always take the most likely token."
    )
    deterministic_mode: bool = own(
        False,
        "Use only operations whose result does not change from run to run (slower on a GPU); an "
        "operation without such an implementation is an error.",
    )
    progress: bool = own(True, "Show a progress bar if the output is a terminal.")
    resume: Literal["auto", False] = own(
        False,
        "auto: resume from checkpoint.save, else checkpoint.load, else start a new run; false: "
        "resume only from checkpoint.load, if it is set.",
    )
    exit_after_minutes: Positive | None = own(
        None, "Save a checkpoint and exit with code 0 after this many minutes; null: never."
    )
    exit_interval: Count | None = own(
        None,
        "Save a checkpoint and exit with code 0 after each step that is a multiple of this; null: "
        "never.",
    )
    kill_switch_path: Name | None = own(
        None,
        "Save a checkpoint and exit with code 0 after the step in which this file appears; if it "
        "exists at the start, train nothing. Only rank 0 looks for it. null: no file.",
    )
    on_nonfinite: NonFiniteSection = section(NonFiniteSection, "Reaction to inf or nan.", own=True)
    loss_spikes: LossSpikesSection = section(LossSpikesSection, "Warn if the loss jumps.", own=True)
    stragglers: StragglersSection = section(StragglersSection, "Log slow ranks.", own=True)
    check_replicas_every: Whole = own(0, "Steps between checks that replicas are equal; 0: never.")

    @property
    def has_length(self) -> bool:
        """Whether a key sets the length of the run."""
        return any(self.lengths.values())

    @property
    def lengths(self) -> dict[str, int | None]:
        """The keys that can set the length of the run; one of them is not None at most."""
        return {
            "train_steps": self.train_steps,
            "epochs": self.epochs,
            "train_samples": self.train_samples,
        }

    def eval_batches(self, epochs: int | None) -> int | None:
        """Return the global batches per evaluation of a run of `epochs`; None: all."""
        return self.eval_steps or (_EVAL_STEPS if epochs is None else None)

    def evaluates(self, epochs: int | None) -> bool:
        """Return whether evaluations are due in a run of `epochs`."""
        return epochs is not None if self.eval_interval is None else self.eval_interval > 0

    @rule("train_steps", "epochs", "train_samples")
    def _one_length(self) -> Iterator[str]:
        given = [f"training.{k} ({n})" for k, n in self.lengths.items() if n is not None]
        if len(given) > 1:
            both = "both" if len(given) == 2 else "all"
            yield f"{' and '.join(given)} {both} set the length of the run: keep one"

    @rule("kill_switch_path")
    def _kill_switch_is_local(self) -> Iterator[str]:
        if self.kill_switch_path is not None and "://" in self.kill_switch_path:
            yield (
                f"training.kill_switch_path {self.kill_switch_path!r} is a URL: give a path on a "
                "file system of rank 0"
            )

    @rule("run_name")
    def _run_name_is_a_folder(self) -> Iterator[str]:
        name = self.run_name
        if name is not None and not (_FOLDER_NAME.fullmatch(name) and name != "latest"):
            yield (
                f"training.run_name {name!r} cannot be the name of a folder in runs: use letters, "
                "digits, '_', '-' and '.', do not start with '.', and do not use 'latest'"
            )


class ParallelWriteSection(Section):
    """DeepSpeed's `checkpoint.parallel_write`."""

    pipeline_stage: bool = ignored(
        False, "Write files per stage.", "every rank always writes its own part", agrees=[True]
    )


if TYPE_CHECKING:
    _Async = Section
else:
    # `async` is a Python keyword, so a class body cannot contain a field of this name.
    _Async = create_model(
        "_Async",
        __base__=Section,
        __module__=__name__,
        **{
            "async": (
                bool,
                own(
                    False, "Save in the background: a step waits only for the copy of the tensors."
                ),
            )
        },
    )


class CheckpointSection(_Async):
    """Where and when checkpoints are saved, and which parts of them are loaded."""

    save: Name | None = own(None, "Folder or fsspec URL to save in; null: save nothing.")
    load: Name | None = own(
        None,
        'Folder or URL to resume from; null: none (with training.resume `"auto"` a run can still '
        "resume from `save`).",
    )
    load_tag: Name | None = own(None, "Checkpoint in `load`; null: the newest undamaged one.")
    interval: Whole = own(
        0, "Steps (or epochs, see `by`) between checkpoints; 0: save only at the end."
    )
    by: Literal["step", "epoch"] = own("step", "Unit of interval.")
    overwrite: bool = own(
        False, "Start a new run although `save` has checkpoints of an earlier run; replaces them."
    )
    take_over: bool = own(
        False,
        "Save although the lock in the folder says that another run uses it. Set this only if that "
        "run has certainly ended: if it still runs, it is stopped with an error.",
    )
    keep_last: Count | None = own(None, "Number of newest checkpoints to keep; null: all.")
    keep_every: Count | None = own(
        None, "Permanently keep checkpoints whose step is a multiple of this; null: none."
    )
    verify: bool = own(
        True, "Before loading, compare the checksum of each file; false: only its size."
    )
    load_module_only: bool = own(False, "Load only parameters and buffers; start at step 0.")
    load_optimizer_states: bool = own(
        True, "false: do not load the optimizer state; the run starts without optimizer state."
    )
    load_lr_scheduler_states: bool = own(
        True, "false: do not load the learning-rate schedule; it starts at step 0."
    )
    override_opt_param_scheduler: bool | None = own(
        None,
        "true, null: a resumed run takes the learning rate, its schedule and the weight decay from "
        "this config. false: a checkpoint with other values is refused; this is the "
        "default of Megatron-LM. With `use_checkpoint_opt_param_scheduler` true, this key must not "
        "be true, and null and false have no effect.",
    )
    use_checkpoint_opt_param_scheduler: bool = own(
        False,
        "true: as in Megatron-LM, a run that resumes (`training.resume`, `load`) takes the "
        "learning rate, its schedule and the weight decay from the checkpoint.",
    )
    strict: bool = own(True, "false: load what fits from another model, and log the rest.")
    allow_changes: tuple[Name, ...] = own(
        (),
        "Config keys or sections that may differ from the config of the checkpoint, even if they "
        'change the model or the order of the data, such as `["model.hidden_dropout", "seed"]`; '
        '`"callbacks.NAME"` drops the state of a callback that the Trainer does not have.',
    )
    tag_validation: Literal["Warn", "Ignore", "Fail"] = honoured(
        "Warn", "What to do when the ranks save with different tags."
    )
    load_universal: bool = ignored(
        False,
        "DeepSpeed: load a checkpoint of another mesh after its conversion.",
        "every checkpoint of pipemega loads on every mesh without conversion",
        agrees=[True],
    )
    use_node_local_storage: bool = ignored(
        False,
        "DeepSpeed: save to each node's disk.",
        "a checkpoint is one folder that the ranks of all nodes can access",
    )
    parallel_write: ParallelWriteSection = section(ParallelWriteSection, "DeepSpeed only.")
    writer: Mapping[str, Any] | None = ignored(
        None, "DeepSpeed: the engine that writes the files.", "torch.distributed.checkpoint writes"
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        # DeepSpeed accepts the three values in upper and lower case.
        word = raw.get("tag_validation") if isinstance(raw, dict) else None
        return raw | {"tag_validation": word.capitalize()} if isinstance(word, str) else raw

    def remarks(self) -> Iterable[str]:
        if self.keep_every is not None and self.keep_last is None:
            yield ("checkpoint.keep_every has no effect without checkpoint.keep_last: all are kept")

    @property
    def in_background(self) -> bool:
        """The key `async`."""
        return bool(getattr(self, "async"))

    @rule("override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler")
    def _one_source_of_the_schedule(self) -> Iterator[str]:
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            yield (
                "checkpoint.override_opt_param_scheduler and "
                "checkpoint.use_checkpoint_opt_param_scheduler are both true: the first keeps "
                "the values of this config, the second those of the checkpoint; keep one"
            )

    @rule("interval", "save")
    def _interval_needs_a_folder(self) -> Iterator[str]:
        if self.interval and self.save is None:
            yield (
                f"checkpoint.interval is {self.interval}, and there is no folder to save in: "
                "set checkpoint.save"
            )


def errors_of_folder(config: Any) -> Iterator[str]:
    """Yield why a config needs `checkpoint.save`, if it is not set."""
    training = config.training
    needs_folder = {
        "training.resume is 'auto'": training.resume == "auto",
        "training.on_nonfinite.policy is 'rollback'": training.on_nonfinite.policy == "rollback",
    }
    for setting, is_set in needs_folder.items():
        if is_set and config.checkpoint.save is None:
            yield (
                f"{setting}, which loads checkpoints of this run, but checkpoint.save is not set: "
                "set it"
            )


class LoraSection(Section):
    """Train y = W x + alpha / r * B A x, with W frozen; see docs/finetuning.md."""

    r: Count = own(8, "Rank: rows of A, columns of B.")
    alpha: Positive = own(8.0, "The product B A is multiplied by alpha / r.")
    targets: Name | tuple[Name, ...] = own(
        "all-linear",
        'Linear layers with an adapter: `"all-linear"`, all except the output head and layers with '
        "tied weights; a list of names, each a whole name or its last parts (`q_proj` matches "
        "`model.layers.0.self_attn.q_proj`); or a regular expression that matches whole names.",
    )
    dropout: Fraction = own(0.0, "Dropout probability of the input of A.")
    rslora: bool = own(False, "Multiply by alpha / sqrt(r) (rank-stabilized LoRA).")
    train_also: tuple[Name, ...] = own(
        (),
        "Layers to train completely, such as a new head: names as in `targets` (peft: "
        "`modules_to_save`).",
    )
    path: Name | None = own(
        None,
        "Folder of an adapter in peft's format to start from. Keys that are not set here take the "
        "values of its adapter_config.json.",
    )

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / (self.r**0.5 if self.rslora else self.r)

    @rule("targets")
    def _has_targets(self) -> Iterator[str]:
        if self.targets == ():
            yield 'lora.targets is an empty list: name the layers, or write "all-linear"'

    def with_file_values(self, values: Mapping[str, Any]) -> "LoraSection":
        """Return the section with the values of an adapter's file for the keys that are not set.

        Raises:
            ConfigError: a key that is set has another value; on every rank.
        """
        for key, value in values.items():
            own_value = getattr(self, key)
            if key in self.model_fields_set and key != "dropout" and not _equal(own_value, value):
                raise ConfigError(
                    f"lora.{key} is {own_value!r}, and {self.path}/adapter_config.json has "
                    f"{value!r}: remove lora.{key}, or start without lora.path",
                    on_every_rank=True,
                )
        new = {key: value for key, value in values.items() if key not in self.model_fields_set}
        return self.model_copy(update=new)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return sorted(one) == sorted(other)
    return bool(one == other)
