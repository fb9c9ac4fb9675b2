"""`mesh`: the number of ranks on each axis."""

from collections.abc import Iterable
from typing import Literal

from pipemega.config.key_kinds import Section, own
from pipemega.config.value_types import Auto, Count, Positive


class MeshSection(Section):
    """Sizes of the mesh axes; their product is the number of ranks."""

    tensor: Count = own(1, "Tensor-parallel size: ranks that share each matrix, best in one node.")
    pipeline: Count = own(1, "Pipeline-parallel size: ranks that share the layers of the model.")
    data: Count | Auto = own(
        "auto", 'Data-parallel size: copies of the model; `"auto"`: ranks / (tensor * pipeline).'
    )
    sequence_parallel: bool = own(
        False, "Megatron's sequence parallelism: norms and dropout on slices of the sequence."
    )
    device: Literal["auto", "cpu", "cuda"] = own(
        "auto", 'Device of the model; `"auto"`: CUDA if it is available, else the CPU.'
    )
    keep_cpu_memory: bool = own(
        True, "On a CPU: keep freed memory for the next micro-batch, do not return it to the OS."
    )
    timeout_seconds: Positive = own(600.0, "Longest wait for another rank before the run fails.")

    def remarks(self) -> Iterable[str]:
        if self.sequence_parallel and self.tensor == 1:
            yield "mesh.sequence_parallel does nothing while mesh.tensor is 1"
