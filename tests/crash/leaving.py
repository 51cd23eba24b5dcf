"""A process that leaves transactions in every state behind, until it is killed; one of another build ends them.

They run in an older build, too, so they use nothing but the public interface and `tests.workload.zygote`.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

import anabranch
from anabranch.errors import AnabranchError
from tests.workload.zygote import Spec, say

SECRET = bytes(range(32))
BY = sha256(SECRET).digest()
SHORT_S, LONG_S = 2.0, 600.0
STREAMS = "one", "two"
TABLE = "rows"
ROWS = {b"kept": b"100", b"broken": b"100", b"held": b"100", b"other": b"100"}
NAME, RESERVED = "nightly", "of a prepared one"
SERIES, NUMBER = "loads", 7


@dataclass(frozen=True)
class Leave(Spec):
    """``folder``: of its replica, which the next process may open."""

    scope: str = ""
    folder: str = ""

    run = "tests.crash.leaving:leave"


@dataclass(frozen=True)
class End(Spec):
    """``left``: what another process said of each transaction that it left, by kind."""

    scope: str = ""
    left: dict[str, dict[str, Any]] = field(default_factory=dict)

    run = "tests.crash.leaving:end"


@dataclass
class _Left:
    """What is said of one transaction, and what has to be alive until the process is killed."""

    kind: str
    txn_id: bytes = b""
    token: bytes = b""
    reservation: bytes = b""
    receipts: list[bytes] = field(default_factory=list)
    timestamp: int = 0

    def said(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "txn_id": self.txn_id.hex(),
            "token": self.token.hex(),
            "reservation": self.reservation.hex(),
            "receipts": [receipt.hex() for receipt in self.receipts],
            "timestamp": self.timestamp,
        }


def leave(number: int, given: dict[str, Any]) -> int:
    """Leave one of each kind, say what, and wait to be killed."""
    spec = Leave(**given)
    say(number, "imported", file=anabranch.__file__)
    with anabranch.connect(spec.bootstrap, prefix=spec.prefix, timeout=60.0) as client:
        leaving = _Leaving(client, spec.scope)
        leaving.create()
        with client.replica(f"{spec.scope}/{TABLE}", folder=spec.folder) as rows:
            for one in (*leaving.of_streams(), *leaving.of_rows(rows)):
                say(number, "left", **one.said())
            say(number, "left_all")
            while True:
                signal.pause()


class _Leaving:
    def __init__(self, client: anabranch.Client, scope: str) -> None:
        self.client = client
        self.scope = scope
        self.streams = [f"{scope}/{name}" for name in STREAMS]
        self.table = f"{scope}/{TABLE}"
        self._alive: list[object] = []

    def create(self) -> None:
        for stream in self.streams:
            self.client.create_stream(stream, 2)
        self.client.create_table(self.table, 1)
        with self.client.begin(self.scope) as txn:
            for key, row in ROWS.items():
                txn.write(self.table, row, key=key)
            txn.commit()

    def of_streams(self) -> Iterator[_Left]:
        """Committed, aborted, open, silent and prepared ones."""
        client = self.client
        for kind in ("one shot", "named", "series"):
            txn = client.begin(self.scope, NAME if kind == "named" else None)
            self._write(txn, kind)
            if kind == "series":
                result = txn.commit(name=SERIES, number=NUMBER)
            else:
                result = txn.commit()
            yield _Left(kind, result.txn_id, timestamp=result.commit_timestamp)
        left = self._joined("aborted")
        client.abort(left.token)
        yield left
        yield self._joined("open")
        yield self._joined("open, then aborted")
        yield self._joined("silent", SHORT_S)
        for kind in ("prepared", "prepared, then aborted"):
            left = self._joined(kind)
            name = RESERVED if kind == "prepared" else None
            client.prepare(left.token, left.receipts, name, by=BY, attempt=b"1")
            yield left
        txn = client.begin(self.scope, keepalive=LONG_S)
        self._write(txn, "prepared in memory")
        yield _Left("prepared in memory", txn.prepare(by=BY, attempt=b"1").txn_id)
        reserved = client.reserve(self.scope, f"{NAME} reserved", LONG_S)
        writer = client.join(reserved)
        self._write(writer, "reserved")
        receipt = writer.finish().to_bytes()
        yield _Left("reserved", reserved.txn_id, b"", reserved.to_bytes(), [receipt])

    def of_rows(self, rows: anabranch.Replica) -> Iterator[_Left]:
        """Each adds 1 to a row: an open one, one whose lock will break; a prepared one, which has read none."""
        with self.client.begin(self.scope, keepalive=LONG_S) as blind:
            blind.write(self.table, b"101", key=b"held")
            yield _Left("held", blind.prepare(by=BY, attempt=b"1").txn_id)
        for kind in ("kept", "broken"):
            txn = rows.begin(keepalive=LONG_S, timeout=60.0)
            self._alive.append(txn)
            has = int(txn.get(self.table, kind.encode()) or b"")
            token = txn.token("all")
            joined = rows.join(token, timeout=60.0)
            joined.put(self.table, kind.encode(), b"%d" % (has + 1))
            assert txn.txn_id is not None
            yield _Left(kind, txn.txn_id, token, receipts=[joined.finish().to_bytes()])

    def _joined(self, kind: str, keepalive: float = LONG_S) -> _Left:
        """An open transaction with one writer, which has finished."""
        txn = self.client.begin(self.scope, keepalive=keepalive)
        token = txn.token("all")
        writer = self.client.join(token)
        self._write(writer, kind)
        receipt = writer.finish().to_bytes()
        self._alive.append(txn)
        assert txn.txn_id is not None
        return _Left(kind, txn.txn_id, token, receipts=[receipt])

    def _write(self, txn: anabranch.Transaction | anabranch.Writer, kind: str) -> None:
        for stream in self.streams:
            for n in range(5):
                txn.write(stream, f"{kind} {n}".encode(), key=b"k%d" % n)


def end(number: int, given: dict[str, Any]) -> int:
    """Commit and abort all that was left open or prepared, and say what was answered."""
    spec = End(**given)
    say(number, "imported", file=anabranch.__file__)
    with anabranch.connect(spec.bootstrap, prefix=spec.prefix, timeout=60.0) as client:
        with client.begin(spec.scope) as txn:
            txn.write(f"{spec.scope}/{TABLE}", b"7", key=b"broken")  # breaks the lock on that row
            txn.commit()
        for kind, call in _endings(client, spec.left):
            try:
                found = call()
                answer = "aborted" if found is None else f"{found.counts.committed}"
            except AnabranchError as error:
                answer = type(error).__name__
            say(number, "ended_one", kind=kind, answer=answer)
    return 0


def _endings(
    client: anabranch.Client, left: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, Callable[[], anabranch.Result | None]]]:
    for kind, said in left.items():
        txn_id, token = bytes.fromhex(said["txn_id"]), bytes.fromhex(said["token"])
        receipts = [bytes.fromhex(receipt) for receipt in said["receipts"]]
        if kind in ("open, then aborted", "prepared, then aborted"):
            # Only the secret proves the right to abort a prepared one.
            whom, proof = (token, None) if kind.startswith("open") else (txn_id, SECRET)
            yield kind, partial(client.abort, whom, secret=proof)
        elif kind in ("prepared", "prepared in memory", "held"):
            yield kind, partial(client.commit, txn_id, secret=SECRET)
        elif kind == "reserved":
            reserved = anabranch.Reservation.from_bytes(bytes.fromhex(said["reservation"]))
            yield kind, partial(client.commit, reserved, receipts)
        elif kind in ("open", "kept", "broken"):
            yield kind, partial(client.commit, token, receipts)
