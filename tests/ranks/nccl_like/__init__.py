"""The engine on process groups for CPU tensors that order operations as NCCL does."""

from typing import Final

# The names of the backends; process_group.py describes them.
STRICT: Final = "nccl_like"
LAZY: Final = "nccl_like_lazy"
SILENT: Final = "nccl_like_silent"
BACKENDS: Final = (STRICT, LAZY, SILENT)
