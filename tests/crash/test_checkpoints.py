"""The RocksDB folder is a checkpoint of the log: used if it can be trusted, else built again, always equal."""

from __future__ import annotations

import logging
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from anabranch.clock import SystemClock
from anabranch.controller.controller import Controller
from anabranch.controller.leadership import STATUS_POSITION
from anabranch.controller.rocksdb_table import ORIGIN, WRITTEN, RocksTable, open_checkpoint
from anabranch.core import rows as k
from anabranch.core.decisions.turn import Settings
from anabranch.ports import Fetched, Log, TopicPartition
from anabranch.protocol.schemas import records as r
from tests.conftest import Broker
from tests.contract.helpers import wait_stable
from tests.crash.cases import Case, Place
from tests.workload.zygote import Zygote

pytestmark = [pytest.mark.broker, pytest.mark.timeout(180)]
STEPS = 50
Rows = dict[bytes, bytes]


class Watched:
    """A log that notes from where the status log is read."""

    def __init__(self, log: Log, status: TopicPartition) -> None:
        self._log = log
        self._status = status
        self.asked: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def fetch(
        self, positions: Mapping[TopicPartition, int], **how: Any
    ) -> dict[TopicPartition, Fetched]:
        if self._status in positions:
            self.asked.append(positions[self._status])
        return self._log.fetch(positions, **how)


@dataclass
class Stopped:
    """A place where the scenario ran up to an open transaction, and no controller leads now."""

    place: Place
    case: Case
    log: Log
    reads: list[int] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return Path(self.place.folder) / "table"

    @property
    def status(self) -> TopicPartition:
        return TopicPartition(f"{self.place.prefix}.status", 0)

    def end(self) -> int:
        return self.log.end_offsets([self.status], committed=True)[self.status]

    def rows(self) -> Rows:
        """Status rows, what is derived of them, and the journal index; without who leads."""
        table = RocksTable(self.folder)
        kinds = (k.STATUS, k.OPEN, k.FINISHED, k.INDEX, k.REJECTED, k.POSITION + b"j")
        try:
            found = {key: value for kind in kinds for key, value in table.scan(kind)}
        finally:
            table.close()
        del found[k.STATUS + k.TERM_KEY], found[k.STATUS + k.ROUND_KEY]
        return found

    def change(self, key: bytes, value: bytes) -> None:
        """Spoil the folder."""
        table = RocksTable(self.folder)
        table.write({key: value})
        table.close()

    def lead(self) -> Rows:
        """Lead for a moment, in this process; where the status log was read from is in ``reads``."""
        log: Any = Watched(self.log, self.status)
        clock = SystemClock()
        table = open_checkpoint(self.folder, log, clock, self.place.prefix, 0)
        settings = Settings(0, 1, self.place.prefix, trusts_open=True)
        controller = Controller(log, table, clock, settings, "test")
        controller.lead()
        controller.step(0.2)  # journals are read to their ends,
        asked = self.case.client.correlation_id()
        self.case.client.send(r.DescribeStreams(None, None), asked)
        self.case.place.producer.flush(10)
        for _ in range(STEPS):  # and a round makes the index last
            if controller.step(0.2):
                break
        assert controller.rounds, "nothing was decided"
        controller.resign()
        table.close()
        self.reads = log.asked
        return self.rows()


def stopped(zygote: Zygote, broker: Broker, log: Log) -> Stopped:
    place = Place.on(zygote, broker.bootstrap, log, f"cp{uuid.uuid4().hex[:6]}")
    case = Case(place, [])
    case.settle()
    case.client.start()
    steps = dict(case.scenario.steps)
    for name in ("create streams", "commit from two writers", "one-shot", "abort"):
        steps[name]()
    steps["write and keep open"]()
    made = Stopped(place, case, log)
    wait_stable(log, {made.status})  # no marker of a round lands after the next one's rows
    case.client.ask(r.GetState(case.scenario.ids["kept"]))  # a round after the last write
    end(case)
    return made


def end(case: Case) -> None:
    last = case.children[-1]
    last.signal(signal.SIGTERM)
    last.wait_ended()
    assert last.status == 0


@pytest.fixture
def here(broker: Broker, zygote: Zygote, log: Log) -> Iterator[Stopped]:
    made = stopped(zygote, broker, log)
    yield made
    for child in made.case.children:
        child.kill()
    made.place.remove()


@pytest.mark.long
def test_deleted_it_is_built_again_equal(here: Stopped) -> None:
    before = here.lead()
    assert any(key.startswith(k.INDEX) for key in before), "something open is indexed"
    shutil.rmtree(here.folder)
    assert here.lead() == before
    assert here.reads[0] == 0, "the whole log was read"
    case = here.case  # and the transaction that was open can be committed
    case.fork().wait_leading()
    case.client.start()
    case.scenario.commit_kept()
    outcome = case.scenario.acknowledged["kept"]
    assert (outcome.committed, outcome.left_out) == (10, 0)
    end(case)
    here.place.check_table()


@pytest.mark.soak
def test_kept_only_the_tail_is_read(here: Stopped) -> None:
    before, end = here.rows(), here.end()
    assert end > 50
    after = here.lead()
    assert {key: after[key] for key in before} == before
    assert here.reads[0] >= end - 1, "but for a marker, nothing is read that was folded before"


# A folder's fault, and the log line about it.
DISTRUST: dict[str, tuple[Callable[[Stopped], None], str]] = {
    "of another cluster": (
        lambda here: here.change(ORIGIN, b"another topic/0"),
        "of another cluster or status topic",
    ),
    "of another control partition": (
        lambda here: here.change(ORIGIN, _origin(here).rpartition(b"/")[0] + b"/1"),
        "of another cluster or status topic",
    ),
    "too old": (lambda here: here.change(WRITTEN, (0).to_bytes(8, "big")), "hours old"),
    "ahead of the log": (
        lambda here: here.change(STATUS_POSITION, (here.end() + 5).to_bytes(8, "big")),
        "ahead of the status log",
    ),
}


def _origin(here: Stopped) -> bytes:
    table = RocksTable(here.folder)
    try:
        return table.get(ORIGIN) or b""
    finally:
        table.close()


FEW = ("ahead of the log",)


@pytest.mark.parametrize(
    "what",
    [pytest.param(what, marks=() if what in FEW else pytest.mark.soak) for what in DISTRUST],
)
def test_a_checkpoint_that_can_not_be_trusted_is_deleted(
    here: Stopped, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = here.lead()
    spoil, why = DISTRUST[what]
    spoil(here)
    here.change(k.STATUS + bytes(16) + b"\x03" + b"ghost", b"\x01\x42nonsense")
    with caplog.at_level(logging.WARNING):
        after = here.lead()
    assert why in caplog.text
    assert after == before
    assert here.reads[0] == 0


@pytest.mark.soak
def test_a_checkpoint_of_another_cluster_is_deleted(
    here: Stopped, zygote: Zygote, broker: Broker, log: Log, caplog: pytest.LogCaptureFixture
) -> None:
    other = stopped(zygote, broker, log)
    before = here.lead()
    shutil.rmtree(here.folder)
    shutil.copytree(other.folder, here.folder)
    other.place.remove()
    with caplog.at_level(logging.WARNING):
        assert here.lead() == before
    assert "of another cluster or status topic" in caplog.text


@pytest.mark.long
def test_a_disk_that_lost_its_last_writes(here: Stopped) -> None:
    """An older checkpoint, as from a backup, is brought up to date from the log."""
    older = here.folder.with_name("older")
    shutil.copytree(here.folder, older)
    case = here.case
    case.fork().wait_leading()
    case.client.start()
    case.scenario.commit_kept()
    case.scenario.last()
    end(case)
    before = here.lead()
    shutil.rmtree(here.folder)
    older.rename(here.folder)
    assert here.lead() == before
    here.place.check_table()
