"""A GPT from a config: the pieces that `pretrain_gpt.py` puts together."""

import math

from pipemega.config import Config
from pipemega.data.build import Datasets, build_datasets
from pipemega.errors import ConfigError
from pipemega.kernels import Kernels
from pipemega.mesh import Mesh
from pipemega.models import GPTConfig, gpt
from pipemega.monitor import get_logger, gpt_flops_per_token
from pipemega.pipeline.module import PipelineModule
from pipemega.training.generate import generate
from pipemega.training.trainer import Trainer


def datasets_of(config: Config, mesh: Mesh) -> Datasets:
    """The data that the config names, prepared if need be; rank 0 shows the progress.

    Raises:
        ConfigError, DataError: there is none, or it is not what it must be.
    """
    if config.model is None or config.training.train_steps is None:
        missing = "model" if config.model is None else "training.train_steps"
        raise ConfigError(f"{missing} is missing: pretraining needs to know it")
    log = get_logger(mesh.rank)
    batch = config.batch(mesh.data.size)
    evaluates = config.training.eval_interval > 0
    datasets = build_datasets(
        config.data,
        seq_length=config.model.seq_length,
        seed=config.seed,
        train_samples=config.training.train_steps * batch.train_batch_size,
        valid_samples=config.training.eval_steps * batch.train_batch_size if evaluates else 0,
        vocab_size=config.model.vocab_size,
        say=log.info if mesh.rank == 0 else None,
        progress=mesh.rank == 0 and config.training.progress,
    )
    for line in datasets.description:
        log.info(line)
    return datasets


def model_of(config: Config, mesh: Mesh, datasets: Datasets) -> PipelineModule:
    """The GPT of the section `model`, with the vocabulary of the data."""
    return gpt(GPTConfig.of(config, datasets.vocab_size), Kernels.detect(mesh.device))


def flops_per_token(config: Config, vocab_size: int) -> float:
    """Of forward and backward; what recomputation adds does not count."""
    model = config.model
    assert model is not None
    return gpt_flops_per_token(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.feed_forward_size,
        seq_length=model.seq_length,
        vocab_size=vocab_size,
        num_query_groups=model.query_groups,
        kv_channels=model.head_size,
        swiglu=model.swiglu,
    )


def report(trainer: Trainer, datasets: Datasets) -> None:
    """What came out: the validation loss beside a bigram model's, and a text if asked for.

    Nothing of a run that was stopped: who stops one does not wait.
    """
    if trainer.stopped:
        return
    _report_losses(trainer, datasets)
    _report_text(trainer, datasets)


def _report_losses(trainer: Trainer, datasets: Datasets) -> None:
    if trainer.engine.mesh.rank != 0 or not trainer.validation:
        return
    (_, first), (_, last) = trainer.validation[0], trainer.validation[-1]
    print(
        f"validation loss {first:.4f} -> {last:.4f} ({(last - first) / first:+.0%}), "
        f"perplexity {math.exp(min(first, 700)):.1f} -> {math.exp(min(last, 700)):.1f}"
    )
    bigram = datasets.bigram()
    if bigram is not None:
        print(
            f"a bigram model of the same training text has {bigram.loss:.4f} "
            f"(single tokens: {bigram.unigram_loss:.4f})"
        )


def _report_text(trainer: Trainer, datasets: Datasets) -> None:
    config, tokenizer = trainer.config, datasets.tokenizer
    count = config.training.generate_tokens
    if not count or tokenizer is None or config.model is None:
        return
    prompt = config.training.generate_prompt
    tokens = generate(
        trainer.engine,
        tokenizer.encode(prompt) or [tokenizer.eod or 0],
        count,
        seq_length=config.model.seq_length,
        vocab_size=datasets.vocab_size,
        temperature=config.training.generate_temperature,
        seed=config.seed,
    )
    if trainer.engine.mesh.rank == 0:
        print(f"sample:\n{prompt}{tokenizer.decode(tokens)}")
