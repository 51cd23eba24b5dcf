"""What must hold between the log and what clients did and were told."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from anabranch.errors import AlreadyCommitted, LocksBroken, NotAuthorized, TransactionAborted
from anabranch.protocol.ids import NO_TXN
from tests.sim.check_log import hold
from tests.sim.ledger import Attempt, Deal, Ledger, Told
from tests.sim.noise import FOREIGN_REASON
from tests.sim.picture import Picture, Placed, left_out
from tests.sim.prepared import check_prepared
from tests.sim.questions import MEDDLED
from tests.sim.world import Violation

Counts = dict[str, int]  # writer label -> events


def check_clients(picture: Picture, ledger: Ledger) -> None:
    """All of it."""
    events = _by_deal(picture, ledger)
    for deal in ledger.deals.values():
        check_deal(picture, ledger, deal, events.get(deal.label, []))
    for txn_id, state, timestamp in ledger.final_answers:
        _check_final(picture, txn_id.hex(), txn_id, state, timestamp)
    check_staleness(picture, ledger)
    check_names(picture)
    check_series(picture, ledger)
    check_plain(picture, ledger)
    check_lanes(picture, ledger)
    check_prepared(picture, ledger)
    for row in picture.rows.values():
        hold(row.reason != FOREIGN_REASON, "a command of an aborted native transaction took effect")
        unmerged = row.reason.startswith(("its journals show", "the broker refused"))
        excused = picture.deleted.keys() | ledger.limited  # its own data is too large there
        spoiled = picture.participants[row.txn_id].keys() & excused
        hold(not unmerged or spoiled, f"{row.txn_id.hex()}: decided, then aborted: {row.reason}")


def check_lanes(picture: Picture, ledger: Ledger) -> None:
    """What came while its lane was blocked was never carried out; each transaction is its lane's alone."""
    run = sorted(ledger.never & picture.rows.keys())
    hold(not run, f"{[txn_id.hex() for txn_id in run]}: carried out, though sent to a blocked lane")
    for row in picture.rows.values():
        hold(row.reason != MEDDLED, f"{row.txn_id.hex()} of {row.owner}: ended by another lane")
    for deal in ledger.deals.values():
        known = picture.rows.get(deal.txn_id or b"")
        owner = deal.lane if known is None else known.owner
        hold(owner == deal.lane, f"{deal.label} of lane {deal.lane} belongs to {owner}")


def _by_deal(picture: Picture, ledger: Ledger) -> dict[str, list[Placed]]:
    """The events in the streams, each traced to its deal; each once, unchanged, in its writer's order."""
    found: dict[str, list[Placed]] = defaultdict(list)
    seen: set[bytes] = set()
    for (stream, number), events in picture.events.items():
        last: dict[tuple[str, str], int] = defaultdict(lambda: -1)
        for event in events:
            value = event.record.value or b""
            if event.txn_id == NO_TXN:
                continue
            where = f"{stream}[{number}] offset {event.offset}, {value!r}"
            origin = ledger.deal_of(value)
            if origin is None:
                raise Violation(f"{where}: nobody wrote it")
            deal, writer, index = origin
            hold(value not in seen, f"{where}: it stands there twice")
            seen.add(value)
            told = Told(stream, event.record.key, value)
            hold(writer.told[index] == told, f"{where}: {writer.told[index]} was written")
            hold(
                last[deal.label, writer.label] < index,
                f"{where}: behind event {last[deal.label, writer.label]} of its writer",
            )
            last[deal.label, writer.label] = index
            found[deal.label].append(event)
    return found


def check_plain(picture: Picture, ledger: Ledger) -> None:
    """Plain writes are seen once each; those of a key and a journal partition in order."""
    seen: set[bytes] = set()
    last: dict[tuple[str, int, bytes | None, int], int] = defaultdict(lambda: -1)
    for stream, _, record in picture.commits():
        for at in record.segments if record.txn_id == NO_TXN else ():
            for event in picture.events[stream, at.partition]:
                if not at.first <= event.offset < at.end:
                    continue
                value, key = event.record.value or b"", event.record.key
                where = f"{stream}[{at.partition}] offset {event.offset}, {value!r}"
                told = ledger.plain.get(value)
                if told is None:
                    raise Violation(f"{where}: nobody wrote it")
                hold((told.stream, told.key) == (stream, key), f"{where}: {told} was written")
                hold(value not in seen, f"{where}: it stands there twice")
                seen.add(value)
                # Null keys are in order within a segment.
                line = stream, told.partition, key, at.segment_id if key is None else 0
                hold(last[line] < told.offset, f"{where}: behind journal offset {last[line]}")
                last[line] = told.offset
    for value, told in ledger.plain.items():
        due = told.offset >= 0 and told.stream not in picture.deleted
        hold(value in seen or not due, f"{value!r} was written and never committed")


def check_deal(picture: Picture, ledger: Ledger, deal: Deal, events: list[Placed]) -> None:
    """A transaction is seen whole, as one of its commits asked for, or not at all; answers are true."""
    ids = {event.txn_id for event in events}
    hold(len(ids) <= 1, f"{deal.label}: its events carry {len(ids)} transaction ids")
    txn_id = next(iter(ids), deal.txn_id)
    if deal.txn_id is not None:
        hold(txn_id == deal.txn_id, f"{deal.label}: its events carry another's id")
    row = picture.rows.get(txn_id) if txn_id is not None else None
    committed = bool(events) or (row is not None and row.state == "COMMITTED")
    counts: Counts = defaultdict(int)
    gone = left_out(picture, txn_id)
    if committed:
        hold(deal.attempts, f"{deal.label}: committed, and nobody asked for it")
        for event in events:
            counts[(event.record.value or b"").decode().split("/")[1]] += 1
        why = [_differs(deal, attempt, counts, gone) for attempt in deal.attempts]
        hold("" in why, f"{deal.label}: committed with {dict(counts)}; {'; '.join(why)}")
        hold(deal.aborted_at is None, f"{deal.label}: committed though an abort was answered")
    for attempt in deal.attempts:
        _check_attempt(picture, deal, attempt, txn_id, committed=committed, events=len(events))
        if committed and attempt.result is not None and attempt.own is not None and counts:
            label, expected = attempt.own[0], _due(deal, *attempt.own, gone)
            hold(
                attempt.result.txn_id != deal.txn_id or counts[label] == expected,
                f"{deal.label}: told committed, with {counts[label]} of {expected} own events",
            )
        if committed and isinstance(attempt.error, AlreadyCommitted) and not deal.claims:
            hold(
                _lacks(deal, attempt, counts, gone),
                f"{deal.label}: refused, though all that it named is committed: {attempt.error}",
            )
        if attempt.error is not None and ledger.is_final(deal):
            told = isinstance(attempt.error, AlreadyCommitted)
            hold(told or not committed, f"{deal.label}: committed, and refused: {attempt.error!r}")
    refused = [a for a in deal.attempts if isinstance(a.error, NotAuthorized) and not a.in_doubt]
    doubled = (
        txn_id in ledger.doubled_commits or deal.label in ledger.doubled
    )  # a copy came after a grant
    told = len(refused) == len(deal.attempts) > 0 and not doubled
    hold(not (told and committed), f"{deal.label}: committed, and refused for want of a right")
    for state, timestamp in deal.finals:
        _check_final(picture, deal.label, txn_id, state, timestamp)
    if deal.named_result is not None:
        _check_named(picture, deal, deal.named_result.txn_id, deal.named_result.commit_timestamp)


def _due(deal: Deal, label: str, count: int | None, gone: set[str]) -> int:
    """How many of a writer's first events (None: of all) were not to these streams."""
    return sum(told.stream not in gone for told in deal.writers[label].told[:count])


def _lacks(deal: Deal, attempt: Attempt, counts: Counts, gone: set[str]) -> bool:
    """Whether something that this call named is not committed: then another commit came first."""
    named: dict[str, int | None] = dict(attempt.receipts or {})
    named |= {attempt.own[0]: attempt.own[1]} if attempt.own is not None else {}
    return attempt.is_false or any(
        counts[label] < _due(deal, label, count, gone) for label, count in named.items()
    )


def _differs(deal: Deal, attempt: Attempt, counts: Counts, gone: set[str]) -> str:
    """Why what is seen outside of the streams that are left out is not what this call asked for; empty if it is."""
    if attempt.is_false:
        return "a false receipt was refused" if attempt.result is None else "a false receipt"
    rest = dict(counts)
    if attempt.own is not None:
        label, expected = attempt.own[0], _due(deal, *attempt.own, gone)
        if rest.pop(label, 0) != expected:
            return f"the handle had written {expected} events"
    if attempt.receipts is not None:
        # A later receipt of theirs may have been registered by then.
        fits = all(
            label in deal.writers
            and _due(deal, label, count, gone)
            <= rest.pop(label, 0)
            <= _due(deal, label, None, gone)
            for label, count in attempt.receipts.items()
        )
        return "" if fits and not rest else f"the receipts named {attempt.receipts}"
    for label, count in rest.items():
        finishing, due = deal.writers[label].finishing, _due(deal, label, None, gone)
        if not finishing or count != due:
            return f"writer {label} had written {due}, finished: {finishing}"
    missing = {w for w in attempt.finished if _due(deal, w, None, gone) and w not in rest}
    missing -= {attempt.own[0]} if attempt.own else set()
    return f"finished writers {sorted(missing)} are missing" if missing else ""


def _check_attempt(
    picture: Picture,
    deal: Deal,
    attempt: Attempt,
    txn_id: bytes | None,
    *,
    committed: bool,
    events: int,
) -> None:
    if attempt.is_false:
        hold(attempt.result is None, f"{deal.label}: a false receipt was taken")
    elif attempt.result is not None and attempt.result.txn_id != txn_id and deal.claims:
        result = attempt.result
        hold(not committed, f"{deal.label}: committed, and answered with another's outcome")
        _check_named(picture, deal, result.txn_id, result.commit_timestamp)
    elif attempt.result is not None:
        result = attempt.result
        hold(result.txn_id == txn_id, f"{deal.label}: answered with another's outcome")
        forgotten = txn_id is not None and picture.is_forgotten(txn_id) and not events
        if not (forgotten and result.counts.committed == 0):
            hold(committed, f"{deal.label}: a commit was answered, and it is not committed")
        wrote = f"{events} events, {deal.rows} rows"
        whole = result.counts.committed == events + deal.rows
        hold(whole, f"{deal.label}: {result.counts}, {wrote}")
        _check_final(picture, deal.label, txn_id, "COMMITTED", result.commit_timestamp)
    elif isinstance(attempt.error, TransactionAborted | LocksBroken):
        hold(not committed, f"{deal.label}: committed, but {attempt.error}")
    elif isinstance(attempt.error, AlreadyCommitted):
        known = committed or (txn_id is not None and picture.is_forgotten(txn_id))
        # Of a number it says that the series is beyond it: see `check_series`.
        hold(known or deal.number is not None, f"{deal.label}: not committed, but {attempt.error}")


def _check_final(
    picture: Picture, what: str, txn_id: bytes | None, state: str, timestamp: int
) -> None:
    """A final answer is what the row says."""
    row = picture.rows.get(txn_id) if txn_id is not None else None
    if row is None:
        known = txn_id is not None and picture.is_forgotten(txn_id)
        hold(known, f"{what}: it was {state}, and there is no row")
    else:
        found = (row.state, row.commit_timestamp)
        hold(found == (state, timestamp), f"{what}: it was {state} at {timestamp}, now {found}")


def _check_named(picture: Picture, deal: Deal, txn_id: bytes, timestamp: int) -> None:
    row = picture.rows.get(txn_id)
    if row is not None:
        hold(row.name == deal.name, f"{deal.label}: answered with one named {row.name!r}")
    _check_final(picture, deal.label, txn_id, "COMMITTED", timestamp)


def check_staleness(picture: Picture, ledger: Ledger) -> None:
    """What was aborted as stale was silent for its keepalive since its leader took over."""
    by_id = {deal.txn_id: deal for deal in ledger.deals.values() if deal.txn_id is not None}
    for txn_id, row in picture.rows.items():
        if row.state != "ABORTED" or not row.reason.startswith("stale"):
            continue
        if row.owner in ledger.blocked:
            continue  # its heartbeats were not read
        # Once it is aborted everywhere, perhaps by a later leader, its coordinator logs it again.
        end = min(ledger.stale[txn_id], default=0.0)
        led = ledger.terms[int.from_bytes(txn_id[:2], "big")]
        since = max((t for t in led if t <= end), default=0.0)
        times = sorted([since, end, *(t for t in ledger.heard[txn_id] if since < t < end)])
        gap = max(b - a for a, b in pairwise(times))
        name = by_id[txn_id].label if txn_id in by_id else txn_id.hex()
        hold(
            gap >= row.keepalive_ms / 1000,
            f"{name}: aborted as stale, but never silent for more than {gap:.3f} s of "
            f"{row.keepalive_ms / 1000} since {since:.3f}",
        )


def check_names(picture: Picture) -> None:
    """A name is committed once."""
    holders: dict[tuple[str, str], bytes] = {}
    for txn_id, row in picture.rows.items():
        if row.state == "COMMITTED" and row.name is not None:
            other = holders.setdefault((row.scope, row.name), txn_id)
            hold(other == txn_id, f"{row.name!r} is committed by {other.hex()} and {txn_id.hex()}")


def check_series(picture: Picture, ledger: Ledger) -> None:
    """A number is committed once, and none after a higher one; who came too late is told so."""
    numbered = {d.txn_id: d for d in ledger.deals.values() if d.number is not None and d.txn_id}
    committed: list[tuple[int, int, str]] = []
    for txn_id, deal in numbered.items():
        row = picture.rows.get(txn_id)
        if row is not None and row.state == "COMMITTED":
            committed.append((row.commit_timestamp, deal.number or 0, deal.label))
    for (_, one, label), (_, next_one, other) in pairwise(sorted(committed)):
        hold(one < next_one, f"{label} is committed as number {one}, then {other} as {next_one}")
    for deal in numbered.values():
        for attempt in deal.attempts:
            result = attempt.result
            if result is not None and result.txn_id != deal.txn_id:
                other_deal = numbered.get(result.txn_id)
                hold(
                    other_deal is not None and other_deal.number == deal.number,
                    f"{deal.label}: number {deal.number} was answered with {result.txn_id.hex()}",
                )
            elif isinstance(attempt.error, AlreadyCommitted) and "series" in str(attempt.error):
                beyond = [n for _, n, _ in committed if n >= (deal.number or 0)]
                forgotten = any(map(picture.is_forgotten, numbered))
                hold(beyond or forgotten, f"{deal.label}: nothing is there, but {attempt.error}")
