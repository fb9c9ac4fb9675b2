"""The backends of a process group, also in torch's debug mode."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipemega.distributed.process_groups import backends_except_gloo, nccl_backend


@pytest.mark.parametrize("debug", [False, True])
def test_the_backend_of_nccl_is_found_within_the_wrapper_of_the_debug_mode(
    monkeypatch: pytest.MonkeyPatch, debug: bool
) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL; the wrapper has no `_set_default_timeout`."""
    nccl = SimpleNamespace()

    class Group:
        def _get_backend(self, device: torch.device) -> object:
            assert device.type == "cuda"
            return SimpleNamespace(wrapped_pg=nccl) if debug else nccl

    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    group: dist.ProcessGroup = Group()  # type: ignore[assignment]
    assert nccl_backend(group) is nccl
    assert backends_except_gloo(group) == [nccl]


def test_torch_wraps_backends_in_the_debug_mode() -> None:
    wrapper = dist.distributed_c10d._ProcessGroupWrapper  # type: ignore[attr-defined]
    assert hasattr(wrapper, "wrapped_pg")
    assert not hasattr(wrapper, "_set_default_timeout")
