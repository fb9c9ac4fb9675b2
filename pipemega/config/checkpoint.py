"""Config section `checkpoint`: where and when checkpoints are saved, and what is loaded."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import create_model

from pipemega.config.key_kinds import Section, honoured, ignored, own, rule, section
from pipemega.config.value_types import Count, Name, Whole


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
        "true, null: in a resumed run the learning rate, its schedule and the weight decay are "
        "those of this config. false: a checkpoint with other values is refused; this is the "
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
        "Config keys or sections that may differ from those of the checkpoint, even if they change "
        'the model or the order of the data, such as `["model.hidden_dropout", "seed"]`; '
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
