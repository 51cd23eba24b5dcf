"""Facts that a leader keeps in memory alone: they begin afresh with each leader, and follow the log.

A turn changes its own *draft* of a part. `LeaderMemory.follow` takes the drafts over when the turn's round is on
the log, or had nothing to log. So a round that is not written leaves nothing behind. Times are monotonic ms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Self, TypeVar

from anabranch.core.journal.table_writes import Write
from anabranch.core.journal.usage import Place
from anabranch.core.read_locks import WindowDraft, Windows
from anabranch.core.state import State
from anabranch.core.stream_states import ACTIVE

IN_TROUBLE = "its commit is decided, but its merge does not go on"  # the answer to askers
K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")


class Kept(Generic[K, V]):
    """A dict; or, ``over`` another one, a turn's changes of that."""

    __slots__ = ("_over", "_rows")

    def __init__(self, over: Kept[K, V] | None = None) -> None:
        self._over = over
        self._rows: dict[K, V | None] = {}

    def get(self, key: K, default: D) -> V | D:
        if key in self._rows:
            found = self._rows[key]
            return default if found is None else found
        return default if self._over is None else self._over.get(key, default)

    def put(self, key: K, value: V | None) -> None:
        """Set a value; None removes the key."""
        if value is None and self._over is None:
            self._rows.pop(key, None)
        else:
            self._rows[key] = value

    def as_dict(self) -> dict[K, V]:
        """All that is kept."""
        rows: dict[K, V | None] = {} if self._over is None else {**self._over.as_dict()}
        rows |= self._rows
        return {key: value for key, value in rows.items() if value is not None}

    @property
    def changed(self) -> bool:
        """Whether a draft changes anything."""
        return bool(self._rows)

    def follow(self, draft: Kept[K, V]) -> None:
        """Take over the changes of a draft of this."""
        for key, value in draft._rows.items():
            self.put(key, value)

    def forget(self, is_gone: Callable[[K], bool]) -> None:
        """Remove the keys that are gone."""
        for key in [key for key in self._rows if is_gone(key)]:
            self.put(key, None)


class Part:
    """One concern. Its fields are `Kept`, or values that are not changed but replaced."""

    __slots__: tuple[str, ...] = ()

    def draft(self) -> Self:
        """A copy that a turn may change."""
        values = [getattr(self, name) for name in self.__slots__]
        return type(self)(*[Kept(v) if type(v) is Kept else v for v in values])

    def follow(self, draft: Self) -> None:
        """Take over the changes of a draft of this."""
        for name in self.__slots__:
            its = getattr(draft, name)
            if type(its) is not Kept:
                setattr(self, name, its)
            elif its.changed:
                getattr(self, name).follow(its)


@dataclass(slots=True)
class Keepalives(Part):
    """When each open transaction was last heard of, and when silent ones are looked for again.

    ``helpers``: lanes, not its owner's, by which its heartbeats came.
    """

    since_ms: int
    heard: Kept[bytes, int] = field(default_factory=Kept)
    helpers: Kept[bytes, tuple[str, ...]] = field(default_factory=Kept)
    next_check_ms: int = 0

    def last(self, txn_id: bytes) -> int:
        return self.heard.get(txn_id, self.since_ms)


Who = bytes | Place  # a transaction, or the plain writes of a journal partition


class Waiting(NamedTuple):
    """A wait for frozen locks: since when, and when it was last heard of, in ms.

    ``on``: for which transactions, on which table. ``writes``: by table, as far as they are kept. ``freezes``: its
    own locks would be frozen, too.
    """

    since_ms: int
    heard_ms: int
    on: tuple[tuple[bytes, str], ...]
    writes: tuple[tuple[str, Write], ...]
    freezes: bool


@dataclass(slots=True)
class Merging(Part):
    """When decided commits and streams' layouts may go on; by transaction, and by stream.

    ``rolls_by_ms``: how long a rolling commit may wait for others. ``to_carry``: big ones that wait while another
    one is carried. ``trouble``: why a carried one does not go on. ``may_grow_ms``: when to ask for partitions.
    ``waiting``: who waits for frozen locks.
    """

    not_before_ms: Kept[bytes, int] = field(default_factory=Kept)
    rolls_by_ms: Kept[bytes, int] = field(default_factory=Kept)
    to_carry: Kept[bytes, bool] = field(default_factory=Kept)
    trouble: Kept[bytes, str] = field(default_factory=Kept)
    may_roll_ms: Kept[str, int] = field(default_factory=Kept)
    may_grow_ms: Kept[str, int] = field(default_factory=Kept)
    waiting: Kept[Who, Waiting] = field(default_factory=Kept)

    def forget_txn(self, txn_id: bytes) -> None:
        self.not_before_ms.put(txn_id, None)
        self.rolls_by_ms.put(txn_id, None)
        self.to_carry.put(txn_id, None)
        self.trouble.put(txn_id, None)
        self.waiting.put(txn_id, None)

    def forget_stream(self, stream: str) -> None:
        self.may_roll_ms.put(stream, None)
        self.may_grow_ms.put(stream, None)
        self.waiting.forget(lambda who: who[0] == stream)


@dataclass(slots=True)
class Cleaning(Part):
    """When and where journals and histories are shortened.

    ``cuttable_ms``: since when something can be cut there. ``spare``: offset below which a history names no event
    that is left. ``crowded``: where runs may have to move.
    """

    next_ms: int = 0
    cuttable_ms: Kept[Place, int] = field(default_factory=Kept)
    spare: Kept[str, int] = field(default_factory=Kept)
    crowded: tuple[Place, ...] = ()
    may_move_ms: Kept[Place, int] = field(default_factory=Kept)

    def forget_stream(self, stream: str) -> None:
        self.spare.put(stream, None)
        self.crowded = tuple(place for place in self.crowded if place[0] != stream)
        self.may_move_ms.forget(lambda place: place[0] == stream)
        self.cuttable_ms.forget(lambda place: place[0] == stream)


@dataclass(slots=True)
class Histories(Part):
    """Commits in each stream's history since its last EPOCH record. Each round counts: its draft is small."""

    since_epoch: Kept[str, int] = field(default_factory=Kept)


@dataclass(slots=True)
class LaneSeen:
    """A lane whose commands are read. ``end``: their end offset, as read last. ``trouble``: why they are not.

    ``read_ms``: each command that was there at this time is decided, by this round at the latest. ``well_ms``: when
    they could be read last, as far as some transaction's silence asked.
    """

    end: int = 0
    read_ms: int = -1
    well_ms: int = -1
    trouble: str = ""

    def usage(self) -> Mapping[str, int]:
        """Units of work that it was charged in all by this leader, and those that it owes."""
        return {}


@dataclass(slots=True)
class LeaderMemory:
    """All that decisions see beside the fold and the index.

    ``written``: what carried transactions write, by table, as far as somebody asked: it follows from the index. The
    shell sets the last five: streams in trouble and why, transactions with a carrier, carried ones with
    refused chunks and why, foreign records by stream, lanes that are not blocked.
    """

    keepalives: Keepalives
    merging: Merging = field(default_factory=Merging)
    cleaning: Cleaning = field(default_factory=Cleaning)
    histories: Histories = field(default_factory=Histories)
    windows: Windows = field(default_factory=Windows)
    written: dict[bytes, Mapping[str, Write]] = field(default_factory=dict)
    waiting: Mapping[str, str] = field(default_factory=dict)
    carrying: Collection[bytes] = ()
    refused: Mapping[bytes, str] = field(default_factory=dict)
    foreign: Mapping[str, int] = field(default_factory=dict)
    lanes: Mapping[str, LaneSeen] = field(default_factory=dict)

    def trouble(self, txn_id: bytes) -> str:
        """The reason why a carried transaction does not go on by itself; empty if none is known."""
        return self.merging.trouble.get(txn_id, "") or self.refused.get(txn_id, "")

    def follow(
        self,
        keepalives: Keepalives | None,
        merging: Merging | None,
        cleaning: Cleaning | None,
        histories: Histories | None,
        windows: WindowDraft | None,
        ended: Iterable[bytes],
        forgotten: Iterable[str],
    ) -> None:
        """Take over the drafts that a turn made. ``ended``: transactions. ``forgotten``: streams; their names are
        free.
        """
        if keepalives is not None:
            self.keepalives.follow(keepalives)
        if merging is not None:
            self.merging.follow(merging)
        if cleaning is not None:
            self.cleaning.follow(cleaning)
        if histories is not None:
            self.histories.follow(histories)
        if windows is not None:
            self.windows.follow(windows)
        for txn_id in ended:
            self.keepalives.heard.put(txn_id, None)
            self.keepalives.helpers.put(txn_id, None)
            self.merging.forget_txn(txn_id)
            self.written.pop(txn_id, None)
        for stream in forgotten:
            self.merging.forget_stream(stream)
            self.cleaning.forget_stream(stream)
            self.histories.since_epoch.put(stream, None)
            self.windows.forget(stream)


def is_usable(state: State, waiting: Mapping[str, str], stream: str) -> bool:
    """Whether a stream's topics can be read and written, as far as is known."""
    row = state.streams.get(stream)
    return row is not None and row.state == ACTIVE and stream not in waiting


def trouble_of(state: State, memory: LeaderMemory, txn_id: bytes) -> str:
    """The reason why a transaction that is being committed does not go on; empty if none is known."""
    txn = state.open.get(txn_id)
    if txn is not None and txn.row.state == "FINALIZE_IN_PROGRESS":
        for stream in sorted(txn.participants):
            if not is_usable(state, memory.waiting, stream):
                why = memory.waiting.get(stream, "a topic of it is gone")
                return f"{IN_TROUBLE}: {stream}: {why}"
    return memory.trouble(txn_id)
