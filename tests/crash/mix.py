"""Writers and group readers of one stream that is scaled all the time. They are killed at random.

Each thread of a writer is a lane: its events are numbered, it commits one transaction after the other, so the
events of each of its keys have one right order. After any trouble a new lane begins. Diaries as in `load`.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anabranch
from anabranch.errors import AskOutcomeError, BeginAgainError, RetryError
from tests.crash.children import read_on, run_threads, until_told
from tests.crash.load import CALL_S, THREADS, Diary
from tests.crash.zygote import Spec, say

KEEPALIVE_S = 3.0
KEYS = 4  # of a lane
PADDING = 64  # bytes that don't compress
BIG = 250  # events of a flush of a big one; more than a chunk
CHUNK_BYTES = 16 << 10
# As soon as a broker allows by default, a killed member is out of the group.
QUICK_GROUP = {"session.timeout.ms": 6_000, "heartbeat.interval.ms": 1_500}


@dataclass(frozen=True)
class Mix(Spec):
    """Writes transactions: one-shots, short ones, long ones that see scalings, big ones, aborted ones."""

    stream: str = ""
    spool: str = ""
    seed: int = 0

    run = "tests.crash.mix:write"


@dataclass(frozen=True)
class Follow(Spec):
    """Reads the stream as a member of a group, and notes each event before it asks for the next one."""

    stream: str = ""
    spool: str = ""
    group: str = ""

    run = "tests.crash.mix:follow"


def value_of(own: str, lane: str, n: int) -> bytes:
    """The head of an event's value: whose it is, and its place in the lane."""
    return f"{own} {lane} {n:07}".encode()


def head_of(value: bytes) -> bytes:
    """Without the padding."""
    return value[: value.rindex(b" ")]


def key_of(lane: str, n: int) -> bytes:
    return f"{lane}/{n % KEYS}".encode()


# -- writers -----------------------------------------------------------------------------------------------


def write(number: int, told: dict[str, Any]) -> int:
    """Run until SIGTERM, then finish the work in hand."""
    spec = Mix(**told)
    ending = until_told()
    diary = Diary(Path(spec.spool) / f"{spec.name}.diary")
    with anabranch.connect(spec.bootstrap, prefix=spec.prefix, timeout=CALL_S) as client:

        def work(thread: int) -> None:
            lane = _Lane(number, client, spec, diary, thread)
            while not ending.is_set():
                lane.one()

        run_threads(number, [partial(work, n) for n in range(THREADS)])
    return 0


class _Lane:
    def __init__(
        self, number: int, client: anabranch.Client, spec: Mix, diary: Diary, thread: int
    ) -> None:
        self._number = number
        self._client = client
        self._stream = spec.stream
        self._diary = diary
        self._chance = random.Random(f"{spec.seed}/{thread}")
        self._base = f"{spec.name}-{thread}"
        self._lanes = 0
        self._begin_lane()

    def _begin_lane(self) -> None:
        self._lanes += 1
        self._lane = f"{self._base}-{self._lanes}"
        self._n = 0

    def one(self) -> None:
        """One transaction of some kind."""
        kind = self._chance.choices(("one-shot", "short", "long", "big", "abort"), (2, 6, 3, 1, 1))
        try:
            self._transact(kind[0])
        except (RetryError, BeginAgainError, AskOutcomeError) as error:
            # The transaction may still be committed, after later ones: they use other keys.
            self._diary.note("trouble", kind=type(error).__name__, why=str(error))
            self._begin_lane()
        except Exception as error:
            self._diary.note("defect", kind=type(error).__name__, why=str(error))
            raise

    def _transact(self, kind: str) -> None:
        own, first = os.urandom(8).hex(), self._n
        txn = self._client.begin(self._stream.partition("/")[0], keepalive=KEEPALIVE_S)
        if kind != "one-shot":
            txn.token()  # it begins now
        self._write(txn, own, self._chance.randint(1, 20))
        if kind == "long":
            time.sleep(self._chance.uniform(0.1, 2.0))
            self._write(txn, own, self._chance.randint(1, 20))
        elif kind == "big":
            for _ in range(3):
                self._write(txn, own, BIG)
                txn.flush()
        elif kind == "abort":
            txn.flush()
            self._diary.note("abort", own=own, lane=self._lane, first=first, end=self._n)
            txn.abort()
            return
        self._diary.note("commit", own=own, lane=self._lane, first=first, end=self._n, kind=kind)
        txn.commit()
        self._diary.note("told", own=own)
        say(self._number, "told")

    def _write(self, txn: anabranch.Transaction, own: str, count: int) -> None:
        for n in range(self._n, self._n + count):
            padding = self._chance.randbytes(PADDING // 2).hex().encode()
            value = value_of(own, self._lane, n) + b" " + padding
            txn.write(self._stream, value, key=key_of(self._lane, n))
        self._n += count


# -- readers -----------------------------------------------------------------------------------------------


def follow(number: int, told: dict[str, Any]) -> int:
    """Until it is killed."""
    spec = Follow(**told)
    notes = os.open(Path(spec.spool) / f"{spec.name}.read", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with (
        anabranch.connect(
            spec.bootstrap, prefix=spec.prefix, timeout=CALL_S, config=QUICK_GROUP
        ) as client,
        client.read(spec.stream, group=spec.group) as reader,
    ):
        say(number, "works")
        for event in read_on(reader):
            os.write(notes, b"%d %s\n" % (time.monotonic_ns(), head_of(event.value or b"")))
    return 0


def read_notes(spool: Path) -> list[bytes]:
    """The notes of all readers, repetitions too, in the order of time."""
    notes = []
    for path in spool.glob("*.read"):
        for line in path.read_bytes().splitlines():
            at, _, head = line.partition(b" ")
            notes.append((int(at), head))
    return [head for _, head in sorted(notes)]
