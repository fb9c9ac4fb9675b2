"""The tests of one GPU, run on a CPU: this shows that the tests themselves are correct."""

import os
import subprocess
import sys

import pytest

from tests.gpu.devices import ROOT

FILES = [
    "test_engine",
    "test_optimizer_step",
    "test_post_validate",
    "test_copies_and_kernels",
    "test_host_copies",
    "test_determinism",
]


@pytest.mark.sweep
def test_the_tests_of_one_gpu_pass_on_a_cpu() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *(f"tests/gpu/{name}.py" for name in FILES)],
        cwd=ROOT,
        env={**os.environ, "PIPEMEGA_TEST_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stdout
    assert " passed" in result.stdout
