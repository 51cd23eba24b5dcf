"""Lists dead letters of processors, and sends them back to their inputs.

A letter goes back in the commit that moves a position in the stream of dead letters. The position belongs to a
processor of its own, ``<stream>-retry``. So each letter is sent once, whatever happens to the process that sends.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.client.client import Client
from anabranch.errors import InvalidArgument, UnknownProcessor
from anabranch.protocol.legal_names import is_plain, split_stream
from anabranch.protocol.limits import copied_time
from anabranch.reading.slices import Piece, split_pieces
from anabranch.reading.task_reader import TaskReader
from anabranch.types import Event, TaskOwnership

_EVENT = re.compile(r"(.+)\[(\d+)\]@(\d+)")
_TIMER = re.compile(r"(.+)@(\d+)")
_PLACE = re.compile(r"(\d+)@(\d+)")
_OWN = ("error", "from")  # the last headers of a letter
_LEFT_OUT = "left_out"
_CUT_BYTES = 256 << 10  # about the size of a commit
_WAIT_S = 0.25
_READ_S = 30.0


class Letter(NamedTuple):
    """A dead letter. ``kind``: event, timer (also of a window), or unknown. ``place``: where the event came from.

    ``stream``: its input. ``obstacle``: why it can't be sent back; empty if it can.
    """

    event: Event
    kind: str
    place: str
    stream: str
    error: str
    obstacle: str
    headers: list[tuple[str, bytes | None]]

    @classmethod
    def of(cls, event: Event) -> Letter:
        """Read an event of a dead-letter stream."""
        headers = list(event.headers)
        left_out = headers.pop()[1] if headers and headers[-1][0] == _LEFT_OUT else None
        own = {name: (value or b"").decode("utf-8", "replace") for name, value in headers[-2:]}
        if tuple(own) != _OWN:
            return cls(event, "unknown", "", "", "", "it is no dead letter", list(event.headers))
        place, obstacle, stream = own["from"], "", ""
        if found := _EVENT.fullmatch(place):
            kind, stream = "event", found[1]
            if is_plain(stream):
                obstacle = "its input is a plain topic"
        else:
            kind, obstacle = "timer", "it is of a timer or window, not of an event"
            if not _TIMER.fullmatch(place):
                kind, obstacle = "unknown", "its header `from` names no event"
        if left_out is not None:
            obstacle = (
                f"it has no {left_out.decode('utf-8', 'replace')}: they were too big for the stream"
            )
        return cls(event, kind, place, stream, own["error"], obstacle, headers[:-2])


@dataclass(slots=True)
class Retried:
    """The effects of `retry`. ``sent``: letters by input. ``passed``: letters that it passed over.

    ``stopped``: the first letter that it could not send back. ``lost``: commits that retention had deleted in part.
    ``more``: whether there were more letters than allowed.
    """

    sent: Counter[str] = field(default_factory=Counter)
    passed: int = 0
    stopped: Letter | None = None
    lost: int = 0
    more: bool = False


def retry_processor(stream: str) -> str:
    """The processor that has the position in a dead-letter stream."""
    return f"{stream}-retry"


def letters(client: Client, stream: str, *, sent: bool = False) -> Iterator[Letter]:
    """The letters that were neither sent back nor passed over, oldest first; with ``sent`` all letters.

    Raises: UnknownStream, SnapshotExpired, NotReady, DeadlineExceeded.
    """
    until = client.snapshot(stream)
    info = None
    if not sent:
        with suppress(UnknownProcessor):
            info = client.processor(retry_processor(stream))
    if info is None:
        with until.read(stream) as every:
            yield from map(Letter.of, every)
        return
    own = TaskOwnership(
        info.processor, info.task_count, info.inputs, {one.task: one for one in info.tasks}, b"",
        info.stores, info.incarnation,
    )  # fmt: skip
    with closing(client.read([stream], ownership=own)) as reader:
        for pieces, _ in _read(reader, until.timestamp, Retried()):
            for piece in pieces:
                yield from map(Letter.of, piece.events)


def letter_at(client: Client, stream: str, place: str) -> Letter:
    """The letter at PARTITION@OFFSET. Raises: InvalidArgument, and as `letters`."""
    found = _PLACE.fullmatch(place)
    if found is None:
        raise InvalidArgument(
            f"{place!r} is no place of a letter: PARTITION@OFFSET, as `dead list` shows it"
        )
    partition, offset = map(int, found.groups())
    for letter in letters(client, stream, sent=True):
        if (letter.event.partition, letter.event.offset) == (partition, offset):
            return letter
    raise InvalidArgument(f"{stream} has no letter at {place}")


def retry(client: Client, stream: str, *, most: int, pass_over: bool = False) -> Retried:
    """Send the letters that are there when the call begins back to their inputs, oldest first, each exactly once.

    A letter that can't be sent back ends the call, or is passed over (``pass_over``). A letter that is sent
    or passed over stays in the stream, and is not sent again.

    Raises: OwnershipLost (another call of this runs), UnknownStream, NotAuthorized, NotReady, DeadlineExceeded. To
    call it again is always safe.
    """
    until = client.snapshot(stream).timestamp
    name, done = retry_processor(stream), Retried()
    client.create_processor(name, [stream], tasks=1)
    ownership = client.take_tasks(name)
    try:
        with closing(client.read([stream], ownership=ownership)) as reader:
            for pieces, later in _read(reader, until, done):
                found = [Letter.of(event) for piece in pieces for event in piece.events]
                taken = _taken(found, most - sum(done.sent.values()) - done.passed, done, pass_over)
                handled, left = split_pieces(pieces, len(taken))
                if handled:
                    _send(client, ownership, taken, reader, left + later)
                for letter in taken:
                    if letter.obstacle:
                        done.passed += 1
                    else:
                        done.sent[letter.stream] += 1
                if left:
                    break
    finally:
        client.release_tasks(ownership)
    return done


def _read(
    reader: TaskReader, until: int, done: Retried
) -> Iterator[tuple[list[Piece], list[Piece]]]:
    """The reader's letters up to a commit timestamp, and later ones that the reader returned with them."""

    def lose(_: str, count: int, __: object) -> None:
        done.lost += count

    reader.on_lost = lose
    clock = reader.clock
    give_up = clock.monotonic() + _READ_S
    while clock.monotonic() < give_up:
        pieces = reader.cut(clock.monotonic() + _WAIT_S, _CUT_BYTES)
        if not pieces and not reader.is_behind:
            return
        if pieces:
            give_up = clock.monotonic() + _READ_S
            early = [piece for piece in pieces if piece.timestamp <= until]
            if early:
                yield early, pieces[len(early) :]
            if len(early) < len(pieces):
                return


def _taken(found: list[Letter], room: int, done: Retried, pass_over: bool) -> list[Letter]:
    """The letters that this call handles, from the first on, up to ``room``."""
    if len(found) > room:
        done.more, found = True, found[:room]
    if not pass_over:
        for at, letter in enumerate(found):
            if letter.obstacle:
                done.stopped, done.more = letter, False
                return found[:at]
    return found


def _send(
    client: Client, ownership: TaskOwnership, taken: Iterable[Letter], reader: TaskReader,
    left: list[Piece],
) -> None:  # fmt: skip
    back = [letter for letter in taken if not letter.obstacle]
    client.check_outputs(ownership.processor, {letter.stream for letter in back})
    with client.begin(split_stream(ownership.processor)[0], ownership=ownership) as txn:
        for letter in back:
            event = letter.event
            txn.write(
                letter.stream,
                event.value,
                key=event.key,
                headers=letter.headers,
                timestamp=copied_time(event.timestamp),
            )
        txn.commit(consumed=reader.consumed(left=left))
