"""Writes anabranch/protocol/schemas/records.pyi, the classes for mypy: ``python -m tests.schemas.records_stub``."""

import subprocess
import sys
from pathlib import Path
from typing import get_args

from anabranch.protocol.schemas import records
from anabranch.protocol.schemas.making import DEFAULTS, TUPLES, Schema, fields_of, schemas

STUB = Path(records.__file__).with_suffix(".pyi")
HEAD = '''"""Generated from the schemas by ``python -m tests.schemas.records_stub``: do not edit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

'''
WORDS = (
    "Asks", "ChangeKind", "ParticipantOp", "ShownStreamState", "StreamState", "TxnState", "Verdict", "VoteAnswer",
)  # fmt: skip


def text() -> str:
    """The stub, as the formatter leaves it."""
    words = [f"{name} = Literal[{get_args(getattr(records, name))}]\n" for name in WORDS]
    asked = "def is_record(cls: type) -> bool: ...\n"
    classes = [_class(schema) for schema in schemas() if schema["type"] == "record"]
    made = HEAD + "".join((*words, asked, *classes)).replace("[(", "[").replace(")]\n", "]\n")
    formatter = [sys.executable, "-m", "ruff", "format", "--stdin-filename", STUB.name, "-"]
    return subprocess.run(formatter, input=made, capture_output=True, text=True, check=True).stdout


def _class(schema: Schema) -> str:
    name = schema["name"]
    plain = name not in TUPLES
    lines = [
        "@dataclass(frozen=True, slots=True)" * plain,
        f"class {name}{'' if plain else '(NamedTuple)'}:",
    ]
    lines.append(f'    """{schema["doc"]}"""\n')
    for field, kind in fields_of(schema).items():
        at = f"{name}.{field}"
        lines.append(f"    {field}: {kind}" + (f" = {DEFAULTS[at]!r}" if at in DEFAULTS else ""))
    return "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    STUB.write_text(text(), encoding="utf-8")
