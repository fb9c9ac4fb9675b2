"""Map-style dataset of images and classes."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pipemega.config.data_images import ImageTransforms
from pipemega.data.file_cache import digest_of
from pipemega.data.images.image_transform import ImageTransform
from pipemega.data.images.labelled_images import LabelledImages, Labels

ImageSample = tuple[Tensor, int | Tensor]


class ImageDataset(Dataset[ImageSample]):
    """Images of one split in the order of the source; the loader shuffles them in each epoch.

    Random changes and the partner of mixup are drawn from the default generators, which the loader
    seeds for each sample from seed, epoch and number.

    Args:
        source: the images.
        name: of the split: "train" has the random changes.
        chosen: numbers of the images of the split.
        transforms: `data.transforms`.
        shape: channels, height and width of the model's images.
        num_classes: of the model.

    Shape:
        [i] -> (float32 [channels, height, width], class), or with mixup
        (float32 [channels, height, width], float32 [num_classes]): a share of each class

    Raises:
        ConfigError: as `ImageTransform`. While reading: DataError: a file is damaged.
    """

    already_shuffled = False

    def __init__(
        self,
        source: LabelledImages,
        name: str,
        chosen: Labels,
        transforms: ImageTransforms,
        shape: tuple[int, int, int],
        num_classes: int,
    ) -> None:
        training = name == "train"
        self.name, self.source, self.num_classes = name, source, num_classes
        self.deterministic = not (training and transforms.is_random)
        self._mixup = transforms.mixup if training else 0.0
        self._chosen, self._shape = chosen, shape
        self._transform = ImageTransform(transforms, shape, source.statistics, training=training)
        described: dict[str, Any] = transforms.model_dump()
        self.fingerprint = digest_of(
            {
                "images": source.identity,
                "split": [name, digest_of({"chosen": chosen.tolist()})],
                "shape": shape,
                "classes": num_classes,
                "transforms": described,
            }
        )

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.source.classes

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> ImageSample:
        """Return one sample; a negative index counts from the end."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"image index {index} is out of range: {len(self)} images")
        image, label = self._single(index)
        if not self._mixup:
            return image, label
        # Both are drawn after the changes of the image, and before those of its partner.
        share = float(np.random.beta(self._mixup, self._mixup))
        partner = int(torch.randint(len(self), ()))
        other, other_label = self._single(partner)
        labels = torch.zeros(self.num_classes)
        labels[label] += share
        labels[other_label] += 1 - share
        return torch.lerp(other, image, share), labels

    def _single(self, index: int) -> tuple[Tensor, int]:
        at = int(self._chosen[index])
        return self._transform(self.source.pixels[at]), int(self.source.labels[at])

    def describe(self) -> str:
        """Return one line: images, classes, size."""
        channels, height, width = self._shape
        return (
            f"{self.name}: {len(self):,} images of {len(self.source.classes)} classes, "
            f"{self.source.name}, as {channels} x {height} x {width}"
        )
