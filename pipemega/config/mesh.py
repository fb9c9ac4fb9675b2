"""`mesh`: the number of ranks on each axis."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

from pipemega.config.key_kinds import Section, own, refused, rule
from pipemega.config.source import show
from pipemega.config.value_types import Auto, Count, Positive
from pipemega.printing import counted

DeviceName = Literal["cpu", "cuda"]

_DEVICE_OF_BACKEND = {"gloo": "cpu", "nccl": "cuda"}

ONLY_1D = "only tensor mode 1d is supported, not 2d, 2.5d or 3d"


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
    backend: Literal["auto", "gloo", "nccl"] = own(
        "auto",
        "Backend of torch.distributed: gloo for a model on the CPU, nccl on GPUs (and gloo for "
        'tensors in CPU memory). With `device` "auto", `"gloo"` selects the CPU and `"nccl"` the '
        'GPUs. `"auto"`: that of the device.',
    )
    keep_cpu_memory: bool = own(
        True, "On a CPU: keep freed memory for the next micro-batch, do not return it to the OS."
    )
    timeout_seconds: Positive = own(600.0, "Longest wait for another rank before the run fails.")
    tensor_mode: Literal["1d", "2d", "2.5d", "3d"] = refused(
        "1d",
        'How matrices are cut over the tensor ranks: `"1d"`, by rows or by columns, as in '
        "Megatron-LM. Colossal-AI's other modes are refused with the following error.",
        f"{ONLY_1D}: remove the mode, and set mesh.tensor to the number of tensor ranks",
        own=True,
    )

    @classmethod
    def prepare(cls, raw: Any) -> Any:
        if not isinstance(raw, Mapping):
            return raw
        raw = dict(raw)
        tensor = raw.get("tensor")
        if isinstance(tensor, Mapping) and "mode" in tensor:
            # Colossal-AI's form.
            raw |= {"tensor": tensor.get("size", 1), "tensor_mode": tensor["mode"] or "1d"}
        if raw.get("device", "auto") == "auto" and raw.get("backend") in _DEVICE_OF_BACKEND:
            raw["device"] = _DEVICE_OF_BACKEND[raw["backend"]]
        return raw

    @rule("backend", "device")
    def _backend_of_device(self) -> Iterator[str]:
        device = _DEVICE_OF_BACKEND.get(self.backend)
        found = {*self.device} if isinstance(self.device, tuple) else {self.device}
        if device is not None and found != {device}:
            yield (
                f"mesh.backend {self.backend!r} is for mesh.device {device!r}, and mesh.device is "
                f'{show(self.device)}: set mesh.device to {device!r}, or mesh.backend to "auto"'
            )

    @rule("device", "pipeline")
    def _one_device_per_pipeline_rank(self) -> Iterator[str]:
        if isinstance(self.device, tuple) and len(self.device) != self.pipeline:
            yield (
                f"mesh.device is a list of {counted(len(self.device), 'device')}, and "
                f"mesh.pipeline is {self.pipeline}: give one device for each pipeline rank, or one "
                f'for all: "device": "cuda"'
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
