"""Loads the kernels of the stages while no message is on its way.

CUDA loads a kernel at its first launch, and this may wait until all running kernels end. A posted
receive is a kernel that runs until its message arrives: if the sender waits for this rank, both
wait for ever. So before a step with new shapes, one micro-batch passes one stage after another:

    rank 0   F0@0 SA0@0                            RG0@0 B0@0
    rank 1            RA0@1 F0@1 B0@1 SG0@1

Each message has arrived before the next kernel is launched. Nothing of this run is kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from pipemega.pipeline.execution_state import MicroBatches
from pipemega.pipeline.executor import Executor
from pipemega.pipeline.messages import map_tensors
from pipemega.pipeline.model.module import BufferCopies
from pipemega.pipeline.plan.instructions import Plan
from pipemega.pipeline.plan_selection import evaluation_plan, warmup_plan
from pipemega.pipeline.recorder import NULL_RECORDER, Recorder
from pipemega.random import preserve_rng


def run_discarded(
    executor: Executor,
    plan: Plan,
    batch: MicroBatches,
    device: torch.device,
    zero_gradients: Callable[[], object],
    recorder: Recorder = NULL_RECORDER,
) -> None:
    """Run `plan`, and undo its effects on buffers and generators; gradients become zero."""
    buffers = BufferCopies(executor.stages.values())
    try:
        with preserve_rng(device):
            executor.run(plan, replace(batch, discard_grads=True), recorder)
    finally:
        buffers.restore()
        zero_gradients()


class KernelWarmup:
    """Runs micro-batches with new shapes once before the step or the evaluation that has them.

    Args:
        executor: runs the stages.
        device: the device of the stages.
    """

    def __init__(self, executor: Executor, device: torch.device) -> None:
        self._executor, self._device = executor, device
        self._done = set[tuple[Any, ...]]()

    def is_due(
        self, plan: Plan, shares: Sequence[float] | None, num_samples: int, trains: bool = True
    ) -> bool:
        """Return whether a step with these shapes comes for the first time; equal on all ranks.

        Args:
            plan: a plan of the training steps; gives the stages and the kinds of backward.
            shares: see `MicroBatches`.
            num_samples: number of samples of the step, on all data ranks.
            trains: whether backwards follow.
        """
        return _key(plan, shares, num_samples, trains) not in self._done

    def run(
        self,
        plan: Plan,
        batch: MicroBatches,
        num_samples: int,
        zero_gradients: Callable[[], object] | None = None,
    ) -> None:
        """Run the first micro-batch; in a step that is not full, each of them.

        Args:
            zero_gradients: sets the gradients to zero; None: only forwards.
        """
        trains = zero_gradients is not None
        self._done.add(_key(plan, batch.shares, num_samples, trains))
        once = warmup_plan(plan) if trains else evaluation_plan(plan, 1)
        zero = zero_gradients or (lambda: None)
        for m in range(1 if batch.shares is None else len(batch.inputs)):
            run_discarded(self._executor, once, _only(batch, m), self._device, zero)


def _key(
    plan: Plan, shares: Sequence[float] | None, num_samples: int, trains: bool
) -> tuple[Any, ...]:
    return trains, trains and plan.splits_backward, None if shares is None else num_samples


def _only(batch: MicroBatches, m: int) -> MicroBatches:
    """Return one micro-batch, with copies of its tensors: layers may change them in place."""

    def copies(values: object) -> object:
        return map_tensors(torch.clone, values)

    part = slice(m, m + 1)
    return MicroBatches(
        [copies(x) for x in batch.inputs[part]],
        [copies(x) for x in batch.labels[part]],
        rng_keys=None if batch.rng_keys is None else batch.rng_keys[part],
        shares=None if batch.shares is None else batch.shares[part],
        counted=batch.counted[part],
    )
