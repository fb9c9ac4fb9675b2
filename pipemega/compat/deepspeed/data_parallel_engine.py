"""Training of a model that is no pipeline, over data ranks."""

from typing import Any

from pipemega.errors import ConfigError


def initialize_data_parallel(
    model: Any, config: Any, **arguments: Any
) -> tuple[Any, Any, Any, Any]:
    """Refuse a model that is no pipeline.

    Raises:
        ConfigError: always; on every rank.
    """
    raise ConfigError(
        f"initialize() got the module {type(model).__name__}: write "
        "PipelineModule([layer, ...], num_stages=...) with its layers",
        on_every_rank=True,
    )
