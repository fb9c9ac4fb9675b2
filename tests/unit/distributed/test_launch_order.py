"""The advice on CUDA_DEVICE_MAX_CONNECTIONS, which is read before CUDA starts."""

import pytest
import torch

from pipemega.distributed.process_groups import launch_order_advice
from pipemega.engine import engine_parts
from tests.ranks.training_runs import build, settings

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
HOPPER, BLACKWELL = (9, 0), (10, 0)


def advice(
    monkeypatch: pytest.MonkeyPatch,
    value: str | None,
    *,
    device: str = "cuda",
    tensor_ranks: int = 2,
    capability: tuple[int, int] = HOPPER,
    hip: str | None = None,
) -> str | None:
    monkeypatch.delenv(VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    return launch_order_advice(torch.device(device), tensor_ranks)


@pytest.mark.parametrize(("value", "shown"), [(None, "not set"), ("8", "8"), ("32", "32")])
def test_tensor_parallel_runs_are_advised_to_use_one_queue(
    value: str | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = advice(monkeypatch, value, tensor_ranks=4)
    assert text is not None
    assert text.startswith(f"{VARIABLE} is {shown}, and mesh.tensor is 4: ")
    assert f"Start the job with {VARIABLE}=1" in text


def test_there_is_no_advice_where_it_would_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert advice(monkeypatch, "1") is None
    assert advice(monkeypatch, None, tensor_ranks=1) is None
    assert advice(monkeypatch, None, device="cpu") is None
    assert advice(monkeypatch, None, capability=BLACKWELL) is None
    assert advice(monkeypatch, None, hip="6.4") is None


@pytest.mark.parametrize(("schedule", "warned"), [("sequential", True), ("zb-h1", False)])
def test_the_run_warns_unless_weight_gradients_are_computed_later(
    schedule: str,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(engine_parts, "launch_order_advice", lambda device, ranks: "one queue")
    build(settings(pipeline={"schedule": schedule}))
    assert ("one queue" in caplog.messages) == warned
