"""`activation_checkpointing`: recompute activations in the backward pass."""

from pipemega.config.key_kinds import Section, honoured, ignored, refused
from pipemega.config.value_types import Count


class ActivationCheckpointingSection(Section):
    """DeepSpeed's activation checkpointing; for the GPT, `model.recompute` gives finer control."""

    number_checkpoints: Count | None = honoured(
        None, "Number of segments; each stores its input and is recomputed in backward; null: off."
    )
    partition_activations: bool = refused(
        False,
        "DeepSpeed: split the stored activations over the tensor ranks.",
        "not implemented; set mesh.sequence_parallel to true, which splits them too",
    )
    cpu_checkpointing: bool = refused(
        False,
        "DeepSpeed: move the stored activations to host memory.",
        "not implemented; use model.recompute or pipeline.activation_checkpoint_interval",
    )
    contiguous_memory_optimization: bool = ignored(
        False, "Store activations in one buffer.", "torch's allocator manages this memory"
    )
    synchronize_checkpoint_boundary: bool = ignored(
        False, "Synchronize at each segment.", "recomputation does not synchronize with the device"
    )
    profile: bool = ignored(False, "DeepSpeed: time each segment.", "use wall_clock_breakdown")
