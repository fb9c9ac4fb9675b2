"""Runs the steps of examples/train_vision.py on any mesh."""

import io
from contextlib import redirect_stdout
from typing import Any

import pipemega
from pipemega import pretrain

SMALL = {
    "image_size": 8, "patch_size": 4, "num_channels": 1, "num_classes": 10, "num_layers": 2,
    "hidden_size": 16, "num_attention_heads": 2, "hidden_dropout": 0.1,
}  # fmt: skip


def settings(**changes: Any) -> dict[str, Any]:
    """Return a config of a small ViT on drawn digits, with all changes that need no package."""
    config: dict[str, Any] = {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "seed": 5,
        "mesh": {"device": "cpu"},
        "model": {"type": "vit", **SMALL},
        "data": {
            "images": "glyphs",
            "split": "90,10,0",
            "transforms": {"random_crop": 2, "flip": True, "mixup": 0.4},
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "training": {
            "train_steps": 3, "eval_interval": 3, "eval_steps": 5, "eval_on_start": False,
            "progress": False,
        },
    }  # fmt: skip
    for key, value in changes.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return config


def train(given: Any, overrides: tuple[str, ...] = ()) -> dict[str, Any]:
    """Train as the example does; return the losses, the values of validation and what is printed.

    Args:
        given: the config, or its file.
    """
    config = pipemega.load_config(given, overrides)
    pretrain.require_images(config)
    mesh = pipemega.build_mesh(config)
    data = pretrain.load_datasets(config, mesh)
    model = pipemega.build_model(config, mesh)
    engine, *_ = pipemega.initialize(model, config, data.train, mesh=mesh)
    trainer = pipemega.Trainer(engine, data.valid, metrics=pretrain.image_metrics(data))
    losses = []
    while not engine.is_complete:
        losses.append(trainer.train_step())
    if config.checkpoint.save:
        trainer.save()
    engine.run.release()
    printed = io.StringIO()
    with redirect_stdout(printed):
        pretrain.print_results(trainer, data)
    return {
        "losses": losses,
        "values": trainer.evaluations[-1].values,
        "printed": printed.getvalue(),
    }
