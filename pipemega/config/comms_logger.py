"""`comms_logger`: a table of the collectives and messages of one step."""

from collections.abc import Iterable, Iterator, Mapping

from pipemega.config.key_kinds import Section, honoured, ignored, own, rule
from pipemega.config.value_types import Count, Name

# DeepSpeed's names of operations -> ours; the empty ones do not occur in a step.
OPERATIONS: Mapping[str, str] = {
    **dict.fromkeys(("all_reduce", "all_reduce_coalesced", "inference_all_reduce"), "all_reduce"),
    **dict.fromkeys(
        ("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "allgather_fn"),
        "all_gather",
    ),
    **dict.fromkeys(
        ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_fn"), "reduce_scatter"
    ),
    **dict.fromkeys(("all_to_all", "all_to_all_single"), "all_to_all"),
    **dict.fromkeys(("send", "isend"), "send"),
    **dict.fromkeys(("recv", "irecv"), "recv"),
    **dict.fromkeys(("send_recv", "batch_isend_irecv"), "send_recv"),
    "broadcast": "broadcast",
    **dict.fromkeys(
        (
            "barrier", "monitored_barrier", "reduce", "gather", "scatter", "all_gather_object",
            "broadcast_object_list",
        ),
        "",
    ),
}  # fmt: skip


class CommsLoggerSection(Section):
    """The communication of one step: calls, bytes, times and bandwidths, once in the log."""

    enabled: bool = honoured(
        False, "Log a table of the communication of step `comms_logger.profile_step`."
    )
    profile_step: Count = own(
        2, "The step that is recorded, counted from the start of the program, also if it resumes."
    )
    verbose: bool = honoured(False, "One line for each message size, not one for each operation.")
    prof_all: bool = honoured(True, "Record all operations; false: only `prof_ops`.")
    prof_ops: tuple[Name, ...] = honoured(
        (), "DeepSpeed's names of operations to record, such as `all_reduce`, `isend`."
    )
    debug: bool = ignored(
        False, "Add the calling function to each name.", "the table names the mesh axis instead"
    )

    @rule("prof_ops")
    def _prof_ops_are_known(self) -> Iterator[str]:
        unknown = [name for name in self.prof_ops if name not in OPERATIONS]
        if unknown:
            yield (
                f"comms_logger.prof_ops has {unknown[0]!r}, which is no operation; the operations "
                f"are {', '.join(OPERATIONS)}"
            )

    def remarks(self) -> Iterable[str]:
        if self.enabled and not self.prof_all and not self.prof_ops:
            yield (
                "comms_logger records nothing, because comms_logger.prof_all is false and "
                "comms_logger.prof_ops is empty: name the operations to record, or set prof_all "
                "to true"
            )
