"""The hashes by which replicas of parameters are compared."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemega.diagnostics.replica_check import hash_tensors

CPU = torch.device("cpu")


@settings(max_examples=60)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    size=st.integers(1, 300),
    data=st.data(),
)
def test_any_flipped_bit_changes_the_hash(
    dtype: torch.dtype, size: int, data: st.DataObject
) -> None:
    width = torch.empty((), dtype=dtype).element_size()
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    tensor = torch.randn(size).to(dtype)
    flipped = tensor.clone()
    at, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 8 * width - 1))
    mask = 1 << bit if bit < 8 * width - 1 else -(1 << bit)
    flipped.view(integers)[at] ^= mask
    one, other = hash_tensors([tensor, flipped], CPU).tolist()
    assert one != other


def test_swapped_elements_change_the_hash() -> None:
    tensor = torch.randn(3, 5)
    one, other = hash_tensors([tensor, tensor.flip(0)], CPU).tolist()
    assert one != other


def test_the_hash_does_not_depend_on_the_strides() -> None:
    tensor = torch.randn(4, 6)
    assert hash_tensors([tensor], CPU) == hash_tensors([tensor.t().contiguous().t()], CPU)


@pytest.mark.parametrize("shape", [(), (0,), (1,)])
def test_empty_and_scalar_tensors_have_a_hash(shape: tuple[int, ...]) -> None:
    assert hash_tensors([torch.zeros(shape)], CPU).shape == (1,)


def test_the_last_element_of_a_tensor_longer_than_a_block_counts() -> None:
    tensor = torch.zeros((1 << 20) + 7)
    changed = tensor.clone()
    changed[-1] = 1.0
    one, other = hash_tensors([tensor, changed], CPU).tolist()
    assert one != other
