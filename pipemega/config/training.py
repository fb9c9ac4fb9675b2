"""`training`: how long, how often it is evaluated, how the loss is averaged.  Floor 1."""

from typing import Literal

from pipemega.config.keys import Count, NotNegative, Positive, Section, Whole, own, section


class NonFiniteSection(Section):
    """What becomes of a step whose loss or gradients hold inf or nan; see docs/long_runs.md."""

    policy: Literal["skip", "stop", "rollback"] | None = own(
        None,
        "skip: go on with the next batch; stop: end the run with an error; rollback: load the "
        "newest checkpoint of checkpoint.save and go on behind the batch. null: skip with bf16 "
        "unless bf16.check_grad_overflow is false, else stop. Overflows of fp16's gradients are "
        "the loss scale's in any case.",
    )
    budget: Count = own(
        10, "Steps of the whole run that a written skip or rollback may cost before it stops."
    )


class LossSpikesSection(Section):
    """When a loss is worth a warning; nothing else comes of it."""

    window: Whole = own(100, "Steps that a loss is compared with; 0: it is not.")
    factor: Positive = own(
        10.0, "Standard deviations above their median that are a spike (1.4826 * MAD each)."
    )


class StragglersSection(Section):
    """When a rank that takes longer than the others is named."""

    factor: NotNegative = own(
        1.5, "Times the median of the ranks with the same work; 0: no rank is timed."
    )
    interval: Count | None = own(None, "Steps that are looked at together; null: steps_per_print.")


class TrainingSection(Section):
    """The loop around the steps."""

    train_steps: Count | None = own(
        None,
        "Optimizer steps of the whole run; `pretrain_gpt.py` needs it, a loop of your own not.",
    )
    eval_interval: Whole = own(0, "Steps between evaluations; 0: never.")
    eval_steps: Count = own(10, "Global batches in one evaluation.")
    loss_reduction: Literal["token", "micro_batch"] = own(
        "token",
        "The loss is the mean over all tokens of the global batch, or the mean of the means of the "
        "micro-batches.",
    )
    weight_decay_norms_and_biases: bool = own(
        True, "false: parameters of one dim (norms, biases) are not decayed."
    )
    generate_tokens: Whole = own(0, "Length of the text that is shown after training; 0: none.")
    generate_prompt: str = own("", "How that text begins.")
    generate_temperature: NotNegative = own(0.0, "0 takes the likeliest token, more draws freely.")
    progress: bool = own(True, "Show a progress bar, where there is a terminal.")
    resume: Literal["auto", False] = own(
        False,
        "auto: begin with the newest complete checkpoint of checkpoint.save; where there is none, "
        "with checkpoint.load; else anew.",
    )
    exit_after_minutes: Positive | None = own(
        None, "Save and end the run, with exit code 0, so long after its start; null: never."
    )
    on_nonfinite: NonFiniteSection = section(NonFiniteSection, "Steps with inf or nan.", own=True)
    loss_spikes: LossSpikesSection = section(LossSpikesSection, "Losses that jump.", own=True)
    stragglers: StragglersSection = section(StragglersSection, "Ranks that lag.", own=True)
    check_replicas_every: Whole = own(
        0, "Steps between comparisons of all copies of each parameter, bit by bit; 0: never."
    )
