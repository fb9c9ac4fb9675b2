"""The training loop around an engine.

trainer          Trainer: trains until the last step and evaluates
pretrain         data, model and results of pretrain_gpt.py; generate samples text
"""

from pipemega.training.generate import generate
from pipemega.training.trainer import Trainer

__all__ = ["Trainer", "generate"]
