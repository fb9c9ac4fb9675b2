"""What a pipeline whose ranks have different devices cannot do.  Imports no torch."""

from collections.abc import Iterator
from typing import Any

from pipemega.config.sections.pipeline_sections import CostsSection


def errors_of_mixed_devices(config: Any) -> Iterator[str]:
    """Yield the keys of a `Config` that need equal devices on all pipeline ranks."""
    devices, section = config.mesh.mixed_devices, config.pipeline
    if not devices:
        return
    listed = f"mesh.device [{', '.join(devices)}] has ranks of different speed"
    if section.schedule == "auto" and not isinstance(section.costs, CostsSection):
        yield (
            f"pipeline.schedule 'auto' assumes ranks of equal speed, and {listed}: name a "
            f"schedule, such as '1f1b' or 'zb-h1'"
        )
    if section.partition == "profile":
        yield (
            f"pipeline.partition 'profile' measures all layers on the device of rank 0, and "
            f"{listed}: give the bounds of the stages, or use 'parameters'"
        )
    if section.vocabulary == "parallel":
        yield (
            f"pipeline.vocabulary 'parallel' gives each rank an equal part of the vocabulary, and "
            f"{listed}: set it to 'stage'"
        )
