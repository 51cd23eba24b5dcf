"""Ten thousand open transactions: all answer, a successor knows them all, and what they cost in memory."""

from __future__ import annotations

import os
import time
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from anabranch.ports import Log
from anabranch.protocol.schemas import records as r
from tests.conftest import Broker
from tests.core.labels import SECRET, Begun
from tests.crash.oracle import check_stream, read_stream
from tests.crash.raw import Raw, make_txn_id, make_writer, quick_producer
from tests.workload.leader import Lead
from tests.workload.zygote import Child, Zygote

MANY = int(os.environ.get("ANABRANCH_OPEN", "10000"))
AT_ONCE = 2_000
KEEPALIVE_MS = 600_000
# Python objects of a transaction with a stream and a writer, and what RocksDB keeps in memory of its rows.
MOST_BYTES_EACH = 16_000
LEAD_DEADLINE_S = 60.0


def memory(child: Child) -> int:
    """Resident bytes that are its own (a forked child shares pages with its parent)."""
    return int(psutil.Process(child.pid).memory_full_info().uss)


@pytest.mark.broker
@pytest.mark.soak
@pytest.mark.timeout(600)
def test_ten_thousand_open(
    broker: Broker, zygote: Zygote, log: Log, tmp_path: Path, measured: Callable[[str], None]
) -> None:
    prefix = f"mo{uuid.uuid4().hex[:6]}"
    scope, stream = f"{prefix}-scope", f"{prefix}-scope/wide"
    lines: list[str] = []

    @contextmanager
    def timed(what: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        lines.append(f"{what:<28}{time.monotonic() - began:6.1f} s")

    def lead(name: str) -> Child:
        spec = Lead(broker.bootstrap, prefix, name, folder=str(tmp_path / name))
        child = zygote.fork(spec)
        child.wait_leading(LEAD_DEADLINE_S)
        return child

    first = lead("first")
    producer = quick_producer(broker.bootstrap, **{"queue.buffering.max.messages": 1_000_000})
    client = Raw(broker.bootstrap, prefix, log, producer).start()

    def ask_all(commands: Sequence[object]) -> list[object]:
        answers: list[object] = []
        for at in range(0, len(commands), AT_ONCE):
            answers += client.ask_all(commands[at : at + AT_ONCE], deadline_s=60)
            client.answers.clear()
        return answers

    def begin(count: int) -> list[Begun]:
        ids = [make_txn_id() for _ in range(count)]
        begun = ask_all([r.Begin(i, scope, None, KEEPALIVE_MS, SECRET) for i in ids])
        assert {b.txn_id for b in begun if isinstance(b, Begun)} == set(ids)
        return [b for b in begun if isinstance(b, Begun)]

    client.ask(r.FindScope(scope, True))
    client.ask(r.CreateStream(stream, 2, {}))
    begin(AT_ONCE)  # whatever a process needs only once
    before = memory(first)
    with timed(f"begin {MANY}"):
        begun = begin(MANY)
    with timed("touch"):
        touched = ask_all([r.Touch(b.token, stream) for b in begun])
        assert {type(t) for t in touched} == {r.Touched}
    with timed("write and register"):
        writers = [make_writer() for _ in begun]
        values = [b.txn_id.hex().encode() for b in begun]
        headers = [
            b.txn_id + w.to_bytes(8, "big", signed=True) + bytes(4)
            for b, w in zip(begun, writers, strict=True)
        ]
        offsets = client.produce(
            [
                (f"{scope}.wide.journal", 0, None, value, [("ab.txn", header)])
                for value, header in zip(values, headers, strict=True)
            ]
        )
        receipts = [
            r.Receipt(
                b.txn_id, w, 1, True, (r.Extent(stream, 0, at, at + 1, 1, zlib.crc32(value)),)
            )
            for b, w, at, value in zip(begun, writers, offsets, values, strict=True)
        ]
        registered = ask_all(
            [r.Register(b.token, receipt) for b, receipt in zip(begun, receipts, strict=True)]
        )
        assert set(registered) == {r.Registered(1)}
    each = (memory(first) - before) / MANY
    lines.append(f"memory of each              {each:6.0f} bytes")

    def check_open() -> None:
        states = ask_all([r.GetState(b.txn_id) for b in begun])
        assert {(o.state, o.streams) for o in states if isinstance(o, r.Outcome)} == {
            ("OPEN", (stream,))
        }
        assert [o.writers for o in states if isinstance(o, r.Outcome)] == [(x,) for x in receipts]

    with timed("ask for the state of all"):
        check_open()
    others = []
    for n in range(20):
        began = time.monotonic()
        event = r.Event(stream, -1, b"other", f"other {n}".encode(), (), -1)
        client.ask(r.OneShot(make_txn_id(), scope, None, (event,)))
        others.append(time.monotonic() - began)
    lines.append(f"a one-shot meanwhile        {sorted(others)[10] * 1000:6.1f} ms (median)")
    first.kill()
    with timed("a successor leads, from nothing"):
        second = lead("second")
    check_open()
    lines.append(
        f"its memory                  {memory(second) / 1e6:6.1f} MB, at first {before / 1e6:.1f}"
    )
    half = MANY // 2
    with timed(f"commit {half}"):
        outcomes = ask_all([r.Commit(b.token, (), None, None, 60_000) for b in begun[:half]])
        assert {(o.state, o.committed) for o in outcomes if isinstance(o, r.Outcome)} == {
            ("COMMITTED", 1)
        }
    with timed(f"abort {MANY - half}"):
        outcomes = ask_all([r.Abort(b.token, "enough") for b in begun[half:]])
        assert {o.state for o in outcomes if isinstance(o, r.Outcome)} == {"ABORTED"}
    second.kill()
    found = read_stream(log, stream)
    check_stream(found)
    seen = sorted(e.value for e in found.events if e.key != b"other")
    assert seen == sorted(values[:half])
    for line in lines:
        measured(line)
    assert each < MOST_BYTES_EACH
