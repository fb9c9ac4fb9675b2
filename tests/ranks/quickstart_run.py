"""What pretrain_gpt.py does with configs/quickstart.json, on a text that never changes."""

import json
from pathlib import Path
from typing import Any

import pipemega
from pipemega.training import Trainer
from pipemega.training.pretrain import datasets_of, flops_per_token, model_of, report

ROOT = Path(__file__).parents[2]


def train(folder: str, overrides: list[str], stop_after: int | None = None) -> dict[str, Any]:
    """The last loss and the lines of metrics.jsonl; a stopped run is saved where it stops."""
    fixed = [
        f'data.corpus="{ROOT / "LICENSE"}"',
        "data.vocab_size=512",
        f'data.cache_path="{folder}/cache"',
        # One document: it cannot be split, so what is trained on is what is evaluated on.
        "training.eval_interval=0",
        "data.split=1,0,0",
        "steps_per_print=5",
        "mesh.device=cpu",
        "training.progress=false",
        f'checkpoint.save="{folder}/run"',
    ]
    config = pipemega.load_config(ROOT / "configs/quickstart.json", [*fixed, *overrides])
    mesh = pipemega.build_mesh(config)
    data = datasets_of(config, mesh)
    engine, *_ = pipemega.initialize(model_of(config, mesh, data), config, data.train, mesh=mesh)
    trainer = Trainer(
        engine,
        data.valid,
        tokens_per_sample=config.model.seq_length if config.model else 0,
        flops_per_token=flops_per_token(config, data.vocab_size),
    )
    if stop_after is not None:
        for _ in range(stop_after):
            last = trainer.train_step()
        trainer.save()
        trainer.monitor.close()
        return {"last": last}
    if mesh.rank == 0:
        assert pipemega.load_config(f"{folder}/run/config.json") == config
    last = trainer.fit()
    report(trainer, data)
    lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
    return {"last": last, "lines": [json.loads(line) for line in lines]}
