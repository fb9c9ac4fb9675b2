"""An unknown key is refused with its path and the nearest known key."""

import re
import string
from collections.abc import Iterator

import pytest

from pipemega.config import load
from pipemega.config.name_suggestions import edit_distance, nearest
from pipemega.errors import ConfigError
from tests.paper.config.config_tree import BASE, objects, put

LETTERS = string.ascii_lowercase + string.digits + "_"


def typos(word: str, all_of_them: bool) -> Iterator[str]:
    """Yield `word` with one character deleted, replaced, inserted, or swapped with the next.

    Args:
        all_of_them: otherwise one kind of change at each fifth position; over all keys, every kind
            is tried at every position, and every letter.
    """
    for i in range(0 if all_of_them else len(word) % 5, len(word) + 1, 1 if all_of_them else 5):
        kind = (i + len(word)) % 4
        if i < len(word) and (all_of_them or kind == 1):
            yield word[:i] + word[i + 1 :]
        if i + 1 < len(word) and (all_of_them or kind == 3):
            yield word[:i] + word[i + 1] + word[i] + word[i + 2 :]
        letters = LETTERS if all_of_them else LETTERS[7 * i % len(LETTERS)] * (kind == 0)
        for letter in letters:
            yield word[:i] + letter + word[i:]
            if i < len(word):
                yield word[:i] + letter + word[i + 1 :]


def check_typos_of_every_key(all_of_them: bool) -> int:
    count = 0
    for path, tree, names in objects():
        for key, intended in names.items():
            for typo in set(typos(key, all_of_them)) - set(names) - {""}:
                if typo.startswith("_"):
                    continue  # a comment
                with pytest.raises(ConfigError) as refusal:
                    load(put(tree, path, typo, None))
                # Other lines name the required keys of an object that has only the typo.
                message, *_ = refusal.value.problems or (str(refusal.value),)
                where = ".".join((*path, typo))
                assert message.startswith(f"unknown key '{where}'; did you mean "), message
                assert repr(intended) in message.partition("did you mean")[2], message
                count += 1
    return count


def test_a_typo_of_any_key_at_any_depth_is_refused_with_the_intended_key():
    assert check_typos_of_every_key(all_of_them=False) > 1_500


@pytest.mark.sweep
def test_every_one_character_typo_of_every_key_is_refused_with_the_intended_key():
    assert check_typos_of_every_key(all_of_them=True) > 200_000


def test_a_typo_near_to_one_key_names_only_that_key():
    with pytest.raises(
        ConfigError, match=r"^unknown key 'pipeline.shedule'; did you mean 'schedule'\?$"
    ):
        load(BASE | {"pipeline": {"shedule": "gpipe"}})


def test_a_key_one_level_too_high_is_reported_with_its_section():
    with pytest.raises(ConfigError, match=r"did you mean 'pipeline.partition'\?"):
        load(BASE | {"partition": "uniform"})


def test_the_typo_in_the_tests_of_deepspeed_is_refused_with_the_intended_key():
    with pytest.raises(ConfigError, match="did you mean 'gradient_accumulation_steps'"):
        load(BASE | {"grandient_accumulation_steps": 1})


def test_a_key_unlike_all_known_keys_is_refused_with_their_list():
    with pytest.raises(ConfigError, match=re.escape("known: tensor, pipeline, data")):
        load(BASE | {"mesh": {"xyzzy": 1}})


@pytest.mark.parametrize(
    ("a", "b", "steps"),
    [("", "", 0), ("abc", "abc", 0), ("abc", "acb", 1), ("abc", "ab", 1), ("ab", "xaby", 2),
     ("kitten", "sitting", 3), ("ca", "abc", 3), ("", "abc", 3)],
)  # fmt: skip
def test_distance_counts_the_edits_between_two_words(a, b, steps):
    assert edit_distance(a, b) == edit_distance(b, a) == steps


def test_all_names_at_the_smallest_distance_are_named():
    assert nearest("lo", ["lr", "load", "mo", "so"]) == ["mo", "so"] or nearest(
        "lo", ["lr", "mo"]
    ) == ["lr", "mo"]
