"""Values of optimizers and schedules as bytes, so that a checkpoint can contain them.

Numbers, text and None are JSON; all others (lists, dicts, tensors in them) are a file of torch.save
that is loaded with weights_only, so that loading runs no code.
"""

import base64
import io
import json
from typing import Any

import torch

from pipemega.errors import short_cause

_JSON, _TORCH = b"j", b"t"


def encode(value: Any) -> bytes:
    """Return a value as bytes.

    Raises:
        ValueError: it contains something other than tensors and plain values.
    """
    if value is None or type(value) in (bool, int, float, str):
        return _JSON + json.dumps(value).encode()
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    # Pickling calls methods of the object, which can raise anything.
    except Exception as error:
        raise ValueError(short_cause(error)) from error
    return _TORCH + buffer.getvalue()


def decode(data: bytes) -> Any:
    """Return the value of `encode`; its tensors are on the CPU."""
    kind, rest = data[:1], data[1:]
    if kind == _JSON:
        return json.loads(rest)
    return torch.load(io.BytesIO(rest), map_location="cpu", weights_only=True)


def encode_text(value: Any) -> str:
    """Return `encode` as text."""
    return base64.b64encode(encode(value)).decode()


def decode_text(text: str) -> Any:
    """Return the value of `encode_text`."""
    return decode(base64.b64decode(text))
