"""A message between layers may be a dataclass; what a stage could not pass on is refused."""

import pytest

from tests.ranks.pipeline import foreign_backward as runs
from tests.ranks.pipeline.message_kinds import REFUSED, RIGHT

CUTS = {
    "1f1b": {"partition": [0, 3, 5]},
    "zb-v": {"partition": [0, 2, 3, 4, 5]},  # the message stays on a rank
}
WORDS = {
    "object": ("object with tensors, Opaque", "return a tuple, dict or dataclass"),
    "in place of a view": ("shares its memory with another tensor", "return a clone()"),
}


@pytest.mark.parametrize("shapes", ["cached", "exchanged"])
@pytest.mark.parametrize("schedule", CUTS)
def test_messages_of_every_kind_train_like_plain_torch(pool, schedule, shapes):
    """A dataclass counted as a constant: the stages before it were not trained."""
    settings = {**CUTS[schedule], "shapes": shapes}
    for found in pool.run(2, runs.compared, list(RIGHT), schedule, settings, 2):
        for kind, distance in found.items():
            assert distance == pytest.approx(0, abs=1e-10), kind


def test_messages_within_recomputed_layers_train_like_plain_torch():
    found = runs.compared(list(RIGHT), "1f1b", {"activation_checkpoint_interval": 1})
    for kind, distance in found.items():
        assert distance == pytest.approx(0, abs=1e-10), kind


@pytest.mark.parametrize("schedule", CUTS)
def test_what_the_next_stage_could_not_get_is_refused(pool, schedule):
    """With a cut in between, the slice did not follow the change: the loss depended on the cut."""
    for kind, words in WORDS.items():
        for found in pool.run(2, runs.compared, [kind], schedule, CUTS[schedule], 2):
            assert all(part in found[kind] for part in words)


def test_a_view_that_a_recomputed_layer_changes_is_refused():
    """The layers got copies, of which each had its own memory."""
    error = runs.compared(list(REFUSED), "1f1b", {"activation_checkpoint_interval": 1})
    assert all(part in error["in place of a view"] for part in WORDS["in place of a view"])
    assert runs.compared(list(REFUSED), "1f1b") == pytest.approx(dict.fromkeys(REFUSED, 0.0))


def test_the_cut_is_counted_or_the_layers_are_cut_without_counts(pool):
    """initialize ended with "Tensor on device cpu is not on the expected device meta"."""
    for found in pool.run(2, runs.compared, list(RIGHT), "auto", {"partition": "auto"}, 2):
        for kind, distance in found.items():
            assert distance == pytest.approx(0, abs=1e-10), kind
