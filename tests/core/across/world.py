"""A random model of transactions across control partitions, over the rules in `anabranch.core.across`.

A world has a few control partitions with clocks of their own. Messages are lost, doubled, late and forged, leaders
die before or after a round is logged, or stay dead for a while, control partitions are added, and clients abort.
What a leader keeps in memory goes with it, rows stay. `World.run` raises `Bad` if something does not hold:

- A transaction is merged everywhere, at one timestamp, or nowhere, and what a client was told stays true.
- Replayed in the order of (timestamp, id), each row that was locked is as it was read, and each sum is right.
- What was said to be safe never changes, whoever asked: a snapshot, a report of a table, a cut of a reader.
- Nothing waits for ever: all ends when nothing is lost any more, and nobody waits for streams it does not touch.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from anabranch.core.across import holds, messages
from anabranch.protocol import hybrid_time
from anabranch.protocol.ids import make_txn_id, txn_text
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from tests.core.across.part import Ask, Bad, Merge, Part, Row, Share, Shared, Txn, home_of


class World(Shared):
    """All control partitions, the messages between them, and clients."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.parts: list[Part] = []
        self.streams: list[str] = []
        self.bag: list[tuple[int, tuple[Any, ...]]] = []  # messages under way, by receiver
        self.asks: list[Ask] = []
        # What was said to be complete: (streams, time, what was there).
        self.claims: list[tuple[list[str], int, dict[str, list[Merge]]]] = []
        self.passes = 0
        self.dead: dict[int, int] = {}  # control partitions without a leader -> until which pass
        self.settled: list[int] = []  # times of complete snapshots, for locks
        for _ in range(self.rnd.choice([2, 3, 3])):
            self.grow()

    def grow(self) -> None:
        """Add a control partition, with two streams."""
        number = len(self.parts)
        skew_ms = self.rnd.choice([0, 0, 30, -30, 300, -300])
        part = Part(self, number, skew_ms)
        self.parts.append(part)
        for stream in (f"s{number}/a", f"s{number}/b"):
            self.part_of[stream] = number
            self.streams.append(stream)
            part.merged[stream] = []

    # -- clients ---------------------------------------------------------------------------------------

    def new(self) -> None:
        rnd = self.rnd
        across = rnd.random() < 0.55
        number = rnd.randrange(len(self.parts))
        names = self.streams if across else [s for s in self.streams if self.part_of[s] == number]
        since = rnd.choice(self.settled[-3:]) if self.settled else 0
        shares: dict[int, Share] = defaultdict(Share)
        long = across and rnd.random() < 0.3
        for stream in rnd.sample(names, rnd.randint(1, min(3, len(names)))):
            share = shares[self.part_of[stream]]
            row = (stream, rnd.choice("xyz"))
            kind = rnd.random()
            if long or kind < 0.5:
                share.puts[row] = rnd.randint(1, 1 << 30)
            elif kind < 0.75:
                share.adds[row] = rnd.randint(1, 9)
            elif since:
                share.reads.add(row)
                if rnd.random() < 0.5:
                    share.puts[stream, rnd.choice("xyz")] = rnd.randint(1, 1 << 30)
            else:
                share.puts[row] = 1
        home = rnd.choice(sorted(shares)) if rnd.random() < 0.85 else rnd.randrange(len(self.parts))
        txn_id = make_txn_id(home, self.now_ms + rnd.randint(-5, 5), rnd.getrandbits(64))
        txn = Txn(txn_id, dict(shares), since, long, rnd.randbytes(32))
        self.txns[txn_id] = txn
        big = rnd.random() < 0.2
        if not txn.others:
            self.commands[home].append(
                ("stage" if big and not shares[home].adds else "one_shot", txn_id)
            )
            return
        for other in txn.others:
            shares[other].big = big and not shares[other].adds and rnd.random() < 0.7
        if long:
            self.commands[home].append(("begin", txn_id))
        else:
            self.commands[home].append(("commit", txn_id, {}))

    def go_on(self, txn: Txn) -> None:
        """Let a client of a long transaction take its next step: touch, write, or commit."""
        rnd, home = self.rnd, home_of(txn.txn_id)
        other = rnd.choice(txn.others)
        share = txn.shares[other]
        if rnd.random() < 0.3 and all((txn.txn_id, one) in self.touched for one in txn.others):
            names = {one: txn.shares[one].events for one in txn.others}
            self.commands[home].append(("commit", txn.txn_id, names))
        elif (txn.txn_id, other) not in self.touched:
            self.commands[other].append(("touch", txn.txn_id))
        else:
            share.events += 1
            self.commands[other].append(("write", txn.txn_id, share.events))

    def ask_snapshot(self) -> None:
        some = self.rnd.sample(self.streams, self.rnd.randint(1, len(self.streams)))
        must, seen = list(self.told), 0
        if self.told_decided and self.rnd.random() < 0.3:
            one = self.rnd.choice(list(self.told_decided))
            must, seen = [*must, one], self.told_decided[one]
        self.asks.append(Ask(sorted(some), seen, must, self.passes))

    # -- the run ---------------------------------------------------------------------------------------

    def run(self, steps: int = 300) -> None:
        for k in range(steps):
            self.now_ms += self.rnd.randint(0, 8)
            if k < steps * 0.8:
                self.disturb()
            self.round(self.rnd.choice(self.parts))
        self.calm = True
        self.dead.clear()
        for k in range(3000):
            self.now_ms += 3
            self.round(self.parts[k % len(self.parts)])
            if k > 100 and self.is_over():
                break
        else:
            raise Bad(f"endless: {self.open()[:3]}")
        self.check()

    def disturb(self) -> None:
        rnd, luck = self.rnd, self.rnd.random()
        if luck < 0.14:
            self.new()
        elif luck < 0.24 and (long := [t for t in self.txns.values() if t.long and t.others]):
            self.go_on(rnd.choice(long[-4:]))
        elif luck < 0.26 and (across := [t for t in self.txns.values() if t.others]):
            txn = rnd.choice(across[-6:])
            self.commands[home_of(txn.txn_id)].append(("abort", txn.txn_id))
        elif luck < 0.34:
            self.ask_snapshot()
        elif luck < 0.36:
            self.dead[rnd.randrange(len(self.parts))] = self.passes + rnd.randint(10, 60)
        elif luck < 0.365 and len(self.parts) < 4:
            self.grow()
        elif luck < 0.39 and self.bag:
            self.forge()
        if rnd.random() < 0.15:
            self.claim()

    def forge(self) -> None:
        """A stranger, who does not know the secret, decides for others."""
        to, (sender, payload, mac, brought) = self.rnd.choice(self.bag)
        if not isinstance(payload, r.AskVote | r.Decide):
            return
        head = payload.head
        verdict: r.Verdict = "COMMIT" if self.rnd.random() < 0.5 else "ABORT"
        at = hybrid_time.from_us(self.now_ms * 1000) if verdict == "COMMIT" else 0
        decide = r.Decide(payload.txn_id, head, verdict, at, "")
        self.bag.append((to, (sender, decide, b"\0" * messages.MAC_SIZE, brought)))
        far = hybrid_time.from_us((self.now_ms + 10_000_000) * 1000)
        self.bag.append((to, (sender, payload, mac, far)))  # a leader with a fast clock

    def claim(self) -> None:
        """A client notes up to which time it has all of some streams, without a snapshot."""
        stream = self.rnd.choice(self.streams)
        part = self.parts[self.part_of[stream]]
        through = part.report(stream)
        if through is not None:
            self.note([stream], through)
        both = list(part.merged)
        cuts = [self.records[s] for s in both if s in self.records]
        if cuts:
            self.note(both, max(cuts))

    def note(self, streams: list[str], at: int) -> None:
        self.claims.append((streams, at, self.content(streams, at)))

    def content(self, streams: Iterable[str], at: int) -> dict[str, list[Merge]]:
        return {
            s: [m for m in self.parts[self.part_of[s]].merged[s] if m.timestamp <= at]
            for s in streams
        }

    def round(self, part: Part) -> None:
        """A pass of one leader: messages come late or twice, and it may die before or after its round is logged."""
        rnd, number = self.rnd, part.number
        self.passes += 1
        if self.dead.get(number, 0) > self.passes:
            return
        if self.dead.pop(number, None) is not None:
            self.die(part)
        take, keep = [], []
        for to, message in self.bag:
            luck = rnd.random()
            if to != number or (luck >= 0.75 and not self.calm):
                keep.append((to, message))
            else:
                take.append(message)
                if luck >= 0.6 and not self.calm:
                    keep.append((to, message))
        if not self.calm:
            rnd.shuffle(take)
        self.bag = keep[-400:]
        if not self.calm and rnd.random() < 0.05:
            self.lose_round(part, take)
            return
        part.step(take, self.commands.pop(number, []), self.asks_for(number))
        self.spread(part)
        if not self.calm and rnd.random() < 0.05:
            self.die(part)
        self.settle()

    def lose_round(self, part: Part, take: list[Any]) -> None:
        """The leader dies before its round is logged: nothing of the round has happened."""
        self.die(part)

    def die(self, part: Part) -> None:
        alone = list(part.alone)
        part.forget()
        self.commands[part.number] += [("one_shot", txn_id) for txn_id in alone]

    def spread(self, part: Part) -> None:
        """Send what the rows say, and the answers of this pass; some of it is lost."""
        for to, message in [*part.out, *part.due()]:
            if self.calm or self.rnd.random() < 0.7:
                secret = self.txns[message.txn_id].secret
                mac = messages.mac_of(secret, part.number, to, encode(message))
                self.bag.append((to, (part.number, message, mac, part.clock)))
        part.out.clear()

    def asks_for(self, number: int) -> list[Ask]:
        return [
            ask
            for ask in self.asks
            if number in {self.part_of[s] for s in ask.streams}
            and number not in (ask.answers if ask.at is None else ask.ready)
        ]

    def settle(self) -> None:
        for ask in list(self.asks):
            parts = {self.part_of[s] for s in ask.streams}
            if ask.at is None and ask.answers.keys() == parts:
                ask.at, _ = self.instant(ask)
            if ask.at is not None and ask.ready >= parts:
                self.asks.remove(ask)
                self.note(ask.streams, ask.at)
                self.settled.append(ask.at)
                self.check_told(ask)

    def instant(self, ask: Ask) -> tuple[int, list[int]]:
        return holds.instant(ask.answers, ask.seen)

    def check_told(self, ask: Ask) -> None:
        content = self.content(ask.streams, ask.at or 0)
        for txn_id in ask.must:
            wrote = {s for share in self.txns[txn_id].shares.values() for s in share.streams}
            for stream in wrote & set(ask.streams):
                if all(m.txn_id != txn_id for m in content[stream]):
                    raise Bad("told: a snapshot of now lacks what was told before")

    # -- what must hold --------------------------------------------------------------------------------

    def unfinished(self) -> Iterator[tuple[Part, bytes]]:
        """The control partitions and transactions that are not over there."""
        for part in self.parts:
            for txn_id, row in part.rows.items():
                is_open = row.state == "OPEN" and self.is_idle(txn_id)
                if row.state not in ("COMMITTED", "ABORTED") and not is_open:
                    yield part, txn_id
            yield from ((part, txn_id) for txn_id in (*part.alone, *part.staging))

    def open(self) -> list[str]:
        """What is not over, for people."""
        return [
            f"{txn_text(txn_id)} at {part.number}: {part.rows.get(txn_id, [''] * 4)[3]}, {part.its.get(txn_id)}, "
            f"{part.votes.get(txn_id)}, {part.answered.get(txn_id)}"
            for part, txn_id in self.unfinished()
        ]

    def is_idle(self, txn_id: bytes) -> bool:
        """Whether a long transaction is just open: its coordinator is, too, and no commit waits."""
        home = self.parts[home_of(txn_id)]
        row = home.rows.get(txn_id)
        return row is not None and row.state == "OPEN" and txn_id not in home.pending

    def is_over(self) -> bool:
        return not (self.asks or any(self.commands.values()) or next(self.unfinished(), None))

    def check(self) -> None:
        merged: list[tuple[int, bytes, str, dict[str, int]]] = sorted(
            (m.timestamp, m.txn_id, stream, m.rows)
            for part in self.parts
            for stream, log in part.merged.items()
            for m in log
        )
        places: dict[bytes, list[tuple[int, str]]] = defaultdict(list)
        for at, txn_id, stream, _ in merged:
            places[txn_id].append((at, stream))
        for txn_id, txn in self.txns.items():
            wrote = sorted(s for share in txn.shares.values() for s in share.streams)
            found = sorted(stream for _, stream in places[txn_id])
            times = {at for at, _ in places[txn_id]}
            if found not in ([], wrote) or len(times) > 1:
                raise Bad(f"torn: {found} of {wrote}")
            if txn_id in {**self.told, **self.told_decided} and found != wrote:
                raise Bad("told: it is not there")
        for streams, at, content in self.claims:
            if self.content(streams, at) != content:
                raise Bad("changed: what was complete is not")
        for txn_id in self.chunks:
            rows = [part.rows[txn_id] for part in self.parts if txn_id in part.rows]
            if any(row.state == "ABORTED" for row in rows):
                raise Bad("undecided: chunks of an aborted transaction are in a stream")
        self.replay(merged)

    def replay(self, merged: list[tuple[int, bytes, str, dict[str, int]]]) -> None:
        """Carry out all commits one after the other: reads and sums have to be as they were."""
        ends = {txn_id: at for at, txn_id, _, _ in merged}
        for part in self.parts:  # those that only read
            for txn_id, row in part.rows.items():
                if row.state == "COMMITTED" and home_of(txn_id) == part.number:
                    ends.setdefault(txn_id, row.commit_timestamp)
        written: dict[Row, list[tuple[int, bytes, int]]] = defaultdict(list)
        for at, txn_id, stream, rows in merged:
            for name, value in rows.items():
                written[stream, name].append((at, txn_id, value))
        for txn_id, at in sorted(ends.items(), key=lambda one: (one[1], one[0])):
            txn = self.txns[txn_id]
            for share in txn.shares.values():
                for read in share.reads:
                    if any(txn.since < a and (a, i) < (at, txn_id) for a, i, _ in written[read]):
                        raise Bad("stale: a row that was read had changed")
                for changed, by in share.adds.items():
                    before = [v for a, i, v in written[changed] if (a, i) < (at, txn_id)]
                    now = next(v for a, i, v in written[changed] if i == txn_id)
                    if now != (before[-1] if before else 0) + by:
                        raise Bad("sum: a change of a row is lost")


def search(make: Callable[[int], World], seeds: Iterable[int]) -> tuple[int, str] | None:
    """The first seed that shows a breach, and what it is."""
    for seed in seeds:
        world = make(seed)
        try:
            world.run()
        except Bad as bad:
            return seed, str(bad)
    return None


if __name__ == "__main__":
    print(search(World, range(int(sys.argv[1]), int(sys.argv[2]))))
