"""Runs the passes of vocabulary parallelism on one pipeline rank, for the executor.

Every rank reads inputs and labels, so the shapes of all messages are known without headers. The
losses, gradients and sums of partial results are in the order of ranks and micro-batches under
every schedule.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from pipemega.distributed.mesh import gather_objects
from pipemega.pipeline.execution_state import ExecutionState, RankStages
from pipemega.pipeline.executor import PipelineEnds
from pipemega.pipeline.messages import InputGradient, TensorMeta, collect_gradients
from pipemega.pipeline.microbatch_loss import microbatch_loss
from pipemega.pipeline.model.vocabulary_shard import EmbeddedInputs, VocabularyShard
from pipemega.pipeline.plan.channels import Channel, channels_of
from pipemega.pipeline.plan.instructions import (
    TRANSFER_OF_NAME,
    TRANSFER_OF_RECEIVE,
    TRANSFER_OF_SEND,
    WITH_SHARDS,
    Direction,
    Instruction,
    Kind,
)
from pipemega.pipeline.transport import Receive, Transport
from pipemega.pipeline.weight_queue import GradReadyListener
from pipemega.tensor_parallel.collectives import require_in_vocabulary, require_one_target_per_token
from pipemega.tensor_parallel.cross_entropy import (
    Exponentials,
    Partial,
    combine,
    hidden_gradient,
    logit_gradient,
    output_pass,
    partial_shapes,
    sum_dtype,
)
from pipemega.tensor_parallel.linear_cross_entropy import counted_rows


@dataclass
class _MicroBatch:
    """What this rank holds of a micro-batch."""

    # Of the local shard: what is sent, or used by the stage on the same rank.
    rows: Tensor | None = None
    partial: list[Tensor] | None = None
    exponentials: Exponentials | None = None
    # Hidden of the tokens that count [tokens, hidden], until T.
    hidden: Tensor | None = None
    # On the rank of the first or the last stage.
    row_gradient: Tensor | None = None
    normalizers: Tensor | None = None
    receives: dict[Channel, Receive] = field(default_factory=dict)
    # Positions of the labels that count, or None for all; empty until they are known.
    counted: tuple[Tensor | None] | None = None


class VocabularyRuns(PipelineEnds):
    """The passes of one rank; S gets the output of the last stage, and E gives the first its input.

    Args:
        model: the local stages; its loss is (losses of the tokens, labels) -> loss of the
            micro-batch.
        shard: the local rows.
        transport: sends messages to the other pipeline ranks.
        listener: is notified when the gradients of a weight are complete; may be None.
        copies_output: the output of the last stage is in memory that the forward of another
            micro-batch overwrites after the backward of this one (CUDA graphs).
    """

    def __init__(
        self,
        model: RankStages,
        shard: VocabularyShard,
        transport: Transport,
        listener: GradReadyListener | None,
        *,
        copies_output: bool = False,
    ) -> None:
        super().__init__(model)
        self._shard, self._copies_output = shard, copies_output
        self.modules, self.reads = [shard], (True, True)
        self._transport, self._listener = transport, listener
        self._rank = shard.pipeline.rank
        self._batches: dict[int, _MicroBatch] = {}
        self._final: frozenset[Instruction] = frozenset()
        self.handlers = {
            Kind.EMBED: self._embed,
            Kind.OUTPUT: self._output,
            Kind.LOSS: self._loss,
            Kind.OUTPUT_WEIGHT: self._output_weight,
            Kind.EMBED_WEIGHT: self._embed_weight,
            **{transfer.send: self._send for transfer in WITH_SHARDS},
            **{transfer.receive: self._receive for transfer in WITH_SHARDS},
        }

    def begin(self, run: ExecutionState) -> None:
        """Prepare a run; collective over the pipeline without backwards."""
        super().begin(run)
        self._batches = {}
        # Every rank computes a part of the outputs of the last stage. A training step returns its
        # outputs on all ranks, or on none.
        self._gives_outputs = run.batch.uses_outputs
        if not run.train:
            uses = gather_objects(self._gives_outputs, self._shard.pipeline)
            self._gives_outputs = any(uses)
        self._final = frozenset()
        if run.final_backwards:  # the listener is to be notified
            program = run.plan.programs[self._rank]
            kinds = (Kind.OUTPUT_WEIGHT, Kind.EMBED_WEIGHT)
            self._final = frozenset({s.kind: s for s in program if s.kind in kinds}.values())

    # Between the stages and the shards, on the ranks of the first and the last stage

    def first_input(self, m: int) -> tuple[Any, list[InputGradient]]:
        step = Instruction(Kind.FORWARD, 0, m)
        first, *others = self._of_all_shards("embedding", step, [self._take_rows(m)])
        rows = first[0].clone()
        for (other,) in others:
            rows += other
        inputs = EmbeddedInputs(self._run.batch.inputs[m], rows.requires_grad_(self._run.train))
        return collect_gradients(inputs)

    def last_output(self, m: int, hidden: Tensor) -> Tensor:
        """Keep the output of the last stage for S and W."""
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        if self._copies_output:
            flat = flat.clone()
        counted = self._counted(m)
        self._of(m).hidden = flat if counted is None else flat.index_select(0, counted)
        return hidden

    # Diagnostics

    def layer_result(self, step: Instruction) -> tuple[int, Tensor | None, Tensor | None] | None:
        """Return (position of the layer, hidden, result) of an E or S of training that just ran."""
        batch, head = self._of(step.microbatch), self._shard.head
        if step.kind is Kind.EMBED:
            return 0, None, batch.rows
        if step.kind is not Kind.OUTPUT:
            return None
        # A shard of padding has no logits.
        statistics = batch.partial[0] if batch.partial and head.start < head.stop else None
        return self._shard.stop - 1, batch.hidden, statistics

    # Passes

    def _embed(self, step: Instruction) -> None:
        self._shard.before_use(self._shard.start)
        ids = self._ids(step.microbatch)
        require_in_vocabulary(ids, self._shard.split.token_loss.vocab_size, "token id")
        with self._shard.observed(self._shard.start, ids):
            self._of(step.microbatch).rows = self._shard.embed(ids)

    def _output(self, step: Instruction) -> None:
        m, split = step.microbatch, self._shard.split
        batch = self._of(m)
        self._shard.before_use(self._shard.stop - 1)
        if received := self._arrived("hidden", step):
            (batch.hidden,) = received[0]
        assert batch.hidden is not None
        batch.partial = []
        if self._has_labels(m):
            require_in_vocabulary(self._labels(m), split.token_loss.vocab_size, "target", -100)
            with self._shard.observed(self._shard.stop - 1, batch.hidden), torch.no_grad():
                partial, batch.exponentials = output_pass(
                    self._shard.head_rows(),
                    batch.hidden,
                    self._targets(m),
                    split.token_loss,
                    self._run.train,
                )
            batch.partial = partial.tensors()
        if self._gives_outputs:
            batch.partial.append(batch.hidden @ self._shard.head.weight.detach().t())
        if not self._run.train:
            batch.hidden = None

    def _loss(self, step: Instruction) -> None:
        m, run, split = step.microbatch, self._run, self._shard.split
        batch = self._of(m)
        own, batch.partial = batch.partial, None
        assert own is not None
        received = self._of_all_shards("partial", step, own)
        if self._gives_outputs:
            self._give_output(m, [part.pop() for part in received])
        if not self._has_labels(m):
            return
        parts = [Partial.of(part) for part in received]
        targets, labels = self._targets(m), self._labels(m)
        with torch.no_grad():
            combined = combine(parts, targets, split.token_loss, self._shard.tensor)
        losses = combined.losses.requires_grad_(run.train)
        loss_fn = self._model.loss_fn
        assert loss_fn is not None
        with torch.set_grad_enabled(run.train):
            share = run.batch.share(m)
            loss, weight = microbatch_loss(loss_fn, losses, labels, share, run.train)
        run.results.losses.add(m, loss, weight)
        if not run.train:
            return
        start = torch.full_like(loss, run.batch.loss_factor)
        (dloss,) = torch.autograd.grad(loss, losses, start)
        with torch.no_grad():
            dloss = dloss.masked_fill(targets == -100, 0.0)
            gradient = hidden_gradient(parts, combined, dloss, split.token_loss)
            run.gradients[self._last + 1, m] = [self._whole(m, gradient)]
            batch.normalizers = torch.stack([combined.normalizer.detach(), dloss])

    def _give_output(self, m: int, logits: list[Tensor]) -> None:
        """Give the caller the logits [batch, sequence, vocabulary (/ T)], from all shards."""
        batch = self._run.batch
        output = self._shard.joined(logits).view(*self._ids(m).shape, -1)
        if batch.share(m) > 0 and batch.keep_outputs:
            self._run.results.outputs[m] = output
        if batch.share(m) > 0 and batch.on_output is not None and self._has_labels(m):
            batch.on_output(output, self._labels(m))

    def _whole(self, m: int, gradient: Tensor) -> Tensor:
        """Return the gradient of all tokens [batch, sequence, hidden], 0 for those left out."""
        gradient = gradient.to(self._shard.head.weight.dtype)
        labels, counted = self._labels(m), self._counted(m)
        if counted is not None:
            whole = gradient.new_zeros(labels.numel(), gradient.shape[1])
            gradient = whole.index_copy_(0, counted, gradient)
        return gradient.view(*labels.shape, -1)

    def _output_weight(self, step: Instruction) -> None:
        m, weight = step.microbatch, self._shard.head.weight
        batch = self._of(m)
        if received := self._arrived("normalizer", step):
            (batch.normalizers,) = received[0]
        if weight.requires_grad:
            assert batch.hidden is not None
            assert batch.exponentials is not None
            assert batch.normalizers is not None
            head, loss = self._shard.head_rows(), self._shard.split.token_loss
            with torch.no_grad():
                dlogits = logit_gradient(
                    head, self._targets(m), batch.exponentials, batch.normalizers, loss
                )
            rows = dlogits.shape[1]
            with self._final_gradient(step, weight):
                if (grad := _summed_in_place(weight)) is not None:
                    with torch.no_grad():
                        grad[:rows].addmm_(dlogits.t(), batch.hidden)
                else:
                    torch.autograd.backward(weight[:rows], dlogits.t() @ batch.hidden)
        batch.hidden = batch.exponentials = batch.normalizers = None

    def _embed_weight(self, step: Instruction) -> None:
        m, weight = step.microbatch, self._shard.embedding.weight
        batch = self._of(m)
        if received := self._arrived("embedding gradient", step):
            (batch.row_gradient,) = received[0]
        if weight.requires_grad:
            assert batch.row_gradient is not None
            local, gradient = self._shard.embed_gradient(self._ids(m), batch.row_gradient)
            with self._final_gradient(step, weight):
                grad = _summed_in_place(weight)
                # On a GPU, `index_add_` adds in any order.
                if grad is not None and not grad.is_cuda:
                    with torch.no_grad():
                        grad.index_add_(0, local.reshape(-1), gradient.flatten(0, -2))
                else:
                    torch.autograd.backward(F.embedding(local, weight), gradient)
        batch.row_gradient = None

    def _final_gradient(self, step: Instruction, weight: Tensor) -> AbstractContextManager[None]:
        if self._listener is None or step not in self._final:
            return nullcontext()
        return self._listener.final_backward([weight], None)  # type: ignore[list-item]

    # Data

    def _of(self, m: int) -> _MicroBatch:
        return self._batches.setdefault(m, _MicroBatch())

    def _ids(self, m: int) -> Tensor:
        return self._shard.split.token_ids(self._run.batch.inputs[m])

    def _has_labels(self, m: int) -> bool:
        return m < len(self._run.batch.labels)

    def _labels(self, m: int) -> Tensor:
        labels: Tensor = self._run.batch.labels[m]
        return labels

    def _targets(self, m: int) -> Tensor:
        """Return the labels of the tokens whose logits are computed [tokens]."""
        flat, counted = self._labels(m).reshape(-1), self._counted(m)
        return flat if counted is None else flat.index_select(0, counted)

    def _counted(self, m: int) -> Tensor | None:
        """Return the positions of the labels that count, at least one; None: all tokens count."""
        batch = self._of(m)
        if batch.counted is None:
            counted = None
            if self._has_labels(m):
                require_one_target_per_token(self._labels(m), self._ids(m).numel())
            if not self._gives_outputs:
                flat = self._labels(m).reshape(-1)
                counted, _ = counted_rows(flat, self._run.batch.counted_labels(m))
            if counted is not None and not len(counted):
                counted = counted.new_zeros(1)
            batch.counted = (counted,)
        return batch.counted[0]

    # Messages

    def _send(self, step: Instruction) -> None:
        transfer = TRANSFER_OF_SEND[step.kind]
        tensors = self._sent(transfer.name, step.microbatch)
        for channel in channels_of(self._run.plan, transfer, step):
            self._transport.send(channel, step.microbatch, tensors)

    def _sent(self, direction: Direction, m: int) -> list[Tensor]:
        """Return the tensors of a message; those that this rank uses no more are released."""
        batch = self._of(m)
        if direction == "embedding":
            return [self._take_rows(m)]
        if direction == "embedding gradient":
            (batch.row_gradient,) = self._run.gradients.pop((0, m))
            return [batch.row_gradient]
        if direction == "partial":
            sent, batch.partial = batch.partial, None
            assert sent is not None
            return sent
        tensor = batch.hidden if direction == "hidden" else batch.normalizers
        assert tensor is not None
        return [tensor]

    def _take_rows(self, m: int) -> Tensor:
        batch = self._of(m)
        rows, batch.rows = batch.rows, None
        assert rows is not None
        return rows

    def _receive(self, step: Instruction) -> None:
        transfer, m = TRANSFER_OF_RECEIVE[step.kind], step.microbatch
        metas = self._metas(transfer.name, m)
        for channel in channels_of(self._run.plan, transfer, step):
            receive = self._transport.receive(channel, m, lambda: metas)
            self._of(m).receives[channel] = receive

    def _metas(self, direction: Direction, m: int) -> list[TensorMeta]:
        split, weight, counted = self._shard.split, self._shard.head.weight, self._counted(m)
        hidden, dtype = split.hidden_size, weight.dtype
        tokens = self._ids(m).numel() if counted is None else len(counted)
        if direction in ("embedding", "embedding gradient"):
            shapes = [((*self._ids(m).shape, hidden), dtype)]
        elif direction == "hidden":
            shapes = [((tokens, hidden), dtype)]
        elif direction == "partial":
            shapes = []
            if self._has_labels(m):
                shapes = partial_shapes(tokens, hidden, dtype, split.token_loss, self._run.train)
            if self._gives_outputs:
                shapes.append(((tokens, len(weight)), dtype))
        else:
            shapes = [((2, tokens), sum_dtype(dtype))]
        return [TensorMeta(shape, dtype, False) for shape, dtype in shapes]

    def _arrived(self, direction: Direction, step: Instruction) -> list[list[Tensor]]:
        """Wait for what `step` uses from other ranks, in the order of ranks."""
        m, transfer = step.microbatch, TRANSFER_OF_NAME[direction]
        used, receives = channels_of(self._run.plan, transfer, step), self._of(m).receives
        found = [list(self._transport.wait(receives.pop(channel))) for channel in used]
        if transfer.proves is not None:
            for channel in used:
                self._transport.release(Channel(transfer.proves, channel.boundary), m)
        if found:
            self._run.recorder.ready()
        return found

    def _of_all_shards(
        self, direction: Direction, step: Instruction, own: list[Tensor]
    ) -> list[list[Tensor]]:
        """Return the result of every shard, in the order of ranks."""
        found = self._arrived(direction, step)
        return [*found[: self._rank], own, *found[self._rank :]]


def _summed_in_place(weight: Tensor) -> Tensor | None:
    """Return the gradient of `weight` if a product can be added to it without autograd.

    None if gradients are summed in another dtype, or a hook of the user must see them.
    """
    grad = weight.grad
    return grad if grad is not None and not weight._backward_hooks else None
