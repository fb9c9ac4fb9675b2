"""Parts of `pretrain_gpt.py`: data, FLOPs and results of a run."""

import argparse
import math
from typing import Any, NoReturn

from pipemega.config import Batch, Config
from pipemega.data.tokens.build_datasets import DataRequest, Datasets, build_datasets
from pipemega.data.tokens.data_files import check_data_inputs
from pipemega.distributed.mesh import Mesh
from pipemega.engine.engine import Engine
from pipemega.errors import ConfigError
from pipemega.layer_costs import counted_model
from pipemega.models.build_model import ModelContext
from pipemega.monitor import get_logger
from pipemega.printing import percent
from pipemega.training.callbacks import SampleText
from pipemega.training.evaluation_sets import load_images
from pipemega.training.generation import generate
from pipemega.training.metrics import Accuracy, Metric
from pipemega.training.trainer import Trainer


class ScriptParser(argparse.ArgumentParser):
    """Raises an error for wrong arguments, so that `pipemega.run` prints it on one rank only.

    The help shows the lines of `description` as they are.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*args, **options)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; {self.format_usage().strip()}")


def require_images(config: Config) -> None:
    """Check that the data of the config are images.

    Raises:
        ConfigError: they are not.
    """
    if config.data.images is None:
        raise ConfigError(
            "the config has no image data, because data.images is not set: set it, or train a "
            "model of text with pretrain_gpt.py",
            on_every_rank=True,
        )


def load_datasets(config: Config, mesh: Mesh) -> Datasets:
    """Load the datasets of the config, and prepare them first if needed; collective.

    Raises:
        ConfigError, DataError: the config names no data, or the data is not valid.
    """
    training = config.training
    if config.model is None:
        raise ConfigError("model is missing: pretraining needs it")
    length, images = config.model.sample_tokens(), config.data.images
    if length is None and images is None:
        raise ConfigError(
            f"pretraining reads token ids, and model.type {config.model.type!r} has no tokens per "
            f"sample: give it a key seq_length, set data.images for a model of images, or train it "
            f"with your own data and pipemega.Trainer"
        )
    if not training.has_length:
        raise ConfigError(
            "training.train_steps (or training.train_samples, or training.epochs) is missing: "
            "pretraining needs it"
        )
    check_data_inputs(config.data)
    log = get_logger(mesh.rank)
    for key, value, why in config.model.computed_values():
        log.info(f"{key} is {value}: {why}")
    epochs = training.epochs
    eval_batches = training.eval_batches(epochs) if training.evaluates(epochs) else 0
    if length is None or images is not None:
        splits = ("train",) if eval_batches == 0 else ("train", "valid")
        datasets = load_images(config, config.data, splits)
    else:
        datasets = _tokens(config, mesh, length, eval_batches)
    for line in datasets.description:
        log.info(line)
    if epochs is not None and datasets.train is not None:
        # The dataset has one order; the loader shuffles it in each epoch.
        datasets.train.already_shuffled = False
    return datasets


def _tokens(config: Config, mesh: Mesh, length: int, eval_batches: int | None) -> Datasets:
    assert config.model is not None, "checked by the caller"
    vocabulary = config.model.vocabulary()
    request = DataRequest(
        seq_length=length,
        seed=config.seed,
        train_samples=config.training.train_samples or _train_samples(config, mesh),
        valid_samples=_samples(eval_batches, config.batch(mesh.data.size)),
        vocab_size=vocabulary if isinstance(vocabulary, int) else "auto",
    )
    return build_datasets(
        config.data,
        request,
        say=get_logger(mesh.rank).info if mesh.rank == 0 else None,
        progress=mesh.rank == 0 and config.training.progress,
    )


def _train_samples(config: Config, mesh: Mesh) -> int | None:
    """Return the samples of `training.train_steps`; None, one pass over the data, without it."""
    steps = config.training.train_steps
    return None if steps is None else config.batch_sizes(mesh.data.size).samples_of(steps)


def _samples(steps: int | None, batch: Batch) -> int | None:
    """Return the samples of some steps; None, one pass over the data, if there is no number."""
    return None if steps is None else steps * batch.train_batch_size


def flops_per_token(config: Config, mesh: Mesh, vocab_size: int | None = None) -> float:
    """Return the model's FLOPs of forward and backward per token; 0: unknown, or not rank 0."""
    if mesh.rank > 0:  # only rank 0 records them
        return 0.0
    context = ModelContext.of(config, mesh.topology, vocab_size=vocab_size)
    return counted_model.flops_per_token(context)


def flops_per_sample(config: Config, mesh: Mesh) -> float:
    """Return the model's FLOPs of forward and backward per image; 0: unknown, or not rank 0."""
    if mesh.rank > 0:  # only rank 0 records them
        return 0.0
    return counted_model.flops_per_sample(ModelContext.of(config, mesh.topology))


def image_metrics(datasets: Datasets) -> dict[str, Metric]:
    """Return the metrics of images: "top1", and "top5" if there are more than 5 classes."""
    ks = [k for k in (1, 5) if k < len(datasets.classes)]
    return {f"top{k}": Accuracy(k) for k in ks}


def print_results(trainer: Trainer, datasets: Datasets) -> None:
    """Print the validation loss, the loss of a bigram model, and a sample text if configured.

    For images: the validation loss and the metrics.

    Prints nothing if the run was stopped early, so that the process exits soon.
    """
    if trainer.stopped:
        return
    if datasets.classes:
        _print_accuracy(trainer)
    else:
        _print_losses(trainer, datasets)
    _print_texts(trainer)


def _print_losses(trainer: Trainer, datasets: Datasets) -> None:
    if trainer.engine.mesh.rank != 0 or not trainer.validation:
        return
    (begin, first), (end, last) = trainer.validation[0], trainer.validation[-1]
    loss, perplexity = f"{last:.4f}", f"{math.exp(min(last, 700)):.1f}"
    if len(trainer.validation) == 1:
        print(f"validation loss {loss}, perplexity {perplexity}")
    else:
        change = percent((last - first) / first, 0, signed=True)
        print(
            f"validation loss {first:.4f} -> {loss} ({change}) from step {begin} to {end}, "
            f"perplexity {math.exp(min(first, 700)):.1f} -> {perplexity}"
        )
    bigram = datasets.bigram()
    if bigram is not None:
        print(
            f"for comparison, on the same text: a bigram model {bigram.loss:.4f}, "
            f"a unigram model {bigram.unigram_loss:.4f}"
        )


def _print_accuracy(trainer: Trainer) -> None:
    if trainer.engine.mesh.rank != 0 or not trainer.evaluations:
        return
    last = trainer.evaluations[-1].values
    shares = [f"{name} {percent(last[name], 1)}" for name in trainer.metric_names]
    print(", ".join([f"validation loss {last['loss']:.4f}", *shares]))


def sample_texts(engine: Engine, datasets: Datasets) -> list[SampleText]:
    """Return a callback that generates texts if `training.generate_tokens` is set, else none."""
    config, tokenizer = engine.config, datasets.tokenizer
    count, prompt = config.training.generate_tokens, config.training.generate_prompt
    if not count or tokenizer is None or config.model is None or datasets.vocab_size is None:
        return []
    vocab_size = datasets.vocab_size
    start = tokenizer.encode(prompt) or [tokenizer.eod or 0]
    length = config.model.sample_tokens()
    assert length is not None, "checked by load_datasets"

    def text() -> tuple[str, str]:
        tokens = generate(
            engine,
            start,
            count,
            seq_length=length,
            vocab_size=vocab_size,
            temperature=config.training.generate_temperature,
            seed=config.seed,
        )
        return prompt, tokenizer.decode(tokens)

    return [SampleText(text)]


def _print_texts(trainer: Trainer) -> None:
    for callback in trainer.callbacks:
        if isinstance(callback, SampleText):
            prompt, text = callback.last_text()
            if trainer.engine.mesh.rank == 0:
                print(f"sample:\n{prompt}{text}")
