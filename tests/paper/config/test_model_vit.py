"""The section `model` of type "vit"."""

from typing import Any

import pytest

from pipemega.config import load
from pipemega.errors import ConfigError


def load_vit(mesh: dict[str, Any] | None = None, **model: Any) -> Any:
    config = {"train_batch_size": 4, "mesh": mesh or {}, "model": {"type": "vit", **model}}
    return load(config)


def test_a_vit_without_keys_is_vit_b_16() -> None:
    assert load_vit().model.model_dump() == load_vit(variant="B/16").model.model_dump() | {
        "variant": None
    }


@pytest.mark.parametrize(
    ("variant", "sizes"),
    [
        ("S/16", (384, 12, 6, 16)),
        ("B/32", (768, 12, 12, 32)),
        ("L/16", (1024, 24, 16, 16)),
    ],
)
def test_a_variant_sets_the_sizes_that_are_not_given(variant: str, sizes: tuple[int, ...]) -> None:
    model = load_vit(variant=variant).model
    found = (model.hidden_size, model.num_layers, model.num_attention_heads, model.patch_size)
    assert found == sizes
    assert model.feed_forward_size == 4 * sizes[0]
    smaller = load_vit(variant=variant, num_layers=3, patch_size=8).model
    assert (smaller.hidden_size, smaller.num_layers, smaller.patch_size) == (sizes[0], 3, 8)


def test_a_resolved_section_is_loaded_again() -> None:
    config = load_vit(variant="S/16", num_classes=10)
    assert load(config.to_dict()).model == config.model


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"variant": "S/15"}, "model.variant"),
        ({"image_size": 30}, "model.image_size (30) must be a multiple of model.patch_size (16)"),
        (
            {"hidden_size": 30, "num_attention_heads": 4},
            "model.hidden_size (30) must be a multiple of model.num_attention_heads (4); the "
            "nearest that fit are 28 and 32",
        ),
        ({"mesh": {"tensor": 5}}, "model.num_attention_heads (12) must be a multiple of mesh.te"),
        (
            {"num_layers": 2, "mesh": {"pipeline": 5}},
            "model.num_layers + patch embedding and head = 2 + 2 = 4",
        ),
        ({"recompute_method": "block"}, "model.recompute_method 'block' recomputes whole blocks"),
        ({"drop_path": 1.0}, "model.drop_path"),
    ],
)
def test_a_vit_that_cannot_be_built_is_refused_by_its_key(
    keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_vit(**keys)
    assert message in str(refusal.value)
