"""The config room: one JSON file, every key with its type and meaning, nothing silently ignored."""

from pipemega.config.batch import Batch
from pipemega.config.config import Config, load

__all__ = ["Batch", "Config", "load"]
