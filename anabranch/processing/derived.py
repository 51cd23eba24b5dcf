"""`anabranch.DerivedTable`: a processor that derives a table from another one, after the commits of that one.

docs/inside/decisions/0063-asynchronous-derivations.md says why the derived table equals a fold of its source at
each timestamp.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, cast

from anabranch.client.calls.derivations import function_of
from anabranch.client.client import Client
from anabranch.core.stream_settings import check_derivation, derived_from, derived_table
from anabranch.errors import IllegalState, InvalidArgument
from anabranch.processing.app import Processor
from anabranch.protocol import defaults
from anabranch.protocol.hybrid_time import to_text
from anabranch.protocol.ids import NO_TXN, VERSION_HEADER, pack_version, unpack_version
from anabranch.protocol.legal_names import check_type, split_stream
from anabranch.protocol.partitioner import task_of
from anabranch.protocol.schemas import records as r
from anabranch.reading.history import HistorySearch
from anabranch.tables.follow import base_runs
from anabranch.types import Event

if TYPE_CHECKING:
    from anabranch.core.derived_rows import Function
    from anabranch.protocol.schemas.records import BaseRow, ProcessorInfo
    from anabranch.tables.indexes import IndexFunction

_ENTRIES = "entries"
_SIZE = 2  # bytes of the length of an entry's key
_ASK_S = 30.0
_AT_ONCE = 5_000  # rows of a base in one commit
_EVERY = (1 << 64) - 1


class DerivedTable(Processor):
    """A processor that writes a derived table, some milliseconds after the commits to its source.

        app = anabranch.DerivedTable("shop/orders", "by-city", city)

    The source may have any writers. ``function``, ``version``: as of `Client.derive`; a changed function needs a
    higher version. ``tasks``, ``commit_interval``, ``cut_bytes``, ``retries``: as of `Processor`. If the
    function fails in every try, the worker stops, since the table would lack entries.
    """

    def __init__(
        self,
        source: str,
        name: str,
        function: IndexFunction,
        *,
        version: int = 1,
        unique: bool = False,
        tasks: int = defaults.TASKS,
        commit_interval: float = defaults.DERIVE_INTERVAL_S,
        cut_bytes: int = defaults.CUT_BYTES,
        retries: int = defaults.HANDLER_RETRIES,
    ) -> None:
        """Raises: InvalidArgument (also with ``unique``)."""
        check_type("a version", version, int)
        split_stream(source)
        if unique:
            raise InvalidArgument(
                f"derivation {name!r}: a worker comes after the commit, so it can't refuse a value that another "
                "row has: use `client.derive`"
            )
        of = r.Derivation(source, check_derivation(name), version)
        super().__init__(
            derived_table(of),
            tasks=tasks,
            commit_interval=commit_interval,
            cut_bytes=cut_bytes,
            retries=retries,
        )
        self.first_bytes = defaults.DERIVE_BYTES
        self.of, self.function = of, function
        self._made = cast("Function", function_of(of, function, "asynchronous"))
        self.derivation = self._made
        self._since = 0  # hybrid time of the base that it begins with; 0: with the first commit
        self._entries, self._derived = self.store(_ENTRIES), self.output(self.name)
        self.on(self.input(source))(self._derive)

    def check(self) -> list[str]:
        """As `Program.check`. Raises: InvalidArgument (also for other inputs, outputs or stores)."""
        source, handlers = self.of.source, sum(map(len, self.handlers.values()))
        parts = *self.inputs, *self.outputs, *self.stores, *self.tables, *self.replicas
        if parts != (source, self.name, _ENTRIES) or handlers > 1:
            raise InvalidArgument(
                f"{self.name} derives a table, and nothing else: put handlers, inputs and stores into another "
                "processor"
            )
        return list(super().check())

    def _derive(self, event: Event) -> None:
        """Write how a change of a row changes its entries."""
        key = event.key
        if key is None:  # such events are no rows
            return
        found = self._entries.get(key)
        before = frozenset() if found is None else _unpacked(found)
        after = self._made.entries(key, event.value).keys()
        version = pack_version(event.commit_timestamp, event.txn_id or NO_TXN)
        headers = [(VERSION_HEADER, version)]
        for entry in sorted(before - after):
            self._derived.write(None, entry, headers)
        for entry in sorted(after - before):
            self._derived.write(b"", entry, headers)
        if before != after:
            if after:
                self._entries[key] = _packed(after)
            else:
                del self._entries[key]

    def prepare(self, client: Client) -> None:
        """As of `Program`: create the derived table, unless it exists.

        If the source was compacted, the processor begins with the base, and reads the commits after it.
        """
        of = self.of
        client.derive(of.source, of.name, self.function, version=of.version, asynchronous=True)
        derived = derived_from(client.describe(self.name).settings)
        self._since = 0 if derived is None else derived.since
        self.start = self._since or "begin"

    def check_created(self, client: Client) -> None:
        """As of `Program`: a processor that has consumed nothing yet has to make the whole table.

        Raises: InvalidArgument (older changes of the source are deleted), IllegalState (the table has rows).
        """
        if _has_begun(client.processor(self.name)):
            return
        self._base(client)
        with closing(client.reader_ports().committed_log(_ASK_S)) as log:
            search = HistorySearch(log, self.name, _ASK_S)
            used = bool(search.commits(0, _EVERY, 1)) or search.is_cut()
        # Another worker may have begun meanwhile: its commits raise sequences, too.
        if used and not _has_begun(client.processor(self.name)):
            raise IllegalState(
                f"{self.name} has rows of an earlier processor: take a higher version, or delete the table first"
            )

    def first_events(
        self, client: Client, tasks: Collection[int]
    ) -> Iterator[tuple[list[Event], list[int]]]:
        """As of `Program`: the rows of the base that the processor begins with.

        Raises: as `check_created`, SnapshotExpired (the base is deleted).
        """
        base = self._base(client) if tasks else None
        if base is None:
            return
        with closing(client.reader_ports().committed_log(_ASK_S)) as log:
            for run in base_runs(log, self.of.source, base, _ASK_S):
                events, of_events = list[Event](), list[int]()
                for event in run.events(self.of.source):
                    if event.key is None or (task := task_of(event.key, self.tasks)) not in tasks:
                        continue
                    at, txn_id = unpack_version(dict(event.headers).get(VERSION_HEADER))
                    events.append(event._replace(headers=[], commit_timestamp=at, txn_id=txn_id))
                    of_events.append(task)
                    if len(events) == _AT_ONCE:
                        yield events, of_events
                        events, of_events = [], []
                if events:
                    yield events, of_events

    def _base(self, client: Client) -> BaseRow | None:
        """The base that the processor begins with; None if it begins with the first commit.

        Raises: InvalidArgument (the source begins with another base).
        """
        base = client.describe(self.of.source).base
        if (0 if base is None else base.timestamp) == self._since:
            return base
        was = f"with its base of {to_text(self._since)}" if self._since else "with its first commit"
        now = "without a base" if base is None else f"with its base of {to_text(base.timestamp)}"
        raise InvalidArgument(
            f"{self.name} would begin {was}, and {self.of.source} begins {now} now, so changes in between are "
            f"deleted: delete the processor {self.name}, and the table, then start it again"
        )


def _has_begun(processor: ProcessorInfo) -> bool:
    """Whether a worker has committed anything, be it a part of the base alone."""
    return any(task.sequence for task in processor.tasks)


def _packed(entries: Collection[bytes]) -> bytes:
    return b"".join(len(one).to_bytes(_SIZE, "big") + one for one in sorted(entries))


def _unpacked(data: bytes) -> frozenset[bytes]:
    found, at = set(), 0
    while at < len(data):
        start = at + _SIZE
        at = start + int.from_bytes(data[at:start], "big")
        found.add(data[start:at])
    return frozenset(found)
