"""The variables of torchrun, as they follow from those of Slurm's srun and Open MPI's mpirun."""

import pytest

from pipemega.config.launch_variables import first_host, launch_variables

SLURM = {
    "ENVIRONMENT": "BATCH",  # every task of a batch job has this too
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04],gpu7",
    "SLURM_JOB_NODELIST": "gpu[01-04],gpu7",
    "SLURM_JOB_ID": "1234567",
}
# As Open MPI 5.0 sets them.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-vm-3498@1",
}


def test_the_variables_of_srun_are_those_of_a_rank():
    found = launch_variables(SLURM)
    assert found.launcher == "srun"
    assert found.problem() is None
    assert found.values == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "gpu03",
        "MASTER_PORT": "24567",
    }


def test_a_batch_script_of_slurm_is_one_process():
    """It has the number of tasks and the id 0, and srun has not started it."""
    script = {name: SLURM[name] for name in ("ENVIRONMENT", "SLURM_NTASKS", "SLURM_JOB_ID")}
    assert launch_variables(script | {"SLURM_PROCID": "0"}).launcher == "none"
    assert launch_variables(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}).launcher == "none"


def test_without_the_variables_of_a_step_slurm_ntasks_is_the_number_of_ranks():
    tasks = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NODELIST": "node7"}
    found = launch_variables(tasks)
    assert found.values["WORLD_SIZE"] == "2"
    assert found.values["MASTER_ADDR"] == "node7"


def test_two_steps_of_a_job_use_different_ports():
    ports = {
        launch_variables(SLURM | {"SLURM_STEP_ID": step}).values["MASTER_PORT"] for step in "0123"
    }
    assert len(ports) == 4


def test_the_variables_of_mpirun_are_those_of_a_rank():
    found = launch_variables(OPEN_MPI)
    assert found.launcher == "mpirun"
    assert found.problem() is None
    port = found.values["MASTER_PORT"]
    assert found.values == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "3",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    assert 20_000 <= int(port) < 30_000
    other = launch_variables(OPEN_MPI | {"PMIX_NAMESPACE": "prterun-vm-3499@1"})
    assert other.values["MASTER_PORT"] != port, "two jobs on one node"


def test_mpirun_on_several_nodes_uses_the_node_list_of_slurm_or_asks_for_the_host():
    nodes = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    slurm = nodes | {"SLURM_JOB_NODELIST": "node[3-4]", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    assert launch_variables(slurm).launcher == "mpirun"
    assert launch_variables(slurm).values["MASTER_ADDR"] == "node3"
    text, remedy = launch_variables(nodes).problem()
    assert text.startswith("MASTER_ADDR not set (found ")
    assert remedy == "set it to the host of rank 0 (mpirun -x MASTER_ADDR=node0)"


@pytest.mark.parametrize("launcher", [SLURM, OPEN_MPI])
def test_variables_that_are_set_are_kept(launcher):
    given = {"MASTER_ADDR": "node9", "MASTER_PORT": "4000"}
    found = launch_variables(launcher | given)
    assert {name: found.values[name] for name in given} == given
    # torchrun that srun or mpirun has started.
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **given}
    assert launch_variables(launcher | torchrun).values == torchrun
    assert launch_variables(launcher | torchrun | {"TORCHELASTIC_RUN_ID": "1"}).launcher == (
        "torchrun"
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"SLURM_PROCID": "first"}, "not a number: RANK='first'"),
        ({"SLURM_STEP_NUM_TASKS": "many"}, "not a number: WORLD_SIZE='many'"),
        ({"WORLD_SIZE": "4"}, "RANK=5 is not below WORLD_SIZE=4"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT=0 is no port"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is no port"),
        (dict.fromkeys(["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"], ""), "MASTER_ADDR not set"),
    ],
)
def test_wrong_variables_are_named_with_a_remedy(change, text):
    problem = launch_variables(SLURM | change).problem()
    assert problem is not None
    assert problem[0].startswith(text)
    assert "rank" in problem[1] or "free port" in problem[1]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node0", "node0"),
        ("node0,node1", "node0"),
        ("node[01-04,07],gpu5", "node01"),
        ("rack[2,4]-a", "rack2-a"),
        ("n-1.cluster", "n-1.cluster"),
    ],
)
def test_the_first_host_of_a_node_list_of_slurm(nodes, first):
    assert first_host(nodes) == first


def test_the_rank_on_the_node_is_read_where_a_script_has_set_rank_itself():
    by_hand = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    assert launch_variables(by_hand | {"SLURM_LOCALID": "1"}).number("LOCAL_RANK", 0) == 1
    mpirun = by_hand | {"OMPI_COMM_WORLD_LOCAL_RANK": "2", "SLURM_LOCALID": "0"}
    assert launch_variables(mpirun).number("LOCAL_RANK", 0) == 2
    assert launch_variables(mpirun | {"LOCAL_RANK": "3"}).number("LOCAL_RANK", 0) == 3
