"""The classes and the schemas beside them are one contract, field by field."""

import json
import re
import types
import typing
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import pytest

from anabranch.schemas import records
from anabranch.schemas.codec import TYPES, schema_of

FOLDER = files("anabranch.schemas")
SCHEMAS = {
    entry.name.removesuffix(".avsc"): json.loads(entry.read_text("utf-8"))
    for entry in FOLDER.iterdir()
    if entry.name.endswith(".avsc")
}
CLASSES = {
    name: cls
    for name, cls in vars(records).items()
    if isinstance(cls, type) and cls.__module__.startswith(f"{records.__name__}.")
}
PRIMITIVES = {
    "string": str,
    "bytes": bytes,
    "boolean": bool,
    "int": int,
    "long": int,
}


def python_type(avro: Any) -> Any:
    """The annotation that a field of this Avro type has."""
    if isinstance(avro, list):
        found = [type(None) if branch == "null" else python_type(branch) for branch in avro]
        return frozenset(found)
    if isinstance(avro, dict) and avro["type"] == "array":
        return ("tuple", python_type(avro["items"]))
    if isinstance(avro, dict) and avro["type"] == "map":
        return ("mapping", python_type(avro["values"]))
    if avro in PRIMITIVES:
        return PRIMITIVES[avro]
    name = avro.removeprefix("anabranch.")
    named = SCHEMAS[name]
    if named["type"] == "enum":
        return ("literal", tuple(named["symbols"]))
    return bytes if named["type"] == "fixed" else CLASSES[name]


def plain(annotation: Any) -> Any:
    """An annotation in the same terms as `python_type`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple:
        assert args[1:] == (...,)
        return ("tuple", plain(args[0]))
    if origin is Mapping:
        assert args[0] is str
        return ("mapping", plain(args[1]))
    if origin is typing.Literal:
        return ("literal", args)
    if origin in (types.UnionType, typing.Union):
        return frozenset(plain(branch) for branch in args)
    return annotation


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_a_record_is_its_schema(name: str) -> None:
    schema, cls = SCHEMAS[name], CLASSES[name]
    hints = typing.get_type_hints(cls)
    assert list(hints) == [field["name"] for field in schema["fields"]]
    for field in schema["fields"]:
        hint, avro = plain(hints[field["name"]]), python_type(field["type"])
        if avro is str and isinstance(hint, tuple) and hint[0] == "literal":
            assert all(value in field["doc"] for value in hint[1]), "the text says which there are"
            continue
        assert hint == avro, field["name"]
    assert cls.__doc__ == schema["doc"]
    assert records.is_record(cls)


def test_every_schema_has_its_class_and_every_class_its_schema() -> None:
    record_schemas = {name for name, schema in SCHEMAS.items() if schema["type"] == "record"}
    assert record_schemas == set(CLASSES)
    for name, schema in SCHEMAS.items():
        if schema["type"] == "enum":
            assert typing.get_args(getattr(records, name)) == tuple(schema["symbols"])


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_a_schema_is_documented_and_named_as_its_file(name: str) -> None:
    schema = SCHEMAS[name]
    assert (schema["name"], schema["namespace"]) == (name, "anabranch")
    assert schema["doc"].strip()
    for field in schema.get("fields", ()):
        assert field["doc"].strip(), field["name"]
        assert re.fullmatch(r"[a-z][a-z0-9_]*", field["name"])
        # The framing carries the version; a default would make readers guess.
        assert "default" not in field


def test_nested_types_are_references_to_other_files() -> None:
    def names(avro: Any) -> set[str]:
        if isinstance(avro, list):
            return set().union(*map(names, avro))
        if isinstance(avro, dict):
            assert avro["type"] in ("array", "map"), "a type defined inside another"
            return names(avro.get("items") or avro.get("values"))
        return set() if avro in PRIMITIVES or avro == "null" else {avro}

    for schema in SCHEMAS.values():
        for field in schema.get("fields", ()):
            for reference in names(field["type"]):
                assert reference.removeprefix("anabranch.") in SCHEMAS


def test_every_type_number_has_a_class_once() -> None:
    assert len(set(TYPES.values())) == len(TYPES)
    assert all(0 < number < 256 for number in TYPES)
    assert set(TYPES.values()) <= set(CLASSES.values())
    for cls in TYPES.values():
        assert schema_of(cls)["name"] == f"anabranch.{cls.__name__}"


def test_every_record_is_framed_or_part_of_one_that_is() -> None:
    reached: set[str] = set()

    def reach(avro: Any) -> None:
        if isinstance(avro, list):
            for branch in avro:
                reach(branch)
        elif isinstance(avro, dict):
            reach(avro.get("items") or avro.get("values"))
        elif avro.startswith("anabranch."):
            name = avro.removeprefix("anabranch.")
            reached.add(name)
            for field in SCHEMAS[name].get("fields", ()):
                reach(field["type"])

    for cls in TYPES.values():
        reach(f"anabranch.{cls.__name__}")
    assert reached == set(SCHEMAS)
