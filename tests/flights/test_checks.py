"""Every check holds for a good run, and each fails for a difference of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from examples.flights.checks import (
    check_aborted,
    check_again,
    check_commit,
    check_dead,
    check_delays,
    check_killed_deciding,
    check_killed_writing,
    check_not_before,
    check_order,
    check_raw,
    check_transfers,
    check_whole,
    judge,
    percentile,
)
from examples.flights.compare import Wanted
from examples.flights.findings import Check, Findings, Killed
from examples.flights.historian import Epoch
from examples.flights.notes import NOTE, RAW, Kind, Notes, digest_of
from examples.flights.source import Row
from examples.flights.stream_checks import check_epochs, check_in_order, check_rows, check_smalls
from examples.flights.transfers import AIRLINES

BIG, DOOMED = "aa" * 16, "bb" * 16
KEYS = (b"N1", b"N2", None)
FLIGHTS, WEATHER = 0, 1


def table(count: int) -> Wanted:
    """So many rows; keys and none take turns."""
    return Wanted(Row(n, KEYS[n % 3], lambda n=n: b"row %d" % n, None) for n in range(count))  # type: ignore[misc]


def notes(*events: dict[str, Any]) -> Notes:
    found = np.zeros(len(events), NOTE)
    for at, event in enumerate(events):
        for name, value in ({"at": 20.0 + at, "offset": at} | event).items():
            found[name][at] = value
    return found


def big(stream: int, row: int, **more: Any) -> dict[str, Any]:
    by = RAW if stream == WEATHER else b"worker-5" if row % 3 == 1 else b"worker-1"
    key, value = digest_of(KEYS[row % 3]), digest_of(b"row %d" % row)
    told = {"stream": stream, "partition": stream, "key": key, "value": value, "by": by}
    return told | {"kind": Kind.BIG, "committed": 5} | more


def small(stream: int, number: int, within: int, at: float, **more: Any) -> dict[str, Any]:
    told: dict[str, Any] = {
        "stream": stream,
        "partition": stream,
        "number": number,
        "within": within,
        "of": 3,
    }
    told |= {"kind": Kind.SMALL, "key": digest_of(b"N1"), "sent": at - 0.5, "at": at}
    return told | {"committed": 4 if number == 0 else 9} | more


def smalls(stream: int, number: int, at: float, **more: Any) -> list[dict[str, Any]]:
    return [small(stream, number, within, at, **more) for within in range(3)]


FLIGHTS_EVENTS = [
    *smalls(FLIGHTS, 0, 8.0, segment=0),
    *(big(FLIGHTS, row, segment=1) for row in range(9)),
    *smalls(FLIGHTS, 1, 40.0, segment=2),
]
WEATHER_EVENTS = [
    *smalls(WEATHER, 0, 8.0),
    *(big(WEATHER, row) for row in range(6)),
    *smalls(WEATHER, 1, 40.0),
]
READER = notes(*FLIGHTS_EVENTS)
LOG = notes(*FLIGHTS_EVENTS, *WEATHER_EVENTS)

HELD = dict.fromkeys(AIRLINES, 1000) | {"AA": 975, "B6": 1030, "UA": 995}
GOOD = Findings(
    streams=["nyc/flights", "nyc/weather"],
    wanted=[table(9), table(6)],
    txn_id=BIG,
    driver_ended_at=2.0,
    dead=b"worker-2",
    dead_flushed=10,
    raw_rows=6,
    raw_is_program=True,
    outcome={
        "requested": 10.0,
        "txn_id": BIG,
        "commit_timestamp": 5,
        "committed": 15,
        "rejected": 0,
        "left_out": 12,
    },
    again={"txn_id": BIG, "commit_timestamp": 5, "committed": 15},
    ticks={"committed": [0, 1], "aborted": [2]},
    txn_ids=["cc" * 16, BIG, "dd" * 16],
    killed_writing=Killed("controller-1", 5.0, 7.0, "controller-2"),
    killed_deciding=Killed("controller-2", 10.1, 12.0, "controller-1"),
    doomed_rows=50,
    doomed_txn_id=DOOMED,
    doomed_state="ABORTED",
    scaled=[(4, 4.0), (3, 8.0)],
    epochs=[
        Epoch(0, 0, 2, 5, False),
        Epoch(1, 1, 4, 5, False),
        Epoch(2, 2, 3, 5, False),
        Epoch(3, 0, 2, 1, True),
        Epoch(4, 2, 3, 5, False),
    ],
    plain=LOG,
    reader=READER,
    whole=READER,
    members=[READER[:8], READER[8:]],
    log=LOG,
    clerks=[
        {"began": [4.0, 11.0], "again": 1, "longest": 2.0, "paid": {"AA": -30, "B6": 30}},
        {"began": [4.5, 13.0], "again": 0, "longest": 1.0, "paid": {"AA": 5, "UA": -5}},
    ],
    audit={"snapshots": 9, "wrong": [], "held": HELD},
)


def test_a_good_run_passes_everything() -> None:
    found = judge(GOOD)
    assert [check for check in found if not check.ok] == []
    assert len(found) == 17
    assert all(check.title and check.seen for check in found)


def outcome(**changes: Any) -> Findings:
    return replace(GOOD, outcome={**GOOD.outcome, **changes})


def noted(name: str, found: Notes) -> Findings:
    changes: dict[str, Any] = {name: found}
    return replace(GOOD, **changes)


def changed(name: str, *places: int, **fields: Any) -> Findings:
    """One observer noted some events otherwise; of members, the first."""
    found = (GOOD.members[0] if name == "members" else getattr(GOOD, name)).copy()
    for field, value in fields.items():
        found[field][list(places)] = value
    return noted(name, found) if name != "members" else members(found, GOOD.members[1])


def less(name: str, *places: int) -> Findings:
    return noted(name, np.delete(getattr(GOOD, name), places))


def more(name: str, *events: dict[str, Any]) -> Findings:
    """Events that were noted last; of members, by another one."""
    late = [{"at": 50.0 + at, "offset": 50 + at} | event for at, event in enumerate(events)]
    if name == "members":
        return members(*GOOD.members, notes(*late))
    return noted(name, np.concatenate([getattr(GOOD, name), notes(*late)]))


def members(*found: Notes) -> Findings:
    return replace(GOOD, members=found)


def of_stream(at: int) -> Callable[[Findings], Check]:
    return lambda found: check_rows(found, at)


def epochs(**changes: Epoch | None) -> Findings:
    """Epochs by e and number; None: without it."""
    by_number = {f"e{epoch.epoch}": epoch for epoch in GOOD.epochs} | changes
    return replace(GOOD, epochs=[epoch for epoch in by_number.values() if epoch is not None])


def audited(**changes: Any) -> Findings:
    return replace(GOOD, audit={**GOOD.audit, **changes})


PLANTED: list[tuple[Callable[[Findings], Check], Findings, str]] = [
    (check_commit, outcome(committed=14), "14 events committed, not 15"),
    (check_commit, outcome(rejected=3), "3 events rejected"),
    (check_commit, outcome(txn_id=DOOMED), "was committed, not"),
    (check_commit, replace(GOOD, driver_ended_at=11.0), "still lived"),
    (check_again, replace(GOOD, again={**GOOD.again, "commit_timestamp": 6}), "commit_timestamp"),
    (check_again, replace(GOOD, again=dict.fromkeys(GOOD.again)), "txn_id is None"),
    (check_not_before, changed("plain", 18, at=9.5), "plain consumer saw an event in nyc/we"),
    (check_not_before, changed("reader", 5, at=9.9), "reader of events saw an event in nyc/fl"),
    (check_not_before, noted("plain", LOG[:3]), "plain consumer never saw"),
    (check_whole, less("whole", *range(3, 12)), "came in 0 transactions"),
    (check_whole, changed("whole", 11, segment=2), "in 2 transactions"),
    (check_whole, less("whole", 4), "not with 9 events"),
    (check_whole, changed("whole", 12, segment=1), "it came with {'big': 9, 'small': 1}"),
    (check_whole, replace(GOOD, txn_ids=["cc", DOOMED, "dd"]), "in 1 transactions, not in one"),
    (check_whole, less("whole", 1), "small transaction 0 came with 2 of 3 events"),
    (check_whole, changed("whole", 12, 13, 14, segment=0), "1 transactions came with events of"),
    (check_whole, changed("whole", 0, 1, 2, committed=6), "out of the order"),
    (of_stream(FLIGHTS), less("log", 3), "key N1: 2 of 3 rows came, number 1 has another"),
    (of_stream(FLIGHTS), changed("log", 4, value=1), "key N2: 3 of 3 rows came, number 1 has"),
    (of_stream(WEATHER), more("log", big(WEATHER, 5)), "no key: 3 of 2 rows came"),
    (check_epochs, epochs(e1=None), "scalings to [3] segments, not to [4, 3]"),
    (check_epochs, epochs(e1=Epoch(1, 1, 5, 5, False)), "scalings to [5, 3] segments"),
    (check_epochs, epochs(e1=None), "do not follow each other"),
    (check_epochs, replace(GOOD, scaled=[(4, 4.0), (3, 10.5)]), "scaled to 3 only 0.5 s after"),
    (check_epochs, epochs(e3=None), "committed in 0 epochs"),
    (
        check_epochs,
        epochs(e3=Epoch(3, 2, 3, 1, True)),
        "epoch 3, which took it, does not duplicate",
    ),
    (
        check_epochs,
        epochs(e3=Epoch(3, 0, 1, 1, True)),
        "epoch 3, which took it, does not duplicate",
    ),
    (check_epochs, epochs(e4=Epoch(4, 1, 4, 1, False)), "does not duplicate epoch 2"),
    (check_epochs, epochs(e4=None), "does not duplicate epoch 2"),
    (check_epochs, epochs(e4=Epoch(4, 2, 3, 1, True)), "committed in 2 epochs"),
    (
        check_in_order,
        changed("members", 3, 6, at=[26.0, 23.0]),
        "key N1: 3 of 3 rows came, number 1",
    ),
    (check_in_order, members(READER[:8], READER[9:]), "no key: 2 of 3 rows came"),
    (check_in_order, members(READER[:9], READER[10:]), "key N1: 2 of 3 rows came, the last"),
    (check_in_order, more("members", big(FLIGHTS, 6)), "key N1: 4 of 3 rows came, number 4"),
    (check_in_order, more("members", big(FLIGHTS, 0, kind=Kind.DOOMED)), "1 events that nobody"),
    (check_in_order, members(READER[:-1]), "small transaction 1: 2 events"),
    (check_in_order, members(READER[:-3]), "small transaction 1: 0 events"),
    (check_in_order, changed("members", 0, committed=6), "key N1 goes back in commit time"),
    (check_in_order, changed("members", 0, at=8.5), "key N1 has small events out of order"),
    (check_in_order, members(READER[3:12]), "nothing was shown"),
    (check_dead, changed("plain", 3, by=b"worker-2"), "1 events of it seen by the plain consumer"),
    (check_dead, changed("reader", 3, 4, by=b"worker-2"), "2 events of it seen by the reader of"),
    (check_dead, changed("log", 3, 4, 5, by=b"worker-2"), "3 events of it seen by the check"),
    (check_dead, outcome(left_out=9), "9 events left out; it had flushed 10"),
    (check_raw, less("log", 18), "5 of its 6 events are visible"),
    (
        check_killed_writing,
        replace(GOOD, killed_writing=Killed("controller-1", 5.0, None, None)),
        "no other one took over",
    ),
    (check_killed_deciding, replace(GOOD, killed_deciding=None), "did not fire"),
    (check_smalls, less("log", 12, 13, 14), "nyc/flights lacks number 1"),
    (check_smalls, less("log", 13), "nyc/flights has 2 of 3 events of number 1"),
    (
        check_smalls,
        more("log", *smalls(WEATHER, 2, 9.0)),
        "nyc/weather has number 2, which was not",
    ),
    (check_smalls, replace(GOOD, ticks={"committed": [], "aborted": []}), "none was committed"),
    (check_delays, changed("plain", 0, 1, 2, 15, 16, 17, sent=3.0), "more than 5.0 s"),
    (check_delays, changed("reader", *range(15), sent=11.0), "the reader of events saw none"),
    (check_order, changed("reader", 5, committed=6), "1 events went back"),
    (check_aborted, replace(GOOD, doomed_state="OPEN"), "its state is OPEN"),
    (check_aborted, more("plain", {"kind": Kind.DOOMED}), "the plain consumer saw 1 of its events"),
    (check_aborted, changed("reader", 3, 4, kind=Kind.OTHER), "the reader of events saw 2"),
    (check_aborted, changed("whole", 3, kind=Kind.DOOMED), "reader of whole transactions saw 1"),
    (check_aborted, more("log", {"kind": Kind.DOOMED}), "the check saw 1"),
    (check_aborted, replace(GOOD, txn_ids=["cc", BIG, DOOMED]), "whole transactions saw it"),
    (check_transfers, audited(wrong=[5990]), "a snapshot shows 5,990, not 6,000"),
    (check_transfers, audited(held=HELD | {"AA": 1005}), "AA has 1005, not 975"),
    (check_transfers, audited(held={}), "UA has None, not 995"),
    (check_transfers, replace(GOOD, clerks=GOOD.clerks[:1]), "AA has 975, not 970"),
    (
        check_transfers,
        replace(GOOD, killed_deciding=Killed("controller-2", 13.5, 14.0, "controller-1")),
        "no transfers before and after",
    ),
    (check_transfers, replace(GOOD, clerks=[]), "no transfers before and after"),
]


@pytest.mark.parametrize(("check", "found", "words"), PLANTED, ids=[p[2] for p in PLANTED])
def test_a_planted_difference_is_found(
    check: Callable[[Findings], Check], found: Findings, words: str
) -> None:
    result = check(found)
    assert not result.ok
    assert words in "\n".join(result.differences)
    assert any(not each.ok for each in judge(found)), "and the run as a whole fails"


def test_delays_are_those_while_the_transaction_was_open() -> None:
    assert "the longest 0.5 s" in check_delays(changed("plain", 12, 13, 14, sent=11.0)).seen


def test_what_comes_again_to_the_group_is_no_difference() -> None:
    again = check_in_order(members(READER[:8], READER[4:]))
    assert again.ok
    assert "2 planes in several segments" not in again.seen
    assert "4 events came again" in again.seen


def test_the_epochs_are_described_in_words() -> None:
    told = check_epochs(GOOD).seen.split("; ")
    assert told[1] == "1: 4 segments"
    assert told[3] == "3: 2 segments, duplicates 0, takes the transaction"
    assert told[4] == "4: 3 segments, duplicates 2"


def test_many_differences_are_cut_short() -> None:
    found = replace(GOOD, ticks={"committed": list(range(50)), "aborted": []})
    differences = check_smalls(found).differences
    assert len(differences) == 12
    assert "and 43 more" in differences


def test_percentile() -> None:
    values = [float(n) for n in range(1, 101)]
    assert percentile(values, 50) == 51
    assert percentile(values, 90) == 91
    assert percentile([7.0], 90) == 7
    assert percentile(list(reversed(values)), 100) == 100
