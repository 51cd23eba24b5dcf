"""Lies about what readers and snapshots were given; see `corruptions`."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from tests.checker.corruptions import Ask, History, lie


@lie("torn-transaction")
def tear_a_poll(h: History) -> bool:
    found = h.one([told for _, told in h.polls("transactions") if len(told["events"]) > 1])
    if found is None:
        return False
    del found["events"][h.random.randrange(len(found["events"]))]
    return True


def _pairs_of_line(h: History, mode: str) -> list[tuple[Ask, int, int]]:
    """Two indexes of one partition in one poll."""
    found = []
    for _, told in h.polls(mode):
        last: dict[tuple[str, int], int] = {}
        for index, row in enumerate(told["events"]):
            line = (row[0], row[1])
            if line in last:
                found.append((told, last[line], index))
            last[line] = index
    return found


@lie("int-poll-order")
def swap_in_poll(h: History) -> bool:
    mode = h.one(["raw", "ordered", "transactions"])
    if (found := h.one(_pairs_of_line(h, mode))) is None:
        return False
    told, one, other = found
    rows = told["events"]
    rows[one], rows[other] = rows[other], rows[one]
    return True


@lie("ext-poll-order")
def swap_polls(h: History) -> bool:
    """Two polls of one reader, one after the other, with something of one line."""
    mode = h.one(["raw", "ordered", "transactions"])
    readers: defaultdict[str, list[Ask]] = defaultdict(list)
    for ask, told in h.polls(mode):
        readers[ask["reader"]].append(told)
    choices = [
        (one, other)
        for polls in readers.values()
        for one, other in pairwise(polls)
        if {row[1] for row in one["events"]} & {row[1] for row in other["events"]}
    ]
    if (found := h.one(choices)) is None:
        return False
    one, other = found
    one["events"], other["events"] = other["events"], one["events"]
    return True


@lie("duplicate")
def give_twice(h: History) -> bool:
    mode = h.one(["raw", "ordered", "transactions"])
    if (found := h.one([told for _, told in h.polls(mode) if told["events"]])) is None:
        return False
    found["events"].append(found["events"][h.random.randrange(len(found["events"]))])
    return True


@lie("poll-skip")
def skip_in_poll(h: History) -> bool:
    mode = h.one(["raw", "ordered"])
    if (found := h.one(_pairs_of_line(h, mode))) is None:
        return False
    told, one, _ = found
    readers = {id(t): a["reader"] for a, t in h.polls(mode)}
    broken = {a["reader"] for _, a in h.asks["poll"]} - {a["reader"] for a, _ in h.polls(mode)}
    if readers[id(told)] in broken or told["events"][one] != min(
        (row for row in told["events"] if row[1] == told["events"][one][1]), key=lambda r: r[2]
    ):
        return False
    has_start = any(
        ask["reader"] == readers[id(told)] and ask["starts"] == "start" for _, ask in h.asks["open"]
    )
    if not has_start:
        return False
    del told["events"][one]
    return True


@lie("poll-skip")
def skip_a_transaction(h: History) -> bool:
    """Of a reader whose polls were all told: one that was not may have given what is skipped."""
    told_ok = {id(ask) for _, ask, _ in h.pairs["poll"]}
    unsure = {ask["reader"] for _, ask in h.asks["poll"] if id(ask) not in told_ok}
    readers: defaultdict[str, list[Ask]] = defaultdict(list)
    for ask, told in h.polls("transactions"):
        if told["events"] and ask["reader"] not in unsure:
            readers[ask["reader"]].append(told)
    polls = h.one([found for found in readers.values() if len(found) > 2])
    if polls is None:
        return False
    polls[h.random.randrange(1, len(polls) - 1)]["events"] = []
    return True


@lie("unseen-commit")
def miss_the_last(h: History) -> bool:
    """A reader that caught up was not given the last event of a partition, or the last transaction."""
    mode = h.one(["raw", "transactions"])
    done = {ask["reader"] for _, ask, _ in h.pairs["caught_up"]}
    polls = [(a, t) for a, t in h.polls(mode) if a["reader"] in done and t["events"]]
    if not polls:
        return False
    reader = h.one(sorted({ask["reader"] for ask, _ in polls}))
    told = [t for a, t in polls if a["reader"] == reader][-1]
    if mode == "transactions":
        told["events"] = []
    else:
        told["events"].pop()
    return True


@lie("snapshot-not-prefix")
def drop_from_snapshot(h: History) -> bool:
    if (found := h.one(h.rows("snapshot_read"))) is None:
        return False
    _, told, index = found
    del told["events"][index]
    return True


@lie("snapshot-not-prefix")
def show_the_future(h: History) -> bool:
    """A snapshot shows a later commit."""
    times = {ask["snapshot"]: told["timestamp"] for _, ask, told in h.pairs["snapshot"]}
    choices = [
        (told, row)
        for _, ask, told in h.pairs["snapshot_read"]
        for _, _, poll in h.pairs["poll"]
        for row in poll["events"]
        if row[0] == ask["stream"] and (row[6] or 0) > times[ask["snapshot"]]
    ]
    if (found := h.one(choices)) is None:
        return False
    found[0]["events"].append(found[1])
    return True


@lie("snapshot-not-prefix")
def stale_snapshot(h: History) -> bool:
    """A snapshot of now is older than what had been told before."""
    told_first = min((t["at"] for _, _, t in h.pairs["commit"]), default=None)
    choices = [
        (ask, told)
        for _, ask, told in h.pairs["snapshot"]
        if ask["asked_for"] is None and told_first is not None and told_first < ask["at"]
    ]
    if (found := h.one(choices)) is None:
        return False
    found[1]["timestamp"] = 1
    for _, ask, told in h.pairs["snapshot_read"]:
        if ask["snapshot"] == found[0]["snapshot"]:
            told["events"] = []
    return True
