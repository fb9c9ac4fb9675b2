"""Ranks that do not find each other: one message, with the address and what to check."""

import socket
import sys
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch.distributed as dist

import pipemega
from pipemega.distributed.process_groups import connect_ranks
from pipemega.errors import MeshError, PipelineError

CHECK = "check that all ranks were started, and MASTER_ADDR and MASTER_PORT (pipemega doctor)"


def set_variables(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **values}.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def listening() -> socket.socket:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


def test_a_rank_that_finds_no_store_names_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    set_variables(monkeypatch, RANK="1", MASTER_PORT="1")
    with pytest.raises(MeshError) as error:
        connect_ranks("gloo", timedelta(seconds=0.2))
    assert str(error.value) == (
        "rank 1 of 2: no connection of all ranks through the store at 127.0.0.1:1 within 0.2 s "
        "(mesh.timeout_seconds): rank 1: no store at 127.0.0.1:1 within 0.2 s (Connection "
        f"refused); {CHECK}"
    )


def test_rank_0_says_how_many_ranks_came(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "Timed out after 3 seconds waiting for clients. 1/2 clients joined."
    set_variables(monkeypatch, RANK="0", MASTER_PORT="29500")
    with (
        # `torch.distributed.rendezvous` is also a function, which hides the module.
        patch.object(
            sys.modules["torch.distributed.rendezvous"],
            "TCPStore",
            side_effect=dist.DistStoreError(reason),
        ),
        pytest.raises(MeshError, match=r"1/2 clients joined; check that all ranks were started"),
    ):
        connect_ranks("gloo", timedelta(seconds=1))


def test_a_rank_that_waits_for_the_process_group_of_all_ranks_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_variables(monkeypatch, RANK="0", MASTER_PORT="29500")
    reason = "wait timeout after 3000ms, keys: /default_pg/0//cpu//0/1"
    with (
        patch("pipemega.distributed.process_groups.launch_store"),
        patch.object(dist, "init_process_group", side_effect=dist.DistStoreError(reason)),
        pytest.raises(PipelineError) as error,
    ):
        connect_ranks("gloo", timedelta(seconds=3))
    assert str(error.value) == (
        "rank 0 in the creation of the process group over ranks 0, 1: timed out after "
        "mesh.timeout_seconds (3 s)"
    )


def test_a_taken_port_of_the_store_is_named(
    monkeypatch: pytest.MonkeyPatch, listening: socket.socket
) -> None:
    port = listening.getsockname()[1]
    set_variables(monkeypatch, RANK="0", MASTER_PORT=str(port))
    with pytest.raises(MeshError) as error:
        connect_ranks("gloo", timedelta(seconds=1))
    assert str(error.value) == (
        f"rank 0: the port of the store, 127.0.0.1:{port}, is used by another process: set "
        "MASTER_PORT to a free port, the same on all ranks"
    )


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "1", "WORLD_SIZE": "two", "MASTER_PORT": "1"}, "not a number: WORLD_SIZE='two'"),
        ({"RANK": "1", "WORLD_SIZE": ""}, "WORLD_SIZE, MASTER_PORT not set"),
    ],
)
def test_a_wrong_number_of_ranks_is_not_taken_for_one_process(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    """Each rank trained alone, and none of them said so."""
    set_variables(monkeypatch, **variables)
    config = pipemega.load_config({"train_batch_size": 2, "mesh": {"device": "cpu"}})
    with pytest.raises(MeshError, match=f"variables of the launcher: {message}"):
        pipemega.build_mesh(config)
