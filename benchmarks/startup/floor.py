"""The lower bound of a start: torch, the groups, and the first step of the quickstart's model.

torchrun starts it like `worker.py`. It is the shortest script for the same work on the same ranks
(tensor 2 x pipeline 2, four micro-batches of 8 x 128 tokens, 1F1B) without pipemega: random
tokens, no config, no corpus, no loader, no clipping, no log. With `training.eval_on_start=true`
among its arguments it first computes the loss of 320 samples, as the quickstart's evaluation does.
"""

import os
import sys
import time

RANK = int(os.environ["RANK"])


def event(name: str) -> None:
    if RANK == 0:
        print(f"@@ |{name}|{time.time()}", flush=True)


event("torchrun starts the worker")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional  # noqa: E402

event("imports")

HIDDEN, FEED_FORWARD, VOCABULARY, BATCH, LENGTH, MICRO_BATCHES = 128, 384, 2048, 8, 128, 4
HEAD_SIZE, EVALUATED = 32, 40
STAGE, SHARD = divmod(RANK, 2)


class Copy(torch.autograd.Function):
    """Before a column-parallel linear: adds the gradients of the tensor ranks."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group  # type: ignore[attr-defined]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)  # type: ignore[attr-defined]
        return grad, None


class Sum(torch.autograd.Function):
    """After a row-parallel linear: adds the outputs of the tensor ranks."""

    @staticmethod
    def forward(ctx: object, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Block(nn.Module):
    """Half of a transformer block: half of the heads and of the feed-forward."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN // 2, bias=False)
        self.out = nn.Linear(HIDDEN // 2, HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, FEED_FORWARD, bias=False)
        self.down = nn.Linear(FEED_FORWARD // 2, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(Copy.apply(self.norms[0](x), self.group)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2) for t in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + Sum.apply(self.out(y.transpose(1, 2).flatten(2)), self.group)
        gate, up = self.up(Copy.apply(self.norms[1](x), self.group)).chunk(2, -1)
        return x + Sum.apply(self.down(functional.silu(gate) * up), self.group)


class Stage(nn.Module):
    """Half of the model: the embedding and two blocks, or two blocks and the head with the loss."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.blocks = nn.Sequential(*(Block(group) for _ in range(2)))
        self.norm = nn.RMSNorm(HIDDEN)
        self.vocabulary = nn.Parameter(0.02 * torch.randn(VOCABULARY // 2, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        """Take tokens and return the hidden state; or take that and return the loss."""
        tokens = torch.randint(VOCABULARY // 2, (BATCH, LENGTH))
        if STAGE == 0:
            return self.blocks(Sum.apply(functional.embedding(tokens, self.vocabulary), self.group))
        hidden = Copy.apply(self.norm(self.blocks(x)), self.group)
        exponents = functional.linear(hidden, self.vocabulary)
        target = exponents.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return (Sum.apply(exponents.exp().sum(-1), self.group).log() - target).mean()


def run(stage: Stage, other: int, count: int, backward: bool) -> None:
    """Run 1F1B, or forwards only, of `count` micro-batches on two stages."""
    sent, outputs = [], []
    for number in range(count + 1):
        if STAGE == 0 and number < count:
            outputs.append(stage(torch.empty(0)))
            sent.append(dist.isend(outputs[-1].detach(), other))
        if STAGE == 0 and number > 0 and backward:
            grad = torch.empty(BATCH, LENGTH, HIDDEN)
            dist.recv(grad, other)
            outputs.pop(0).backward(grad)
        if STAGE == 1 and number < count:
            x = torch.empty(BATCH, LENGTH, HIDDEN)
            dist.recv(x, other)
            loss = stage(x.requires_grad_(backward))
            if backward:
                loss.backward()
                assert x.grad is not None
                sent.append(dist.isend(x.grad, other))
    for request in sent:
        if request is not None:
            request.wait()


def main() -> None:
    dist.init_process_group("gloo")
    groups = []
    for pairs in (([0, 1], [2, 3]), ([0, 2], [1, 3])):
        ranks = next(pair for pair in pairs if RANK in pair)
        groups.append(dist.new_group(ranks, use_local_synchronization=True))
    stage, other = Stage(groups[0]), (RANK + 2) % 4
    if RANK == 0:
        print("[pipemega] INFO: run folder", flush=True)
    if "training.eval_on_start=true" in sys.argv:
        with torch.no_grad():
            run(stage, other, EVALUATED, backward=False)
        dist.barrier()
        if RANK == 0:
            print("validation step 0 ", flush=True)
    run(stage, other, MICRO_BATCHES, backward=True)
    # Not torch.optim: its constructors import torch._dynamo, which takes half a second.
    parameters = [p for p in stage.parameters() if p.grad is not None]
    zeros = [[torch.zeros_like(p) for p in parameters] for _ in range(2)]
    with torch.no_grad():
        torch._fused_adamw_(
            parameters, [p.grad for p in parameters], *zeros, [],  # type: ignore[arg-type]
            [torch.ones(()) for _ in parameters], lr=1e-3, beta1=0.9, beta2=0.95,
            weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
    dist.barrier()
    if RANK == 0:
        print("step 1/1", flush=True)


if __name__ == "__main__":
    main()
