"""Headers of messages: structure, shapes and dtypes."""

from typing import Any

import pytest
import torch

from pipemega.pipeline.messages import Header, Packed, TensorMeta, tensors_of

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
            [X, X.clone().detach().requires_grad_()],
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


def test_tensors_in_one_buffer_are_aligned_and_independent() -> None:
    like = [torch.ones(3, 5, dtype=torch.bfloat16), torch.tensor(True), torch.empty(0, 2)]
    like += [torch.arange(6.0).reshape(1, 2, 3)]
    layout = Packed([TensorMeta.of(tensor) for tensor in like])
    assert layout.nbytes == 3 * 256
    views = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8))
    starts = [view.data_ptr() - views[0].data_ptr() for view in views]
    assert [starts[at] for at in (0, 1, 3)] == [0, 256, 512]
    versions = [view._version for view in views]
    for view, tensor in zip(views, like, strict=True):
        assert (view.shape, view.stride(), view.dtype) == (
            tensor.shape, tensor.stride(), tensor.dtype,
        )  # fmt: skip
        view.copy_(tensor)
        assert torch.equal(view, tensor)
    # A change in place of one is not seen by autograd as a change of another.
    assert [view._version for view in views] == [version + 1 for version in versions]


@pytest.mark.parametrize(
    ("sent", "matches"),
    [(X, True), (X[:1], False), (X.detach(), False), (X.double(), False), ([X], False), (3, False)],
)
def test_a_header_matches_messages_of_its_shapes(sent: Any, matches: bool) -> None:
    assert Header.of(X).matches(sent) is matches
    assert Header.of({"x": X, "n": 1}).matches({"x": sent, "n": 1}) is matches
