"""`training`: how long, how often it is evaluated, how the loss is averaged.  Floor 1."""

from typing import Literal

from pipemega.config.keys import Count, NotNegative, Section, Whole, own


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
