"""`flops_profiler`: DeepSpeed's table of the costs of modules."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from pipemega.config.key_kinds import Section, honoured
from pipemega.config.value_types import NotNegative, Whole


class FlopsProfilerSection(Section):
    """A table of parameters, FLOPs and forward times of the modules, printed once."""

    enabled: bool = honoured(False, "Profile the modules in one training step.")
    profile_step: Whole = honoured(
        1,
        "Number of the step to profile; 0 and 1 are the first step, whose times may include "
        "warm-up.",
    )
    module_depth: Annotated[int, Field(ge=-1)] = honoured(
        -1, "Deepest level of modules in the table; the whole model is level 0; -1: all levels."
    )
    top_modules: Whole = honoured(1, "Number of classes of modules to list for each level.")
    detailed: bool = honoured(True, "Also list every module.")
    recompute_fwd_factor: NotNegative = honoured(
        0.0, "Share of the forward that activation checkpointing repeats in backward."
    )
    output_file: str | None = honoured(
        None, "File for the table, instead of standard output; written by rank 0."
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        # Older configs could contain the section as true, false or null.
        if raw is None or isinstance(raw, bool):
            return {"enabled": bool(raw)}
        return raw


def warnings_of_profiling(config: Any) -> Iterator[str]:
    """Yield a warning if a `Config` profiles a step that the run does not have."""
    section, training = config.flops_profiler, config.training
    if not section.enabled or not training.has_length:
        return
    # More data ranks have as many steps, or fewer.
    steps = config.batch_sizes(config.smallest_data_size).run_length(training).steps
    if steps is not None and section.profile_step > steps:
        in_samples = training.train_samples is not None
        length = f"train_samples are {steps} steps" if in_samples else f"train_steps {steps}"
        yield (
            f"flops_profiler.profile_step ({section.profile_step}) is after the last step "
            f"(training.{length}): no step will be profiled"
        )
