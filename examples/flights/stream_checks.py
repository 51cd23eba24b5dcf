"""The checks of the streams: rows, small transactions, epochs, and an ordered group's events. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from examples.flights.compare import compare
from examples.flights.findings import Check, Findings, few
from examples.flights.notes import NO_KEY, Kind, Notes, of_kind


def check_rows(found: Findings, at: int) -> Check:
    """A stream equals its table, row by row."""
    wanted = found.wanted[at]
    big = of_kind(found.log, Kind.BIG)
    matched, differences = compare(wanted, big[big["stream"] == at])
    return Check(
        f"{found.streams[at]} against its source",
        f"{matched:,} of {wanted.count:,} rows, each key in order ({wanted.keys:,} keys)",
        tuple(few(differences)),
    )


def check_smalls(found: Findings) -> Check:
    """Every small transaction is in every stream, whole; aborted ones are in none."""
    committed, aborted = set(found.ticks["committed"]), set(found.ticks["aborted"])
    differences: list[str] = []
    if not committed:
        differences.append("none was committed")
    for at, stream in enumerate(found.streams):
        sizes = _sizes(found.log[found.log["stream"] == at])
        seen = {number for number, _ in sizes}
        differences += few(f"{stream} lacks number {n}" for n in sorted(committed - seen))
        differences += few(f"{stream} has number {n}, which was not committed"
                            for n in sorted(seen - committed))  # fmt: skip
        differences += few(
            f"{stream} has {count} of {of} events of number {n}"
            for (n, of), count in sorted(sizes.items())
            if count != of
        )
    return Check(
        "Small transactions on the same streams, meanwhile",
        f"{len(committed):,} committed, each whole in all streams; {len(aborted):,} aborted",
        tuple(differences),
    )


def _sizes(notes: Notes) -> Counter[tuple[int, int]]:
    """(number, expected events) of each small transaction -> events that came."""
    return Counter(of_kind(notes, Kind.SMALL)[["number", "of"]].tolist())


def check_epochs(found: Findings) -> Check:
    """The stream was scaled while the transaction was open, which then committed in a copy of its own layout."""
    requested = found.outcome["requested"]
    epochs = found.epochs
    differences = []
    scaled = [segments for segments, _ in found.scaled]
    made = [epoch for epoch in epochs[1:] if epoch.reference == epoch.epoch]
    if [epoch.segments for epoch in made] != scaled:
        differences.append(
            f"the history has scalings to {[epoch.segments for epoch in made]} segments, "
            f"not to {scaled}"
        )
    differences += [
        f"scaled to {segments} only {at - requested:.1f} s after the commit was asked for"
        for segments, at in found.scaled
        if at >= requested
    ]
    if [epoch.epoch for epoch in epochs] != list(range(len(epochs))):
        differences.append("the epochs do not follow each other")
    took = [at for at, epoch in enumerate(epochs) if epoch.big]
    if len(took) != 1:
        differences.append(f"the transaction was committed in {len(took)} epochs")
    for at in took:
        epoch, after = epochs[at], epochs[at + 1 : at + 2]
        first = epochs[0]
        if epoch.reference != first.epoch or epoch.segments != first.segments or not at:
            differences.append(
                f"epoch {epoch.epoch}, which took it, does not duplicate the first one"
            )
        last = made[-1].epoch if made else first.epoch
        if [each.reference for each in after] != [last]:
            differences.append(f"the epoch after it does not duplicate epoch {last}")
    return Check(
        f"{found.streams[0]}, scaled while the transaction was open: its epochs",
        "; ".join(map(str, epochs)),
        tuple(differences),
    )


def check_in_order(found: Findings) -> Check:
    """A group of readers got all of each plane's events, in the order of the source and of the commits."""
    wanted, log = found.wanted[0], found.log[found.log["stream"] == 0]
    members = np.repeat(range(len(found.members)), [len(notes) for notes in found.members])
    noted = np.concatenate(found.members)
    by_time = np.argsort(noted["at"], kind="stable")
    noted, members = noted[by_time], members[by_time]
    # Repeated events are allowed, in any order: only the first of each counts.
    place = noted["partition"].astype(np.int64) << 48 | noted["offset"]
    firsts = np.sort(np.unique(place, return_index=True)[1])
    came, members = noted[firsts], members[firsts]
    big = came["kind"] == Kind.BIG
    rows, differences = compare(wanted, came[big])
    differences += _out_of_order(found, came)
    if foreign := len(of_kind(came, Kind.DOOMED, Kind.OTHER)):
        differences.append(f"{foreign:,} events that nobody committed")
    smalls, in_log = _sizes(came), _sizes(log)
    wrong = (smalls - in_log) + (in_log - smalls)
    differences += few(f"small transaction {n}: {smalls[n, of]} events" for n, of in sorted(wrong))
    keyed = came["key"] != NO_KEY
    moved = _several(came["key"][keyed], came["segment"][keyed])
    if not moved:
        differences.append("no key had events in several segments: nothing was shown")
    shared = _several(came["key"][keyed], members[keyed])
    return Check(
        f"A group of readers of {found.streams[0]}, in order across all epochs",
        f"{rows:,} rows of {wanted.keys:,} planes and {len(smalls):,} small transactions, "
        f"each plane's in order; {moved:,} planes in several segments, {shared:,} read by "
        f"both members; {len(noted) - len(came):,} events came again",
        tuple(few(differences)),
    )


def _out_of_order(found: Findings, came: Notes) -> list[str]:
    """The first events of keys that go back in commit time, or in the small transactions' numbers."""
    differences = []
    by_key = came[came["key"] != NO_KEY]
    by_key = by_key[np.argsort(by_key["key"], kind="stable")]
    back = np.diff(by_key["committed"]) < 0
    differences += _backward(found, by_key, back, "goes back in commit time")
    smalls = of_kind(by_key, Kind.SMALL)
    place = smalls["number"].astype(np.int64) << 32 | smalls["within"]
    differences += _backward(found, smalls, np.diff(place) <= 0, "has small events out of order")
    return differences


def _backward(found: Findings, by_key: Notes, back: NDArray[np.bool_], what: str) -> list[str]:
    """``back``: whether an event is out of order after the one before it. Only events of one key count."""
    wrong = by_key[1:][back & (np.diff(by_key["key"]) == 0)]
    names = map(found.wanted[0].name, wrong["key"].tolist())
    return [
        f"{name} {what}: partition {event['partition']}, offset {event['offset']}"
        for name, event in zip(names, wrong, strict=True)
    ]


def _several(keys: NDArray[Any], values: NDArray[Any]) -> int:
    """How many keys have several of the values."""
    pairs = np.unique(np.stack([keys.astype(np.int64), values.astype(np.int64)]), axis=1)
    return int(np.count_nonzero(np.unique(pairs[0], return_counts=True)[1] > 1))
