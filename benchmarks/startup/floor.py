"""The lower bound of a start: torch, the groups of the quickstart, and one step, without pipemega.

torchrun starts it like `worker.py`, with the root of a tree as its first argument. The step has
the quickstart's 4 x 1024 tokens, forward and backward, in linears of its sizes; no evaluation.
"""

import os
import sys
import time

print_times = os.environ["RANK"] == "0"
if print_times:
    print(f"@@ |torchrun starts the worker|{time.time()}", flush=True)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

if print_times:
    print(f"@@ |imports|{time.time()}", flush=True)

HIDDEN, FEED_FORWARD, VOCABULARY, TOKENS, MICRO_BATCHES = 128, 384, 2048, 8 * 128, 4
# Of one rank of tensor 2 x pipeline 2, without attention: two blocks, and half of a head.
SIZES = [(HIDDEN, 3 * HIDDEN // 2), (HIDDEN // 2, HIDDEN)]
SIZES += [(HIDDEN, FEED_FORWARD), (FEED_FORWARD // 2, HIDDEN)]
SIZES = [*SIZES, *SIZES, (HIDDEN, VOCABULARY // 4)]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for pairs in (([0, 1], [2, 3]), ([0, 2], [1, 3])):
        ranks = next(pair for pair in pairs if rank in pair)
        group = dist.new_group(ranks, use_local_synchronization=True)
        dist.all_reduce(torch.zeros(1), group=group)
    dist.barrier()
    layers = [torch.nn.Linear(*size, bias=False) for size in SIZES]
    optimizer = torch.optim.AdamW([p for layer in layers for p in layer.parameters()], fused=True)
    if print_times:
        print("[pipemega] INFO: run folder", flush=True)
    for _ in range(MICRO_BATCHES):
        for layer in layers:
            layer(torch.randn(TOKENS, layer.in_features, requires_grad=True)).sum().backward()
    optimizer.step()
    dist.barrier()
    if print_times:
        print("step 1/1", flush=True)


if __name__ == "__main__":
    assert len(sys.argv) > 1, "started by benchmarks.startup.run"
    main()
