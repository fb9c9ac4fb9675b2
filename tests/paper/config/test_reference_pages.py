"""The JSON Schema and the reference pages agree with the keys that the checks accept."""

import re
from pathlib import Path

import pytest

import pipemega
from pipemega.config.declarations import key_info, section_type
from pipemega.config.reference_pages import all_sections, deepspeed_page, reference_page, schema
from pipemega.config.sections.hf_section import HFSection
from tests.paper.config.config_tree import objects

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(
    ("name", "make", "page"),
    [("config.md", reference_page, "docs"), ("deepspeed.md", deepspeed_page, "deepspeed")],
)
def test_the_committed_page_is_what_the_code_generates(name, make, page):
    assert (DOCS / name).read_text(encoding="utf-8") == make(), (
        f"run: pipemega config {page} > docs/{name}"
    )


def test_every_key_has_a_meaning_and_a_row_on_the_page_for_it():
    reference, deepspeed = reference_page(), deepspeed_page()
    for title, path, kind in all_sections():
        for name, field in kind.model_fields.items():
            info = key_info(field)
            assert field.description, (title, name)
            assert field.description.endswith((".", "...")), (title, name)
            supported = info["status"] == "honoured" or info.get("own")
            if kind is HFSection and name == "type":
                continue  # the row of the GPT
            dotted = name if path[-1:] == ("params",) else ".".join((*path, name))
            if supported and field.default_factory is None:
                assert reference.count(f"| `{dotted}` |") >= 1, dotted
            if not supported and path[-1:] != ("params",):
                assert f"| `{dotted}` |" not in reference
            if not info.get("own") and section_type(field.annotation) is None:
                assert f"| `{name}` |" in deepspeed
            if why := info.get("why"):
                assert why[1:].rstrip(".") in reference + deepspeed
    tables = re.sub(r"^### `(\w+\.params|model)` of .*\n(\n|\|.*\n)*", "", reference, flags=re.M)
    rows = re.findall(r"^\| `([\w.]+)` \|.*$", tables, re.M)
    assert len(rows) == len(set(rows))
    assert "|  |" not in reference + deepspeed


def test_the_schema_has_every_key_and_no_other():
    found = schema()
    definitions = found["$defs"]
    for _, path, kind in all_sections():
        name = kind.__name__
        if path == ("model",):
            name = f"model.{kind.model_fields['type'].default}"
        part = found if not path else definitions[name]
        assert part["additionalProperties"] is False
        assert set(part["properties"]) == set(kind.model_fields) | set(kind.old_names)
        assert "^_" in part["patternProperties"]
    assert sum(1 for _ in objects()) > 60


def test_the_schema_takes_auto_where_the_config_does():
    found = schema()
    assert {"const": "auto"} in found["properties"]["train_batch_size"]["anyOf"]
    assert {"const": "auto"} not in found["$defs"]["MeshSection"]["properties"]["tensor"].get(
        "anyOf", []
    )


def test_the_schema_selects_the_params_by_the_type_of_the_optimizer():
    cases = schema()["$defs"]["OptimizerSection"]["allOf"]
    sgd = next(case for case in cases if case["if"]["properties"]["type"]["const"] == "SGD")
    assert sgd["then"]["properties"]["params"] == {"$ref": "#/$defs/SgdParams"}


def test_every_honoured_key_is_read_outside_of_the_config_package():
    """A weak check: each name is read as an attribute somewhere outside the config package."""
    package = Path(pipemega.__file__).parent
    files = [path for path in package.rglob("*.py") if path.parent.name != "config"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    # By Config.batch, by `load`, by DataSection.token_files, by ViTSection.prepare,
    # and by ResNetSection.blocks.
    solved = {
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "imports",
        "valid_data_path", "test_data_path", "variant", "depth",
    }  # fmt: skip
    dead = [
        ".".join((*path, name))
        for _, path, kind in all_sections()
        if path[-1:] != ("params",)
        for name, field in kind.model_fields.items()
        if key_info(field)["status"] == "honoured" and section_type(field.annotation) is None
        if name not in solved and not re.search(rf"\.{name}\b", text)
    ]
    assert dead == []
