"""The images of a run, in the size that its model takes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from pipemega.config import Config
from pipemega.config.sections.data_section import DataSection
from pipemega.data.tokens.build_datasets import Datasets
from pipemega.distributed.topology import Topology
from pipemega.errors import ConfigError
from pipemega.lazy_imports import deferred
from pipemega.models.build_model import ModelContext, model_section, sample_from

if TYPE_CHECKING:
    from pipemega.data.images import image_dataset
else:
    image_dataset = deferred("pipemega.data.images.image_dataset")


def load_images(config: Config, section: DataSection, splits: Sequence[str]) -> Datasets:
    """Return the images of `section` for the model of `config`.

    Args:
        splits: the sets that are needed: "train", "valid", "test".

    Raises:
        ConfigError, DataError: the model takes no images, or as `build_images`.
    """
    request = image_dataset.ImageRequest(
        image_shape(config), model_section(config).number_of_classes(), tuple(splits)
    )
    found = image_dataset.build_images(section, request)
    return Datasets(
        **found.splits,
        vocab_size=None,
        tokenizer=None,
        description=found.description,
    )


def image_shape(config: Config) -> tuple[int, int, int]:
    """Return channels, height and width of the images that the model takes.

    Raises:
        ConfigError: it takes no images.
    """
    mesh = config.mesh
    topology = Topology(mesh.pipeline, config.smallest_data_size, mesh.tensor)
    inputs, _ = sample_from(ModelContext.of(config, topology))
    if isinstance(inputs, Tensor) and inputs.dim() == 4:
        _, channels, height, width = inputs.shape
        return channels, height, width
    got = f"{list(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
    raise ConfigError(
        f"data.images gives images [samples, channels, height, width], and model.type "
        f"{model_section(config).type!r} takes {got}: set model.type to 'vit' or 'resnet', or "
        f"remove data.images",
        on_every_rank=True,
    )
