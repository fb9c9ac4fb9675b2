"""`training`: length of the run, evaluation, and what the Trainer does on errors and spikes."""

import re
from collections.abc import Iterator
from typing import Literal

from pipemega.config.key_kinds import Section, own, rule, section
from pipemega.config.value_types import Count, Name, NotNegative, Positive, Whole

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

    window: Whole = own(100, "Compare the loss with that of this many previous steps; 0: no check.")
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
