"""Runs a case with pipemega on the ranks of the pool, and with plain torch in one process."""

import logging
import traceback
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipemega import EXPERT_AXIS, TENSOR_AXIS, LayerSpec, PipelineModule, TiedLayerSpec, initialize
from pipemega.distributed.mesh import Axis
from pipemega.distributed.topology import Topology
from pipemega.engine.engine import Engine
from pipemega.errors import PipemegaError
from pipemega.layer_costs import tensor_meter
from pipemega.layer_costs.tensor_meter import rates_for
from pipemega.pipeline.schedules import SCHEDULES, splits_backward
from tests.fuzz.cases import OPTIMIZERS, Case, Mesh
from tests.fuzz.experts import KINDS as EXPERTS
from tests.fuzz.experts import Mixture, ignoring_loss
from tests.fuzz.layers import LAYERS, WHOLE_BACKWARD, WIDTH, functional_loss
from tests.ranks.recorded_graphs import graphs_on_cpus
from tests.ranks.training_runs import offload_on_cpus

Sample = tuple[Tensor, Tensor]
# A loss, a norm, or a parameter; by a name that says which.
Numbers = dict[str, Any]


def head(embedding: nn.Embedding, x: Tensor) -> Tensor:
    return x @ embedding.weight.T


def specs(case: Case) -> list[Any]:
    """Return the layers of a case, for a PipelineModule."""
    words = TiedLayerSpec("words", nn.Embedding, WIDTH, WIDTH)
    found: list[Any] = {
        "tensors": [],
        "tokens": [LayerSpec(nn.Embedding, WIDTH, WIDTH)],
        "tied": [words],
    }[case.ends]
    torch.manual_seed(3)
    for kind in case.layers:
        for layer in LAYERS[kind]:
            if kind == "tied":
                found.append(TiedLayerSpec("tied", layer))
            elif kind == "parallel":
                found.append(LayerSpec(layer, TENSOR_AXIS))
            elif kind in EXPERTS:
                found.append(LayerSpec(layer, TENSOR_AXIS, EXPERT_AXIS))
            elif kind == "tanh":
                found.append(layer)
            else:
                found.append(layer() if case.style == "built" else LayerSpec(layer))
    if case.ends == "tied":
        found.append(TiedLayerSpec("words", nn.Embedding, WIDTH, WIDTH, forward_fn=head))
    return found


def samples(case: Case) -> list[Sample]:
    """Return the samples of all steps, in order."""
    generator = torch.Generator().manual_seed(len(case.layers))
    count = case.steps * case.micro_batches * case.samples
    x, y = torch.randn(2, count, 4, WIDTH, generator=generator)
    if case.ends != "tensors":
        x = torch.randint(WIDTH, (count, 4), generator=generator)
    return list(zip(x, y, strict=True))


def micro_batches(case: Case, step: int) -> list[Sample]:
    """Return the micro-batches of the whole batch of a step."""
    data, size = samples(case), case.samples
    first = step * case.micro_batches * size
    starts = range(first, first + case.micro_batches * size, size)
    found = (tuple(map(torch.stack, zip(*data[n : n + size], strict=True))) for n in starts)
    return [(x, y) for x, y in found]


def config_of(case: Case, mesh: Mesh) -> dict[str, Any]:
    late = {"optimizer_sync": "post_validate", "optimizer_sync_after": 0}
    splits = mesh.schedule in SCHEDULES and splits_backward(mesh.schedule)
    params = OPTIMIZERS[case.optimizer] | {"weight_decay": case.weight_decay}
    return {
        "train_batch_size": case.micro_batches * case.samples,
        "train_micro_batch_size_per_gpu": case.samples,
        "gradient_clipping": case.clipping,
        "gradient_accumulation_fusion": case.fused,
        "training": {"weight_decay_norms_and_biases": True},
        "optimizer": {"type": case.optimizer, "params": params},
        "mesh": {
            "pipeline": mesh.pipeline,
            "tensor": mesh.tensor,
            "expert": mesh.expert,
            "timeout_seconds": 30,
        },
        "data": {"dataloader_type": "single"},
        "zero_optimization": {"stage": int(mesh.zero), "overlap_comm": mesh.overlap},
        "pipeline": {
            "schedule": mesh.schedule,
            "partition": mesh.partition,
            "shapes": case.shapes,
            "activation_checkpoint_interval": case.recompute,
            # Keeps the W of the schedule, for which these layers are refused.
            **({"weight_queue_limit": None} if {*case.layers} & {*WHOLE_BACKWARD} else {}),
            **({"chunks": mesh.chunks} if mesh.schedule != "auto" else {}),
            **(late if case.late_sync else {}),
            "fill_waits": case.fills and mesh.expert > 1 and splits,
        },
        "activation_checkpointing": {"cpu_checkpointing": case.offload},
        "compile": {"enabled": False, "cuda_graphs": case.graphs},
        "steps_per_print": None,
    }


def engine_of(case: Case, mesh: Mesh) -> Engine:
    arguments: dict[str, Any] = {}
    if case.data == "initialize":
        arguments["training_data"] = samples(case)
    elif case.example:
        arguments["example"] = micro_batches(case, 0)[0]
    net = PipelineModule(specs(case), loss_of(case))
    # So slow that parts of W fit into the exchanges of a few tokens.
    slow = replace(rates_for(None, Topology()), exchange=1e7)
    with mock.patch.object(tensor_meter, "_FULL", slow):
        return initialize(net, config_of(case, mesh), **arguments)[0]


def loss_of(case: Case) -> Any:
    return ignoring_loss if case.ignored else functional_loss


def freeze(case: Case, step: int, layers: Iterator[tuple[int, Any]]) -> None:
    """Set requires_grad of the layers that are frozen in some steps."""
    for position, layer in layers:
        is_frozen = case.is_frozen(position, step)
        built = None if is_frozen is None else _built(specs(case)[position])
        if is_frozen is None or not isinstance(built, nn.Module):
            continue
        # Some kinds have parameters that are never trained.
        trained = {name for name, p in built.named_parameters() if p.requires_grad}
        for name, parameter in layer.named_parameters():
            if name in trained:
                parameter.requires_grad_(not is_frozen)


def train(case: Case, folder: str) -> tuple[Numbers, dict[str, Tensor]]:
    """Train with pipemega; return numbers, and the first values of parameters and buffers."""
    found: Numbers = {}
    engine = engine_of(case, case.mesh)
    first = engine.parameter_state() | engine.buffer_state()
    for step in range(case.steps):
        if step == case.resume_at and case.resumed is not None:
            engine.save_checkpoint(folder)
            engine = engine_of(case, case.resumed)
            engine.load_checkpoint(folder)
        if case.frozen:
            for stage in engine.local_stages:
                named = ((int(name), layer) for name, layer in stage.layers.items())
                freeze(case, step, named)
        batches = micro_batches(case, step)
        data = engine.mesh.data
        mine = batches[data.rank :: data.size]
        if step == case.evaluate_at:
            found[f"evaluation {step}"] = engine.eval_batch(mine, len(mine))
        if case.data == "initialize":
            loss = engine.train_batch()
        elif case.data == "iterator":
            loss = engine.train_batch(iter(mine))
        else:
            loss = engine.train_batch(batch=tuple(map(torch.cat, zip(*mine, strict=True))))
        engine.settle()
        found[f"loss {step}"] = loss
        if case.clipping:
            found[f"norm {step}"] = engine.get_global_grad_norm()
    engine.check_replicas()
    found |= engine.parameter_state()
    found |= {n: b for n, b in engine.buffer_state().items() if n.endswith(".expert_bias")}
    engine.close()
    return found, first


def expected(case: Case, first: dict[str, Tensor]) -> Numbers:
    """Train with torch, from the parameters `first`."""
    built = [_built(layer) for layer in specs(case)]
    ties: dict[str, nn.Module] = {}
    for spec, layer in zip(specs(case), built, strict=True):
        if isinstance(spec, TiedLayerSpec):
            layer.weight = ties.setdefault(spec.key, layer).weight
    named: dict[str, nn.Parameter] = {}
    for position, layer in enumerate(built):
        if isinstance(layer, nn.Module):
            for name, parameter in layer.named_parameters():
                if not any(parameter is other for other in named.values()):
                    named[f"layers.{position}.{name}"] = parameter
    buffers = {
        f"layers.{position}.{name}": buffer
        for position, layer in enumerate(built)
        if isinstance(layer, nn.Module)
        for name, buffer in layer.named_buffers()
        if f"layers.{position}.{name}" in first  # not what is empty between two steps
    }
    with torch.no_grad():
        for name, tensor in {**named, **buffers}.items():
            tensor.copy_(first[name])
    trained = {name: p for name, p in named.items() if p.requires_grad}
    mixtures = [layer for layer in built if isinstance(layer, Mixture)]
    for mixture in mixtures:
        mixture.is_plain = True
    options = OPTIMIZERS[case.optimizer] | {"weight_decay": case.weight_decay}
    options.pop("adam_w_mode", None)
    optimizer = getattr(torch.optim, case.optimizer)(trained.values(), **options)
    tied = {
        position: spec.forward_fn
        for position, spec in enumerate(specs(case))
        if isinstance(spec, TiedLayerSpec) and spec.forward_fn is not None
    }

    def losses_of(micro: Sample) -> tuple[Tensor, float, Tensor]:
        """Return the sum of losses, its weight, and the auxiliary losses of the samples."""
        h: Any = micro[0].clone()
        for position, layer in enumerate(built):
            h = tied[position](layer, h) if position in tied else layer(h)
        result, own = loss_of(case)(h, micro[1]), sum(mixture.loss for mixture in mixtures)
        return *(result if case.ignored else (result, 1.0)), torch.as_tensor(own)

    found: Numbers = {}
    data_size = case.mesh.data
    for step in range(case.steps):
        if step == case.resume_at and case.resumed is not None:
            data_size = case.resumed.data
        freeze(case, step, iter(enumerate(built)))
        batches = micro_batches(case, step)
        if step == case.evaluate_at:
            found[f"evaluation {step}"] = _evaluation(built, losses_of, batches)
        weight = sum(float(ignoring_loss.weight_of_labels(y)) for _, y in batches)
        weight = weight if case.ignored else len(batches)
        losses, sums = [], {name: torch.zeros_like(p) for name, p in trained.items()}
        for rank in range(data_size):
            optimizer.zero_grad()
            for micro in batches[rank::data_size]:
                loss, _, own = losses_of(micro)
                whole = loss / weight + own / (len(batches) * case.samples)
                (whole * data_size).backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
            for name, parameter in trained.items():
                if parameter.grad is not None:
                    sums[name] += parameter.grad / data_size
        for name, parameter in trained.items():
            # A parameter that the loss does not use has a gradient of 0.
            parameter.grad = sums[name] if parameter.requires_grad else None
        found[f"loss {step}"] = sum(losses) / weight
        if case.clipping:
            norm = nn.utils.clip_grad_norm_(trained.values(), case.clipping)
            found[f"norm {step}"] = norm.item()
        optimizer.step()
        for mixture in mixtures:
            mixture.end_step()
    found |= {name: b for name, b in buffers.items() if name.endswith(".expert_bias")}
    return found | {name: parameter.detach() for name, parameter in named.items()}


def _built(layer: Any) -> Any:
    return layer.build(Axis("tensor")) if isinstance(layer, LayerSpec) else layer


def _evaluation(built: list[Any], losses_of: Any, batches: list[Sample]) -> float:
    modules = [layer for layer in built if isinstance(layer, nn.Module)]
    for module in modules:
        module.eval()
    with torch.no_grad():
        losses, weights, _ = zip(*map(losses_of, batches), strict=True)
        mean = float(sum(losses)) / sum(weights)
    for module in modules:
        module.train()
    return mean


def distances(found: Numbers, wanted: Numbers) -> dict[str, float]:
    """Return the largest difference of each number, relative to values above 1."""
    assert found.keys() == wanted.keys(), (found.keys(), wanted.keys())
    result = {}
    for name, value in wanted.items():
        one, other = torch.as_tensor(found[name]), torch.as_tensor(value)
        if one.numel():
            scale = max(1.0, float(other.abs().max()))
            result[name] = float((one - other).abs().max()) / scale
    return result


def compare(case: Case, folder: str) -> tuple[str, Any]:
    """Run on one rank; return "numbers" with the distances from torch, or the kind of an error."""
    torch.set_default_dtype(torch.float64)
    logging.disable()
    # Of torch, about a layer with a hook whose input needs no gradient.
    warnings.filterwarnings("ignore", "Full backward hook is firing")
    try:
        with offload_on_cpus(), graphs_on_cpus():
            found, first = train(case, folder)
        losses = {name: value for name, value in found.items() if name.startswith("loss ")}
        if dist.get_rank() == 0:
            return "numbers", (losses, distances(found, expected(case, first)))
        return "numbers", (losses, {})
    except PipemegaError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception:
        return "error", traceback.format_exc()
    finally:
        logging.disable(logging.NOTSET)
        torch.set_default_dtype(torch.float32)
