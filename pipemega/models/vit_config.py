"""Sizes and options of a vision transformer."""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from pipemega.config import Config
from pipemega.config.model_vit import ViTSection
from pipemega.errors import ConfigError
from pipemega.models.block_config import BlockConfig
from pipemega.parameters import even_share


@dataclass(frozen=True, kw_only=True)
class ViTConfig(BlockConfig):
    """Sizes and options of a ViT; the keys of `ViTSection` say what they mean.

    Args:
        length: positions of an image: patches, and the class token if there is one.
    """

    first_block: ClassVar[int] = 1

    image_size: int
    patch_size: int
    num_channels: int
    num_classes: int
    pool: Literal["class", "mean"]
    drop_path: float
    init: Literal["torch", "jax"]
    label_smoothing: float
    length: int
    causal: bool = False

    @classmethod
    def of(cls, config: Config) -> "ViTConfig":
        """Return the ViT of the sections `model` and `mesh`.

        Raises:
            ConfigError: the section `model` has another type, or its sizes do not divide by
                mesh.tensor.
        """
        section, mesh = config.model, config.mesh
        if not isinstance(section, ViTSection):
            found = "is missing" if section is None else f"has the type {section.type!r}"
            raise ConfigError(f"the section 'model' {found}, and a ViT needs the type 'vit'")
        even_share(section.num_attention_heads, mesh.tensor, "model.num_attention_heads")
        length = section.num_patches + (section.pool == "class")
        sequence_parallel = mesh.sequence_parallel and mesh.tensor > 1
        own = {f.name for f in fields(cls)}
        return cls(
            **{key: value for key, value in section.model_dump().items() if key in own}
            | {
                "ffn_hidden_size": section.feed_forward_size,
                "num_query_groups": section.num_attention_heads,
                "kv_channels": section.hidden_size // section.num_attention_heads,
                "length": length,
                "sequence_parallel": sequence_parallel,
                "padded_from": length if sequence_parallel and length % mesh.tensor else None,
            }
        )
