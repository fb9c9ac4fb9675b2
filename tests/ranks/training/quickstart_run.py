"""Runs pretrain_gpt.py's steps with configs/quickstart.json on a fixed text."""

import json
from pathlib import Path
from typing import Any

import pipemega
from pipemega.training import Trainer
from pipemega.training.pretrain import (
    flops_per_token,
    load_datasets,
    print_results,
    sample_texts,
)

ROOT = Path(__file__).parents[3]


def train(folder: str, overrides: list[str], stop_after: int | None = None) -> dict[str, Any]:
    """Return the last loss and the lines of metrics.jsonl; a stopped run is saved first."""
    fixed = [
        f'data.corpus="{ROOT / "LICENSE"}"',
        "data.vocab_size=512",
        f'data.cache_path="{folder}/cache"',
        # One document cannot be split into training and validation data.
        "training.eval_interval=0",
        "data.split=1,0,0",
        "steps_per_print=5",
        "mesh.device=cpu",
        "training.progress=false",
        f'checkpoint.save="{folder}/run"',
    ]
    config = pipemega.load_config(ROOT / "configs/quickstart.json", [*fixed, *overrides])
    mesh = pipemega.build_mesh(config)
    data = load_datasets(config, mesh)
    engine, *_ = pipemega.initialize(
        pipemega.build_model(config, mesh, data.vocab_size), config, data.train, mesh=mesh
    )
    trainer = Trainer(
        engine,
        data.valid,
        flops_per_token=flops_per_token(config, mesh, data.vocab_size),
        callbacks=sample_texts(engine, data),
    )
    if stop_after is not None:
        for _ in range(stop_after):
            last = trainer.train_step()
        trainer.save()
        engine.run.release()
        return {"last": last}
    last = trainer.fit()
    if mesh.rank == 0:
        assert pipemega.load_config(f"{folder}/run/config.json") == config
    print_results(trainer, data)
    lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
    return {"last": last, "lines": [json.loads(line) for line in lines]}
