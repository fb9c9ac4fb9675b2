"""The training loop around an engine.

trainer          Trainer: trains steps or epochs, and evaluates
callback         Callback; callbacks: those that are ready to use; callback_list calls them
metrics          Metric, Accuracy, ...; metric_set reduces them over micro-batches and ranks
pretrain         data, model and results of pretrain_gpt.py; image_data: images for a model
generate         generates text; sampling chooses the next token
"""

from pipemega.training.callback import Callback
from pipemega.training.callbacks import (
    EarlyStopping,
    LRLogger,
    SampleText,
    SaveBest,
    Timing,
)
from pipemega.training.generation import generate
from pipemega.training.metrics import Accuracy, Loss, Metric, MixupAccuracy, Perplexity
from pipemega.training.trainer import Trainer

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
