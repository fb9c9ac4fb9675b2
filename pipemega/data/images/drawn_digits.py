"""Images of digits for trials without a download: scikit-learn's, or drawn here."""

import math

import numpy as np
import torch
from torch.nn import functional as F

from pipemega.data.images.labelled_images import (
    ArrayPixels,
    ChannelStatistics,
    LabelledImages,
)

_CLASSES = tuple("0123456789")

# Of values from 0 to 1: normalized values are from -1 to 1.
_STATISTICS = ChannelStatistics((0.5,), (0.5,))

_DRAWN, _SIDE = 4000, 20
_SEED = 20
_TURN, _SHEAR, _SHIFT, _NOISE = math.radians(15), 0.2, 0.15, 0.1

# 7 rows of 5 pixels per digit; the highest bit is the leftmost pixel.
_FONT = (
    (14, 17, 19, 21, 25, 17, 14), (4, 12, 4, 4, 4, 4, 14), (14, 17, 1, 2, 4, 8, 31),
    (31, 2, 4, 2, 1, 17, 14), (2, 6, 10, 18, 31, 2, 2), (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14), (31, 1, 2, 4, 8, 8, 8), (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
)  # fmt: skip


def scikit_digits() -> LabelledImages | None:
    """Return the 1,797 handwritten digits of scikit-learn, 8 x 8; None: it is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "sklearn":
            raise
        return None
    found = load_digits()
    # 17 levels of grey.
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)[:, None]
    labels = np.asarray(found.target, dtype=np.int64)
    name = "the digits of scikit-learn"
    return LabelledImages(name, ArrayPixels(pixels), labels, _CLASSES, _STATISTICS)


def drawn_digits() -> LabelledImages:
    """Return 4,000 digits, 20 x 20: turned, sheared, scaled, shifted, with noise; always equal."""
    random = torch.Generator().manual_seed(_SEED)

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.empty(_DRAWN).uniform_(low, high, generator=random)

    labels = torch.arange(_DRAWN) % len(_CLASSES)
    font = torch.tensor([[[row >> 4 - x & 1 for x in range(5)] for row in rows] for rows in _FONT])
    turn, shear = uniform(-_TURN, _TURN), uniform(-_SHEAR, _SHEAR)
    # From positions in the image to positions in the 5 x 7 pixels of a digit.
    wide, high = uniform(1.2, 2.0), uniform(1.1, 1.6)
    rows = [
        [wide * turn.cos(), wide * (shear - turn.sin()), uniform(-_SHIFT, _SHIFT) * wide],
        [high * turn.sin(), high * turn.cos(), uniform(-_SHIFT, _SHIFT) * high],
    ]
    maps = torch.stack([torch.stack(row, -1) for row in rows], 1)
    grid = F.affine_grid(maps, [_DRAWN, 1, _SIDE, _SIDE], align_corners=False)
    glyphs = font[labels, None].float()
    drawn = (
        F.grid_sample(glyphs, grid, align_corners=False) * uniform(0.6, 1.0)[:, None, None, None]
    )
    drawn += torch.empty_like(drawn).uniform_(-_NOISE, _NOISE, generator=random)
    pixels = (drawn.clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    return LabelledImages(
        "digits that pipemega draws", ArrayPixels(pixels), labels.numpy(), _CLASSES, _STATISTICS
    )
