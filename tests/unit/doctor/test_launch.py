"""What `pipemega doctor` reads from the variables of the launcher."""

import pytest

from pipemega.config.launch_variables import launch_variables
from pipemega.doctor.attendance import judge_launch

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "3",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "gpu[03-04],gpu7",
    "SLURM_JOB_ID": "1234567",
}


def test_the_variables_of_torchrun_are_complete():
    launch = launch_variables(TORCHRUN | SLURM)
    numbers = [launch.number(name, 0) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    assert (launch.launcher, *numbers) == ("torchrun", 3, 8, 3)
    finding = judge_launch(launch)
    assert (finding.status, finding.text) == ("ok", "torchrun: 8 ranks, store at node0:29400")


def test_without_variables_it_is_one_process():
    launch = launch_variables({})
    assert (launch.launcher, launch.number("RANK", 0), launch.number("WORLD_SIZE", 1)) == (
        "none", 0, 1,
    )  # fmt: skip
    assert judge_launch(launch).status == "ok"


def test_srun_without_torchrun_needs_no_variables():
    launch = launch_variables(SLURM)
    assert launch.launcher == "srun"
    assert launch.values["RANK"] == "5"
    finding = judge_launch(launch)
    assert (finding.status, finding.text) == ("ok", "srun: 8 ranks, store at gpu03:24567")


@pytest.mark.parametrize(
    ("change", "status", "text"),
    [
        ({"MASTER_ADDR": None}, "failed", "MASTER_ADDR not set (found LOCAL_RANK, MASTER_PORT, "),
        ({"WORLD_SIZE": None}, "failed", "WORLD_SIZE not set"),
        ({"RANK": "three"}, "failed", "not a number: RANK='three'"),
        ({"RANK": "8"}, "failed", "RANK=8 is not below WORLD_SIZE=8"),
        (
            {"LOCAL_RANK": None},
            "warning",
            "LOCAL_RANK is not set: ranks that see several GPUs would",
        ),
    ],
)
def test_a_missing_or_wrong_variable_is_named_with_a_remedy(change, status, text):
    environment = {k: v for k, v in (TORCHRUN | change).items() if v is not None}
    finding = judge_launch(launch_variables(environment))
    assert finding.status == status
    assert text in finding.text
    assert "torchrun" in finding.remedy
