"""Kernels of the meta device that import torch._dynamo.

Some kernels of the meta device are Python functions, which torch keeps out of `torch.compile`. For
that it imports torch._dynamo at the first call, which takes 0.6 s of a process at start-up.
"""

from functools import cache
from types import FunctionType
from typing import Any

import torch._compile
import torch._refs
from torch._decomp import global_decomposition_table


@cache
def protected_functions() -> tuple[Any, ...]:
    """Return the functions that `torch._disable_dynamo` decorates, for `without_dynamo`.

    Closures of the kernels have them.
    """
    tables: list[dict[Any, Any]] = [*global_decomposition_table.values(), vars(torch._refs)]
    todo = [f for table in tables for f in table.values() if isinstance(f, FunctionType)]
    seen, found = set(map(id, todo)), list[Any]()
    while todo:
        function = todo.pop()
        cells = (cell.cell_contents for cell in function.__closure__ or ())
        inner = [f for f in cells if isinstance(f, FunctionType)]
        if function.__code__.co_filename == torch._compile.__file__:
            found += inner
        todo += (f for f in inner if id(f) not in seen)
        seen.update(map(id, inner))
    return tuple(found)
