"""The checks of the transactions, on messages and notes of the processes. Pure functions: tests plant faults."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from examples.flights.findings import Check, Findings, Killed, few
from examples.flights.notes import RAW, Kind, of_kind
from examples.flights.stream_checks import check_epochs, check_in_order, check_rows, check_smalls
from examples.flights.transfers import AIRLINES, OPENED_WITH, TOTAL

MAX_USUAL_DELAY_S = 2.0


def judge(found: Findings) -> list[Check]:
    """All checks, in the order of the story."""
    return [
        check_commit(found),
        check_again(found),
        check_not_before(found),
        check_whole(found),
        *(check_rows(found, at) for at in range(len(found.streams))),
        check_epochs(found),
        check_in_order(found),
        check_dead(found),
        check_raw(found),
        check_killed_writing(found),
        check_killed_deciding(found),
        check_smalls(found),
        check_delays(found),
        check_order(found),
        check_aborted(found),
        check_transfers(found),
    ]


def check_commit(found: Findings) -> Check:
    """The commit, by a process that did not begin the transaction, took exactly the rows."""
    outcome, total = found.outcome, sum(wanted.count for wanted in found.wanted)
    after = outcome["requested"] - found.driver_ended_at
    differences = []
    if outcome["txn_id"] != found.txn_id:
        differences.append(f"transaction {outcome['txn_id']} was committed, not {found.txn_id}")
    if outcome["committed"] != total:
        differences.append(f"{outcome['committed']:,} events committed, not {total:,}")
    if outcome["rejected"]:
        differences.append(f"{outcome['rejected']:,} events rejected")
    if after <= 0:
        differences.append("the process that began the transaction still lived")
    return Check(
        "Committed by another process, from token and receipts",
        f"{outcome['committed']:,} events, {after:.1f} s after the process that began it had ended",
        tuple(differences),
    )


def check_again(found: Findings) -> Check:
    """A process that begins under the name again gets the first outcome."""
    names = ("txn_id", "commit_timestamp", "committed")
    differences = [
        f"{name} is {found.again[name]}, not {found.outcome[name]}"
        for name in names
        if found.again[name] != found.outcome[name]
    ]
    return Check(
        "A restarted driver, beginning under the same name",
        "gets the same outcome" if not differences else "gets another outcome",
        tuple(differences),
    )


def check_not_before(found: Findings) -> Check:
    """No observer saw an event of the big transaction before its commit was asked for."""
    requested = found.outcome["requested"]
    seen, differences = [], []
    for name, notes in found.observers.items():
        big = of_kind(notes, Kind.BIG)
        if not len(big):
            differences.append(f"the {name} never saw the transaction")
            continue
        event = big[np.argmin(big["at"])]
        first, stream = float(event["at"]), found.streams[event["stream"]]
        seen.append(f"{name}: {first - requested:+.2f} s")
        if first < requested:
            differences.append(
                f"the {name} saw an event in {stream} {requested - first:.2f} s before the commit"
            )
    return Check(
        "Nothing visible before the commit", "first event, " + "; ".join(seen), tuple(differences)
    )


def check_whole(found: Findings) -> Check:
    """The reader of whole transactions saw each whole, or not at all."""
    whole, expected = found.whole, found.wanted[0].count
    differences = []
    places = np.unique(of_kind(whole, Kind.BIG)["segment"]).tolist()
    if [found.txn_ids[at] for at in places] != [found.txn_id]:
        differences.append(f"its rows came in {len(places)} transactions, not in one of its id")
    for at in places:
        kinds = Counter(whole["kind"][whole["segment"] == at].tolist())
        if kinds != {Kind.BIG: expected}:
            counts = {Kind(kind).name.lower(): count for kind, count in kinds.items()}
            differences.append(f"it came with {counts}, not with {expected:,} events")
    smalls = of_kind(whole, Kind.SMALL)
    sizes = Counter(smalls[["segment", "number", "of"]].tolist())
    halves = [
        f"small transaction {number} came with {count} of {of} events"
        for (_, number, of), count in sizes.items()
        if count != of
    ]
    mixed = len(sizes) - len({at for at, _, _ in sizes})
    if mixed:
        differences.append(f"{mixed} transactions came with events of others")
    if (np.diff(whole["committed"]) < 0).any():
        differences.append("transactions came out of the order of their commit timestamps")
    return Check(
        f"Whole transactions of {found.streams[0]}",
        f"{expected:,} events at once, between {len(sizes):,} small ones",
        (*differences, *few(halves)),
    )


def check_dead(found: Findings) -> Check:
    """The killed writer's flushed rows are invisible; its share, written again, is visible."""
    visible = {
        name: int(np.count_nonzero(notes["by"] == found.dead))
        for name, notes in (found.observers | {"check": found.log}).items()
    }
    differences = [
        f"{count:,} events of it seen by the {name}" for name, count in visible.items() if count
    ]
    left_out = found.outcome["left_out"]
    if left_out < found.dead_flushed:
        differences.append(f"{left_out:,} events left out; it had flushed {found.dead_flushed:,}")
    return Check(
        "A writer killed after a flush, its share redone by another",
        f"{left_out:,} events of it left out, {sum(visible.values()):,} visible",
        tuple(differences),
    )


def check_raw(found: Findings) -> Check:
    """The program that uses only the protocol took part."""
    visible = np.count_nonzero(of_kind(found.log, Kind.BIG)["by"] == RAW)
    differences = []
    if visible != found.raw_rows:
        differences.append(f"{visible:,} of its {found.raw_rows:,} events are visible")
    who = "imports nothing of anabranch" if found.raw_is_program else (
        "replaced by the library: it can't connect as told"
    )  # fmt: skip
    return Check(
        "A fifth writer: examples/raw_client.py", f"{visible:,} events; {who}", tuple(differences)
    )


def check_killed_writing(found: Findings) -> Check:
    """After the first kill another controller led."""
    return _killed("The leading controller killed while writers wrote", found.killed_writing)


def check_killed_deciding(found: Findings) -> Check:
    """After the second kill, past the decision, another controller finished the commit."""
    title = "The leading controller killed between decision and COMMITTED"
    killed = found.killed_deciding
    if killed is None:
        return Check(title, "it was not killed", ("the failpoint did not fire",))
    return _killed(title, killed)


def _killed(title: str, killed: Killed) -> Check:
    if killed.taken_over_at is None:
        return Check(title, f"{killed.name} was killed", ("no other one took over",))
    return Check(
        title,
        f"{killed.by} led {killed.taken_over_at - killed.at:.1f} s after {killed.name} was gone",
    )


def check_delays(found: Findings) -> Check:
    """Small transactions are seen at once: no reader waits for the open one."""
    requested = found.outcome["requested"]
    seen, differences = [], []
    for name, notes in found.observers.items():
        smalls = of_kind(notes, Kind.SMALL)
        smalls = smalls[smalls["sent"] < requested]
        firsts: dict[tuple[int, int], float] = {}
        for stream, number, at, sent in smalls[["stream", "number", "at", "sent"]].tolist():
            firsts.setdefault((stream, number), at - sent)
        delays = list(firsts.values())
        if not delays:
            differences.append(f"the {name} saw none")
            continue
        usual = percentile(delays, 50)
        seen.append(
            f"{name}: half within {usual * 1000:,.0f} ms, 90 % within "
            f"{percentile(delays, 90) * 1000:,.0f} ms, the longest {max(delays):.1f} s "
            "(while a controller was dead)"
        )
        if usual > MAX_USUAL_DELAY_S:
            differences.append(f"half of them took the {name} more than {usual:.1f} s")
    return Check(
        "While the big one was open, from calling a small commit to seeing it",
        "; ".join(seen),
        tuple(differences),
    )


def check_order(found: Findings) -> Check:
    """The reader of events saw each partition in the order of commit timestamps."""
    reader = found.reader
    backwards = sum(
        int(np.count_nonzero(np.diff(reader["committed"][reader["partition"] == partition]) < 0))
        for partition in np.unique(reader["partition"])
    )
    differences = (f"{backwards:,} events went back in commit time",) if backwards else ()
    return Check(
        "Order of what the reader of events saw",
        f"{len(reader):,} events, commit time never goes back on a partition",
        differences,
    )


def check_aborted(found: Findings) -> Check:
    """An aborted transaction left nothing."""
    differences = []
    if found.doomed_state != "ABORTED":
        differences.append(f"its state is {found.doomed_state}, not ABORTED")
    noted = found.observers | {"reader of whole transactions": found.whole, "check": found.log}
    for name, notes in noted.items():
        if count := len(of_kind(notes, Kind.DOOMED, Kind.OTHER)):
            differences.append(f"the {name} saw {count:,} of its events")
    if found.doomed_txn_id in found.txn_ids:
        differences.append("the reader of whole transactions saw it")
    return Check(
        "A second transaction, aborted",
        f"{found.doomed_rows:,} events written to journals, none in a stream",
        tuple(differences),
    )


def check_transfers(found: Findings) -> Check:
    """There were transfers before and after each death of a controller, and no snapshot shows half of one."""
    began = sorted(at for clerk in found.clerks for at in clerk["began"])
    audit, paid = found.audit, Counter[str]()
    for clerk in found.clerks:
        paid.update(clerk["paid"])
    wanted = {name: OPENED_WITH + paid[name] for name in AIRLINES}
    differences = [f"a snapshot shows {total:,}, not {TOTAL:,}" for total in audit["wrong"]]
    differences += [
        f"{name} has {audit['held'].get(name)}, not {held:,}"
        for name, held in wanted.items()
        if audit["held"].get(name) != held
    ]
    killed = [found.killed_writing, found.killed_deciding]
    for at in (killed_one.at for killed_one in killed if killed_one is not None):
        if not began or not began[0] < at < began[-1]:
            differences.append("no transfers before and after a controller was killed")
    again = sum(clerk["again"] for clerk in found.clerks)
    longest = max((clerk["longest"] for clerk in found.clerks), default=0.0)
    return Check(
        f"Money moved between rows of a table by {len(found.clerks)} processes",
        f"{len(began):,} transfers, {again:,} times begun again, the longest {longest:.1f} s (while a controller "
        f"was dead); {audit['snapshots']:,} snapshots, the total right in each",
        tuple(few(differences)),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that this percentage of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
