"""`activation_checkpointing`: what is computed again backward, and not kept.  Floor 1."""

from pipemega.config.keys import Count, Section, honoured, ignored, refused


class ActivationCheckpointingSection(Section):
    """DeepSpeed's activation checkpointing; `model.recompute` is the finer choice for the GPT."""

    number_checkpoints: Count | None = honoured(
        None, "Parts that the whole model is cut into; each keeps its input alone. null: none."
    )
    partition_activations: bool = refused(
        False,
        "DeepSpeed: cut what is kept over the tensor ranks.",
        "not here yet; mesh.sequence_parallel cuts it as well, so set that to true instead",
    )
    cpu_checkpointing: bool = refused(
        False,
        "DeepSpeed: move what is kept to host memory.",
        "not here yet; use model.recompute or pipeline.activation_checkpoint_interval",
    )
    contiguous_memory_optimization: bool = ignored(
        False,
        "DeepSpeed: keep it in one buffer.",
        "torch's allocator does that well enough by itself",
    )
    synchronize_checkpoint_boundary: bool = ignored(
        False,
        "DeepSpeed: wait for the device at each part.",
        "the device is never waited for there",
    )
    profile: bool = ignored(False, "DeepSpeed: time each part.", "use wall_clock_breakdown")
