"""Every check holds for a good run, and each fails for a difference of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

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
    check_rows,
    check_smalls,
    check_whole,
    judge,
    percentile,
)
from examples.flights.events import RAW
from examples.flights.findings import Check, Findings, Killed
from examples.flights.historian import Epoch
from examples.flights.order_check import OrderReport
from examples.flights.rows import StreamReport
from examples.flights.scaling_checks import check_epochs, check_in_order

BIG, DOOMED = "aa" * 16, "bb" * 16
STREAMS = {"nyc/flights": 100, "nyc/weather": 20}


def seen(first: float = 12.0) -> dict[str, Any]:
    """What an observer reports."""
    counts = [
        {"stream": stream, "kind": "big", "count": count, "first": first, "last": 13.0}
        for stream, count in STREAMS.items()
    ]
    small = {"stream": "nyc/flights", "kind": "small", "count": 6, "first": 1.0, "last": 14.0}
    return {
        "seen": [*counts, small],
        "writers": {"worker-1": 60, "worker-5": 40, RAW: 20},
        "delays": [[1.0, 0.02], [2.0, 0.03], [3.0, 2.5], [11.0, 9.0]],
        "backwards": 0,
    }


def committed(txn_id: str | None, timestamp: int, **more: Any) -> dict[str, Any]:
    """What the reader of whole transactions reports of one."""
    base: dict[str, Any] = {
        "txn_id": txn_id,
        "commit_timestamp": timestamp,
        "kinds": {"small": 3},
        "smalls": [],
    }
    return {**base, **more}


def report(stream: str, **changes: Any) -> StreamReport:
    """What comparing a stream brought."""
    count = STREAMS[stream]
    base = StreamReport(
        stream=stream,
        expected=count,
        matched=count,
        keys=5,
        differences=(),
        difference_count=0,
        smalls={0: (3, 3), 1: (3, 3)},
        kinds={"big": count, "small": 6},
        writers={RAW: 20} if stream == "nyc/weather" else {"worker-1": 60, "worker-5": 40},
    )
    return replace(base, **changes)


GOOD = Findings(
    counts=STREAMS,
    transactions_stream="nyc/flights",
    txn_id=BIG,
    driver_ended_at=2.0,
    dead="worker-2",
    dead_flushed=10,
    raw_rows=20,
    raw_is_program=True,
    outcome={
        "requested": 10.0,
        "txn_id": BIG,
        "commit_timestamp": 5,
        "committed": 120,
        "rejected": 0,
        "left_out": 12,
    },
    again={"txn_id": BIG, "commit_timestamp": 5, "committed": 120},
    ticks={"committed": [0, 1], "aborted": [2]},
    plain=seen(),
    reader=seen(),
    transactions=[
        committed("cc" * 16, 1, smalls=[[0, 3, 3]]),
        committed(BIG, 5, kinds={"big": 100}),
        committed("dd" * 16, 9, smalls=[[1, 3, 3]]),
    ],
    streams=[report("nyc/flights"), report("nyc/weather")],
    killed_writing=Killed("controller-1", 5.0, 7.0, "controller-2"),
    killed_deciding=Killed("controller-2", 10.1, 12.0, "controller-1"),
    doomed_rows=50,
    doomed_txn_id=DOOMED,
    doomed_state="ABORTED",
    scaled=[4, 3],
    scaled_at=[4.0, 8.0],
    epochs=[
        Epoch(0, 0, 2, 5, False),
        Epoch(1, 1, 4, 5, False),
        Epoch(2, 2, 3, 5, False),
        Epoch(3, 0, 2, 1, True),
        Epoch(4, 2, 3, 5, False),
    ],
    ordered=OrderReport(
        rows=100,
        expected=100,
        keys=5,
        moved=3,
        shared=2,
        repeated=1,
        smalls=((0, 3), (1, 3)),
        differences=(),
        difference_count=0,
    ),
)


def test_a_good_run_passes_everything() -> None:
    found = judge(GOOD)
    assert [check for check in found if not check.ok] == []
    assert len(found) == 16
    assert all(check.title and check.seen for check in found)


def outcome(**changes: Any) -> Findings:
    return replace(GOOD, outcome={**GOOD.outcome, **changes})


def plain(**changes: Any) -> Findings:
    return replace(GOOD, plain={**GOOD.plain, **changes})


def reader(**changes: Any) -> Findings:
    return replace(GOOD, reader={**GOOD.reader, **changes})


def with_seen(kind: str, count: int) -> dict[str, Any]:
    extra = {"stream": "nyc/flights", "kind": kind, "count": count, "first": 1.0, "last": 1.0}
    return {"seen": [*GOOD.plain["seen"], extra]}


def flights(**changes: Any) -> Findings:
    return replace(GOOD, streams=[report("nyc/flights", **changes), GOOD.streams[1]])


def epochs(**changes: Epoch | None) -> Findings:
    """Epochs by e and number; None: without it."""
    by_number = {f"e{epoch.epoch}": epoch for epoch in GOOD.epochs} | changes
    return replace(GOOD, epochs=[epoch for epoch in by_number.values() if epoch is not None])


def ordered(**changes: Any) -> Findings:
    return replace(GOOD, ordered=replace(GOOD.ordered, **changes))


def transactions(*found: Mapping[str, Any]) -> Findings:
    return replace(GOOD, transactions=list(found))


SMALL_0, BIG_ONE, SMALL_1 = GOOD.transactions

PLANTED: list[tuple[Callable[[Findings], Check], Findings, str]] = [
    (check_commit, outcome(committed=119), "119 events committed, not 120"),
    (check_commit, outcome(rejected=3), "3 events rejected"),
    (check_commit, outcome(txn_id=DOOMED), "was committed, not"),
    (check_commit, replace(GOOD, driver_ended_at=11.0), "still lived"),
    (check_again, replace(GOOD, again={**GOOD.again, "commit_timestamp": 6}), "commit_timestamp"),
    (check_again, replace(GOOD, again=dict.fromkeys(GOOD.again)), "txn_id is None"),
    (check_not_before, replace(GOOD, plain=seen(9.5)), "plain consumer saw an event in nyc/"),
    (check_not_before, replace(GOOD, reader=seen(9.9)), "reader of events saw an event in nyc/"),
    (check_not_before, plain(seen=[]), "plain consumer never saw"),
    (check_whole, transactions(SMALL_0, SMALL_1), "came in 0 transactions"),
    (check_whole, transactions(BIG_ONE, {**BIG_ONE, "commit_timestamp": 6}), "in 2 transactions"),
    (check_whole, transactions({**BIG_ONE, "kinds": {"big": 99}}), "not with 100 events"),
    (check_whole, transactions({**BIG_ONE, "kinds": {"big": 100, "small": 1}}), "not with 100"),
    (check_whole, transactions({**BIG_ONE, "txn_id": DOOMED}), "in 1 transactions, not in one"),
    (check_whole, transactions(BIG_ONE, committed("ee", 6, smalls=[[4, 2, 3]])), "2 of 3 events"),
    (
        check_whole,
        transactions(BIG_ONE, committed("ee", 6, smalls=[[4, 3, 3], [5, 3, 3]])),
        "events of others",
    ),
    (check_whole, transactions(SMALL_1, BIG_ONE), "out of the order"),
    (lambda f: check_rows(f.streams[0]), flights(matched=99), "99 of 100 rows"),
    (
        lambda f: check_rows(f.streams[0]),
        flights(differences=("that one",), difference_count=8),
        "and 7 more",
    ),
    (check_epochs, epochs(e1=None), "scalings to [3] segments, not to [4, 3]"),
    (check_epochs, epochs(e1=Epoch(1, 1, 5, 5, False)), "scalings to [5, 3] segments"),
    (check_epochs, epochs(e1=None), "do not follow each other"),
    (check_epochs, replace(GOOD, scaled_at=[4.0, 10.5]), "scaled to 3 only 0.5 s after"),
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
    (check_in_order, ordered(differences=("went back",), difference_count=3), "and 2 more"),
    (check_in_order, ordered(rows=99), "99 of 100 rows came"),
    (check_in_order, ordered(smalls=((0, 3), (1, 2))), "small transaction 1: 2 events"),
    (check_in_order, ordered(smalls=((0, 3),)), "small transaction 1: 3 events"),
    (check_in_order, ordered(moved=0), "nothing was shown"),
    (check_dead, plain(writers={"worker-2": 1}), "1 events of it seen by the plain consumer"),
    (check_dead, reader(writers={"worker-2": 2}), "2 events of it seen by the reader of events"),
    (check_dead, flights(writers={"worker-2": 3}), "3 events of it seen by the check"),
    (check_dead, outcome(left_out=9), "9 events left out; it had flushed 10"),
    (check_raw, replace(GOOD, raw_rows=21), "20 of its 21 events are visible"),
    (
        check_killed_writing,
        replace(GOOD, killed_writing=Killed("controller-1", 5.0, None, None)),
        "no other one took over",
    ),
    (check_killed_deciding, replace(GOOD, killed_deciding=None), "did not fire"),
    (check_smalls, flights(smalls={0: (3, 3)}), "nyc/flights lacks number 1"),
    (check_smalls, flights(smalls={0: (3, 3), 1: (2, 3)}), "2 of 3 events of number 1"),
    (
        check_smalls,
        flights(smalls={0: (3, 3), 1: (3, 3), 2: (3, 3)}),
        "has number 2, which was not committed",
    ),
    (check_smalls, replace(GOOD, ticks={"committed": [], "aborted": []}), "none was committed"),
    (check_delays, plain(delays=[[1.0, 3.0], [2.0, 4.0]]), "more than 4.0 s"),
    (check_delays, reader(delays=[[11.0, 0.1]]), "the reader of events saw none"),
    (check_order, reader(backwards=4), "4 events went back"),
    (check_aborted, replace(GOOD, doomed_state="OPEN"), "its state is OPEN"),
    (check_aborted, plain(**with_seen("doomed", 2)), "the plain consumer saw 2 of its events"),
    (check_aborted, reader(**with_seen("other", 1)), "the reader of events saw 1"),
    (check_aborted, flights(kinds={"big": 100, "doomed": 5}), "nyc/flights holds 5"),
    (check_aborted, transactions(BIG_ONE, committed(DOOMED, 7)), "whole transactions saw it"),
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
    assert "the longest 2.5 s" in check_delays(GOOD).seen


def test_the_epochs_are_told_in_words() -> None:
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
