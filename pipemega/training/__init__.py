"""The loop around the engine."""

from pipemega.training.generate import generate
from pipemega.training.trainer import Trainer, run_folder

__all__ = ["Trainer", "generate", "run_folder"]
