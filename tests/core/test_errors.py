"""Errors: each can be sent to another process, and each that `core` names has a row among the refusals."""

from __future__ import annotations

import ast
import importlib
import pickle
import pkgutil
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch import errors
from anabranch.errors import IllegalState
from anabranch.ports import TopicPartition
from anabranch.processing.failures import HandlerFailed
from anabranch.types import Event
from tests.core import test_refusals, test_refusals_of_processors, test_refusals_of_tables

EVENT = Event("s/a", b"k", b"v", [("h", None)], 1, None, 2, 3, 4, 5)
# The arguments of errors that are not made from one text.
MADE: dict[str, tuple[Any, ...]] = {
    "Again": (IllegalState("no"),),
    "HandlerFailed": (EVENT, IllegalState("no"), "s/a[4]@5"),
    "ChildError": ("NotReady", "a text"),
    "HashMismatch": ("file", "expected", "found"),
    "LogRefused": ("no", 5, ("t",)),
    "OffsetOutOfRange": (TopicPartition("t", 1), 7),
    "PortTaken": (9092,),
    "TopicGone": ("gone", "t"),
}


def all_errors() -> Iterator[type[BaseException]]:
    seen: set[type] = set()
    for module in pkgutil.walk_packages(anabranch.__path__, "anabranch."):
        if module.name.endswith("__main__") or ".kernels" in module.name:
            continue
        for found in vars(importlib.import_module(module.name)).values():
            if isinstance(found, type) and issubclass(found, BaseException) and found not in seen:
                seen.add(found)
                if found.__module__.startswith("anabranch"):
                    yield found


def test_every_error_is_read_back_as_it_was() -> None:
    count = 0
    for kind in all_errors():
        error = kind(*MADE.get(kind.__name__, ("a text",)))
        error.noted = 7  # type: ignore[attr-defined]
        back = pickle.loads(pickle.dumps(error))
        assert type(back) is kind
        assert (back.args, str(back)) == (error.args, str(error)), kind
        told = {name: str(value) for name, value in vars(error).items()}
        assert {name: str(value) for name, value in vars(back).items()} == told, kind
        count += 1
    assert count > 70


class Unsendable(Exception):
    """Errors as programs define them: two arguments with one in `args`, and one that can't be pickled."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(f"{text} {number}")
        self.call = lambda: number


def fail() -> None:
    raise HandlerFailed(EVENT, Unsendable(5, "five"), "s/a[4]@5")


def test_what_a_handler_raised_comes_out_of_a_pool_of_processes() -> None:
    with (
        ProcessPoolExecutor(1, get_context("spawn")) as pool,
        pytest.raises(HandlerFailed, match=r"s/a\[4\]@5: Unsendable: five 5") as failed,
    ):
        pool.submit(fail).result()
    assert failed.value.event == EVENT
    assert "Unsendable: five 5" in str(failed.value.error)


# Errors that the code of `core` names, and that are no answer to a command.
WITHOUT_ROW = {
    "InvariantViolation": "a defect, which ends the controller's work",
    "MalformedRecord": "rows and bytes that no controller or client wrote: `test_state`, `test_table_locks`",
    "UnsupportedVersion": "rows of a newer controller: `test_state`, `test_features`",
    "Locked": "segments of exclusive streams: `test_segment_locks`",
    "TopicMisconfigured": "the broker's refusal of new partitions, which the shell reports: `test_copies`",
}


def named_in_core() -> set[str]:
    """The errors whose class the code of `core` names, other than to catch it."""
    found: set[str] = set()
    for path in (Path(anabranch.__file__).parent / "core").rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        caught = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.ExceptHandler) and node.type is not None
            for part in ast.walk(node.type)
        }
        for node in ast.walk(tree):
            if id(node) not in caught and isinstance(node, ast.Name | ast.Attribute):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return found & errors._CODES.keys()


def test_every_error_that_core_raises_has_a_row_among_the_refusals() -> None:
    files = (test_refusals, test_refusals_of_processors, test_refusals_of_tables)
    tables = [table for file in files for table in file.TABLES.values()]
    answers = {answer.split(";")[0] for _, _, rows in tables for _, answer, _ in rows.values()}
    rows = answers & errors._CODES.keys()
    assert named_in_core() - rows == WITHOUT_ROW.keys()
