"""The plan of a model with the sizes of DeepSeek-V3."""

from pathlib import Path

from pipemega.config import load
from pipemega.planning.estimate import Request, estimate

CONFIG = Path(__file__).parents[3] / "configs/moe_671b_pp16.json"
HIDDEN, FFN, DENSE_FFN, EXPERTS, VOCABULARY = 7168, 2048, 18432, 256, 129280


def test_the_plan_of_671_b_parameters_counts_every_expert_once_and_divides_them() -> None:
    report = estimate(Request(load(CONFIG), world=2048, quick=True))
    attention = 4 * HIDDEN**2 + 2 * HIDDEN  # with the two norms of a block
    experts = EXPERTS * 3 * HIDDEN * FFN
    other = attention + 3 * HIDDEN * FFN + EXPERTS * HIDDEN  # shared expert, router
    dense = attention + 3 * HIDDEN * DENSE_FFN
    outside = 2 * VOCABULARY * HIDDEN + HIDDEN
    assert report.parameters == 3 * dense + 58 * (experts + other) + outside
    # Rank 1 has four blocks; of their experts one of the 64 ranks of the expert axis has a part.
    assert report.stages[1].layers == "4 x Block"
    assert report.prediction.memory[1].footprint.parameters == 4 * (experts // 64 + other)
