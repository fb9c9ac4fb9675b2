"""DeepSpeed's Python interface over pipemega: `import pipemega.compat.deepspeed as deepspeed`.

    python -m pipemega.compat.deepspeed script.py ...     `import deepspeed` is this package

The modules and names of DeepSpeed are in `names.json`; each is imported on first use.
"""

from typing import Any

from pipemega.compat.deepspeed.virtual_modules import attribute, create_modules

create_modules()


def __getattr__(name: str) -> Any:
    return attribute("", name)
