"""The loop around the engine."""

from pipemega.training.generate import generate
from pipemega.training.journal import run_folder
from pipemega.training.trainer import Trainer

__all__ = ["Trainer", "generate", "run_folder"]
