"""A step that is taken back on a GPU."""

import pytest
import torch

from tests.unit import test_post_validate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lamb"])
def test_a_step_that_is_done_again_is_the_step_that_waited(name, dtype):
    test_post_validate.check(name, dtype, "cuda")
