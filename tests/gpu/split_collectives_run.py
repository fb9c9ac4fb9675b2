"""Collectives of sequence parallelism that are split by sample, on two ranks.

test_copies_and_kernels.py starts it with torchrun; the argument is the device.
"""

import sys

import torch

from pipemega.distributed.mesh import build_mesh, pick_device
from pipemega.distributed.topology import Topology
from pipemega.tensor_parallel import collectives
from pipemega.tensor_parallel.collectives import gather_sequence

SHAPE = (3, 1024, 512)  # 2 MiB for each sample


def of_rank(rank: int) -> torch.Tensor:
    # Whole numbers, whose sums are exact.
    return torch.randint(100, SHAPE, generator=torch.Generator().manual_seed(rank)).float()


def main() -> None:
    mesh = build_mesh(Topology(1, 1, 2), pick_device(sys.argv[1]))  # type: ignore[arg-type]
    axis, length = mesh.tensor, SHAPE[1]
    assert collectives._pieces(2 * of_rank(0).nbytes, (3, 2 * length, 512), 1) == 3
    x = of_rank(mesh.rank).to(mesh.device).requires_grad_()
    gathered = gather_sequence(x, axis)
    assert torch.equal(gathered.cpu(), torch.cat([of_rank(0), of_rank(1)], 1))
    weights = [torch.cat([of_rank(2 + r), of_rank(4 + r)], 1) for r in range(2)]
    gathered.backward(weights[mesh.rank].to(mesh.device))
    assert x.grad is not None
    own = slice(mesh.rank * length, (mesh.rank + 1) * length)
    assert torch.equal(x.grad.cpu(), (weights[0] + weights[1])[:, own])
    print("equal", flush=True)


if __name__ == "__main__":
    main()
