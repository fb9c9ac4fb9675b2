"""KeepFloat64 undoes the casts to float32 that models of transformers contain."""

import pytest
import torch
from torch.nn import functional as F

from pipemega.hf_check.split_run import KeepFloat64

X = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)

CASTS = {
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "to by keyword": lambda x: x.to(dtype=torch.float32),
    "softmax": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    "sum": lambda x: torch.sum(x, dtype=torch.float32),
}


@pytest.mark.parametrize("name", CASTS)
def test_a_cast_of_a_float64_tensor_is_undone_only_in_the_mode(name):
    with KeepFloat64():
        assert CASTS[name](X).dtype == torch.float64
    assert CASTS[name](X).dtype == torch.float32


def test_other_tensors_are_cast():
    with KeepFloat64():
        assert torch.arange(3).float().dtype == torch.float32
        assert X.to(torch.int64).dtype == torch.int64
