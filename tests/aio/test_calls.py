"""The generated handles: they are those of the blocking client, all of them, with its signatures."""

from __future__ import annotations

import inspect

import pytest

import anabranch.aio
from tests.aio.calls import KINDS, PAGE, Kind, text

# Of workers of `Processor`, of programs that read topics themselves, and of the client's own parts.
NOT_HERE = {
    "WriteSession": {"keepalive_ms", "live_token", "gone", "client_closes", "after_fork"},
    "Client": {"heart", "reader_ports", "check_outputs", "mirror"},
    "Transaction": {
        "acknowledged", "after_fork", "client_closes", "commit_with", "gone", "identity", "keep", "left_by",
        "live_token", "open_named", "prepare_with", "read_by", "write_state",
    },
    "Writer": {
        "acknowledged", "after_fork", "client_closes", "gone", "live_token", "opened", "put", "put_many", "receipt",
        "store", "touch",
    },
    "Replica": {"begin_tasks", "deadline", "marks", "report_due", "step"},
    "TableTransaction": {"added", "check_unique", "commit_with", "unchanged", "write_entries", "write_state"},
    "JoinedTransaction": {"added", "check_unique", "unchanged", "write_entries"},
    "TableSnapshot": {
        "check_open", "get_version", "in_place_of", "is_forked", "row_at", "stamped", "walk", "walk_some",
    },
    "Snapshot": set(),
    "Reader": {"after_fork"},
    "TransactionReader": {"after_fork"},
    "SnapshotReader": {"after_fork"},
    "Changes": {"after_fork"},
    "TaskReader": {"after_fork", "cut", "end", "has_fetched", "is_behind", "on_lost", "through"},
}  # fmt: skip


def test_the_page_is_what_is_generated() -> None:
    assert PAGE.read_text() == text(), "python -m tests.aio.calls"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_all_calls_are_there(kind: Kind) -> None:
    module, name = kind.homes[0]
    public = {one for one in dir(getattr(module, name)) if not one.startswith("_")}
    here = {one for one in dir(getattr(anabranch.aio, kind.new)) if not one.startswith("_")}
    assert public - here == NOT_HERE[kind.name]


def test_signatures_are_those_of_the_blocking_client() -> None:
    ours = inspect.signature(anabranch.aio.AsyncClient.create_stream).parameters
    theirs = inspect.signature(anabranch.Client.create_stream).parameters
    assert [*ours] == [*theirs]
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]
