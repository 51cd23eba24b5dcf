"""Writers under load: drivers that begin and commit, helpers that join by a token. They are killed at random.

What a process is about to do stands in its diary before it does it, and what it was told after. Helpers are
given tokens, and give receipts, through files in the spool, as tasks of a batch job would.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anabranch
from anabranch.errors import AlreadyCommitted, AskOutcomeError, BeginAgainError, RetryError
from tests.crash.children import put, run_threads, until_told
from tests.crash.zygote import Spec

STREAMS = ("wide", "narrow")
THREADS = 4
HELPERS_DEADLINE_S = 2.0
CALL_S = 30.0
KEYS = 40


@dataclass(frozen=True)
class Drive(Spec):
    """Begins transactions, alone and with helpers, and commits, aborts or forgets them."""

    scope: str = ""
    spool: str = ""
    seed: int = 0

    run = "tests.crash.load:drive"


@dataclass(frozen=True)
class Help(Spec):
    """Joins transactions by the tokens that it finds in the spool."""

    scope: str = ""
    spool: str = ""
    seed: int = 0

    run = "tests.crash.load:help_out"


class Diary:
    """Lines of JSON that outlive the process."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(self, what: str, **more: Any) -> None:
        """One line, whole."""
        os.write(self._file, json.dumps({"what": what, **more}).encode() + b"\n")


def read_diaries(spool: Path) -> Iterator[dict[str, Any]]:
    """All that any process noted; of each process in order."""
    for path in sorted(spool.glob("*.diary")):
        for line in path.read_text().splitlines():
            yield json.loads(line)


def payloads(txn_id: bytes, who: str, count: int) -> list[tuple[str, bytes, bytes]]:
    """(stream, key, value) that nothing else has."""
    return [
        (STREAMS[n % 3 == 0], f"key-{n % KEYS}".encode(), f"{txn_id.hex()} {who} {n:05}".encode())
        for n in range(count)
    ]


# -- drivers -----------------------------------------------------------------------------------------------


def drive(number: int, told: dict[str, Any]) -> int:
    """Run until SIGTERM, then finish the work in hand."""
    spec = Drive(**told)
    ending = until_told()
    diary = Diary(Path(spec.spool) / f"{spec.name}.diary")
    with anabranch.connect(spec.bootstrap, prefix=spec.prefix, timeout=CALL_S) as client:

        def work(thread: int) -> None:
            driver = _Driver(client, spec, diary, random.Random(f"{spec.seed}/{thread}"))
            while not ending.is_set():
                driver.one()

        run_threads(number, [partial(work, n) for n in range(THREADS)])
    return 0


class _Driver:
    def __init__(
        self, client: anabranch.Client, spec: Drive, diary: Diary, chance: random.Random
    ) -> None:
        self._client = client
        self._scope = spec.scope
        self._spool = Path(spec.spool)
        self._diary = diary
        self._chance = chance

    def one(self) -> None:
        """One transaction of some kind; only troubles that a caller has to expect are passed over."""
        kind = self._chance.choices(
            (self._one_shot, self._together, self._aborted, self._forgotten), (4, 5, 1, 1)
        )[0]
        try:
            kind()
        except (RetryError, BeginAgainError, AskOutcomeError) as error:
            self._diary.note("trouble", kind=type(error).__name__, why=str(error))
        except Exception as error:
            self._diary.note("defect", kind=type(error).__name__, why=str(error))
            raise

    def _one_shot(self) -> None:
        txn = self._client.begin(self._scope)
        count = self._chance.randint(1, 20)
        # The id of a one-shot is made with its commit: its payloads have one of their own.
        own = os.urandom(16)
        self._write(txn, payloads(own, "one-shot", count))
        self._diary.note("one-shot", own=own.hex(), count=count)
        try:
            result = txn.commit()
        except AskOutcomeError:
            self._diary.note("unknown", own=own.hex(), txn=(txn.txn_id or b"").hex())
            raise
        self._diary.note("told", own=own.hex(), txn=result.txn_id.hex(), at=result.commit_timestamp)

    def _together(self) -> None:
        """This process and some helpers, of whom any may die."""
        txn, txn_id, token = self._begin(10.0)
        tasks = {}
        for n in range(self._chance.randint(0, 2)):
            who, count = f"helper-{n}", self._chance.choice((1, 7, 150))
            tasks[who] = count
            put(self._spool / f"{txn_id.hex()}.{who}.task", json.dumps([token.hex(), who, count]))
        count = self._chance.randint(1, 150)
        self._write(txn, payloads(txn_id, "driver", count))
        receipts = self._collect(txn_id, tasks)
        takes = {"driver": count} | {who: tasks[who] for who in receipts}
        self._diary.note("commit", txn=txn_id.hex(), takes=takes)
        result = txn.commit(receipts=list(receipts.values()))
        self._diary.note("told", txn=txn_id.hex(), at=result.commit_timestamp)

    def _collect(self, txn_id: bytes, tasks: dict[str, int]) -> dict[str, bytes]:
        until = time.monotonic() + HELPERS_DEADLINE_S
        found: dict[str, bytes] = {}
        while len(found) < len(tasks) and time.monotonic() < until:
            for who in tasks.keys() - found.keys():
                path = self._spool / f"{txn_id.hex()}.{who}.receipt"
                if path.exists():
                    found[who] = bytes.fromhex(path.read_text())
            time.sleep(0.01)
        return found

    def _aborted(self) -> None:
        txn, txn_id, _ = self._begin(10.0)
        self._write(txn, payloads(txn_id, "driver", 5))
        txn.flush()
        self._diary.note("abort", txn=txn_id.hex())
        txn.abort()
        self._diary.note("told abort", txn=txn_id.hex())

    def _forgotten(self) -> None:
        txn, txn_id, _ = self._begin(1.0)
        self._write(txn, payloads(txn_id, "driver", 5))
        txn.flush()

    def _begin(self, keepalive: float) -> tuple[anabranch.Transaction, bytes, bytes]:
        txn = self._client.begin(self._scope, keepalive=keepalive)
        token = txn.token()
        txn_id = txn.txn_id
        assert txn_id is not None
        self._diary.note("begun", txn=txn_id.hex())
        return txn, txn_id, token

    def _write(self, txn: anabranch.Transaction, events: list[tuple[str, bytes, bytes]]) -> None:
        for stream, key, value in events:
            txn.write(f"{self._scope}/{stream}", value, key=key)


# -- helpers -----------------------------------------------------------------------------------------------


def help_out(number: int, told: dict[str, Any]) -> int:
    """Until SIGTERM: take tasks, write, leave receipts."""
    spec = Help(**told)
    ending = until_told()
    spool = Path(spec.spool)
    diary = Diary(spool / f"{spec.name}.diary")
    with anabranch.connect(spec.bootstrap, prefix=spec.prefix, timeout=CALL_S) as client:

        def work(thread: int) -> None:
            while not ending.is_set():
                for path in sorted(spool.glob("*.task")):
                    mine = path.with_suffix(f".{spec.name}-{thread}")
                    with contextlib.suppress(FileNotFoundError):  # another one was quicker
                        path.rename(mine)
                        _help_noting(client, spec, diary, json.loads(mine.read_text()))
                time.sleep(0.01)

        run_threads(number, [partial(work, n) for n in range(THREADS)])
    return 0


def _help_noting(
    client: anabranch.Client, spec: Help, diary: Diary, task: tuple[str, str, int]
) -> None:
    try:
        _help_with(client, spec, task)
    except (RetryError, BeginAgainError, AskOutcomeError, AlreadyCommitted) as error:
        # The last two: the driver waited for so long, and commits, or has committed, without this helper.
        diary.note("trouble", kind=type(error).__name__, why=str(error))
    except Exception as error:
        diary.note("defect", kind=type(error).__name__, why=str(error))
        raise


def _help_with(client: anabranch.Client, spec: Help, task: tuple[str, str, int]) -> None:
    token, who, count = task
    with client.join(bytes.fromhex(token)) as writer:
        for stream, key, value in payloads(writer.txn_id, who, count):
            writer.write(f"{spec.scope}/{stream}", value, key=key)
        receipt = writer.finish()
    put(Path(spec.spool) / f"{writer.txn_id.hex()}.{who}.receipt", receipt.to_bytes().hex())
