"""`mesh`: the number of ranks on each axis."""

from collections.abc import Iterable, Iterator
from typing import Literal

from pipemega.config.key_kinds import Section, own, rule
from pipemega.config.value_types import Auto, Count, Positive

DeviceName = Literal["cpu", "cuda"]


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
    device: Auto | DeviceName | tuple[DeviceName, ...] = own(
        "auto",
        'Device of the model; `"auto"`: CUDA if it is available, else the CPU. A list gives the '
        'device of each pipeline rank: `["cpu", "cuda", "cuda"]`.',
    )
    keep_cpu_memory: bool = own(
        True, "On a CPU: keep freed memory for the next micro-batch, do not return it to the OS."
    )
    timeout_seconds: Positive = own(600.0, "Longest wait for another rank before the run fails.")

    @rule("device", "pipeline")
    def _one_device_per_pipeline_rank(self) -> Iterator[str]:
        if isinstance(self.device, tuple) and len(self.device) != self.pipeline:
            yield (
                f"mesh.device has {len(self.device)} entries, and mesh.pipeline is "
                f"{self.pipeline}: give one device for each pipeline rank, or one for all: "
                f'"device": "cuda"'
            )

    @property
    def mixed_devices(self) -> tuple[DeviceName, ...]:
        """The device of each pipeline rank if they differ; empty if they are equal."""
        several = isinstance(self.device, tuple) and len(set(self.device)) > 1
        return self.device if several and isinstance(self.device, tuple) else ()

    @property
    def first_device(self) -> Auto | DeviceName:
        """The device of the first pipeline rank: of all of them unless there are mixed devices."""
        return self.device[0] if isinstance(self.device, tuple) else self.device

    def device_of(self, pipeline_rank: int) -> DeviceName:
        """The device of a pipeline rank for a plan, which takes "auto" as CUDA."""
        wish = self.device[pipeline_rank] if isinstance(self.device, tuple) else self.device
        return "cpu" if wish == "cpu" else "cuda"

    def remarks(self) -> Iterable[str]:
        if self.sequence_parallel and self.tensor == 1:
            yield "mesh.sequence_parallel does nothing while mesh.tensor is 1"
