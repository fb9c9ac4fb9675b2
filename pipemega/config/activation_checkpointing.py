"""`activation_checkpointing`: recompute activations in the backward pass."""

from collections.abc import Iterator
from typing import Any

from pipemega.config.key_kinds import Section, honoured, ignored
from pipemega.config.model_transformer import TransformerSection
from pipemega.config.value_types import Count


class ActivationCheckpointingSection(Section):
    """DeepSpeed's activation checkpointing; for the GPT, `model.recompute` gives finer control."""

    number_checkpoints: Count | None = honoured(
        None,
        "Largest number of segments of the whole model; each segment stores only its input and is "
        "recomputed in backward; null: off.",
    )
    partition_activations: bool = ignored(
        False,
        "DeepSpeed: split the stored activations over the tensor ranks; refused if "
        "mesh.tensor is above 1.",
        "mesh.tensor is 1, so there is nothing to split",
    )
    cpu_checkpointing: bool = ignored(
        False,
        "DeepSpeed: move the stored activations to host memory; refused if the "
        "config recomputes activations.",
        "this config stores no activations of segments: it recomputes nothing",
    )
    contiguous_memory_optimization: bool = ignored(
        False, "Store activations in one buffer.", "torch's allocator manages this memory"
    )
    synchronize_checkpoint_boundary: bool = ignored(
        False, "Synchronize at each segment.", "recomputation does not synchronize with the device"
    )
    profile: bool = ignored(False, "DeepSpeed: time each segment.", "use wall_clock_breakdown")


def errors_of_recompute(config: Any) -> Iterator[str]:
    """Yield why the keys of a `Config` that choose the layers to recompute exclude each other."""
    interval, segments = _checkpoints_of_all_layers(config)
    if interval and segments:
        yield (
            f"pipeline.activation_checkpoint_interval ({interval}) and "
            f"activation_checkpointing.number_checkpoints ({segments}) are two ways to set the "
            "same thing: keep one"
        )
    method = config.model.recompute_method if isinstance(config.model, TransformerSection) else None
    if method is not None and (interval or segments):
        yield (
            f"model.recompute_method {method!r} chooses the blocks to recompute, and activation "
            "checkpointing (pipeline.activation_checkpoint_interval or "
            "activation_checkpointing.number_checkpoints) recomputes all layers: keep one"
        )


def errors_of_stored_activations(config: Any) -> Iterator[str]:
    """Yield the errors if a `Config` treats stored activations in a way that is not supported."""
    stored = config.activation_checkpointing
    if stored.partition_activations and config.mesh.tensor > 1:
        yield (
            "activation_checkpointing.partition_activations is not supported with mesh.tensor "
            f"{config.mesh.tensor}: set mesh.sequence_parallel to true, which splits activations "
            "too"
        )
    recompute = isinstance(config.model, TransformerSection) and config.model.recompute != "none"
    if stored.cpu_checkpointing and (recompute or any(_checkpoints_of_all_layers(config))):
        yield (
            "activation_checkpointing.cpu_checkpointing is not supported: activations stay on the "
            "device; remove the key, and recompute more if they do not fit "
            "(pipeline.activation_checkpoint_interval 1, or model.recompute 'full')"
        )


def warnings_of_recompute(config: Any) -> Iterator[str]:
    """Yield a warning if a `Config` chooses the blocks of a built-in model, and all layers."""
    full = isinstance(config.model, TransformerSection) and config.model.recompute == "full"
    if full and any(_checkpoints_of_all_layers(config)):
        yield (
            "model.recompute 'full' recomputes each block, and activation checkpointing recomputes "
            "all layers: one of the two is enough"
        )


def _checkpoints_of_all_layers(config: Any) -> tuple[int, int | None]:
    return (
        config.pipeline.activation_checkpoint_interval,
        config.activation_checkpointing.number_checkpoints,
    )
