"""Runs on the ranks of a pool: weights from a folder, one step, a checkpoint."""

from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch

import pipemega
from pipemega.hf.weights.gpt_export import gpt_to_export
from pipemega.hf.weights.gpt_import import gpt_from_pretrained, gpt_section
from pipemega.hf.weights.safetensors_files import SafetensorsFolder
from pipemega.hf_check.split_run import KeepFloat64
from pipemega.training.validation import output_shard
from tests.ranks.hf import tiny_models

LEARNING_RATE = 0.1


def load_step_and_save(
    folder: str,
    family: str,
    mesh: tuple[int, ...],
    checkpoint: str,
    keys: Mapping[str, Any] | None = None,
    steps: int = 1,
) -> int:
    """Load a folder, train SGD steps in fp64, save; return the bytes that this rank has read.

    Args:
        mesh: pipeline, tensor and data ranks; expert ranks, by default 1.
        keys: further keys of the config of the run.
    """
    names = ("pipeline", "tensor", "data", "expert")
    torch.set_default_dtype(torch.float64)
    try:
        net = pipemega.from_pretrained(folder, attn_implementation="eager")
        config = {
            "train_batch_size": tiny_models.NUM_MICROBATCHES,
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0,
            "mesh": {"device": "cpu"} | dict(zip(names, mesh, strict=False)),
            "training": {"loss_reduction": "token"},
            "optimizer": {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        }
        # The layers have one implementation, whatever the config names.
        net.hf_config._experts_implementation = "eager"
        engine, *_ = pipemega.initialize(net, config | (keys or {}))
        batch = tiny_models.batch_of(tiny_models.config_of(family))
        own = tiny_models.microbatches(batch)[engine.mesh.data.rank :: engine.mesh.data.size]
        with KeepFloat64():
            for _ in range(steps):
                engine.train_batch(iter(own))
        engine.save_checkpoint(checkpoint, tag="trained")
        engine.close()
    finally:
        torch.set_default_dtype(torch.float32)
    return int(net.source.files.bytes_read)


def built_in_gpt(folder: str, mesh: tuple[int, int]) -> dict[str, Any]:
    """Return the parameters of the built-in GPT with the weights of a folder.

    Args:
        mesh: pipeline and tensor ranks.
    """
    config = pipemega.load_config(
        {
            "train_micro_batch_size_per_gpu": 1,
            "mesh": {"pipeline": mesh[0], "tensor": mesh[1], "device": "cpu"},
            "model": gpt_section(folder, seq_length=16),
        }
    )
    engine, *_ = pipemega.initialize(gpt_from_pretrained(folder, config), config)
    parameters = {name: value.numpy() for name, value in engine.parameter_state().items()}
    engine.close()
    return parameters


def built_in_gpt_round_trip(
    folder: str, family: str, mesh: Mapping[str, int], checkpoint: str
) -> dict[str, Any]:
    """Load a folder into the built-in GPT in fp64, and save a checkpoint.

    Returns:
        `logits`; `read`: the names of the tensors of the files that this rank has read.
    """
    read: set[str] = set()
    plain_read = SafetensorsFolder.read

    def recorded(files: SafetensorsFolder, name: str, index: Any = ()) -> Any:
        read.add(name)
        return plain_read(files, name, index)

    torch.set_default_dtype(torch.float64)
    try:
        section = gpt_section(folder) | {"make_vocab_size_divisible_by": 4}
        config = pipemega.load_config(
            {
                "train_micro_batch_size_per_gpu": tiny_models.NUM_MICROBATCHES,
                "mesh": {**mesh, "device": "cpu"},
                "model": section,
            }
        )
        with mock.patch.object(SafetensorsFolder, "read", recorded):
            engine, *_ = pipemega.initialize(gpt_from_pretrained(folder, config), config)
        inputs, _ = tiny_models.batch_of(tiny_models.config_of(family))
        (output,) = engine.infer([inputs["input_ids"]])
        logits = output_shard(engine).gather(output)
        engine.save_checkpoint(checkpoint, tag="loaded")
        engine.close()
    finally:
        torch.set_default_dtype(torch.float32)
    return {"logits": logits.numpy(), "read": read}


def built_in_gpt_step(
    folder: str, family: str, mesh: tuple[int, ...], pipeline: Mapping[str, Any]
) -> dict[str, Any]:
    """Return loss and gradients, by HF's names, of one SGD step of the built-in GPT.

    As in `split_runs`, weights that transformers stores transposed are as in a linear.

    Args:
        mesh: pipeline and tensor ranks; and data ranks, which share the experts (default 1).
        pipeline: the section of the config.
    """
    stages, tensor, *data = mesh
    data_ranks = data[0] if data else 1
    sizes = {"pipeline": stages, "tensor": tensor, "data": data_ranks, "expert": data_ranks}
    torch.set_default_dtype(torch.float64)
    try:
        section = gpt_section(folder) | {"make_vocab_size_divisible_by": 4}
        config = pipemega.load_config(
            {
                "train_batch_size": tiny_models.NUM_MICROBATCHES,
                "train_micro_batch_size_per_gpu": 1,
                "gradient_clipping": 0,
                "mesh": {**sizes, "device": "cpu"},
                "pipeline": dict(pipeline),
                "model": section,
                "training": {"loss_reduction": "token"},
                "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
            }
        )
        engine, *_ = pipemega.initialize(gpt_from_pretrained(folder, config), config)
        before = {name: value.clone() for name, value in engine.parameter_state().items()}
        batch = tiny_models.batch_of(tiny_models.config_of(family), "ignored")
        own = tiny_models.microbatches(batch)[engine.mesh.data.rank :: data_ranks]
        loss = engine.train_batch(iter(own))
        after = engine.parameter_state()
        engine.close()
    finally:
        torch.set_default_dtype(torch.float32)
    gradients = {}
    assert config.model is not None
    for name, place in gpt_to_export(config.model, tiny_models.VOCAB).tensors.items():
        key = place.key.removeprefix("parameters/")
        gradient = before[key] - after[key]
        rows = slice(None) if place.rows is None else slice(*place.rows)
        gradients[name] = gradient[rows].numpy()
    return {"loss": loss, "gradients": gradients}
