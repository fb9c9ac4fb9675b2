"""Runs that once trained wrongly or failed, as cases: python -m tests.fuzz.models --trials.

A dict gives the keys of a `Case`; the key of a row says what pipemega did.
"""

from typing import Any

from tests.fuzz.cases import Case, Mesh

TWO = Mesh(pipeline=2, partition="uniform")
ZERO = Mesh(data=2, zero=True)


def _row(*layers: str, **keys: Any) -> Case:
    return Case(layers=(*layers, "linear"), **{"micro_batches": 4, **keys})


def _zb(schedule: str = "zb-h1", **keys: Any) -> Mesh:
    return Mesh(pipeline=2, schedule=schedule, **{"partition": "uniform", **keys})


def _cut(position: int, num_layers: int, **keys: Any) -> Mesh:
    return Mesh(pipeline=2, partition=[0, position, num_layers], **keys)


TRIALS: dict[str, Case] = {
    # The gradient view was contiguous, and the parameter was not.
    "channels_last, AdamW": _row("conv channels_last", optimizer="AdamW"),
    "channels_last, SGD": _row("conv channels_last", mesh=_zb()),
    "channels_last, Adagrad, resumed": _row(
        "conv channels_last", optimizer="Adagrad", mesh=ZERO, resumed=TWO, resume_at=1
    ),
    "a transposed parameter": _row("transposed", optimizer="AdamW", mesh=ZERO),
    "a parameter with gaps": _row("gaps", optimizer="AdamW"),
    # A rollback changed masters that all-gathers in flight were reading.
    "post-validation, ZeRO, overlap": _row(
        "linear", "tanh", optimizer="AdamW", clipping=0.05, late_sync=True, steps=4,
        mesh=_zb(data=2, zero=True, overlap=True),
    ),
    # W added what a layer computes by autograd.grad.
    "autograd.grad in a layer": _row("saliency", "own weight", mesh=_zb()),
    "a backward in a forward": _row("inner backward", "implicit", mesh=_zb("zb-h2")),
    "a gradient of a gradient, split backward": _row("penalty", mesh=_zb()),
    "a backward in a forward, graphs": _row("inner backward", "implicit", graphs=True),
    "layers are frozen between steps, graphs": _row(
        "linear", "linear", graphs=True, steps=4, frozen=((0, 0, 1), (1, 2, 2))
    ),
    # The gradient of a weight without elements was refused.
    "a linear without elements": _row("empty", fused=True),
    "a linear without elements, split backward": _row("empty", mesh=_zb()),
    "a gradient of a gradient, full backward": _row("penalty", "whole penalty", mesh=TWO),
    # They had no effect under a split backward.
    "a replaced forward": _row("replaced forward", mesh=_zb()),
    "a hook after the accumulation": _row("hook after", mesh=_zb()),
    # The stages before it were not trained.
    "a dataclass, cached": _row("message: dataclass", mesh=_cut(1, 3)),
    "a dataclass, exchanged": _row("message: dataclass", shapes="exchanged", mesh=_cut(1, 3)),
    "an object": _row("message: object", mesh=_cut(1, 3)),
    # The slice did not follow the change.
    "a view, changed in place": _row("message: in place of a view", mesh=_cut(1, 3)),
    "a view, changed in place in one stage": _row("message: in place of a view"),
    # A frozen parameter was decayed and moved by its momentum; one that was unfrozen stayed.
    "frozen after a step": _row("linear", optimizer="AdamW", weight_decay=0.1, frozen=((1, 2, 0),)),
    "frozen before a step": _row("linear", mesh=_zb(), data="iterator", frozen=((0, 1, 0),)),
    "frozen, ZeRO": _row("linear", optimizer="AdamW", mesh=ZERO, frozen=((1, 1, 1),)),
    # The count on the meta device failed.
    "a tensor without a device": _row("message: created", mesh=Mesh(pipeline=2)),
    # They were replaced, or failed in W.
    "attributes named lookup and product": _row("names", mesh=_zb()),
    "prune and weight_norm": _row("prune", "weight_norm", mesh=_zb()),
    "functional_call, vmap, func.grad": _row("transforms", mesh=_zb()),
    "a complex parameter": _row("complex", mesh=Mesh(data=2)),
    # They could not be resumed.
    "an empty parameter, resumed": _row("empty", mesh=ZERO, resumed=TWO, resume_at=1),
    "a number as parameter, NAdam, resumed": _row(
        "scalar", optimizer="NAdam", mesh=ZERO, resumed=ZERO, resume_at=1
    ),
    # A recomputed group got a copy of its input in the forward and not in the recomputation, with
    # other strides: backward took the saved tensors in another order.
    "a recomputed layer whose input has gaps": Case(layers=("complex", "linear"), recompute=1),
    # With map-style data the ranks did not learn of it.
    "frozen, data given to initialize": _row("linear", weight_decay=0.1, frozen=((0, 1, 0),)),
    # The move of the first step removed its hooks.
    "a built module with a hook, which moves": _row(
        "hook after", "linear", "tanh", style="built", data="batch", mesh=Mesh(pipeline=2)
    ),
    # The provisional plan had no W, the final one had.
    "linears, whose W the first micro-batch decides": _row(
        "linear", "tanh", "tanh", "linear", data="iterator", micro_batches=1,
        mesh=Mesh(2, schedule="dualpipe-v", chunks=2, partition=[0, 2, 3, 4, 5]),
    ),
    "frozen with post-validation and map-style data": _row(
        "linear", late_sync=True, mesh=_zb(), frozen=((1, 1, 0),)
    ),
    # Beside a mean loss, they were as many times too strong as a micro-batch has samples.
    "auxiliary losses of experts": _row("experts, gated", samples=3),
    "W within exchanges": _row(
        "experts", mesh=Mesh(pipeline=2, data=2, expert=2, schedule="zb-h1"), micro_batches=8,
        fills=True,
    ),
    # A graph repeated the numbers of rows of its capture.
    "experts, graphs": _row("experts, aux_loss", graphs=True),
    # The step had the number of samples of one data rank.
    "auxiliary losses, ignored labels, whole batches": _row(
        "experts", data="batch", ignored=True, mesh=Mesh(data=2, expert=2)
    ),
    # The fused SGD of torch failed.
    "some parameters without momentum": _row("linear", data="batch", frozen=((0, 0, 0),)),
}  # fmt: skip
REFUSED_TRIALS = {
    "a gradient of a gradient, split backward",
    "an object",
    "a view, changed in place",
    "frozen with post-validation and map-style data",
}
