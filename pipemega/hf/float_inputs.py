"""Shapes of main inputs that are no tokens, by their names in transformers."""

from collections.abc import Callable
from typing import Any

FLOAT_INPUT_SHAPES: dict[str, Callable[[Any], tuple[int, ...]]] = {
    "pixel_values": lambda c: _image_shape(getattr(c, "vision_config", c)),
    "input_features": lambda c: (c.num_mel_bins, 2 * c.max_source_positions),
}


def _image_shape(config: Any) -> tuple[int, int, int]:
    size = config.image_size
    height, width = (size, size) if isinstance(size, int) else size
    return getattr(config, "num_channels", 3), height, width
