"""The schemas, and the classes that are made of them."""

import re
from typing import Any, get_args

from anabranch.protocol.schemas import records
from anabranch.protocol.schemas.codec import TYPES, schema_of
from anabranch.protocol.schemas.making import DEFAULTS, TUPLES, WORDS, fields_of, schemas
from tests.schemas.records_stub import STUB, text

SCHEMAS = {schema["name"]: schema for schema in schemas()}
CLASSES = {
    name: cls
    for name, cls in vars(records).items()
    if isinstance(cls, type) and cls.__module__ == records.__name__
}
PRIMITIVES = {"string", "bytes", "boolean", "int", "long"}


def test_the_stub_is_fresh() -> None:
    assert STUB.read_text() == text(), "python -m tests.schemas.records_stub"


def test_tables_name_fields_that_are_there() -> None:
    fields = {f"{name}.{field}" for name in CLASSES for field in fields_of(SCHEMAS[name])}
    assert set(DEFAULTS) | set(WORDS) <= fields
    assert set(CLASSES) >= TUPLES
    for name, schema in SCHEMAS.items():
        for field in schema.get("fields", ()):
            words = get_args(getattr(records, WORDS.get(f"{name}.{field['name']}", ""), None))
            assert all(word in field["doc"] for word in words), "the text says which there are"


def test_records_and_texts_of_secrets() -> None:
    """No text shows a secret or a token; rows of transactions go to logs."""
    begin = records.Begin(bytes(16), "a", None, 1, b"\x07" * 32)
    row = records.TxnRow(
        bytes(16), "a", None, "OPEN", 1, 1, 1, 1, 1, 1, 1, "", b"\x07" * 32, "open"
    )
    assert all(records.is_record(type(one)) for one in (begin, row))
    assert r"\x07" not in f"{begin!r} {row!r}"


def test_each_schema_is_documented() -> None:
    for name, schema in SCHEMAS.items():
        assert schema["namespace"] == "anabranch", name
        assert schema["doc"].strip(), name
        for field in schema.get("fields", ()):
            assert field["doc"].strip(), (name, field["name"])
            assert re.fullmatch(r"[a-z][a-z0-9_]*", field["name"]), name
            # The framing carries the version; a default would make readers guess.
            assert "default" not in field, (name, field["name"])


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
