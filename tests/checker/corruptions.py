"""Lies: each changes a correct history so that nothing explains it any more, and says what has to be found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

from checker.reading import Entry

Ask = dict[str, Any]
Pairs = list[tuple[str, Ask, Ask]]  # file, ask, what was told; only if it is ok


class CannotLie(Exception):
    """The history has nothing that the lie could change."""


class History:
    """The operations of a history that were told ok, by what they are."""

    def __init__(self, entries: list[Entry], random: Random) -> None:
        self.entries, self.random = entries, random
        self.pairs: defaultdict[str, Pairs] = defaultdict(list)
        self.asks: defaultdict[str, list[tuple[str, Ask]]] = defaultdict(list)
        waiting: dict[tuple[str, int], Ask] = {}
        for file, _, entry in entries:
            if entry["kind"] == "ask":
                waiting[file, entry["op"]] = entry
                self.asks[entry["what"]].append((file, entry))
            elif entry["outcome"] == "ok":
                ask = waiting[file, entry["op"]]
                self.pairs[ask["what"]].append((file, ask, entry))
        self.writes = {
            name: (ask, index)
            for what in ("write", "plain")
            for _, ask in self.asks[what]
            for index, (_, name) in enumerate(ask["events"])
        }

    def rows(self, what: str) -> list[tuple[Ask, Ask, int]]:
        """Ask, told and index of every event row of these operations."""
        return [(a, t, i) for _, a, t in self.pairs[what] for i in range(len(t["events"]))]

    def one(self, choices: list[Any]) -> Any:
        """Any of them. `CannotLie`: there is none."""
        if not choices:
            raise CannotLie
        return self.random.choice(choices)

    def alone(self, mode: str) -> set[str]:
        """Readers of a mode that have no group."""
        return {
            ask["reader"]
            for _, ask in self.asks["open"]
            if ask["mode"] == mode and ask["group"] is None
        }

    def done(self) -> set[str]:
        """Handles of which a commit was told (not that of another one)."""
        return {a["txn"] for _, a, told in self.pairs["commit"] if not told.get("replayed")}

    def must(self, name: str) -> bool:
        """An event has to be in the log: its writer was acknowledged, and its commit told."""
        ask, _ = self.writes[name]
        is_told = any(ask is one for _, one, _ in self.pairs[ask["what"]])
        return is_told and (ask["what"] == "plain" or ask["txn"] in self.done())

    def polls(self, mode: str) -> list[tuple[Ask, Ask]]:
        """Polls of readers without a group."""
        readers = self.alone(mode)
        return [(a, t) for _, a, t in self.pairs["poll"] if a["reader"] in readers]


Lie = Callable[[History], bool]  # whether it could be told
LIES: dict[str, tuple[Lie, set[str]]] = {}


def lie(*kinds: str) -> Callable[[Callable[[History], None]], None]:
    """Register one, and the kinds of which one has to be found."""

    def register(function: Callable[[History], None]) -> None:
        def told(history: History) -> bool:
            try:
                function(history)
            except CannotLie:
                return False
            return True

        LIES[function.__name__] = (told, set(kinds))

    return register


def _log_rows(h: History) -> list[tuple[Ask, Ask, int]]:
    return [one for one in h.rows("log") if h.must(one[1]["events"][one[2]][2])]


@lie("lost-write")
def drop_from_log(h: History) -> None:
    found = h.one(_log_rows(h))
    _, told, index = found
    del told["events"][index]


@lie("lost-write")
def drop_transaction_everywhere(h: History) -> None:
    """The service forgets a transaction wholly: no reader sees it, no record names it."""
    told = h.one([t for _, a, t in h.pairs["commit"] if t["committed"] and not t.get("replayed")])
    for what in ("log", "poll", "snapshot_read"):
        at = 3 if what == "log" else 5
        for _, _, seen in h.pairs[what]:
            seen["events"] = [row for row in seen["events"] if row[at] != told["txn_id"]]
    for _, _, seen in h.pairs["commits"]:
        seen["records"] = [row for row in seen["records"] if told["txn_id"] not in row[2]]


@lie("duplicate")
def twice_in_log(h: History) -> None:
    found = h.one(h.rows("log"))
    _, told, index = found
    told["events"].append([told["end"], *told["events"][index][1:]])
    told["end"] += 1


@lie("int-send-order")
def swap_in_log(h: History) -> None:
    """Two events of one writer and key change places, for all readers."""
    places: defaultdict[tuple[Any, ...], list[list[Any]]] = defaultdict(list)
    for _, ask, told in h.pairs["log"]:
        for row in told["events"]:
            write, _ = h.writes[row[2]]
            if row[1] is not None and write["what"] == "write":
                key = (ask["stream"], ask["partition"], row[1], write["txn"], write["writer"])
                places[key].append(row)
    rows = h.one([found for found in places.values() if len(found) > 1])
    one, other = rows[0], rows[-1]
    one[2], other[2] = other[2], one[2]


@lie("aborted-read")
def reveal_aborted(h: History) -> None:
    """A late write of an aborted transaction gets into the log."""
    aborted = {ask["txn"]: ask for _, ask, _ in h.pairs["abort"]}
    ids = {ask["txn"]: told["txn_id"] for _, ask, told in h.pairs["begin"]}
    writes = [ask for _, ask in h.asks["write"] if ask["txn"] in aborted]
    write = h.one(writes)
    logs = [told for _, ask, told in h.pairs["log"] if ask["stream"] == write["stream"]]
    told = h.one(logs)
    key, name = write["events"][0]
    told["events"].append([told["end"], key, name, ids[write["txn"]]])
    told["end"] += 1


@lie("aborted-read", "changed-answer")
def abort_the_committed(h: History) -> None:
    """An abort is answered of one that is committed, and whose commit was not answered."""
    seen = {row[3] for _, _, told in h.pairs["log"] for row in told["events"]}
    begun = [(ask, told["txn_id"]) for _, ask, told in h.pairs["begin"]]
    ids = {txn_id: ask["txn"] for ask, txn_id in begun if txn_id is not None}
    known = h.done() | {ids.get(a["txn_id"]) for _, a, _ in h.pairs["state"]}
    txns = [ids[one] for one in seen if one in ids and ids[one] not in known]
    txn = h.one(sorted(txns))
    at = max(entry["at"] for _, _, entry in h.entries)
    h.entries.append(("zz", 1, {"at": at, "op": 1, "kind": "ask", "what": "abort", "txn": txn}))
    h.entries.append(("zz", 2, {"at": at, "op": 1, "kind": "told", "outcome": "ok"}))


@lie("dirty-read")
def see_too_early(h: History) -> None:
    """A raw reader was given an event before its commit was asked."""
    asked: dict[str, int] = {}
    for _, ask in h.asks["commit"]:
        asked[ask["txn"]] = min(asked.get(ask["txn"], ask["at"]), ask["at"])
    choices = []
    for _, told in h.polls("raw"):
        for index, row in enumerate(told["events"]):
            write, _ = h.writes[row[4]]
            if write["what"] == "write":
                choices.append((told, index, asked[write["txn"]]))
    found = h.one(choices)
    told, index, at = found
    row = told["events"].pop(index)
    poll = {"reader": "early", "op": 2, "at": at - 1}
    opened = {"reader": "early", "mode": "raw", "streams": [row[0]], "group": None}
    more = {"what": "open", **opened, "starts": "end", "op": 1, "at": at - 1}
    lines = [
        {"kind": "ask", **more},
        {"kind": "told", "outcome": "ok", "op": 1, "at": at - 1},
        {"kind": "ask", "what": "poll", **poll},
        {"kind": "told", "outcome": "ok", "op": 2, "at": at - 1, "events": [row]},
    ]
    h.entries += [("early", number, line) for number, line in enumerate(lines, 1)]


@lie("changed-answer")
def another_timestamp(h: History) -> None:
    """One of two answers about a commit is wrong (its record counts as one)."""
    written = {one for _, _, t in h.pairs["commits"] for row in t["records"] for one in row[2]}
    told = [t for _, _, t in h.pairs["commit"] if t["txn_id"] in written]
    found = h.one(told)
    found["timestamp"] += h.random.choice([-1, 1])


@lie("changed-answer", "aborted-read")
def another_state(h: History) -> None:
    # For an empty one without other answers, either is true.
    known = {told["events"][i][3] for _, told, i in h.rows("log")}
    known |= {told["txn_id"] for _, _, told in h.pairs["commit"]}
    states = [(ask, told) for _, ask, told in h.pairs["state"] if told["state"] == "committed"]
    ended = [told for ask, told in states if ask["txn_id"] in known]
    found = h.one(ended)
    found |= {"state": "aborted", "timestamp": None}


@lie("changed-answer")
def open_again(h: History) -> None:
    ends = [told for _, _, told in h.pairs["commit"]]
    found = h.one(ends)
    at = max(entry["at"] for _, _, entry in h.entries) + 1
    ask = {"at": at, "op": 1, "kind": "ask", "what": "state", "txn_id": found["txn_id"]}
    told = {"at": at, "op": 1, "kind": "told", "outcome": "ok", "state": "open", "timestamp": None}
    h.entries += [("zz", 1, ask), ("zz", 2, told)]


@lie("unexplained", "changed-answer")
def another_count(h: History) -> None:
    found = h.one(h.pairs["commit"])
    found[2]["committed"] += 1


@lie("unexplained", "aborted-read", "lost-write")
def another_id_in_log(h: History) -> None:
    rows = [row for _, _, told in h.pairs["log"] for row in told["events"] if row[3] is not None]
    row = h.one(rows)
    row[3] = "f" * 32


@lie("unexplained")
def another_key(h: History) -> None:
    what = h.one(["log", "poll", "snapshot_read"])
    found = h.one(h.rows(what))
    _, told, index = found
    told["events"][index][1 if what == "log" else 3] = "other"


@lie("unexplained")
def nobody_wrote_it(h: History) -> None:
    what = h.one(["log", "poll", "snapshot_read"])
    found = h.one(h.rows(what))
    _, told, index = found
    told["events"][index][2 if what == "log" else 4] = "nobody"


@lie("unexplained")
def moved(h: History) -> None:
    """An event is given at another offset than it has."""
    found = h.one(h.rows("poll"))
    _, told, index = found
    told["events"][index][2] += 1000


@lie("torn-transaction", "lost-write")
def tear_in_log(h: History) -> None:
    """A part of a transaction without any answer is lost; its record has the right edges."""
    counts: defaultdict[str, list[tuple[Ask, int]]] = defaultdict(list)
    for _, told, index in h.rows("log"):
        name = told["events"][index][2]
        write, _ = h.writes[name]
        is_whole = any(write is one for _, one, _ in h.pairs["write"])
        if write["what"] == "write" and is_whole and write["txn"] not in h.done():
            counts[write["txn"]].append((told, index))
    found = h.one([rows for rows in counts.values() if len(rows) > 1])
    told, index = h.one(found)
    del told["events"][index]


@lie("non-monotone-timestamps", "changed-answer")
def back_in_history(h: History) -> None:
    records = [t["records"] for _, _, t in h.pairs["commits"] if len(t["records"]) > 1]
    found = h.one(records)
    at = h.random.randrange(1, len(found))
    found[at][1] = found[at - 1][1] - h.random.choice([0, 1])


@lie("non-monotone-timestamps")
def slow_clock(h: History) -> None:
    """A whole transaction gets the timestamp of one that was told before it was asked, everywhere."""
    own = [(a, t) for _, a, t in h.pairs["commit"] if not t.get("replayed")]
    asked: dict[str, int] = {}
    for _, ask in h.asks["commit"]:
        asked[ask["txn"]] = min(asked.get(ask["txn"], ask["at"]), ask["at"])
    choices = [
        (early["timestamp"], told["timestamp"])
        for _, early in own
        for ask, told in own
        if early["at"] < asked[ask["txn"]] and early["txn_id"] != told["txn_id"]
    ]
    found = h.one(choices)
    right, wrong = found[1], found[0]
    for _, _, entry in h.entries:
        if entry.get("timestamp") == right:
            entry["timestamp"] = wrong
        for row in entry.get("records", ()):
            row[1] = wrong if row[1] == right else row[1]
        for row in entry.get("events", ()):
            if len(row) == 7 and row[6] == right:
                row[6] = wrong


@lie("changed-answer")
def number_taken_twice(h: History) -> None:
    numbered = [(a, t) for _, a, t in h.pairs["commit"] if "number" in a and not t.get("replayed")]
    if len(numbered) < 2:
        raise CannotLie
    one, other = h.random.sample(numbered, 2)
    if one[1]["txn_id"] == other[1]["txn_id"]:
        raise CannotLie
    other[0]["series"], other[0]["number"] = one[0]["series"], one[0]["number"]


@lie("aborted-read", "lost-write")
def another_writer(h: History) -> None:
    """The log has what a writer wrote that the only commit did not take."""
    commits: defaultdict[str, list[Ask]] = defaultdict(list)
    for _, ask in h.asks["commit"]:
        commits[ask["txn"]].append(ask)
    taken = {row[2] for _, _, told in h.pairs["log"] for row in told["events"]}
    writes = [h.writes[name][0] for name in sorted(taken)]
    owners = {str(write["txn"]): write for write in writes if write["what"] == "write"}
    txns = [
        txn
        for txn, write in owners.items()
        if len(found := commits.get(txn, [])) == 1
        and write["writer"] in (found[0]["writers"] or ())
    ]
    txn = h.one(txns)
    commits[txn][0]["writers"].remove(owners[txn]["writer"])


# What readers and snapshots were given.


@lie("torn-transaction")
def tear_a_poll(h: History) -> None:
    found = h.one([told for _, told in h.polls("transactions") if len(told["events"]) > 1])
    del found["events"][h.random.randrange(len(found["events"]))]


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
def swap_in_poll(h: History) -> None:
    mode = h.one(["raw", "ordered", "transactions"])
    found = h.one(_pairs_of_line(h, mode))
    told, one, other = found
    rows = told["events"]
    rows[one], rows[other] = rows[other], rows[one]


@lie("ext-poll-order")
def swap_polls(h: History) -> None:
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
    found = h.one(choices)
    one, other = found
    one["events"], other["events"] = other["events"], one["events"]


@lie("duplicate")
def give_twice(h: History) -> None:
    mode = h.one(["raw", "ordered", "transactions"])
    found = h.one([told for _, told in h.polls(mode) if told["events"]])
    found["events"].append(found["events"][h.random.randrange(len(found["events"]))])


@lie("poll-skip")
def skip_in_poll(h: History) -> None:
    mode = h.one(["raw", "ordered"])
    found = h.one(_pairs_of_line(h, mode))
    told, one, _ = found
    readers = {id(t): a["reader"] for a, t in h.polls(mode)}
    broken = {a["reader"] for _, a in h.asks["poll"]} - {a["reader"] for a, _ in h.polls(mode)}
    if readers[id(told)] in broken or told["events"][one] != min(
        (row for row in told["events"] if row[1] == told["events"][one][1]), key=lambda r: r[2]
    ):
        raise CannotLie
    has_start = any(
        ask["reader"] == readers[id(told)] and ask["starts"] == "start" for _, ask in h.asks["open"]
    )
    if not has_start:
        raise CannotLie
    del told["events"][one]


@lie("poll-skip")
def skip_a_transaction(h: History) -> None:
    """Of a reader whose polls were all told: one that was not may have given what is skipped."""
    told_ok = {id(ask) for _, ask, _ in h.pairs["poll"]}
    unsure = {ask["reader"] for _, ask in h.asks["poll"] if id(ask) not in told_ok}
    readers: defaultdict[str, list[Ask]] = defaultdict(list)
    for ask, told in h.polls("transactions"):
        if told["events"] and ask["reader"] not in unsure:
            readers[ask["reader"]].append(told)
    polls = h.one([found for found in readers.values() if len(found) > 2])
    polls[h.random.randrange(1, len(polls) - 1)]["events"] = []


@lie("unseen-commit")
def miss_the_last(h: History) -> None:
    """A reader that caught up was not given the last event of a partition, or the last transaction."""
    mode = h.one(["raw", "transactions"])
    done = {ask["reader"] for _, ask, _ in h.pairs["caught_up"]}
    polls = [(a, t) for a, t in h.polls(mode) if a["reader"] in done and t["events"]]
    if not polls:
        raise CannotLie
    reader = h.one(sorted({ask["reader"] for ask, _ in polls}))
    told = [t for a, t in polls if a["reader"] == reader][-1]
    if mode == "transactions":
        told["events"] = []
    else:
        told["events"].pop()


@lie("snapshot-not-prefix")
def drop_from_snapshot(h: History) -> None:
    found = h.one(h.rows("snapshot_read"))
    _, told, index = found
    del told["events"][index]


@lie("snapshot-not-prefix")
def show_the_future(h: History) -> None:
    """A snapshot shows a later commit."""
    times = {ask["snapshot"]: told["timestamp"] for _, ask, told in h.pairs["snapshot"]}
    choices = [
        (told, row)
        for _, ask, told in h.pairs["snapshot_read"]
        for _, _, poll in h.pairs["poll"]
        for row in poll["events"]
        if row[0] == ask["stream"] and (row[6] or 0) > times[ask["snapshot"]]
    ]
    found = h.one(choices)
    found[0]["events"].append(found[1])


@lie("snapshot-not-prefix")
def stale_snapshot(h: History) -> None:
    """A snapshot of now is older than what had been told before."""
    told_first = min((t["at"] for _, _, t in h.pairs["commit"]), default=None)
    choices = [
        (ask, told)
        for _, ask, told in h.pairs["snapshot"]
        if ask["asked_for"] is None and told_first is not None and told_first < ask["at"]
    ]
    found = h.one(choices)
    found[1]["timestamp"] = 1
    for _, ask, told in h.pairs["snapshot_read"]:
        if ask["snapshot"] == found[0]["snapshot"]:
            told["events"] = []
