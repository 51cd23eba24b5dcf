"""Some seeds. A failing one is printed with the command that replays it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from anabranch.batches.records import Record, encode_batch
from anabranch.core.decisions.prepared import without
from anabranch.core.rows import partition_key, txn_key
from anabranch.core.transaction_states import born
from anabranch.errors import AlreadyCommitted
from anabranch.ports import TopicPartition
from anabranch.protocol import limits
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.schemas.records import PartitionRow
from anabranch.topics.names import status_topic
from checker import judge
from tests.mutants.catalogue import CALM, OVER
from tests.mutants.decisions import wall_clock_only
from tests.mutants.rounds import safe_ahead, safe_unlogged
from tests.sim.check_clients import check_deal
from tests.sim.held import KINDS, THINGS
from tests.sim.ledger import Ledger
from tests.sim.picture import Picture, Placed
from tests.sim.simulation import SPREAD, simulate
from tests.sim.weather import CLEAR, HOUR
from tests.sim.world import Violation

SEEDS = (*range(446, 470), 473, 498, 562)
# What has to occur in all of these seeds, or a test of it is none.
FAULTS = frozenset(
    (
        "clock jump",
        "crash",
        "delay",
        "denying",
        "double command",
        "freeze",
        "full disk",
        "half an append",
        "hidden partition",
        "late end",
        "late send",
        "leaderless",
        "lost checkpoint",
        "lost message",
        "lost reply",
        "nonsense",
        "refusing",
        "retention",
        "slow disk",
        "slow lead",
        "stale",
        "topic deleted",
        "topic not known",
        "unavailable",
        "uncertain",
        "uncertain send",
    )
)
JUDGED = (
    "transactions committed",
    "answers on transactions",
    "real-time order of commits",
    "polls, ordered",
    "polls, raw",
    "polls, transactions",
    "snapshots",
    "tasks taken",
    "commits that consumed",
    "events consumed",
    "reads of snapshots of tables",
    "reads that hold at their commit",
    SPREAD,
)

PARTS = ("consumed", "name", "number", "changes", "open", "prepares", "ReservedByPrepared")

SAFE_SEEDS = (0, 1, 2, 3, 4, 5)
MOST_SEEDS = 60
OFTEN_S = 0.3
SHORT_S = 3.0  # of a run that has all kinds of work, but not for long
# Limits that bound a transaction, but not its rows.
_OTHERS = {
    "ASKS_OF_TXN", "FOLLOWED", "HELD_COMMANDS", "HELPERS", "NAME", "ROW_CHANGES", "TURN_MS", "UNCOMMITTED",
    "UNREAD",
}  # fmt: skip
_OF_ONE = re.compile(r"\ban? (open )?transaction\b")


@pytest.mark.soak
@pytest.mark.timeout(300)
def test_what_must_hold_holds_under_every_seed() -> None:
    """Other seeds are played for each commit (`.ci/run`)."""
    commits = 0
    faults: Counter[str] = Counter()
    judged: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    for seed in SEEDS:
        report = simulate(seed)
        assert not report.violation, str(report)
        commits += report.commits
        faults.update(report.faults)
        judged.update(report.judged)
        parts.update(report.parts)
    assert commits > 5 * len(SEEDS), "too little happens in these runs"
    assert not FAULTS - faults.keys(), "faults that never strike"
    assert all(judged[what] > 20 for what in JUDGED), dict(judged)
    assert parts.keys() >= set(PARTS), dict(parts)


@pytest.mark.slow(4)
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(1), id="one"),
        pytest.param(range(100), id="many", marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_a_transaction_over_two_control_partitions_has_one_outcome(seeds: range) -> None:
    """One outcome and one timestamp, though controllers die, and messages are lost, late or doubled."""
    weather: dict[str, Any] = CLEAR | OVER
    for seed in seeds:
        report = simulate(seed, **weather)
        assert not report.violation, str(report)


@pytest.mark.parametrize(
    "seed", [2, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 3))]
)
def test_a_seed_replays_exactly(seed: int, tmp_path: Path) -> None:
    """And its history is judged in files as in memory."""
    lines: list[str] = []
    first = simulate(seed, trace=lines.append, history=tmp_path, work_s=SHORT_S)
    again = simulate(seed, work_s=SHORT_S)
    assert not first.violation, str(first)
    assert len(lines) > 500
    assert (first.digest, first.steps) == (again.digest, again.steps)
    assert {what: n for what, n in first.judged.items() if what != SPREAD} == judge(tmp_path).counts


@pytest.mark.soak
def test_a_full_disk_ends_the_process_and_nothing_else() -> None:
    """The next one, once there is room, goes on where the log stands."""
    report = simulate(8, full_disk=0.04, full_disk_s=2.0)
    assert not report.violation, str(report)
    assert report.commits > 0
    assert report.faults["full disk"] > 1


def test_a_refusal_that_names_a_missing_writer_is_held_against_what_is_committed() -> None:
    ledger, native, txn_id = Ledger("p", ("s/a",), Mock()), (1, 0), bytes(16)
    deal = ledger.open("s", "journal")
    for writer in ("w1", "w2"):
        deal.event(deal.writer(writer), "s/a", b"k")
    deal.attempt(0.0, None, {"w1": 1})
    other = deal.attempt(0.0, None, {"w1": 1, "w2": 1})
    other.error = AlreadyCommitted("it was committed without a writer; write that again")
    row = born("one_shot", txn_id, 0, scope="s", owner="open", committed=1)._replace(
        state="COMMITTED"
    )
    picture = Picture(rows={txn_id: row})
    record = Record(0, 0, b"k", f"{deal.label}/w1/0".encode())
    seen = [Placed("s/a", 0, 0, native, record, txn_id, 0)]
    check_deal(picture, ledger, deal, seen)
    other.receipts = {"w1": 1}
    with pytest.raises(Violation, match="all that it named is committed"):
        check_deal(picture, ledger, deal, seen)


def test_what_rows_said_is_known_when_they_are_forgotten() -> None:
    """A commit without a LOST stream looked torn once its row was gone; until then any other loss was excused."""
    ledger, native, txn_id = Ledger("p", (), Mock()), (1, 0), bytes(16)
    deal = ledger.open("s", "one-shot")
    for stream in ("s/a", "s/lost", "s/a"):
        deal.event(deal.writer("own"), stream, b"k")
    deal.attempt(0.0, "own", None)
    row = without(born("one_shot", txn_id, 0, scope="s", owner="open", committed=3), 1, {"s/lost"})
    part = encode(PartitionRow(("t",)))
    records = [
        Record(0, 0, txn_key(txn_id), encode(row)),
        Record(1, 0, partition_key(txn_id, 1), part),
    ]
    status = TopicPartition(status_topic("p"), 0)
    ledger.see_status(0.0, native, status, encode_batch(records))
    ledger.settle(native, commit=True)
    assert ledger.spread == [txn_id]
    picture = Picture(deleted={"s/lost": "journal"}, left_out=ledger.left_out)
    records = [Record(0, 0, b"k", f"{deal.label}/own/{number}".encode()) for number in (0, 2)]
    seen = [Placed("s/a", 0, 0, native, record, txn_id, 0) for record in records]
    check_deal(picture, ledger, deal, seen)
    with pytest.raises(Violation, match="the handle had written"):
        check_deal(picture, ledger, deal, seen[:1])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_nothing_waits_for_a_stream_in_trouble_that_it_never_touched() -> None:
    """But for what `tests/sim/hour.py` names."""
    weather: dict[str, Any] = {**CLEAR, **CALM, **HOUR, "hour_s": 600.0, "lose_s": 0, "lag_s": 0}
    report = simulate(1, **weather)
    assert not report.violation, str(report)


@pytest.mark.slow(3)
@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(SAFE_SEEDS[:1], id="few"),
        pytest.param(SAFE_SEEDS, id="all", marks=pytest.mark.soak),
    ],
)
def test_a_safe_time_that_was_answered_stays_safe(seeds: tuple[int, ...]) -> None:
    for seed in seeds:
        report = simulate(seed, safe_s=OFTEN_S, readers=0, workers=0)
        assert not report.violation, str(report)


@pytest.mark.parametrize(
    "plant",
    [
        safe_unlogged,
        *(pytest.param(plant, marks=pytest.mark.soak) for plant in (safe_ahead, wall_clock_only)),
    ],
)
def test_a_planted_bug_in_safe_times_is_found(
    plant: Callable[[], AbstractContextManager[object]],
) -> None:
    for seed in range(MOST_SEEDS):
        weather: dict[str, Any] = {**CLEAR, "jump_s": 0.5, "jump_by_s": 5.0}
        report = simulate(seed, bug=plant(), safe_s=OFTEN_S, readers=0, **weather)
        if report.violation.startswith("safe time"):
            return
    pytest.fail(f"not found in {MOST_SEEDS} seeds")


def test_each_limit_of_an_open_transaction_is_checked_after_each_round() -> None:
    known = {name: found for name, found in vars(limits).items() if isinstance(found, limits.Limit)}
    of_one = {name for name, found in known.items() if _OF_ONE.search(found.bounds)} - _OTHERS
    held = {thing.limit for thing in THINGS.values()}
    assert of_one <= held, "count it in tests/sim/held.py"
    assert held <= known.keys()
    assert {name for its in KINDS.values() for name in its} <= THINGS.keys()
