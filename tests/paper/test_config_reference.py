"""What is said about the config is made from what is checked."""

import re
from pathlib import Path

import pytest

import pipemega
from pipemega.config.keys import marks, section_in
from pipemega.config.reference import deepspeed_page, groups, reference_page, schema
from tests.paper.config_tree import objects

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("name", "make", "page"),
    [("config.md", reference_page, "docs"), ("deepspeed.md", deepspeed_page, "deepspeed")],
)
def test_the_committed_page_is_what_the_code_says(name, make, page):
    assert (DOCS / name).read_text(encoding="utf-8") == make(), (
        f"run: python -m pipemega config {page} > docs/{name}"
    )


def test_every_key_stands_on_a_page_with_a_meaning():
    pages = reference_page() + deepspeed_page()
    for title, _, kind in groups():
        for name, field in kind.model_fields.items():
            assert field.description, (title, name)
            assert f"| `{name}` |" in pages
            if why := marks(field).get("why"):
                assert why[1:].rstrip(".") in pages


def test_the_schema_has_every_key_and_no_other():
    found = schema()
    definitions = found["$defs"]
    for _, path, kind in groups():
        part = found if not path else definitions[kind.__name__]
        assert part["additionalProperties"] is False
        assert set(part["properties"]) == set(kind.model_fields) | set(kind.old_names)
        assert "^_comment" in part["patternProperties"]
    assert sum(1 for _ in objects()) > 60


def test_the_schema_takes_auto_where_the_config_does():
    found = schema()
    assert {"const": "auto"} in found["properties"]["train_batch_size"]["anyOf"]
    assert {"const": "auto"} not in found["$defs"]["MeshSection"]["properties"]["tensor"].get(
        "anyOf", []
    )


def test_the_schema_asks_of_each_optimizer_type_its_own_params():
    cases = schema()["$defs"]["OptimizerSection"]["allOf"]
    sgd = next(case for case in cases if case["if"]["properties"]["type"]["const"] == "SGD")
    assert sgd["then"]["properties"]["params"] == {"$ref": "#/$defs/SgdParams"}


def test_no_honoured_key_is_dead():
    """Weak but wide: each is read, by its name, somewhere outside the config room."""
    package = Path(pipemega.__file__).parent
    files = [path for path in package.rglob("*.py") if path.parent.name != "config"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    solved = {"train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}  # by Config.batch
    dead = [
        ".".join((*path, name))
        for _, path, kind in groups()
        if path[-1:] != ("params",)
        for name, field in kind.model_fields.items()
        if marks(field)["status"] == "honoured" and section_in(field.annotation) is None
        if name not in solved and not re.search(rf"\.{name}\b", text)
    ]
    assert dead == []
