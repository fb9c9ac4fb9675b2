"""Scripts under torchrun on the emulation of NCCL: exit code and error of a failed rank."""

import pytest

# pytest finds the fixture `scripts` by its name in this module.
from tests.ranks.fault_tolerance.test_failing_scripts import CONFIG, Scripts, scripts  # noqa: F401
from tests.ranks.nccl_like import BACKENDS

INITIALIZE = """
    from tests.ranks.nccl_like.process_group import register
    register()
    torch.distributed.init_process_group("{backend}", timeout=timedelta(seconds=5))
"""


@pytest.mark.sweep
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_layer_that_raises_on_one_rank_ends_all_ranks_with_one_message(
    scripts: Scripts,  # noqa: F811
    backend: str,
) -> None:
    config = {**CONFIG, "mesh": {"pipeline": 2, "device": "cpu", "timeout_seconds": 5}}
    ended = scripts.run(
        before=INITIALIZE.format(backend=backend).strip(),
        fault="raise ValueError('injected error')",
        config=config,
    )
    assert ended.code == 1
    # The third call of the layer: the first one was in the warm-up.
    assert ended.printed.startswith(
        "rank 1: forward of micro-batch 1 at stage 1 (F1@1): layers.1 (Faulty) failed: ValueError: "
        "injected error"
    )
    assert scripts.left() == []
