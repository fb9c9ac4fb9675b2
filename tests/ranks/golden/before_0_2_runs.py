"""Runs that are saved by one version and continued by another; they run on every rank.

All paths are relative to the folder `tests/golden/before_0_2`, or to a copy of it.
"""

import json
import logging
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import pipemega
import pipemega.compat.deepspeed as deepspeed
from pipemega.training import Callback, Trainer
from pipemega.training.pretrain import load_datasets
from tests.ranks import small_models
from tests.ranks.compat import data_parallel_runs, engine_calls

BEFORE, AFTER = 2, 2
CLIENT = {"best": 1.5, "table": [0, 1, 2]}
GPT = {
    "num_layers": 1,
    "hidden_size": 4,
    "num_attention_heads": 1,
    "seq_length": 12,
    "vocab_size": "auto",
    "make_vocab_size_divisible_by": 8,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.0,
}
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}}


def config_of(**changes: Any) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "train_micro_batch_size_per_gpu": 2,
        "seed": 11,
        "gradient_clipping": 1.0,
        "optimizer": ADAMW,
        "training": {"train_steps": 8, "progress": False},
        "mesh": {"device": "cpu"},
        **changes,
    }


CORPUS = {"data_path": ["data/corpus"], "split": "80,20,0", "cache_path": "data/cache"}
# Of the function `finetuning_dataset`, whose cache knows records by their content.
INSTRUCTIONS = {
    "format": "instruction",
    "tokenizer": "data/corpus.tokenizer.json",
    "cache_path": "data/cache",
}
SENTENCE = "to be or not to be that is the question"
# Of each run: its config as the user wrote it; stored in config.json.
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": config_of(
        model=GPT,
        data=CORPUS,
        scheduler={"type": "cosine", "params": {"warmup_steps": 2, "min_lr": 0.001}},
    ),
    "zero1_data2": config_of(
        zero_optimization={"stage": 1}, mesh={"device": "cpu", "data": 2}, gradient_clipping=0.1
    ),
    "lora": config_of(
        model={**GPT, "vocab_size": 272}, lora={"r": 2, "alpha": 4.0, "dropout": 0.1}
    ),
    # SGD: no rounding decides a step in fp32.
    "hf_llama": config_of(optimizer={"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}),
    "trainer": config_of(
        training={"train_steps": 4, "eval_interval": 2, "eval_steps": 1, "progress": False},
        checkpoint={"save": "trainer/checkpoints", "interval": 2},
    ),
    "auto_pipeline2": config_of(
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
        mesh={"device": "cpu", "pipeline": 2},
        pipeline={"schedule": "auto"},
    ),
    "deepspeed_loop": data_parallel_runs.config_of(1),
}


@contextmanager
def working_folder(folder: str, dtype: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    torch.set_default_dtype(getattr(torch, dtype))
    torch.manual_seed(0)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        os.chdir(before)


def stored_config(name: str, changes: list[str] | None = None) -> Any:
    return pipemega.load_config(f"{name}/config.json", changes or [])


def gpt_engine(name: str) -> Any:
    """Return the engine of a model and the data that its config describes."""
    config = stored_config(name)
    mesh = pipemega.build_mesh(config)
    data = load_datasets(config, mesh)
    model = pipemega.build_model(config, mesh, data.vocab_size)
    return pipemega.initialize(model, config, data.train, mesh=mesh)[0]


def lora_engine(name: str) -> Any:
    config = stored_config(name)
    mesh = pipemega.build_mesh(config)
    words = SENTENCE.split()
    records = [
        {"prompt": " ".join(words[: 1 + at % 3]), "response": " ".join(words[at % 4 : at % 4 + 3])}
        for at in range(40)
    ]
    data = pipemega.finetuning_dataset(records, INSTRUCTIONS, seq_length=12)
    model = pipemega.build_model(config, mesh, 272)
    return pipemega.initialize(model, config, data, mesh=mesh)[0]


class Points(torch.utils.data.Dataset[Any]):
    fingerprint = "forty points"

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(small_models.WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x.flip(0)


def small_engine(name: str, changes: list[str] | None = None) -> Any:
    return pipemega.initialize(small_models.plain(2), stored_config(name, changes), Points())[0]


class Tokens(torch.utils.data.Dataset[Any]):
    fingerprint = "forty sentences"

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(32, (9,), generator=generator)
        return tokens[:-1], tokens[1:]


def llama_engine(name: str) -> Any:
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    net = pipemega.from_pretrained(config, pretrained=False)
    return pipemega.initialize(net, stored_config(name), Tokens())[0]


def saved_or_loaded(engine: Any, folder: str, step: Callable[[int], float], saves: bool) -> Any:
    """Train and save, or load; then train on.

    Args:
        step: trains step number i, and returns its loss.

    Returns:
        the losses after the checkpoint.
    """
    if saves:
        for number in range(BEFORE):
            step(number)
        engine.save_checkpoint(folder, client_state=CLIENT)
    else:
        path, client = engine.load_checkpoint(folder)
        assert path is not None
        assert {key: client[key] for key in CLIENT} == CLIENT
        assert engine.global_steps == BEFORE
    return [step(number) for number in range(BEFORE, BEFORE + AFTER)]


def with_loader(build: Callable[[str], Any], name: str, saves: bool) -> list[float]:
    engine = build(name)
    losses: list[float] = saved_or_loaded(
        engine, f"{name}/checkpoints", lambda _: float(engine.train_batch()), saves
    )
    assert engine.consumed_samples == 8 * (BEFORE + AFTER)
    return losses


def deepspeed_loop(name: str, saves: bool) -> list[float]:
    config = json.loads(Path(name, "config.json").read_text())
    engine, *_ = deepspeed.initialize(model=data_parallel_runs.net(), config=config)

    def step(number: int) -> float:
        total = 0.0
        for place in range(data_parallel_runs.MICRO_BATCHES):
            tokens = data_parallel_runs.tokens(number, place, 0)
            loss = data_parallel_runs.loss_of(engine, tokens)
            engine.backward(loss)
            engine.step()
            total += float(loss.detach())
        return total

    losses: list[float] = saved_or_loaded(engine, f"{name}/checkpoints", step, saves)
    return losses


def deepspeed_pipeline(name: str, saves: bool) -> list[float]:
    _, engine = engine_calls.build(2, 1)
    count = engine.micro_batches

    def step(number: int) -> float:
        batches = engine_calls.micro_batches((number + 1) * count)[number * count :]
        return float(engine.train_batch(data_iter=iter(batches)))

    losses: list[float] = saved_or_loaded(engine, f"{name}/checkpoints", step, saves)
    return losses


class Counting(Callback):
    """Counts its calls, also in checkpoints, and keeps the losses of this process."""

    def __init__(self) -> None:
        self.counts = {"after_step": 0, "after_evaluation": 0}
        self.losses: list[float] = []

    def after_step(self, trainer: Any, loss: float) -> None:
        self.counts["after_step"] += 1
        self.losses.append(loss)

    def after_evaluation(self, trainer: Any, values: Mapping[str, float]) -> None:
        self.counts["after_evaluation"] += 1
        self.losses.append(values["loss"])

    def state_dict(self) -> dict[str, Any]:
        return dict(self.counts)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.counts = state


def trainer(name: str, saves: bool) -> list[float]:
    """Return losses and evaluations after the checkpoint of the Trainer's second step."""
    if saves:
        engine = small_engine(name, [f"training.exit_interval={BEFORE}"])
        Trainer(engine, Points(), callbacks=[Counting()]).fit()
    folders = [f'checkpoint.load="{name}/checkpoints"', f'checkpoint.save="{name}/resumed"']
    engine = small_engine(name, ['training.resume="auto"', *folders])
    assert engine.global_steps == BEFORE
    counting = Counting()
    loop = Trainer(engine, Points(), callbacks=[counting])
    loop.fit()
    assert counting.counts == {"after_step": 4, "after_evaluation": 3}
    assert [step for step, _ in loop.validation] == [0, 2, 4]
    return counting.losses


class Run(NamedTuple):
    """A stored run: number of ranks, default dtype, (name, saves) -> losses."""

    world_size: int
    dtype: str
    function: Callable[[str, bool], list[float]]


RUNS: dict[str, Run] = {
    "plain": Run(1, "float64", partial(with_loader, gpt_engine)),
    "zero1_data2": Run(2, "float64", partial(with_loader, small_engine)),
    "lora": Run(1, "float64", partial(with_loader, lora_engine)),
    "hf_llama": Run(1, "float32", partial(with_loader, llama_engine)),
    "trainer": Run(1, "float64", trainer),
    "deepspeed_loop": Run(1, "float64", deepspeed_loop),
    "deepspeed_pipeline": Run(2, "float32", deepspeed_pipeline),
}


def run(folder: str, name: str, saves: bool) -> list[float]:
    with working_folder(folder, RUNS[name].dtype):
        return RUNS[name].function(name, saves)


def machine() -> dict[str, Any]:
    """Return what the name of a file of measured costs depends on, besides the run."""
    return {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}


def auto_schedule(folder: str, on: Mapping[str, Any], steps: int) -> tuple[list[str], list[float]]:
    """Train with schedule "auto"; return what it logs and the losses.

    Args:
        on: `machine()` of the run that measured the costs.
    """
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("pipemega")
    log.addHandler(handler)
    try:
        with (
            working_folder(folder, "float64"),
            mock.patch.dict(os.environ, XDG_CACHE_HOME="cache"),
            mock.patch("platform.machine", return_value=on["machine"]),
            mock.patch("os.cpu_count", return_value=on["cores"]),
            mock.patch("torch.__version__", on["torch"]),
        ):
            example = next(small_models.microbatches(0, 1, rows=2))
            engine, *_ = pipemega.initialize(
                small_models.plain(8), stored_config("auto_pipeline2"), example=example
            )
            losses = [
                engine.train_batch(small_models.microbatches(step, 4, rows=2))
                for step in range(steps)
            ]
            engine.close()
            return logged, losses
    finally:
        log.removeHandler(handler)
