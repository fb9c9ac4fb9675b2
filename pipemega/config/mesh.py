"""`mesh`: how the ranks are laid out.  Floor 1."""

from collections.abc import Iterable
from typing import Literal

from pipemega.config.keys import Auto, Count, Positive, Section, own


class MeshSection(Section):
    """How the ranks are laid out; the product of the three axes is the number of ranks."""

    tensor: Count = own(1, "Ranks that share each matrix; keep them inside a node.")
    pipeline: Count = own(1, "Ranks that share the layers of one copy of the model.")
    data: Count | Auto = own("auto", 'Copies of the model; `"auto"`: as many as the ranks make.')
    sequence_parallel: bool = own(
        False, "Norms and dropout on a slice of the sequence per tensor rank (Megatron's)."
    )
    device: Literal["auto", "cpu", "cuda"] = own(
        "auto", 'Where the model runs; `"auto"`: CUDA where there is one.'
    )
    keep_cpu_memory: bool = own(
        True,
        "On a CPU: freed memory stays with the process for the next micro-batch, in place of going "
        "back to the system and coming again page by page.",
    )
    timeout_seconds: Positive = own(600.0, "How long a rank waits for another before it gives up.")

    def remarks(self) -> Iterable[str]:
        if self.sequence_parallel and self.tensor == 1:
            yield "mesh.sequence_parallel does nothing while mesh.tensor is 1"
