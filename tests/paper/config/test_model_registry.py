"""Model types: registered by users, checked like the keys of pipemega, shown by the schema."""

import json
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic.errors import PydanticSchemaGenerationError

import pipemega
from pipemega.cli import main
from pipemega.config import load, model_registry
from pipemega.config.model_registry import ModelSection, model_types, register_model
from pipemega.config.reference_pages import schema
from pipemega.config.sections.gpt_section import GPTSection
from pipemega.config.sections.hf_section import HFSection
from pipemega.errors import ConfigError
from tests.paper.config.config_tree import BASE, MODEL


class Norm(Enum):
    LAYER = "layer"
    RMS = "rms"


class Patch(BaseModel):
    size: int = 16
    overlap: bool = False


class MyViT(BaseModel):
    """A vision transformer."""

    width: int = Field(description="Hidden size.")
    depth: int = Field(12, ge=1, le=100)
    patch: Patch = Patch()
    norm: Norm = Norm.LAYER
    weights: Path | None = None
    drop: float = 0.0

    @field_validator("width")
    @classmethod
    def _even(cls, width: int) -> int:
        if width % 2:
            raise ValueError(f"{width} is odd")
        return width

    @model_validator(mode="after")
    def _fits(self) -> "MyViT":
        if self.width < self.patch.size:
            raise ValueError("the width must be at least the patch size")
        return self

    def build(self, context: Any) -> Any:
        return context, self.depth


@pytest.fixture(autouse=True)
def _types(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the types that other tests have registered.
    own = {name: model_registry._TYPES[name] for name in ("gpt", "hf")}
    monkeypatch.setattr(model_registry, "_TYPES", own)


@pytest.fixture
def vit() -> type[MyViT]:
    return register_model("my-vit")(MyViT)


def with_model(**keys: Any) -> dict[str, Any]:
    return {**BASE, "model": {"type": "my-vit", "width": 64, **keys}}


def test_a_registered_type_is_the_section_model(vit: type[MyViT]) -> None:
    given = with_model(depth=3, patch={"size": 8}, norm="rms", weights="a/b", drop=1)
    model: Any = load(given).model
    assert isinstance(model, MyViT)
    assert isinstance(model, vit)
    assert isinstance(model, ModelSection)
    assert (model.type, model.width, model.depth) == ("my-vit", 64, 3)
    assert (model.patch.size, model.patch.overlap) == (8, False)
    assert (model.norm, model.weights, model.drop) == (Norm.RMS, Path("a/b"), 1.0)
    assert model.build("context") == ("context", 3)


def test_the_resolved_config_is_json_and_loads_again(vit: type[MyViT]) -> None:
    config = load(with_model(patch={"size": 8}, norm="rms", weights="a/b"))
    tree = json.loads(config.to_json())["model"]
    assert tree == {
        "type": "my-vit", "width": 64, "depth": 12, "patch": {"size": 8, "overlap": False},
        "norm": "rms", "weights": "a/b", "drop": 0.0,
    }  # fmt: skip
    assert load(config.to_json()) == config


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"widht": 3}, "unknown key 'model.widht'; did you mean 'width'?"),
        ({"width": True}, "model.width must be an integer, not true"),
        ({"width": "64"}, 'model.width must be an integer, not "64"'),
        ({"width": None}, "model.width must be an integer, not null"),
        ({"depth": 0}, "model.depth must be an integer >= 1 and <= 100, not 0"),
        ({"norm": "layr"}, 'model.norm must be "layer" or "rms", not "layr"'),
        ({"weights": 3}, "model.weights must be text or null, not 3"),
        ({"patch": {"sise": 3}}, "unknown key 'model.patch.sise'; did you mean 'size'?"),
        ({"patch": {"size": 1.5}}, "model.patch.size must be an integer, not 1.5"),
        ({"width": 63}, "model.width: 63 is odd"),
        ({"width": 8}, "model: the width must be at least the patch size"),
    ],
)
def test_its_keys_are_checked_like_those_of_pipemega(
    vit: type[MyViT], keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        load(with_model(**keys))


def test_a_missing_key_is_reported_with_its_description(vit: type[MyViT]) -> None:
    with pytest.raises(ConfigError, match=r"^model.width is missing, and has no default: Hidden"):
        load({**BASE, "model": {"type": "my-vit"}})


def test_an_unknown_type_is_refused_with_the_known_ones(vit: type[MyViT]) -> None:
    with pytest.raises(ConfigError) as refusal:
        load({**BASE, "model": {"type": "my-vti", "width": 64}})
    known = ", ".join(model_types())
    assert known.startswith("gpt, hf")
    assert str(refusal.value) == (
        f"model.type 'my-vti' is not registered; did you mean 'my-vit'? Known: {known}. For a "
        "type of yours, name the module that registers it in the top-level key 'imports'"
    )
    with pytest.raises(ConfigError, match=f"'mixer' is not registered; known: {known}"):
        load({**BASE, "model": {"type": "mixer"}})
    with pytest.raises(ConfigError, match=r"model.type must be text, not 3; known: gpt"):
        load({**BASE, "model": {"type": 3}})


def test_a_section_without_a_type_is_the_gpt() -> None:
    assert isinstance(load({**BASE, "model": MODEL}).model, GPTSection)
    assert isinstance(load({**BASE, "model": {**MODEL, "type": "gpt"}}).model, GPTSection)
    assert isinstance(load({**BASE, "model": {"type": "hf", "path": "x"}}).model, HFSection)


def test_a_name_is_registered_once(vit: type[MyViT]) -> None:
    class Other(BaseModel):
        def build(self, context: Any) -> Any: ...

    with pytest.raises(ConfigError) as refusal:
        register_model("my-vit")(Other)
    assert str(refusal.value) == (
        f"register_model('my-vit'): the name belongs to MyViT ({__file__}), and "
        f"{Other.__qualname__} ({__file__}) cannot have it too: choose another name"
    )
    with pytest.raises(ConfigError, match=r"register_model\('gpt'\): the name belongs to GPTSecti"):
        register_model("gpt")(Other)


def test_the_same_class_may_be_registered_again_by_a_second_import() -> None:
    assert register_model("my-vit")(MyViT) is not register_model("my-vit")(MyViT)
    load(with_model())


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        (MyViT, MyViT, "takes the name of a model type, such as @register_model"),
        ("x", int, "must decorate a class derived from pydantic.BaseModel, whose"),
        ("x", Patch, "the class Patch has no method build(self, context), which returns"),
        (
            "x",
            type("Clash", (MyViT,), {"__annotations__": {"sample": int}}),
            "the key 'sample' of Clash has the name of a method of model sections",
        ),
    ],
)
def test_a_class_that_cannot_be_a_section_is_refused(name: Any, kind: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        register_model(name)(kind)


def test_a_key_of_a_type_that_pydantic_does_not_know_is_refused_by_the_decorator() -> None:
    class Unknown: ...

    class Odd(ModelSection):
        layer: Unknown

    with pytest.raises(PydanticSchemaGenerationError, match="Unknown"):
        register_model("odd")(Odd)
    assert "odd" not in model_types()


def test_the_schema_selects_the_keys_by_the_type(vit: type[MyViT]) -> None:
    found = schema()["$defs"]
    section = found["ModelSection"]
    assert section["properties"]["type"] == {"enum": ["gpt", "hf", "my-vit"]}
    cases = {c["if"]["properties"]["type"]["const"]: c for c in section["allOf"]}
    # Without a type the section is that of the GPT.
    assert {name: case["if"]["required"] for name, case in cases.items()} == {
        "gpt": [], "hf": ["type"], "my-vit": ["type"],
    }  # fmt: skip
    assert cases["my-vit"]["then"] == {"$ref": "#/$defs/model.my-vit"}
    own = found["model.my-vit"]
    assert set(own["properties"]) == {"type", *MyViT.model_fields}
    assert own["required"] == ["width"]
    assert own["additionalProperties"] is False
    assert own["properties"]["width"]["description"] == "Hidden size."
    assert "anyOf" not in own["properties"]["depth"]  # "auto" is not a value
    assert found["Patch"]["additionalProperties"] is False
    assert found["Norm"]["enum"] == ["layer", "rms"]


MODULE = """
import pydantic
import pipemega

@pipemega.register_model("imported")
class Imported(pydantic.BaseModel):
    depth: int = 1

    def build(self, context):
        raise NotImplementedError
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    loaded = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - loaded:
        if name.startswith("registered_"):
            del sys.modules[name]


def written(folder: Path, module: str, text: str = MODULE) -> Path:
    (folder / f"{module}.py").write_text(text)
    path = folder / "config.json"
    tree = {"imports": [module], **BASE, "model": {"type": "imported", "depth": 2}}
    path.write_text(json.dumps(tree, indent=1))
    return path


def test_imports_are_found_in_the_folder_of_the_config(folder: Path) -> None:
    model: Any = load(written(folder, "registered_a")).model
    assert (model.type, model.depth) == ("imported", 2)


def test_imports_are_found_in_the_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    config = load(json.loads(written(folder, "registered_b").read_text()))
    assert config.model is not None
    assert config.model.type == "imported"
    assert config.imports == ("registered_b",)
    # What a checkpoint stores loads again.
    assert load(config.to_dict()) == config


def test_a_module_that_fails_is_reported_with_its_own_line(folder: Path) -> None:
    path = written(folder, "registered_c", "import os\nvalue = 1\nprint(value / 0)\n")
    with pytest.raises(ConfigError) as refusal:
        load(path)
    assert str(refusal.value) == (
        "imports: the module 'registered_c' failed: ZeroDivisionError: division by zero "
        f"({folder / 'registered_c.py'}, line 3: print(value / 0)) ({path}, line 2)"
    )


def test_a_module_that_is_missing_or_no_python_is_reported(folder: Path) -> None:
    path = written(folder, "registered_d", "def f(:\n")
    with pytest.raises(ConfigError, match=r"'registered_d' failed: SyntaxError: .*registered_d.py"):
        load(path)
    path = written(folder, "registered_e", "import registered_missing\n")
    with pytest.raises(ConfigError, match=r"ModuleNotFoundError: No module named 'registered_mis"):
        load(path)
    with pytest.raises(ConfigError, match=r"^imports: there is no module 'registered_f' in"):
        load(path, ['imports=["registered_f"]'])
    with pytest.raises(ConfigError, match=r'imports must be a list of \(text\), not "x"'):
        load(path, ['imports="x"'])


def test_a_module_that_registers_a_taken_name_is_reported(folder: Path) -> None:
    path = written(folder, "registered_g", MODULE.replace('"imported"', '"gpt"'))
    with pytest.raises(
        ConfigError, match=r"ConfigError: register_model\('gpt'\): the name"
    ) as text:
        load(path)
    assert f"({folder / 'registered_g.py'}, line " in str(text.value), "where the user registers it"


def test_a_script_that_exits_is_reported(folder: Path) -> None:
    path = written(folder, "registered_j", "import sys\nsys.exit(3)\n")
    with pytest.raises(ConfigError, match=r"'registered_j' failed: SystemExit: 3 .*line 2: sys.ex"):
        load(path)


@pytest.mark.parametrize("name", ["my_models.py", "./my_models", ".my_models"])
def test_a_path_is_no_name_of_a_module(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{re.escape(name)}' is not the .* write 'my_models'"):
        load({**BASE, "imports": [name]})


def test_lists_and_dicts_of_objects_are_keys_of_a_model() -> None:
    class WithTables(BaseModel):
        patches: list[Patch] = []
        named: dict[str, Patch] = {}

        def build(self, context: Any) -> Any: ...

    register_model("with-tables")(WithTables)
    try:
        section = {"type": "with-tables", "patches": [{"size": 8}], "named": {"a": {"size": 4}}}
        model: Any = load({**BASE, "model": section}).model
        assert (model.patches[0].size, model.named["a"].size) == (8, 4)
    finally:
        del model_registry._TYPES["with-tables"]


def test_the_command_schema_shows_the_types_of_a_config(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "schema", "--config", str(written(folder, "registered_h"))]) == 0
    found = json.loads(capsys.readouterr().out)["$defs"]["model.imported"]
    assert set(found["properties"]) == {"type", "depth"}
    written(folder, "registered_i", "1 / 0")
    assert main(["config", "schema", "--config", str(folder / "config.json")]) == 2
    assert "imports: the module 'registered_i' failed" in capsys.readouterr().err


def test_the_decorator_is_public() -> None:
    assert pipemega.register_model is register_model
