"""OutputShard: declares that the output of a layer is a slice of the whole output."""

from dataclasses import dataclass

from torch import Tensor

from pipemega.distributed.mesh import Axis
from pipemega.tensor_parallel.collectives import gather_from_tensor
from pipemega.tensor_parallel.vocabulary import local_range


@dataclass(frozen=True)
class OutputShard:
    """The last dim of a layer's output is sharded over the tensor ranks, in rank order.

    A last layer has it as the attribute `output_shard`, so that metrics see the whole output. The
    layers of this package have it; a layer that contains one of them passes it on:

        self.output_shard = self.head.output_shard

    Args:
        axis: the tensor axis of the mesh.
        size: width of the whole output, without padding.
    """

    axis: Axis
    size: int

    def local_range(self, output: Tensor) -> tuple[int, int]:
        """Return [start, stop) of the columns of this rank's `output`, without padding."""
        return local_range(self.size, output.shape[-1], self.axis.rank)

    def gather(self, output: Tensor) -> Tensor:
        """Return the whole output; collective over the tensor ranks.

        Shape:
            output [..., padded size / T]  ->  [..., size]
        """
        return gather_from_tensor(output, self.axis)[..., : self.size]
