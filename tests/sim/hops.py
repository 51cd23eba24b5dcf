"""Two clients, and two control partitions whose clocks differ: a commit exceeds what the other client was told.

It goes from one to the other by `observe`, a token, a writer that joins; or, with commit wait, by nothing at all.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.client.client import Client
from anabranch.errors import ClockSkew, UnknownScope, UnknownStream
from anabranch.protocol import hybrid_time
from tests.sim.check_log import hold
from tests.sim.clients import ENDS, beat
from tests.sim.faults import Faults
from tests.sim.ledger import Ledger
from tests.sim.ports import SimCluster, client_ports
from tests.sim.recorded import recorded_begin, recorded_commit, told_commit
from tests.sim.world import START_S, Process, World
from tests.sim.writers import commit_one, recorded_write

NEAR, FAR = "s/b", "far/x"  # the second has a control partition of its own
_RESTART_S = 1.0
_TIMEOUT_S = 10.0
_BROKEN = hybrid_time.from_us(2_208_988_800_000_000)  # the year 2040


class Hopper:
    """A process with the clients; it is started again when it dies."""

    def __init__(self, world: World, cluster: SimCluster, faults: Faults, ledger: Ledger) -> None:
        self.world, self.cluster, self.faults, self.ledger = world, cluster, faults, ledger
        weather = faults.weather
        self.jobs = 8 if weather.hop_s and len(ledger.streams) > 1 else 0
        self.kinds = [self._observe, self._token, self._writer, self._broken]
        if weather.error_s:
            self.kinds.append(self._wait)
        self.busy = False
        self._starts = 0

    @property
    def done(self) -> bool:
        """All jobs are done."""
        return self.jobs == 0 and not self.busy

    def start(self) -> None:
        """Start a process, if there is work."""
        self.busy = False
        if not self.jobs:
            return
        self._starts += 1
        process = Process(f"h.{self._starts}", "client")
        process.on_death.append(lambda: self.world.later(self.faults.span(_RESTART_S), self.start))
        self.world.spawn(process, "main", lambda: self._run(process))

    def _client(self, process: Process, *, commit_wait: bool = False) -> Client:
        ports = client_ports(self.cluster, process, self.ledger.prefix)
        ports = replace(ports, max_clock_skew=1e6, commit_wait=commit_wait)
        client = Client(ports, timeout=_TIMEOUT_S, threads=False)
        self.world.spawn(process, "heart", lambda: beat(self.world, client, process))
        return client

    def _run(self, process: Process) -> None:
        while self.jobs:
            self.world.sleep(self.faults.span(self.faults.weather.hop_s))
            self.busy = True
            self.jobs -= 1
            kind = self.world.random.choice(self.kinds)
            one, other = self.world.random.sample((NEAR, FAR), 2)
            waits = kind == self._wait
            first, second = self._client(process, commit_wait=waits), self._client(process)
            try:
                first.create_stream(FAR, 1)
                kind(first, second, one, other)
            except (
                UnknownStream,
                UnknownScope,
                *ENDS,
            ) as error:  # the first: a client makes it just now
                self.world.note("hopper", f"{kind.__name__}: {type(error).__name__}: {error}")
            self.busy = False

    # -- the ways that a timestamp goes ---------------------------------------------------------------

    def _commit(self, client: Client, stream: str, seen: int = 0) -> int:
        deal = self.ledger.open(stream.split("/")[0], "one-shot")
        parts = self.world, self.ledger, client, deal, stream, _TIMEOUT_S
        found = commit_one(*parts, seen=seen).commit_timestamp
        weather = self.faults.weather
        ahead_s = hybrid_time.to_us(found) / 1e6 - START_S - self.world.now
        most_s = weather.skew_s + weather.jump_by_s + weather.apart_s
        hold(ahead_s <= most_s, f"a commit is dated {ahead_s:.1f} s ahead of all clocks")
        return found

    def _observe(self, first: Client, second: Client, one: str, other: str) -> None:
        told = self._commit(first, one)
        second.observe(told)
        self._commit(second, other, told)

    def _wait(self, first: Client, second: Client, one: str, other: str) -> None:
        told = self._commit(first, one)
        self._commit(second, other, told)

    def _token(self, first: Client, second: Client, one: str, other: str) -> None:
        with first.begin(other.split("/")[0]) as txn:
            txn.token()  # begins it, before the time that counts
            with first.outside():
                told = self._commit(first, one)
            second.join(txn.token())
            self._commit(second, other, told)
            txn.abort()

    def _writer(self, first: Client, second: Client, one: str, other: str) -> None:
        """The committer has seen nothing; the writer that it takes has."""
        deal = self.ledger.open(other.split("/")[0], "journal", keepalive=30.0)
        with recorded_begin(self.ledger, deal):
            txn = second.begin(deal.scope)
        deal.writer("own")
        with txn:
            token = txn.token()
            deal.txn_id, deal.begun = txn.txn_id, True
            told = self._commit(first, one)
            account = deal.writer("w1")
            with first.join(token) as writer:
                event = deal.event(account, other, b"one")
                recorded_write(self.ledger, deal, account, event, writer.write)
                account.finishing = True
                account.flushed.append(1)
                with self.ledger.history.here.asking("finish", txn=deal.label, writer="w1.0"):
                    writer.finish()
                account.finished_at = self.world.now
            attempt = deal.attempt(self.world.now, "own", None)
            with recorded_commit(self.ledger, deal, attempt, told) as answer:
                attempt.result = txn.commit(timeout=_TIMEOUT_S)
                told_commit(answer, deal, attempt.result)
            attempt.ended = self.world.now

    def _broken(self, first: Client, second: Client, one: str, other: str) -> None:
        """A client that is wrong by years is refused, and drags nobody along."""
        first._session._raise(_BROKEN)
        try:
            self._commit(first, one)
        except ClockSkew:
            self._commit(second, one)
