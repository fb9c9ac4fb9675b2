"""Runs on the ranks of a pool: one step of a Hugging Face model on a mesh."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import pipemega
from pipemega.hf.description import ModelDescription
from pipemega.hf.hf_module import HFPipelineModule
from pipemega.hf.routed_experts import auxiliary_losses
from pipemega.hf.tasks import model_class_of
from pipemega.hf.weights.safetensors_files import is_transposed
from pipemega.hf_check.split_run import KeepFloat64
from pipemega.parameters import shard_of
from pipemega.training import generate
from tests.ranks.hf import tiny_models


class StateDictSource:
    """Values of the state_dict of the whole model."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state

    def has(self, name: str) -> bool:
        return name in self._state

    def load(self, name: str, tensor: Tensor) -> None:
        full = self._state[name]
        shard_of(tensor).copy_from_full(full.T if is_transposed(tensor) else full, tensor.data)


def module_of(
    config: Any, sequence_parallel: bool = False, losses: tuple[float, float] | None = None
) -> HFPipelineModule:
    """Return the model as layers, with the values of `tiny_models.whole_model`.

    Args:
        losses: weights of the auxiliary loss and the z-loss.
    """
    source = StateDictSource(tiny_models.whole_model(config).state_dict())
    description = ModelDescription(
        config, model_class_of(config, None), sequence_parallel=sequence_parallel
    )
    routers = None if losses is None else auxiliary_losses(description, *losses)
    return HFPipelineModule(description, source, losses=routers)


def engine_config(mesh: tuple[int, ...], schedule: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config: one SGD step, whose change of the parameters is the gradient.

    Args:
        mesh: pipeline and tensor ranks; data and expert ranks, by default 1.
        keys: replace those of the config.
    """
    names = ("pipeline", "tensor", "data", "expert")
    return {
        "train_batch_size": tiny_models.NUM_MICROBATCHES,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "mesh": {"data": 1, "device": "cpu"} | dict(zip(names, mesh, strict=False)),
        "pipeline": {"schedule": schedule},
        "training": {"loss_reduction": "token"},
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    } | dict(keys)


def one_step(
    family: str,
    mesh: tuple[int, ...],
    schedule: str,
    side: str = "plain",
    attention: str = "eager",
    changes: Mapping[str, Any] | None = None,
    sequence_parallel: bool = False,
    keys: Mapping[str, Any] | None = None,
    losses: tuple[float, float] | None = None,
    folder: str = "",
) -> dict[str, Any]:
    """Return loss and gradients by HF's names, and what a run with `folder` records of experts.

    Args:
        changes: changes to the config of the family.
        keys: further keys of the config of the run.
        losses: see `module_of`.
    """
    torch.set_default_dtype(torch.float64)
    try:
        config = tiny_models.config_of(family, attention, **(changes or {}))
        net = module_of(config, sequence_parallel, losses)
        keys = dict(keys or {}) | ({"checkpoint": {"save": folder}} if folder else {})
        engine, *_ = pipemega.initialize(net, engine_config(mesh, schedule, keys))
        before = {name: value.clone() for name, value in engine.parameter_state().items()}
        data = tiny_models.microbatches(tiny_models.batch_of(config, side))
        data = data[engine.mesh.data.rank :: engine.mesh.data.size]
        with KeepFloat64():
            loss = engine.train_batch(iter(data))
        after = engine.parameter_state()
        engine.close()
        file = Path(folder) / "metrics.jsonl"
        lines = file.read_text().splitlines() if folder and engine.mesh.world.rank == 0 else ()
        steps = [row for row in map(json.loads, lines) if row["kind"] == "train"]
        return {
            "experts": {n: v for row in steps for n, v in row["extra"].items()},
            "loss": loss,
            "gradients": {net.hf_name(n): (before[n] - after[n]).numpy() for n in before},
        }
    finally:
        torch.set_default_dtype(torch.float32)


def one_step_with(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return `one_step` with keyword arguments."""
    return one_step(**arguments)


def generated(family: str, mesh: tuple[int, ...]) -> list[int]:
    """Return the tokens that a model chooses after three others, without a step of training."""
    torch.set_default_dtype(torch.float64)
    try:
        net = module_of(tiny_models.config_of(family))
        engine, *_ = pipemega.initialize(net, engine_config(mesh, "1f1b", {}))
        sizes = {"seq_length": tiny_models.LENGTH, "vocab_size": tiny_models.VOCAB}
        return generate(engine, [9, 5, 7], 12, temperature=1.0, seed=4, **sizes)
    finally:
        torch.set_default_dtype(torch.float32)


def initial_values(family: str, mesh: tuple[int, ...]) -> dict[str, Any]:
    """Return the parameters of a model from scratch, by HF's names."""
    config = tiny_models.config_of(family)
    net = HFPipelineModule(ModelDescription(config, model_class_of(config, None)))
    engine, *_ = pipemega.initialize(net, engine_config(mesh, "1f1b", {}))
    return {net.hf_name(n): value.numpy() for n, value in engine.parameter_state().items()}


def half_precision_step(family: str, mesh: tuple[int, ...], precision: str) -> dict[str, Any]:
    """Return the loss of one step and the dtypes of the local parameters, by HF's names."""
    torch.set_default_dtype(torch.float64)
    try:
        config = tiny_models.config_of(family)
        data = tiny_models.microbatches(tiny_models.batch_of(config))
        net = module_of(config)
        section: dict[str, Any] = {"enabled": True}
        if precision == "fp16":
            section["initial_scale_power"] = 4
        engine, *_ = pipemega.initialize(net, engine_config(mesh, "1f1b", {precision: section}))
    finally:
        torch.set_default_dtype(torch.float32)
    loss = engine.train_batch(iter(data))
    parameters = engine.steps.model.parameters
    dtypes = {net.hf_name(name): str(p.dtype) for name, p in parameters.items()}
    return {"loss": loss, "dtypes": dtypes}


def evaluation_loss(family: str, mesh: tuple[int, ...], embedded: bool = False) -> float:
    """Return the loss of an evaluation.

    Args:
        embedded: give inputs_embeds in place of tokens.
    """
    torch.set_default_dtype(torch.float64)
    try:
        config = tiny_models.config_of(family)
        engine, *_ = pipemega.initialize(module_of(config), engine_config(mesh, "1f1b", {}))
        inputs, labels = tiny_models.batch_of(config)
        if embedded:
            table = tiny_models.whole_model(config).get_input_embeddings()
            inputs = {"inputs_embeds": table(inputs["input_ids"]).detach()}
        parts = []
        for m in range(len(labels)):
            parts.append(({n: v[m : m + 1] for n, v in inputs.items()}, labels[m : m + 1]))
        with KeepFloat64():
            return float(engine.eval_batch(iter(parts)))
    finally:
        torch.set_default_dtype(torch.float32)
