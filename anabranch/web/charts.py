"""Charts of the last hour: samples in a ring, drawn as SVG; and the lags that charts and pages show."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, NamedTuple

from anabranch.client.client import Client
from anabranch.errors import AnabranchError, NotAuthorized
from anabranch.presentation.load import Load, loads
from anabranch.presentation.rows import group_row, processor_row, span_text
from anabranch.topics.names import mirror_group
from anabranch.types import LeaderInfo, StreamDescription

HOUR_S = 3600.0
_LAG_S = 60.0  # between two questions for the lags of all groups
_LAG_SHARE = 20  # pauses between them are at least this many times as long as they take
_LAG_AGE_S = 5.0  # if a lag is older than this, the chart shows its age
_LEAST_S = 300.0  # of a chart
_GAP_S = 60.0  # no line is drawn between samples that are farther apart
# The size of a chart without its legend, and the room above it.
_WIDTH = 300.0
_HEIGHT = 72.0
_TOP = 6.0


class Sample(NamedTuple):
    """The state of the cluster at monotonic second ``at``; None: not known.

    ``commits``: a second, since the sample before. ``takeovers``: since the sample before.
    """

    at: float
    commits: float | None
    behind: int | None
    journal_bytes: int | None
    takeovers: int | None


class Chart(NamedTuple):
    """A chart of the page. ``now``: its newest value, as text. ``svg``: its picture."""

    title: str
    now: str
    svg: str


class Lags(NamedTuple):
    """Rows of consumer groups and processors, with their lags in streams that the lane may see."""

    groups: list[dict[str, Any]]
    processors: list[dict[str, Any]]

    @property
    def most(self) -> int:
        """The greatest lag, in events."""
        places = [
            *(one for group in self.groups for one in group["streams"]),
            *(one for processor in self.processors for one in processor["inputs"]),
        ]
        return max((one["events_behind"] or 0 for one in places), default=0)


class LagSource:
    """The newest lags, for charts and pages: both show the same answer. Several threads may use it.

    ``newest``: None before the first answer, and after an error. ``at``: when it was given. ``took``: its seconds.
    """

    def __init__(
        self, client: Client, timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``timeout``: seconds for a call of the client."""
        self.newest: Lags | None = None
        self.at = 0.0
        self.took = 0.0
        self._client = client
        self._timeout = timeout
        self._clock = clock
        self._lock = threading.Lock()

    def ask(self, age_s: float, streams: Callable[[], Iterable[StreamDescription]]) -> Lags:
        """Lags that are at most this old. ``streams``: lists what the lane may see. Raises: as the client."""
        with self._lock:
            began = self._clock()
            if self.newest is not None and began - self.at <= age_s:
                return self.newest
            try:
                self.newest = self._asked({one.stream for one in streams()})
            except BaseException:
                self.newest = None
                raise
            finally:
                self.at = self._clock()
                self.took = self.at - began
            return self.newest

    def _asked(self, seen: set[str]) -> Lags:
        client, timeout = self._client, self._timeout
        processors = []
        for scope in sorted({name.partition("/")[0] for name in seen}):
            for one in client.processors(scope, timeout=timeout):
                info = client.processor(one.processor, timeout=timeout)
                processors.append(processor_row(info, client.lag(info, timeout=timeout)))
        mirrors = {mirror_group(one["processor"]): one["processor"] for one in processors}
        groups = [group_row(one) for one in client.groups(timeout=timeout)]
        for group in groups:
            group["mirror_of"] = mirrors.get(group["group"])
            # Brokers show groups to this process that its lane may know nothing of.
            group["streams"] = [one for one in group["streams"] if one["stream"] in seen]
        return Lags(groups, processors)


@dataclass(slots=True)
class Recorder:
    """Takes samples of the cluster, in one thread. ``missing``: why some numbers are not known."""

    client: Client
    timeout: float
    clock: Callable[[], float] = time.monotonic
    samples: deque[Sample] = field(default_factory=deque)
    missing: str = ""
    lags: LagSource = field(init=False)
    loads: Sequence[Load] = ()  # between the last two samples
    _leaders: dict[int, LeaderInfo] = field(default_factory=dict)
    _answered: Sequence[LeaderInfo] = ()  # the leaders in the last sample
    _asked: float = 0.0  # when the leaders were asked; 0: never
    _lag_due: float = 0.0

    def __post_init__(self) -> None:
        self.lags = LagSource(self.client, self.timeout, self.clock)

    def sample(self) -> None:
        """Take a sample. A number stays unknown if the cluster does not answer, or the lane may not see it."""
        commits = journal = takeovers = None
        try:
            leaders = self.client.leaders(timeout=self.timeout)
            self.missing = "; ".join(map(str, leaders.missing.values()))
            now = self.clock()
            self.loads = loads(self._answered, leaders, now - self._asked)
            self._answered = leaders
            commits, takeovers = self._since(leaders, now)
            if not leaders.missing:
                journal = sum(each.uncommitted_bytes for each in leaders)
            self._asked = now
        except AnabranchError as error:
            self.missing = f"{type(error).__name__}: {error}"
            if isinstance(error, NotAuthorized):
                self._forget(commits=None, journal_bytes=None, takeovers=None)
            now = self.clock()
        if now >= self._lag_due:
            self._ask_lag()
        lags = self.lags.newest
        behind = None if lags is None else lags.most
        self.samples.append(Sample(now, commits, behind, journal, takeovers))
        while self.samples[0].at < now - HOUR_S:
            self.samples.popleft()

    def _since(self, leaders: Sequence[LeaderInfo], now: float) -> tuple[float | None, int | None]:
        """Commits a second and takeovers since the last answers of these leaders."""
        committed, takeovers, known = 0, 0, False
        for each in leaders:
            before = self._leaders.get(each.control_partition)
            self._leaders[each.control_partition] = each
            if before is None:
                continue
            known = True
            takeovers += max(0, each.term - before.term)
            if each.term == before.term:  # a new leader counts from where it began
                committed += max(0, each.committed - before.committed)
        if not known or not self._asked:
            return None, None
        return committed / max(0.001, now - self._asked), takeovers

    def _ask_lag(self) -> None:
        try:
            self.lags.ask(_LAG_AGE_S, lambda: self.client.streams(timeout=self.timeout))
        except AnabranchError as error:
            if isinstance(error, NotAuthorized):
                self._forget(behind=None)
        self._lag_due = self.clock() + max(_LAG_S, _LAG_SHARE * self.lags.took)

    def _forget(self, **unknown: Any) -> None:
        """Take these numbers out of all samples: the lane may not see them any more."""
        if "commits" in unknown:
            self.loads = ()
        self.samples = deque(each._replace(**unknown) for each in self.samples)

    def charts(self) -> list[Chart]:
        """The charts as of the last sample; none before the second sample."""
        samples = tuple(self.samples)  # another thread adds to them
        if len(samples) < 2:
            return []
        kinds: tuple[tuple[str, str, Callable[[float], str]], ...] = (
            ("commits", "commits a second", _rate),
            ("behind", "events behind, of the slowest group or processor", _count),
            ("journal_bytes", "of open transactions in journals", size_text),
        )
        now = samples[-1].at
        made = []
        for name, title, text in kinds:
            points = [(each.at - now, getattr(each, name)) for each in samples]
            last = points[-1][1]
            shown = "?" if last is None else text(last)
            svg = line(title, points, text)
            if name == "behind" and (age := now - self.lags.at) >= _LAG_AGE_S:
                title += f", {span_text(age)} ago"
            made.append(Chart(title, shown, svg))
        taken = [(each.at - now, each.takeovers) for each in samples]
        total = sum(number or 0 for _, number in taken)
        known = any(number is not None for _, number in taken)
        title = "takeovers by other controllers"
        made.append(Chart(title, f"{total:,}" if known else "?", bars(title, taken)))
        return made


def _rate(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


def size_text(value: float) -> str:
    """A number of bytes for people, on all pages."""
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:,.0f} {unit}" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} GB"


Points = Sequence[tuple[float, float | None]]  # seconds before now (negative), value


def line(title: str, points: Points, text: Callable[[float], str]) -> str:
    """An SVG of values over the last hour, from 0 to their greatest one."""
    known = [value for _, value in points if value is not None]
    most, since = max(known, default=0.0), _since(points)
    runs: list[list[tuple[float, float]]] = [[]]
    last = None
    for at, value in points:
        if value is None or (last is not None and at - last > _GAP_S):
            runs.append([])
        if value is not None:
            runs[-1].append((_x(at, since), _y(value, most)))
        last = at
    body = ""
    for run in runs:
        if len(run) > 1:
            path = " L".join(f"{x:.1f},{y:.1f}" for x, y in run)
            floor = f"{_HEIGHT:g}"
            body += f"<path class='area' d='M{run[0][0]:.1f},{floor} L{path} L{run[-1][0]:.1f},{floor} Z'/>"
            body += f"<path class='line' d='M{path}'/>"
    told = f"{title}, in the last hour: " + (f"at most {text(most)}" if known else "not known")
    label = f"{text(most)} at most" if known else "not known"
    return _svg(told, label, since, body)


def bars(title: str, points: Points) -> str:
    """An SVG with a bar at each time that something happened."""
    times, since = [(at, int(number)) for at, number in points if number], _since(points)
    body = "".join(
        f"<rect class='bar' x='{min(_WIDTH - 3, _x(at, since)):.1f}' y='{_TOP:g}' width='3' "
        f"height='{_HEIGHT - _TOP:g}'><title>{number} {span_text(-at)} ago</title></rect>"
        for at, number in times
    )
    total = sum(number for _, number in times)
    latest = f"the last one {span_text(-times[-1][0])} ago" if times else "none"
    return _svg(f"{title}, in the last hour: {total}", latest, since, body)


def _since(points: Points) -> float:
    """The seconds that a chart shows: less than an hour for a new process."""
    return min(HOUR_S, max(_LEAST_S, -points[0][0] if points else 0.0))


def _x(at: float, since: float) -> float:
    return max(0.0, _WIDTH * (1 + at / since))


def _y(value: float, most: float) -> float:
    return _HEIGHT - (value / most if most else 0.0) * (_HEIGHT - _TOP)


def _svg(told: str, label: str, since: float, body: str) -> str:
    return (
        f"<svg class='chart' viewBox='0 0 {_WIDTH:g} {_HEIGHT + 16:g}' role='img'><title>{escape(told)}</title>"
        f"<path class='base' d='M0,{_HEIGHT:g} H{_WIDTH:g}'/>{body}"
        f"<text x='0' y='{_HEIGHT + 13:g}'>{span_text(since)} ago</text>"
        f"<text x='{_WIDTH:g}' y='{_HEIGHT + 13:g}' text-anchor='end'>{escape(label)}</text></svg>"
    )
