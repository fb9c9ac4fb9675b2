"""The message between the layers of a Hugging Face model.

hidden                      [batch, sequence, hidden], if nothing else is needed
(hidden, carried, side)     carried: other tensors with a gradient, such as an encoder's output
                            side: integer inputs from which masks and positions are computed
"""

from typing import Any

from torch import Tensor

Side = dict[str, Tensor]


def unpack(message: Any) -> tuple[Tensor, list[Tensor], Side]:
    """Return (hidden, carried, side) of a message."""
    if isinstance(message, Tensor):
        return message, [], {}
    hidden, carried, side = message
    return hidden, list(carried), side


def pack(hidden: Tensor, carried: list[Tensor], side: Side) -> Any:
    """Return the message with these parts."""
    return (hidden, carried, side) if carried or side else hidden


def split_hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any, Any]:
    """Return (hidden, other args, other kwargs) of the call of a layer."""
    if args:
        return args[0], args[1:], kwargs
    others = {key: value for key, value in kwargs.items() if key != "hidden_states"}
    return kwargs["hidden_states"], (), others
