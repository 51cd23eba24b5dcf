"""A stream's history for people: its newest epochs and their commits, and a picture of them (SVG)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from math import log10, sqrt

from anabranch.errors import count_of
from anabranch.protocol import defaults
from anabranch.protocol.hybrid_time import to_ms, to_text
from anabranch.protocol.ids import NO_TXN, segment_epoch, segment_number
from anabranch.protocol.partitioner import SPACE
from anabranch.protocol.schemas.records import CommitRecord, EpochRecord, EpochSegment
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.history import HistorySearch


@dataclass(slots=True)
class History:
    """The newest epochs of a stream, oldest first, and their commits in order."""

    epochs: list[EpochRecord] = field(default_factory=list)
    commits: list[CommitRecord] = field(default_factory=list)

    def add(self, record: EpochRecord | CommitRecord, last: int) -> None:
        """Add a record. If that makes more than ``last`` epochs, drop the oldest epoch with its commits."""
        if isinstance(record, CommitRecord):
            self.commits.append(record)
            return
        if self.epochs and self.epochs[-1].stream_epoch == record.stream_epoch:
            return  # an epoch that is logged again
        self.epochs.append(record)
        if len(self.epochs) > last:
            del self.epochs[:-last]
            first = self.epochs[0].stream_epoch
            self.commits = [c for c in self.commits if c.stream_epoch >= first]

    def of_epoch(self, stream_epoch: int) -> list[CommitRecord]:
        return [c for c in self.commits if c.stream_epoch == stream_epoch]


def read_history(
    ports: ReaderPorts, stream: str, *, last: int, timeout: float = defaults.TIMEOUT_S
) -> History:
    """The newest epochs of a stream that exists. ``last``: at most this many. ``timeout``: seconds.

    Raises:
        NotReady: the end was not reached within the timeout.
    """
    history = History()
    with closing(ports.committed_log(timeout)) as source:
        for record in HistorySearch(source, stream, timeout).newest_epochs(last):
            history.add(record, last)
    return history


class Follower:
    """Follows a stream's history, and keeps only the newest records. For one thread; `close` it."""

    EPOCHS, RECORDS = 40, 3000

    def __init__(self, ports: ReaderPorts, stream: str, timeout: float) -> None:
        """``timeout``: seconds for each request of a `read`."""
        self._source = ports.committed_log(timeout)
        self._search = HistorySearch(self._source, stream, timeout)
        self._next = self._end = 0
        self.history = History()

    def read(self) -> History:
        """The newest epochs and commits as of now. Raises: NotReady, SnapshotExpired, NotAuthorized."""
        self._search.last()
        end = self._search.end
        if end == self._end:
            return self.history
        if end - self._next > self.RECORDS:
            self._next, self.history = end - self.RECORDS, History()
        found = list(self._search.since(self._next))
        if found and not self.history.epochs and (epoch := self._search.epoch(found[0])):
            self.history.add(epoch, self.EPOCHS)
        for at in found:
            self.history.add(at.record, self.EPOCHS)
            self._next = at.offset + 1
        del self.history.commits[: -self.RECORDS]
        self._end = end
        return self.history

    def close(self) -> None:
        self._source.close()


INK = "#1f2933"
SOFT = "#616e7c"
LINE = "#cbd2d9"
WATER = ("#2b6cb0", "#3182ce", "#2c5282", "#4a90d9")
ROLLED = "#d69e2e"
ROLLED_DARK = "#975a16"
SCALED = "#2f855a"
FONT = "Helvetica, Arial, sans-serif"
# Margins.
LEFT = 78.0
RIGHT = 46.0
# Least and greatest width of the picture: few epochs are stretched, many are compressed.
NARROW = 1080.0
WIDE = 3200.0
_TOP = 132.0
_LABEL = 62.0  # least width of an epoch that gets its own heading
_TEXT = 6.2  # average width of a letter at size 12

_ROLLED_TOLD = (
    "rolled in: a transaction that is older than the scaling commits. The layout that it wrote by opens once "
    "more, takes its events, and is sealed again"
)


def draw(epochs: Sequence[EpochRecord], commits: Sequence[CommitRecord], title: str) -> str:
    """An SVG of a stream's history.

    ``epochs`` (at least one) and ``commits`` are in the history's order. Commits of other epochs are not shown.
    """
    if not epochs:
        raise ValueError("a stream has at least one epoch")
    return _Picture(epochs, commits, title).svg()


class _Picture:
    def __init__(
        self, epochs: Sequence[EpochRecord], commits: Sequence[CommitRecord], title: str
    ) -> None:
        self._epochs = epochs
        self._title = title
        self._rolled = rolled_of(epochs)
        self._arms = arms_of(epochs, self._rolled)
        self._by_id = {arm.segment.segment_id: arm for arm in self._arms}
        places = {epoch.stream_epoch: at for at, epoch in enumerate(epochs)}
        self._commits: list[list[CommitRecord]] = [[] for _ in epochs]
        for commit in commits:
            if commit.stream_epoch in places:
                self._commits[places[commit.stream_epoch]].append(commit)
        self._bounds, self._gap = columns_of([len(each) for each in self._commits])
        self._width = self._bounds[-1] + RIGHT
        widest = max(len(epoch.segments) for epoch in epochs)
        self._depth = float(min(900, max(300, 34 * widest)))
        self._gradients: dict[tuple[str, str], str] = {}

    def svg(self) -> str:
        body = [
            *self._flows(),
            *(self._arm(arm) for arm in self._arms),
            *self._ripples(),
            *self._borders(),
            *self._headings(),
            *self._rolled_in(),
            *self._names(),
            *self._axes(),
            *self._words(),
        ]
        width, height = round(self._width), round(_TOP + self._depth + 192)
        fades = "".join(
            f"<linearGradient id='{name}'><stop offset='0' stop-color='{one}'/>"
            f"<stop offset='1' stop-color='{other}'/></linearGradient>"
            for (one, other), name in self._gradients.items()
        )
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' "
            f"height='{height}' font-family='{FONT}' role='img'><title>{_safe(self._title)}</title>"
            f"<defs>{fades}</defs><rect width='{width}' height='{height}' fill='#fff'/>"
            f"{''.join(body)}</svg>\n"
        )

    # -- water ------------------------------------------------------------------------------------------

    def _y(self, position: float) -> float:
        return _TOP + position / SPACE * self._depth

    def _inside(self, segment: EpochSegment, position: float) -> float:
        """The height of a key position in a segment's band, inside its banks."""
        top, bottom = self._y(segment.low), self._y(segment.high)
        bank = min(7.0, (bottom - top) * 0.14)
        share = (position - segment.low) / (segment.high - segment.low)
        return top + bank + share * (bottom - top - 2 * bank)

    def _span(self, arm: Arm) -> tuple[float, float]:
        """Left and right end of an arm, without the flows to and from other arms."""
        first, last = self._bounds[arm.first], self._bounds[arm.last + 1]
        start = first if arm.first == 0 else first + self._gap / 2
        end = last if arm.last == len(self._epochs) - 1 else last - self._gap / 2
        return start, end

    def _arm(self, arm: Arm) -> str:
        start, end = self._span(arm)
        s = arm.segment
        top, bottom = self._inside(s, s.low), self._inside(s, s.high)
        told = (
            f"segment {arm.name}, partition {s.partition} from offset {s.start_offset:,}, "
            f"keys {s.low:#010x} to {s.high:#x}"
        )
        made = (
            f"<rect class='arm' data-segment='{s.segment_id}' x='{start:.1f}' y='{top:.1f}' "
            f"width='{end - start:.1f}' height='{bottom - top:.1f}' fill='{_color(arm)}'>"
            f"<title>{told}</title></rect>"
        )
        open_end = arm.last == len(self._epochs) - 1
        if open_end:
            middle, tip = (top + bottom) / 2, min(14.0, (bottom - top) / 2)
            made += (
                f"<path d='M{end:.1f},{top:.1f} L{end + tip:.1f},{middle:.1f} L{end:.1f},{bottom:.1f} Z' "
                f"fill='{_color(arm)}'/>"
            )
        return made

    def _names(self) -> Iterable[str]:
        """The segments' names, shortened to fit, drawn over the strokes and next to the dots."""
        for arm in self._arms:
            (start, end), s = self._span(arm), arm.segment
            top, bottom = self._inside(s, s.low), self._inside(s, s.high)
            for words in (f"{arm.name}  p{s.partition}", arm.name, str(arm.number)):
                if bottom - top >= 12 and (len(words) + 2) * _TEXT <= end - start:
                    y = min(top + 16, (top + bottom) / 2 + 4)
                    yield _text(start + 6, y, words, "#fff", weight="bold")
                    break

    def _flows(self) -> Iterable[str]:
        """The flow from a sealed segment to each of its successors, by key range."""
        for at in range(1, len(self._epochs)):
            before = [arm for arm in self._arms if arm.last == at - 1]
            after = [arm for arm in self._arms if arm.first == at]
            for one in before:
                for other in after:
                    low = max(one.segment.low, other.segment.low)
                    high = min(one.segment.high, other.segment.high)
                    if low < high:
                        yield self._flow(one, other, low, high)

    def _flow(self, one: Arm, other: Arm, low: int, high: int) -> str:
        a, b = self._span(one)[1], self._span(other)[0]
        middle = (a + b) / 2
        left = [self._inside(one.segment, p) for p in (low, high)]
        right = [self._inside(other.segment, p) for p in (low, high)]
        name = self._gradients.setdefault(
            (_color(one), _color(other)), f"flow{len(self._gradients)}"
        )
        fill = _color(one) if _color(one) == _color(other) else f"url(#{name})"
        return (
            f"<path class='flow' d='M{a:.1f},{left[0]:.1f} C{middle:.1f},{left[0]:.1f} "
            f"{middle:.1f},{right[0]:.1f} {b:.1f},{right[0]:.1f} L{b:.1f},{right[1]:.1f} "
            f"C{middle:.1f},{right[1]:.1f} {middle:.1f},{left[1]:.1f} {a:.1f},{left[1]:.1f} Z' "
            f"fill='{fill}' fill-opacity='0.62'/>"
        )

    # -- commits ----------------------------------------------------------------------------------------

    def _commit_x(self, at: int, index: int) -> float:
        start, end = self._bounds[at] + self._gap / 2 + 3, self._bounds[at + 1] - self._gap / 2 - 3
        return start + (end - start) * (index + 0.5) / len(self._commits[at])

    def _ripples(self) -> Iterable[str]:
        """A light stroke for each commit with events; strokes that would touch are joined."""
        for at, commits in enumerate(self._commits):
            if self._rolled[at]:
                continue
            last: dict[int, float] = {}
            for index, commit in enumerate(commits):
                x = self._commit_x(at, index)
                for part in commit.segments:
                    arm = self._by_id.get(part.segment_id)
                    if arm is None or x - last.get(part.segment_id, 0.0) < 2.5:
                        continue
                    last[part.segment_id] = x
                    s = arm.segment
                    top, bottom = self._inside(s, s.low), self._inside(s, s.high)
                    yield (
                        f"<path class='commit' d='M{x:.1f},{top + 1:.1f} V{bottom - 1:.1f}' "
                        "stroke='#fff' stroke-opacity='0.5' stroke-width='1.2'/>"
                    )

    def _rolled_in(self) -> Iterable[str]:
        """The transactions of rolling commits: where their events are, and how many."""
        base = _TOP + self._depth
        free = LEFT
        for at, commits in enumerate(self._commits):
            if not self._rolled[at] or not commits:
                continue
            for index, commit in enumerate(commits):
                yield self._drop(at, self._commit_x(at, index), commit)
            name = "plain writes" if commits[0].txn_id == NO_TXN else f"txn {_short(commits[0])}"
            if len(commits) > 1:
                name += f" +{len(commits) - 1}"
            words = count_of(sum(map(_count, commits)), "event")
            x = (self._bounds[at] + self._bounds[at + 1]) / 2
            half = max(len(words), len(name)) * _TEXT / 2
            if x - half >= free:
                yield _text(x, base + 26, name, ROLLED_DARK, "middle", weight="bold")
                yield _text(x, base + 41, words, ROLLED_DARK, "middle")
                free = x + half + 8

    def _drop(self, at: int, x: float, commit: CommitRecord) -> str:
        base = _TOP + self._depth
        spots = []
        for part in commit.segments:
            arm = self._by_id.get(part.segment_id)
            if arm is not None:
                middle = (arm.segment.low + arm.segment.high) / 2
                spots.append((self._inside(arm.segment, middle), part.count))
        top = min((y for y, _ in spots), default=base)
        told = f"{commit.txn_id.hex()}: {count_of(_count(commit), 'event')} by the layout of epoch "
        dots = "".join(
            f"<circle cx='{x:.1f}' cy='{y:.1f}' r='{3 + min(4.0, log10(events + 1)):.1f}' "
            f"fill='{ROLLED_DARK}' stroke='#fff' stroke-width='1.4'/>"
            for y, events in spots
        )
        return (
            f"<g class='rolled-in'><title>{told}{self._epochs[at].reference_epoch}</title>"
            f"<path d='M{x:.1f},{top:.1f} V{base + 12:.1f}' stroke='{ROLLED_DARK}' "
            f"stroke-width='1.4'/>{dots}</g>"
        )

    # -- title, scales, legend ----------------------------------------------------------------------------

    def _borders(self) -> Iterable[str]:
        for at in range(1, len(self._epochs)):
            epoch = self._epochs[at]
            if epoch.reference_epoch == epoch.stream_epoch:
                x = self._bounds[at]
                yield (
                    f"<path class='scaling' d='M{x:.1f},{_TOP - 12:.1f} V{_TOP + self._depth + 8:.1f}' "
                    f"stroke='{SCALED}' stroke-width='1.6' stroke-dasharray='4 3'/>"
                )

    def _headings(self) -> Iterable[str]:
        free = 0.0
        for at, epoch in enumerate(self._epochs):
            a, b = self._bounds[at], self._bounds[at + 1]
            x = (a + b) / 2
            own = epoch.reference_epoch == epoch.stream_epoch
            color = ROLLED_DARK if self._rolled[at] else SCALED if own and at else SOFT
            thick = 5 if own or self._rolled[at] else 2
            yield (
                f"<rect x='{a + 2:.1f}' y='{_TOP - 20:.1f}' width='{b - a - 4:.1f}' "
                f"height='{thick}' rx='2' fill='{color}'/>"
            )
            lines = self._said_of(at)
            half = max(len(line) for line in lines) * _TEXT / 2
            if b - a < _LABEL:
                lines, half = (str(epoch.stream_epoch),), 9.0
            if x - half < free:
                continue
            free = x + half + 6
            for i, line in enumerate(reversed(lines)):
                weight = "bold" if i == len(lines) - 1 else "normal"
                yield _text(x, _TOP - 27 - 14 * i, line, color, "middle", weight=weight)

    def _said_of(self, at: int) -> tuple[str, ...]:
        epoch = self._epochs[at]
        name = f"epoch {epoch.stream_epoch}"
        if self._rolled[at]:
            return name, f"copy of {epoch.reference_epoch}"
        if epoch.reference_epoch != epoch.stream_epoch:
            return name, f"back to {epoch.reference_epoch}"
        count = len(epoch.segments)
        if not at:
            return name, count_of(count, "segment")
        return name, f"scaled to {count}"

    def _axes(self) -> Iterable[str]:
        base = _TOP + self._depth
        x = LEFT - 16
        yield f"<path d='M{x},{_TOP} V{base}' stroke='{LINE}' stroke-width='1'/>"
        for share, words in ((0, "0"), (0.5, "2³¹"), (1, "2³²")):
            y = _TOP + share * self._depth
            yield f"<path d='M{x - 4},{y} H{x}' stroke='{LINE}'/>"
            yield _text(x - 8, y + 4, words, SOFT, "end")
        middle = _TOP + self._depth / 4
        yield (
            f"<text transform='translate({x - 12:.1f},{middle:.1f}) rotate(-90)' font-size='12' "
            f"fill='{SOFT}' text-anchor='middle'>hash of the key</text>"
        )
        line = base + 58
        yield f"<path d='M{LEFT},{line} H{self._bounds[-1]:.1f}' stroke='{LINE}' stroke-width='1'/>"
        start = to_ms(self._epochs[0].timestamp)
        free = 0.0
        for at, epoch in enumerate(self._epochs):
            passed = (to_ms(epoch.timestamp) - start) / 1000
            words = _seconds(passed)
            tick = self._bounds[at]
            half = len(words) * _TEXT / 2
            if tick - half >= free:
                yield f"<path d='M{tick:.1f},{line} v5' stroke='{SOFT}'/>"
                yield _text(tick, line + 18, words, SOFT, "middle")
                free = tick + half + 12

    def _words(self) -> Iterable[str]:
        count = sum(map(len, self._commits))
        yield _text(24, 32, self._title, INK, size=19, weight="bold")
        yield _text(
            24,
            54,
            f"{count_of(len(self._epochs), 'epoch')}, {count_of(count, 'commit')}, from "
            f"{to_text(self._epochs[0].timestamp)}. Every key is in one segment at a time; read from left "
            "to right, each key's events are in order.",
            SOFT,
            size=13,
        )
        base = _TOP + self._depth + 104
        entries = [
            (
                WATER[0],
                "a segment: a range of keys on a partition (number@epoch, p partition); strokes are commits",
            ),
            (SCALED, "a scaling: segments are sealed, others take their keys"),
        ]
        if any(self._rolled):
            entries += [
                (ROLLED, _ROLLED_TOLD),
                (ROLLED_DARK, "where its events went, and how many"),
            ]
        for i, (color, words) in enumerate(entries):
            y = base + 20 * i
            if color == SCALED:
                yield f"<path d='M32,{y - 11} v14' stroke='{color}' stroke-width='1.6' stroke-dasharray='4 3'/>"
            elif color == ROLLED_DARK:
                yield f"<circle cx='32' cy='{y - 4}' r='5' fill='{color}'/>"
            else:
                yield f"<rect x='24' y='{y - 10}' width='17' height='11' fill='{color}'/>"
            yield _text(50, y, words, SOFT)


def _color(arm: Arm) -> str:
    return ROLLED if arm.rolled else WATER[arm.number % len(WATER)]


def _text(
    x: float,
    y: float,
    words: str,
    fill: str,
    at: str = "start",
    *,
    size: int = 12,
    weight: str = "normal",
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size}' fill='{fill}' text-anchor='{at}' "
        f"font-weight='{weight}'>{_safe(words)}</text>"
    )


def _safe(words: str) -> str:
    """Escaped text, without characters that XML does not allow."""
    return escape("".join(c if c >= " " else " " for c in words))


def _short(commit: CommitRecord) -> str:
    return commit.txn_id.hex()[-6:]


def _count(commit: CommitRecord) -> int:
    return sum(part.count for part in commit.segments)


def _seconds(passed: float) -> str:
    if passed >= 3600:
        return f"{passed / 3600:,.1f} h"
    if passed >= 100:
        return f"{passed / 60:.1f} min"
    return f"{passed:.1f} s"


@dataclass(slots=True)
class Arm:
    """A segment in the picture, and the first and last epoch (index in the history) in which it was open."""

    segment: EpochSegment
    first: int
    last: int
    rolled: bool

    @property
    def number(self) -> int:
        return segment_number(self.segment.segment_id)

    @property
    def name(self) -> str:
        return f"{self.number}@{segment_epoch(self.segment.segment_id)}"


def rolled_of(epochs: Sequence[EpochRecord]) -> list[bool]:
    """For each epoch, whether it is the copy of a reference epoch, made for rolling commits."""
    present = epochs[0].reference_epoch
    found = []
    for epoch in epochs:
        if epoch.reference_epoch == epoch.stream_epoch:
            present = epoch.stream_epoch
        found.append(epoch.reference_epoch != present)
    return found


def arms_of(epochs: Sequence[EpochRecord], rolled: Sequence[bool]) -> list[Arm]:
    """All segments, in the order in which they open."""
    arms: list[Arm] = []
    open_arms: dict[int, Arm] = {}
    for at, epoch in enumerate(epochs):
        now = {}
        for segment in epoch.segments:
            arm = open_arms.get(segment.segment_id)
            if arm is None:
                arm = Arm(segment, at, at, rolled[at])
                arms.append(arm)
            arm.last = at
            now[segment.segment_id] = arm
        open_arms = now
    return arms


def columns_of(counts: Sequence[int]) -> tuple[list[float], float]:
    """Each epoch's left edge, the last epoch's right edge, and the width of the flow between two epochs."""
    least = 118.0 if len(counts) <= 10 else 44.0 if len(counts) <= 40 else 16.0
    widths = [least + min(150.0, 9 * sqrt(count)) for count in counts]
    total = sum(widths)
    factor = min(max(1.0, (NARROW - LEFT - RIGHT) / total), (WIDE - LEFT - RIGHT) / total)
    bounds = [LEFT]
    for width in widths:
        bounds.append(bounds[-1] + width * factor)
    gap = min(46.0, 0.5 * min(b - a for a, b in pairwise(bounds)))
    return bounds, gap
