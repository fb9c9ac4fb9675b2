"""Our own ViT as a ViTForImageClassification of transformers."""

from pipemega.config.model_vit import ViTSection
from pipemega.errors import CheckpointError
from pipemega.hf.export import CheckpointTensor, ModelToExport
from pipemega.hf.gpt_export import linear_at, parameter_at
from pipemega.models.vit_config import ViTConfig


def vit_to_export(section: ViTSection) -> ModelToExport:
    """Return a ViT of the config section `model` as a model of transformers.

    Raises:
        CheckpointError: the ViT has no class token.
    """
    import transformers

    s = section
    if s.pool != "class":
        raise CheckpointError(
            f"this ViT cannot be exported: the ViT of transformers classifies by a class token "
            f"(model.pool is {s.pool!r})"
        )
    config = transformers.ViTConfig(
        hidden_size=s.hidden_size,
        num_hidden_layers=s.num_layers,
        num_attention_heads=s.num_attention_heads,
        intermediate_size=s.feed_forward_size,
        hidden_act="gelu",
        hidden_dropout_prob=s.hidden_dropout,
        attention_probs_dropout_prob=s.attention_dropout,
        layer_norm_eps=s.norm_epsilon,
        image_size=s.image_size,
        patch_size=s.patch_size,
        num_channels=s.num_channels,
        num_labels=s.num_classes,
    )
    head = ViTConfig.first_block + s.num_layers
    tensors = {
        "vit.embeddings.cls_token": parameter_at(0, "class_token"),
        "vit.embeddings.position_embeddings": parameter_at(0, "positions"),
        **linear_at(0, "projection", "vit.embeddings.patch_embeddings.projection", True),
        **linear_at(head, "norm", "vit.layernorm", True),
        **linear_at(head, "linear", "classifier", True),
    }
    for number in range(s.num_layers):
        tensors |= _block(number, s.hidden_size)
    return ModelToExport(config, "ViTForImageClassification", tensors)


def _block(number: int, hidden: int) -> dict[str, CheckpointTensor]:
    at, to = ViTConfig.first_block + number, f"vit.layers.{number}"
    found = {
        **linear_at(at, "attention_norm", f"{to}.layernorm_before", True),
        **linear_at(at, "attention.output", f"{to}.attention.o_proj", True),
        **linear_at(at, "mlp_norm", f"{to}.layernorm_after", True),
        **linear_at(at, "mlp.up", f"{to}.mlp.fc1", True),
        **linear_at(at, "mlp.down", f"{to}.mlp.fc2", True),
    }
    for index, name in enumerate(("q_proj", "k_proj", "v_proj")):
        rows = (index * hidden, (index + 1) * hidden)
        found |= linear_at(at, "attention.qkv", f"{to}.attention.{name}", True, rows=rows)
    return found
