"""The timeout of a process group, with the names of several versions of torch."""

from datetime import timedelta
from typing import Any, cast

import pytest
import torch.distributed as dist

from pipemega.distributed import mesh

GROUP = cast(dist.ProcessGroup, object())
TIMEOUT = timedelta(seconds=7)


@pytest.mark.parametrize("has_new_name", [True, False])
def test_the_timeout_is_set_by_the_name_that_this_torch_does_not_deprecate(
    monkeypatch: pytest.MonkeyPatch, has_new_name: bool
) -> None:
    called: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        dist.distributed_c10d, "_set_pg_timeout", lambda *given: called.append(("old", *given))
    )
    monkeypatch.delattr(dist, "set_timeout", raising=False)
    if has_new_name:
        monkeypatch.setattr(
            dist, "set_timeout", lambda *given: called.append(("new", *given)), raising=False
        )
    mesh._set_timeout(GROUP, TIMEOUT)
    assert called == [("new" if has_new_name else "old", TIMEOUT, GROUP)]
