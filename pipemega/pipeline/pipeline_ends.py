"""What is before the first stage and after the last: by default the data and the loss."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pipemega.pipeline.execution_state import ExecutionState, RankStages
from pipemega.pipeline.messages import InputGradient, InputGuard, map_tensors, tensors_of
from pipemega.pipeline.microbatch_loss import microbatch_loss
from pipemega.pipeline.model.vocabulary_shard import VocabularyShard
from pipemega.pipeline.plan.instructions import Instruction, Kind
from pipemega.tensor_parallel.deferred_logits import defer_logits, takes_deferred_logits


class PipelineEnds:
    """The first stage gets the inputs of the micro-batches; backward starts from their losses.

    Gradients are passed as between stages: the first stage leaves those of its input, and the last
    stage takes those of its output, as if a stage followed (`ExecutionState.gradients`).

    Args:
        model: the local stages, with the loss.

    Attributes:
        reads: whether this rank needs the inputs, and the labels, of the micro-batches.
        modules: layers of the model that are on this rank and in none of its stages.
        handlers: run the instructions that only a derived class has.
    """

    modules: Sequence[VocabularyShard] = ()
    handlers: Mapping[Kind, Callable[[Instruction], None]] = {}

    def __init__(self, model: RankStages) -> None:
        self._model, self._last = model, model.num_stages - 1
        self.reads = 0 in model.stages, self._last in model.stages
        self._guard = InputGuard()
        self._run: ExecutionState  # set by `begin`

    def begin(self, run: ExecutionState) -> None:
        """Prepare a run; collective over the pipeline."""
        self._run = run

    def first_input(self, m: int) -> tuple[Any, list[InputGradient]]:
        """Return the input of the first stage, and the gradients that its backward computes."""
        return self._model.cast_inputs(self._run.batch.inputs[m]), []

    def output_context(self, m: int) -> AbstractContextManager[None]:
        """Return the context in which the head defers its logits if only the loss needs them."""
        batch, stage = self._run.batch, self._model.stages[self._last]
        if batch.uses_outputs or m >= len(batch.labels):
            return nullcontext()
        is_read = stage.observer is not None and stage.observer.reads_outputs
        loss_fn = self._model.loss_fn
        if is_read or not takes_deferred_logits(loss_fn):
            return nullcontext()
        return defer_logits(loss_fn, stage.last_layer, batch.loss_factor, batch.counted_labels(m))

    def last_output(self, m: int, output: Any) -> Any:
        """Record the results of the last stage; return what its backward starts from.

        That is the loss, or the output if there is none. As between stages, the gradient of it must
        be in the state of the run before this backward begins.
        """
        run, loss_fn = self._run, self._model.loss_fn
        batch, share, result = run.batch, run.batch.share(m), output
        is_used = share > 0 and batch.uses_outputs
        detached = map_tensors(Tensor.detach, output) if is_used else None
        if is_used and batch.keep_outputs:
            run.results.outputs[m] = detached
        has_labels = m < len(batch.labels)
        labels = batch.labels[m] if has_labels else None
        if has_labels and loss_fn is not None:

            def run_loss(copied: Any) -> tuple[Tensor, Tensor]:
                outputs, labels = copied if is_used else (output, copied)
                return microbatch_loss(loss_fn, outputs, labels, share, run.train)

            # The loss must not change labels, and outputs that are used again.
            key = ("loss", run.train, is_used)
            given = (output, labels) if is_used else labels
            result, weight = self._guard.bind(key)(run_loss, given)
            run.results.losses.add(m, result, weight)
        if has_labels and is_used and batch.on_output is not None:
            batch.on_output(detached, labels)
        if run.train:
            run.gradients[self._last + 1, m] = [
                torch.full_like(tensor, batch.loss_factor)
                for tensor in tensors_of(result)
                if tensor.requires_grad
            ]
        return result

    def layer_result(self, step: Instruction) -> tuple[int, Tensor | None, Tensor | None] | None:
        """Return (position, input, result) of the layer of `modules` that `step` has just run.

        None if it has run none.
        """
        return None
