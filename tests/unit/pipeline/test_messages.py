"""Headers of messages: structure, shapes and dtypes."""

from typing import Any

import pytest
import torch

from pipemega.pipeline.messages import Header, TensorMeta, tensors_of

X = torch.ones(2, 3, requires_grad=True)
Y = torch.ones(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("message", "tensors"),
    [
        (X, [X]),
        ([X], [X]),
        ({"hidden": X, "depth": 3, "ids": (Y, None)}, [X, Y]),
        ((X, Y, X), [X, Y]),
        (7, []),
    ],
)
def test_a_message_is_restored_from_its_header_and_tensors(
    message: Any, tensors: list[torch.Tensor]
) -> None:
    header = Header.of(message)
    assert header.tensors == [TensorMeta.of(tensor, at) for at, tensor in enumerate(tensors)]
    assert all(a is b for a, b in zip(tensors_of(message), tensors, strict=True))
    again = header.fill(tensors)
    assert all(a is b for a, b in zip(tensors_of(again), tensors, strict=True))
    assert Header.of(again).difference(header) is None


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (X, X[:1], "was float32 [2, 3] with gradient and is now float32 [1, 3] with gradient"),
        (X, X.detach(), "was float32 [2, 3] with gradient and is now float32 [2, 3]"),
        (X, [X], "the structure was * and is now [*]"),
        (X, 3, "and is now 3"),
        ([X, 3], [X, 4], "output[1] was 3 and is now 4"),
        (
            [X, X],
            [X, X.detach().requires_grad_()],
            "is now float32 [2, 3] with gradient, but at other places of the message",
        ),
    ],
)
def test_the_difference_of_two_headers_names_what_changed(
    before: Any, after: Any, words: str
) -> None:
    difference = Header.of(before).difference(Header.of(after))
    assert difference is not None
    assert words in difference
