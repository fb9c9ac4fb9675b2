"""The training loop around an engine.

trainer          Trainer: trains steps or epochs, and evaluates; Callback, and what calls them
callbacks        callbacks that are ready to use
metrics          Metric, Accuracy, ...; their sums over micro-batches and ranks
validation       validation sets; evaluation_sets: data for `evaluate`, prompts, images of a model
generation       generates text; trained_model: opens a trained model
pretrain         data, model and results of pretrain_gpt.py
"""

from pipemega.training.callbacks import (
    EarlyStopping,
    LRLogger,
    SampleText,
    SaveBest,
    Timing,
)
from pipemega.training.generation import generate
from pipemega.training.metrics import Accuracy, Loss, Metric, MixupAccuracy, Perplexity
from pipemega.training.trainer import Callback, Trainer

__all__ = [
    "Accuracy",
    "Callback",
    "EarlyStopping",
    "LRLogger",
    "Loss",
    "Metric",
    "MixupAccuracy",
    "Perplexity",
    "SampleText",
    "SaveBest",
    "Timing",
    "Trainer",
    "generate",
]
