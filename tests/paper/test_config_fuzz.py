"""Whatever is in the file, the answer is a config or a ConfigError."""

from hypothesis import given, settings
from hypothesis import strategies as st

from pipemega.config import Config, load
from pipemega.errors import ConfigError
from tests.paper.config_tree import objects, put

OBJECTS = list(objects())
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**400), 10**400),
    st.integers(-3, 70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["auto", "Adam", "gpipe", "fp16", "type:(", "1,1,1", "linear", "{", "nan"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda below: (
        st.lists(below, max_size=4)
        | st.dictionaries(st.sampled_from(["type", "params", "enabled", "stage", "a"]), below)
    ),
    max_leaves=6,
)


@st.composite
def changed_configs(draw):
    tree = None
    for _ in range(draw(st.integers(1, 3))):
        path, base, names = draw(st.sampled_from(OBJECTS))
        try:
            tree = put(tree or base, path, draw(st.sampled_from(list(names))), draw(VALUES))
        except (AttributeError, TypeError):  # an earlier change left no object there
            continue
    return tree


def outcome(source, overrides=()) -> Config | None:
    try:
        return load(source, overrides)
    except ConfigError as error:
        message = str(error)
    assert message
    assert "\n" not in message
    return None


@settings(max_examples=1000, deadline=None)
@given(changed_configs())
def test_any_value_at_any_key_is_accepted_or_refused_by_a_config_error(tree):
    config = outcome(tree)
    if config is not None:
        assert load(config.to_dict()) == config
        assert all(isinstance(warning, str) for warning in config.warnings)


@settings(max_examples=200, deadline=None)
@given(VALUES)
def test_anything_in_place_of_a_config_is_refused_by_a_config_error(value):
    outcome(value)


@settings(max_examples=150, deadline=None)
@given(st.text("{}[]\":,'/*#\\ \nasn1.5e-", max_size=40))
def test_any_text_in_place_of_a_file_is_refused_by_a_config_error(text):
    outcome("{" + text)


@settings(max_examples=150, deadline=None)
@given(st.text("mesh.tnor=1,{}[]\" '", max_size=20))
def test_any_override_is_accepted_or_refused_by_a_config_error(text):
    outcome({"train_batch_size": 8}, [text])
