"""Compiled layers of Hugging Face models."""

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

pytest.importorskip("transformers")

from tests.ranks.hf.split_runs import one_step


@pytest.mark.sweep
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_equal_layers_of_llama_are_one_graph_with_the_gradients_of_uncompiled_ones(
    schedule: str,
) -> None:
    want = one_step("llama", (1, 1), schedule)
    torch._dynamo.reset()
    counters.clear()
    compiled = {"compile": {"enabled": True, "backend": "aot_eager"}}
    got = one_step("llama", (1, 1), schedule, keys=compiled)
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["graph_break"] == {}
    assert got["loss"] == pytest.approx(want["loss"], rel=1e-12)
    assert set(got["gradients"]) == set(want["gradients"])
    for name, gradient in want["gradients"].items():
        torch.testing.assert_close(
            torch.as_tensor(got["gradients"][name]),
            torch.as_tensor(gradient),
            rtol=1e-10,
            atol=1e-12,
        )
    torch._dynamo.reset()
