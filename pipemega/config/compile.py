"""`compile`: torch.compile for each layer of a stage."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import create_model

from pipemega.config.key_kinds import Section, honoured, ignored, own, refused, rule
from pipemega.config.value_types import Name

# Arguments of torch.compile that `kwargs` may have; each is also a key of the section.
_ARGUMENTS = ("backend", "mode", "dynamic")
# Modes that add CUDA graphs -> the same without them.
_WITHOUT_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}
_DEEPCOMPILE = (
    "autoep_non_moe free_activation free_activation_threshold offload_activation "
    "offload_activation_pin_memory offload_opt_states double_buffer symmetric_memory debug_log "
    "offload_parameters sync_before_reduce sync_after_reduce sync_before_allgather "
    "sync_after_allgather keep_int_input_tensors keep_all_input_tensors passes"
)

if TYPE_CHECKING:
    _DeepCompileKeys = Section
else:
    _DeepCompileKeys = create_model(
        "_DeepCompileKeys",
        __base__=Section,
        __module__=__name__,
        **{
            name: (Any, ignored(None, "An option of DeepCompile.", "DeepCompile is not used"))
            for name in _DEEPCOMPILE.split()
        },
    )


class CompileSection(_DeepCompileKeys):
    """torch.compile for each layer in training; see docs/gpu.md."""

    enabled: bool = honoured(False, "Compile the forward and backward of each layer.")
    backend: Name = honoured("inductor", "Backend of torch.compile.")
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = own(
        "default", "Mode of torch.compile; CUDA graphs are not used."
    )
    dynamic: bool | None = own(
        None,
        "Compile kernels that work with any size of the inputs: true: always; false: never; null: "
        "when a layer gets inputs of a second size.",
    )
    kwargs: Mapping[str, Any] | None = honoured(
        None, "Arguments of torch.compile: `backend`, `mode`, `dynamic`."
    )
    deepcompile: bool = refused(
        False,
        "DeepSpeed's compiler of the whole step.",
        "DeepCompile rewrites the graph of DeepSpeed's engine: set compile.enabled instead, which "
        "compiles each layer by torch.compile",
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        """Move the arguments in `kwargs` to the keys of the same names."""
        if raw is None or isinstance(raw, bool):
            return {"enabled": bool(raw)}
        given = raw.get("kwargs") if isinstance(raw, Mapping) else None
        if not isinstance(given, Mapping):
            return raw
        moved = {name: given[name] for name in _ARGUMENTS if name in given}
        rest = {name: value for name, value in given.items() if name not in moved}
        return {**moved, **raw, "kwargs": rest}

    @rule("kwargs")
    def _kwargs_are_known(self) -> Iterator[str]:
        unknown = [name for name, value in (self.kwargs or {}).items() if value]
        if unknown:
            yield (
                f"compile.kwargs has {unknown[0]!r}, which pipemega does not pass to "
                f"torch.compile: remove it; {', '.join(_ARGUMENTS)} are allowed"
            )

    @property
    def mode_without_graphs(self) -> str:
        """The mode without CUDA graphs."""
        return _WITHOUT_GRAPHS.get(self.mode, self.mode)

    def remarks(self) -> Iterable[str]:
        if self.enabled and self.mode in _WITHOUT_GRAPHS:
            yield (
                f"compile.mode {self.mode!r} runs as {self.mode_without_graphs!r}: a CUDA graph "
                "has one memory for its activations, and a pipeline holds those of several "
                "micro-batches"
            )
