"""Undoing and repeating an optimizer step on a GPU."""

import pytest
import torch

from tests.gpu.devices import ONE_DEVICE, one_gpu
from tests.unit.optimizer import test_post_validate

pytestmark = one_gpu


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lamb"])
def test_a_repeated_step_equals_the_synchronous_step(name, dtype):
    test_post_validate.check(name, dtype, ONE_DEVICE)
