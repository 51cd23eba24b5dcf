"""What has to hold, judged from what the processes said. Pure, so that tests can plant differences."""

from __future__ import annotations

from collections.abc import Sequence

from examples.flights.events import RAW
from examples.flights.findings import Check, Findings, Killed, few
from examples.flights.rows import StreamReport
from examples.flights.scaling_checks import check_epochs, check_in_order

MAX_USUAL_DELAY_S = 2.0


def judge(found: Findings) -> list[Check]:
    """All checks, in the order of the story."""
    return [
        check_commit(found),
        check_again(found),
        check_not_before(found),
        check_whole(found),
        *(check_rows(report) for report in found.streams),
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
    ]


def check_commit(found: Findings) -> Check:
    """The commit by a process that began nothing took exactly the rows."""
    outcome, total = found.outcome, sum(found.counts.values())
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
    """Who begins under the name again gets the outcome that stands."""
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
    for name, report in zip(found.observers, (found.plain, found.reader), strict=True):
        firsts = [(s["first"], s["stream"]) for s in report["seen"] if s["kind"] == "big"]
        if not firsts:
            differences.append(f"the {name} never saw the transaction")
            continue
        first, stream = min(firsts)
        seen.append(f"{name}: {first - requested:+.2f} s")
        if first < requested:
            differences.append(
                f"the {name} saw an event in {stream} {requested - first:.2f} s before the commit"
            )
    return Check(
        "Nothing visible before the commit", "first event, " + "; ".join(seen), tuple(differences)
    )


def check_whole(found: Findings) -> Check:
    """The reader of whole transactions saw all of each, or nothing."""
    expected = found.counts[found.transactions_stream]
    differences = []
    bigs = [t for t in found.transactions if "big" in t["kinds"]]
    if [t["txn_id"] for t in bigs] != [found.txn_id]:
        differences.append(f"its rows came in {len(bigs)} transactions, not in one")
    for big in bigs:
        if big["kinds"] != {"big": expected}:
            differences.append(f"it came with {big['kinds']}, not with {expected:,} events")
    halves = [
        f"small transaction {n} came with {count} of {of} events"
        for t in found.transactions
        for n, count, of in t["smalls"]
        if count != of
    ]
    mixed = sum(1 for t in found.transactions if len(t["smalls"]) > 1)
    if mixed:
        differences.append(f"{mixed} transactions came with events of others")
    times = [t["commit_timestamp"] for t in found.transactions]
    if times != sorted(times):
        differences.append("transactions came out of the order of their commit timestamps")
    whole = sum(1 for t in found.transactions if t["smalls"])
    return Check(
        f"Whole transactions of {found.transactions_stream}",
        f"{expected:,} events at once, between {whole:,} small ones",
        (*differences, *few(halves)),
    )


def check_rows(report: StreamReport) -> Check:
    """A stream is its table, row by row."""
    more = report.difference_count - len(report.differences)
    differences = list(report.differences)
    if more > 0:
        differences.append(f"and {more:,} more")
    if report.matched != report.expected and not differences:
        differences.append(f"{report.matched:,} of {report.expected:,} rows")
    return Check(
        f"{report.stream} against its source",
        f"{report.matched:,} of {report.expected:,} rows, each key in order ({report.keys:,} keys)",
        tuple(differences),
    )


def check_dead(found: Findings) -> Check:
    """Nothing of the killed writer is visible, though it had flushed; its share is."""
    visible = {
        "plain consumer": found.plain["writers"].get(found.dead, 0),
        "reader of events": found.reader["writers"].get(found.dead, 0),
        "check": sum(report.writers.get(found.dead, 0) for report in found.streams),
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
    """The program that knows only the protocol took part."""
    visible = sum(report.writers.get(RAW, 0) for report in found.streams)
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


def check_smalls(found: Findings) -> Check:
    """Every small transaction is in every stream, whole; the aborted ones in none."""
    committed, aborted = set(found.ticks["committed"]), set(found.ticks["aborted"])
    differences: list[str] = []
    if not committed:
        differences.append("none was committed")
    for report in found.streams:
        seen = set(report.smalls)
        differences += few(f"{report.stream} lacks number {n}" for n in sorted(committed - seen))
        differences += few(f"{report.stream} has number {n}, which was not committed"
                            for n in sorted(seen - committed))  # fmt: skip
        differences += few(
            f"{report.stream} has {count} of {of} events of number {n}"
            for n, (count, of) in sorted(report.smalls.items())
            if count != of
        )
    return Check(
        "Small transactions on the same streams, meanwhile",
        f"{len(committed):,} committed, each whole in all streams; {len(aborted):,} aborted",
        tuple(differences),
    )


def check_delays(found: Findings) -> Check:
    """Small transactions are seen at once: nobody waits for the open one."""
    requested = found.outcome["requested"]
    seen, differences = [], []
    for name, report in zip(found.observers, (found.plain, found.reader), strict=True):
        delays = [delay for sent, delay in report["delays"] if sent < requested]
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
    backwards = found.reader["backwards"]
    count = sum(s["count"] for s in found.reader["seen"])
    differences = (f"{backwards:,} events went back in commit time",) if backwards else ()
    return Check(
        "Order of what the reader of events saw",
        f"{count:,} events, commit time never goes back on a partition",
        differences,
    )


def check_aborted(found: Findings) -> Check:
    """An aborted transaction left nothing."""
    differences = []
    if found.doomed_state != "ABORTED":
        differences.append(f"its state is {found.doomed_state}, not ABORTED")
    for name, seen in zip(found.observers, (found.plain, found.reader), strict=True):
        count = sum(s["count"] for s in seen["seen"] if s["kind"] in ("doomed", "other"))
        if count:
            differences.append(f"the {name} saw {count:,} of its events")
    for report in found.streams:
        count = sum(n for kind, n in report.kinds.items() if kind in ("doomed", "other"))
        if count:
            differences.append(f"{report.stream} holds {count:,} of its events")
    if any(t["txn_id"] == found.doomed_txn_id for t in found.transactions):
        differences.append("the reader of whole transactions saw it")
    return Check(
        "A second transaction, aborted",
        f"{found.doomed_rows:,} events written to journals, none in a stream",
        tuple(differences),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many percent are not above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]
