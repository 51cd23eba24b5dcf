"""The bodies of pages: the client's answers, rendered by templates in the poller's threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from anabranch.client.client import Client
from anabranch.core.stream_settings import is_table
from anabranch.core.stream_states import ACTIVE
from anabranch.errors import (
    AnabranchError,
    InvalidArgument,
    NotAuthorized,
    NotReady,
    UndecodableValue,
)
from anabranch.extras import need
from anabranch.logs import escaped
from anabranch.presentation.history import Follower, draw
from anabranch.presentation.load import advice
from anabranch.presentation.rows import (
    Laid,
    bytes_text,
    lag_text,
    laid_out,
    open_transaction_row,
    processor_row,
    segment_name,
    span_text,
    time_text,
    timeline_row,
    transaction_row,
    value_text,
)
from anabranch.presentation.system_tables import commit_rows
from anabranch.presentation.topology import Topology, picture, read_topology
from anabranch.protocol.hybrid_time import from_datetime, read_moment, to_datetime, to_text
from anabranch.protocol.ids import parse_txn_text
from anabranch.types import (
    Event,
    LeaderInfo,
    Listed,
    OpenTransaction,
    StreamDescription,
    TransactionInfo,
)
from anabranch.values import Stream, text_of, undecodable
from anabranch.web.charts import LagSource, Recorder, size_text
from anabranch.web.events import Part, Search, after, newest, of_commit, weight
from anabranch.web.folders import remove_left
from anabranch.web.hub import INTERVAL_S, WATCH_S, View

T = TypeVar("T")
if TYPE_CHECKING:
    from anabranch.web.tables import Row, Tables

LIMITS = (100, 1000, 10_000)
COUNTS = (20, 50, 200)  # events or rows of a page
_VALUE = 4_000  # characters of a value that a page shows
_TROUBLE = 500  # characters of a text that says why a value is not decoded
_DECODED = 256 << 10  # bytes of the longest value that is decoded
_MOST_LINKED = 1000  # bytes of a key that a link has; fields of addresses have no more characters
_MOST_SKIPPED = 1_000_000  # rows that a page may skip after the key in its link, if many keys begin with that key
_MOST_HEADERS = 20
_SCOPES_S = 30.0
_USUAL_S = 2 * WATCH_S  # within this time, a page that browsers show needs the same again
_LAGS_S = 3.5  # the greatest age of lags, which take a question for each scope
_REFUSED_S = 10.0  # before a lane without the right to see control partitions asks for them again
_OLDEST = 5  # open transactions of the overview
_MOST_RIVERS = 16  # pictures of streams that are kept up to date
_MOST_TIMELINES = 64
_MOST_SEARCHED = 50  # streams whose histories are searched for a one-shot
_MOST_WRITTEN = 1000  # one-shots whose streams are kept
_MOST_READ = 16  # lists of events that are kept until something is committed
_MOST_READ_BYTES = 4 << 20  # of such a list
_WITHOUT_KEYS = ("COMMITTED", "FINALIZE_IN_PROGRESS")  # states whose reason is a stream's name
_HIDDEN = "hidden: see --show-values"
# State of an open transaction -> what it waits for.
WAITS = {
    "OPEN": "its programs: they write, and one of them commits. It is aborted if none of them says it is alive",
    "PREPARED": "the word of its coordinator, which alone knows how it ends",
    "COMMIT_IN_PROGRESS": "the journals to show all that its writers wrote, and its turn",
    "FINALIZE_IN_PROGRESS": "its merge: the decision is made, and the events are on their way into the streams",
    "ABORT_IN_PROGRESS": "its streams to note that it is aborted",
}
# List of transactions -> the states that its filter offers.
STATES = {
    "open": tuple(WAITS),
    "finished": (*WAITS, "COMMITTED", "ABORTED"),
    "prepared": ("PREPARED",),
}


def environment() -> Environment:
    """The templates, which escape all text."""
    made = Environment(
        loader=PackageLoader("anabranch.web"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "at": time_text, "clock": clock_text, "count": "{:,}".format, "hybrid": to_text, "lag": lag_text,
        "query": query_text, "segment": segment_name, "short": short_time, "size": size_text, "span": span_text,
        "waits": _waits,
    }  # fmt: skip
    return made


def rendered(templates: Environment, name: str, **facts: Any) -> str:
    """A template with these facts. Bytes of a browser that are not UTF-8 are shown as `\\udcff`."""
    text = templates.get_template(name).render(**facts)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def clock_text(timestamp: int) -> str:
    """The moment of a hybrid time, to the millisecond."""
    return to_datetime(timestamp).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def short_time(text: str | None) -> str:
    """A time of `time_text` to the second; a dash for none."""
    return "-" if text is None else f"{text[:10]} {text[11:19]}"


def query_text(given: Mapping[str, Any]) -> str:
    """Fields as the query of an address. Empty fields are left out. Bytes, and text of bytes, stay as they are."""
    pairs = [(name, each) for name, each in given.items() if each not in (None, "", b"")]
    return urlencode(
        [
            (name, each if isinstance(each, bytes) else os.fsencode(str(each)))
            for name, each in pairs
        ]
    )


def _waits(state: str) -> str:
    return WAITS.get(state, "")


@dataclass(frozen=True, slots=True)
class Showing:
    """Whether pages have actions (``acts``), and events and rows (``values``), which a ``handle`` decodes."""

    acts: bool = False
    values: bool = False
    handle: Callable[[str], Stream[Any, Any] | None] = lambda _: None


class Shown(NamedTuple):
    """An event or row as a page shows it.

    ``trouble``: why it is not decoded. ``raw_key``: for links; None without a key, or if it is too long for a link.
    """

    key: Laid | None
    value: Laid | None
    headers: Sequence[tuple[str, Laid | None]]
    trouble: str
    raw_key: bytes | None
    event: Event | None = None


class EventsAsked(NamedTuple):
    """Which events a page shows, as fields of its address; empty ones are not given."""

    stream: str
    key: str
    text: str
    since: str
    commit: str
    txn: str
    limit: str


class Start(NamedTuple):
    """The place at which a page of rows begins: ``skipped`` rows after the first key from ``key`` on."""

    key: bytes
    skipped: int

    def after(self, rows: Sequence[Row], next_key: bytes | None, prefix: bytes) -> Start | None:
        """The start of the next page, which begins at ``next_key``; it has only the first bytes of a long key."""
        if next_key is None:
            return None
        key = max(next_key[:_MOST_LINKED], prefix)
        skipped = sum(1 for row in rows if row.key >= key) if len(key) < len(next_key) else 0
        return Start(key, skipped + (self.skipped if key == self.key and skipped else 0))


class _Memory:
    """Answers of the cluster, for pages that show parts of the same list. For one thread."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[float, Any]] = {}  # what -> until when, answer
        self._needed: dict[Any, float] = {}  # what -> when a page last needed all of it

    def ask(self, what: Any, call: Callable[[], T], seconds: float = INTERVAL_S) -> T:
        """The answer to a call, which is made again after ``seconds``."""
        now = time.monotonic()
        self._kept = {k: v for k, v in self._kept.items() if v[0] > now}
        if what not in self._kept:
            found = call()
            self._kept[what] = time.monotonic() + seconds, found
        answer: T = self._kept[what][1]
        return answer

    def known(self, what: Any, otherwise: T) -> T:
        """The answer, if it is not too old."""
        until, answer = self._kept.get(what, (0.0, otherwise))
        return answer if time.monotonic() < until else otherwise

    def need(self, what: Any) -> None:
        """Note that a page needs all of this."""
        now = time.monotonic()
        self._needed = {k: at for k, at in self._needed.items() if now - at < _USUAL_S}
        self._needed[what] = now

    def is_needed(self, what: Any) -> bool:
        """Whether a page has needed all of this lately, so that it will be asked for in the next polls, too."""
        return time.monotonic() - self._needed.get(what, -_USUAL_S) < _USUAL_S


class Pages:
    """Makes the bodies of pages. For two threads: one of the pages that read events and rows, one of the others."""

    def __init__(
        self,
        client: Client,
        templates: Environment,
        timeout: float,
        showing: Showing,
        recorder: Recorder | None = None,
    ) -> None:
        """``timeout``: seconds for a call of the client. ``recorder``: for charts; None: pages have none."""
        self._client = client
        self._templates = templates
        self._timeout = timeout
        self._showing = showing
        self._recorder = recorder
        self._lags = recorder.lags if recorder is not None else LagSource(client, timeout)
        self._rivers: dict[str, Follower] = {}
        # By transaction: all that it was made from, and the timeline.
        self._timelines: dict[bytes, tuple[object, dict[str, Any]]] = {}
        self._written: dict[bytes, tuple[str, ...]] = {}  # streams of one-shots
        self._newest: dict[EventsAsked, Part] = {}
        self._tables: Tables | None = None
        self._lock = threading.Lock()  # guards `_tables` and `_closed`
        self._closed = self._has_swept = False
        self._memory = _Memory()

    def body(self, view: View) -> str:
        """A page's body as HTML. Raises: as the client."""
        facts = KINDS[view.kind](self, *view.about)
        return rendered(
            self._templates,
            f"{view.kind}.html",
            acts=self._showing.acts,
            values=self._showing.values,
            **facts,
        )

    def sweep(self) -> None:
        """Close idle replicas. The first call removes what killed processes left. For the thread that reads."""
        if not self._has_swept:
            self._has_swept = True
            remove_left()
        if self._tables is not None:
            self._tables.close_idle()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for river in self._rivers.values():
            river.close()
        if self._tables is not None:
            self._tables.close()

    # -- lists ----------------------------------------------------------------------------------------

    def _all_streams(self) -> Listed[StreamDescription]:
        return self._memory.ask("streams", lambda: self._client.streams(timeout=self._timeout))

    def _scopes(self) -> set[str]:
        """The scopes of all streams, up to `_SCOPES_S` old: a filter offers them."""

        def ask() -> set[str]:
            return {one.stream.partition("/")[0] for one in self._all_streams()}

        return self._memory.ask("scopes", ask, _SCOPES_S)

    def _overview(self) -> dict[str, Any]:
        streams = self._all_streams()
        # If browsers show the page of transactions, its list is asked for anyway.
        whole = _listed("open", "", LIMITS[0])
        oldest = self._open_ones("", LIMITS[0] if self._memory.is_needed(whole) else _OLDEST)
        parts, hidden = self._parts()
        recorder = self._recorder
        return {
            "streams": streams,
            "missing": streams.missing | oldest.missing | parts.missing,
            "troubled": [s for s in streams if s.state != "ACTIVE" or s.trouble],
            "segments": sum(len(s.segments) for s in streams),
            "uncommitted": sum(s.uncommitted_bytes for s in streams),
            "oldest": oldest.each(open_transaction_row)[:_OLDEST],
            "open": sum(part["open_transactions"] for part in parts),
            "hidden": hidden,
            "behind": sum(max(0, part["end"] - part["position"]) for part in parts),
            "quarantined": sum(len(part["quarantined"]) for part in parts),
            "charts": recorder.charts() if recorder is not None else [],
            "uncharted": recorder.missing if recorder is not None else "",
        }

    def _streams(self, text: str = "", state: str = "", limit: str = "1000") -> dict[str, Any]:
        found = self._all_streams()
        wanted = [
            one
            for one in found
            if text.lower() in f"{one.stream} {one.description}".lower()
            and state in ("", one.state)
        ]
        wanted.sort(key=attrgetter("stream"))
        return {
            "streams": wanted[: int(limit)],
            "count": len(wanted),
            "total": len(found),
            "states": sorted({one.state for one in found} | {state} - {""}),
            "text": text,
            "state": state,
            "limit": int(limit),
            "limits": LIMITS,
            "missing": found.missing,
        }

    def _stream(self, name: str) -> dict[str, Any]:
        stream = self._client.describe(name, timeout=self._timeout)
        river, trouble = self._river(stream)
        is_of_rows = is_table(stream.settings)
        return {"stream": stream, "river": river, "trouble": trouble, "is_table": is_of_rows}

    def _transactions(
        self, show: str, scope: str, state: str, text: str, limit: str
    ) -> dict[str, Any]:
        client, most, timeout = self._client, int(limit), self._timeout
        what = _listed(show, scope, most)
        found: Listed[dict[str, Any]]
        if show == "open":
            self._memory.need(what)
            found = self._open_ones(scope, most).each(open_transaction_row)
        elif show == "prepared":
            found = self._memory.ask(
                what, lambda: client.prepared(scope or None, limit=most, timeout=timeout)
            ).each(transaction_row)
        else:
            found = self._memory.ask(
                what,
                lambda: client.transactions(
                    scope=scope or None, finished=True, limit=most, timeout=timeout
                ),
            ).each(transaction_row)
        shown = [each | {"reason": self._reason(each["state"], each["reason"])} for each in found]
        rows = [
            each
            for each in shown
            if state in ("", each["state"])
            and text.lower()
            in " ".join((each["txn_id"], each["name"] or "", each["owner"], each["reason"])).lower()
        ]
        return {
            "found": rows[:most],
            "full": len(found) >= most,
            "missing": found.missing,
            "show": show,
            "scope": scope,
            "state": state,
            "text": text,
            "states": STATES[show],
            "limit": most,
            "limits": LIMITS,
            "scopes": sorted({*self._scopes()} | {scope} - {""}),
        }

    def _open_ones(self, scope: str, most: int) -> Listed[OpenTransaction]:
        """Open transactions of a scope, or (empty) of all, the oldest first."""
        return self._memory.ask(
            _listed("open", scope, most),
            lambda: self._client.open_transactions(scope or None, most, timeout=self._timeout),
        )

    def _reason(self, state: str, reason: str) -> str:
        """The reason of a transaction, if this process may show it: of an abort, it may name keys of rows."""
        is_hidden = reason and state not in _WITHOUT_KEYS and not self._showing.values
        return _HIDDEN if is_hidden else reason

    def _transaction(self, txn: str) -> dict[str, Any]:
        found = self._client.open_transaction(parse_txn_text(txn), timeout=self._timeout)
        unfinished = sum(1 for one in found.writers if not one.finished)
        return {
            "txn": replace(found.info, reason=self._reason(found.info.state, found.info.reason)),
            "now": found,
            "unfinished": unfinished,
            "streams": self._streams_of(found.info),
            "timeline": self._timeline(found),
        }

    def _timeline(self, found: OpenTransaction) -> dict[str, Any]:
        """The timeline of a transaction, or its ``trouble``. Logs are read again once the transaction changes."""
        txn_id = found.info.txn_id
        now = found.info, found.writers, found.staged_merges, found.waits and found.waits.why
        known = self._timelines.get(txn_id)
        if known is None or known[0] != now:
            try:
                made = timeline_row(self._client.timeline(txn_id, timeout=self._timeout))
                for step in made["steps"]:
                    if step["step"] == "aborted":
                        step["about"] = self._reason("ABORTED", step["about"])
                known = now, made | {"trouble": ""}
            except AnabranchError as error:
                return {"trouble": f"{type(error).__name__}: {error}"}
            while len(self._timelines) >= _MOST_TIMELINES:
                self._timelines.pop(next(iter(self._timelines)))
            self._timelines[txn_id] = known
        return known[1]

    def _streams_of(self, info: TransactionInfo) -> tuple[str, ...]:
        """The streams of a transaction. Controllers forget those of one-shots: histories know them."""
        if info.streams or not info.commit_timestamp or not info.counts.committed:
            return info.streams
        if info.txn_id not in self._written:
            names = [one.stream for one in self._all_streams() if one.state == ACTIVE]
            if len(names) > _MOST_SEARCHED:
                names = []
            ports, at = self._client.reader_ports(), info.commit_timestamp
            try:
                rows = commit_rows(ports, names, at - 1, at, 1, self._timeout)
            except AnabranchError:
                return ()
            if len(self._written) >= _MOST_WRITTEN:
                self._written.clear()
            ours = (row.streams for row in rows if row.txn_id == info.txn_id)
            self._written[info.txn_id] = next(ours, ())
        return self._written[info.txn_id]

    def _groups(self, text: str = "") -> dict[str, Any]:
        lags = self._lags.ask(_LAGS_S, self._all_streams)

        def has(name: str, streams: list[dict[str, Any]]) -> bool:
            return any(text.lower() in f"{name} {one['stream']}".lower() for one in streams)

        return {
            "processors": [
                each for each in lags.processors if has(each["processor"], each["inputs"])
            ],
            "groups": [each for each in lags.groups if has(each["group"], each["streams"])],
            "text": text,
        }

    def _processor(self, name: str) -> dict[str, Any]:
        info = self._client.processor(name, topology=True, timeout=self._timeout)
        row = processor_row(info, self._client.lag(info, timeout=self._timeout))
        found = read_topology(info.topology)
        if found is None:
            found = Topology(stores=dict.fromkeys(info.stores, "a store"))
        return {
            "processor": row,
            "tasks": [task for task in info.tasks if task.holder],
            "picture": Markup(picture(found, row["inputs"], f"Topology of {name}")),
            "declared": bool(info.topology),
        }

    def _controllers(self, text: str = "") -> dict[str, Any]:
        parts, hidden = self._parts()
        leaders: Sequence[LeaderInfo] = ()
        if not hidden:  # the same right is needed for both
            try:
                leaders = self._client.leaders(timeout=self._timeout)
            except AnabranchError as error:
                hidden = f"{type(error).__name__}: {error}"
        measured = self._recorder.loads if self._recorder is not None and not hidden else ()
        quarantined = [
            row
            for part in parts
            for row in part["quarantined"]
            if text.lower() in f"{row['what']} {row['reason']}".lower()
        ]
        return {
            "parts": parts,
            "leaders": {each.control_partition: each for each in leaders},
            "loads": {each.control_partition: each for each in measured},
            "advice": advice(measured),
            "quarantined": quarantined,
            "hidden": hidden,
            "missing": parts.missing,
            "text": text,
        }

    def _parts(self) -> tuple[Listed[dict[str, Any]], str]:
        """A row for each control partition, or the reason why the lane may not see them."""
        refused: str = self._memory.known("refused", "")
        if refused:
            return Listed(), refused
        try:
            return self._memory.ask(
                "parts", lambda: self._client.commands(timeout=self._timeout).each(asdict)
            ), ""
        except NotAuthorized as error:
            refused = str(error)
            return Listed(), self._memory.ask("refused", lambda: refused, _REFUSED_S)

    def _river(self, stream: StreamDescription) -> tuple[Markup | None, str]:
        """The picture of a stream, or the reason why there is no picture."""
        name = stream.stream
        if name not in self._rivers:
            while len(self._rivers) >= _MOST_RIVERS:
                self._rivers.pop(next(iter(self._rivers))).close()
            ports = self._client.reader_ports()
            self._rivers[name] = Follower(ports, name, self._timeout)
        try:
            past = self._rivers[name].read()
        except AnabranchError as error:
            self._rivers.pop(name).close()
            return None, f"{type(error).__name__}: {error}"
        if not past.epochs:
            return None, "its history has no record so far"
        return Markup(draw(past.epochs, past.commits, f"Stream {name}")), ""

    # -- events and rows ------------------------------------------------------------------------------

    def _seen(self, name: str) -> StreamDescription:
        """A stream whose values may be shown. Raises: NotAuthorized."""
        if not self._showing.values:
            raise NotAuthorized("this process shows no events or rows: start it with --show-values")
        # Brokers may let this process read what its lane may not know of.
        return self._client.describe(name, timeout=self._timeout)

    def _events(self, *about: str) -> dict[str, Any]:
        asked = EventsAsked._make(about)
        stream = self._seen(asked.stream)
        timestamp = self._commit_of(asked)
        handle = self._showing.handle(asked.stream)
        is_wanted = _wanted(handle, asked.key, asked.text)
        search = Search(asked.stream, int(asked.limit), is_wanted, self._timeout)
        if timestamp:
            part = of_commit(self._client, search, timestamp)
        elif asked.since:
            part = after(self._client, search, _moment(asked.since))
        else:
            part = self._newest_of(search, asked)
        return {
            "stream": stream,
            "is_table": is_table(stream.settings),
            "found": [
                shown(handle, event.key, event.value, event)
                # The newest first, unless they are the beginning of something.
                for event in (part.events if timestamp or asked.since else reversed(part.events))
            ],
            "part": part,
            "asked": asked,
            "key": asked.key if asked.key.isprintable() else bytes_text(os.fsencode(asked.key)),
            "commit": timestamp,
            "limit": int(asked.limit),
            "limits": COUNTS,
        }

    def _commit_of(self, asked: EventsAsked) -> int:
        """The timestamp of the commit whose events are asked for; 0: of all. Raises: InvalidArgument."""
        if not asked.txn:
            return _number(asked.commit, "commit")
        txn_id = parse_txn_text(asked.txn)
        info = self._client.open_transaction(txn_id, timeout=self._timeout).info
        if not info.commit_timestamp:
            raise InvalidArgument(f"{info}: it has no committed events")
        return info.commit_timestamp

    def _newest_of(self, search: Search, asked: EventsAsked) -> Part:
        """The newest events, which are read again only once something was committed."""
        part = newest(self._client, search, self._newest.pop(asked, None))
        if sum(map(weight, part.events)) <= _MOST_READ_BYTES:
            self._newest[asked] = part
        while len(self._newest) > _MOST_READ:
            del self._newest[next(iter(self._newest))]
        return part

    def _rows(
        self, name: str, prefix: str, first: str, skipped: str, at: str, limit: str
    ) -> dict[str, Any]:
        stream = self._seen(name)
        handle, loading, page = self._showing.handle(name), "", None
        start = Start(os.fsencode(first or prefix), _number(skipped, "skip"))
        if start.skipped > _MOST_SKIPPED:
            raise InvalidArgument(f"a page skips at most {_MOST_SKIPPED:,} rows")
        try:
            page = self._replicas().rows(
                name,
                prefix=os.fsencode(prefix) if prefix else None,
                first=start.key or None,
                skipped=start.skipped,
                at=_moment(at),
                limit=int(limit),
                timeout=self._timeout,
            )
        except NotReady as error:
            loading = str(error)
        found = page.rows if page is not None else []
        return {
            "stream": stream,
            "is_table": True,
            "found": [shown(handle, row.key, row.value) for row in found],
            "page": page,
            "next": None
            if page is None
            else start.after(found, page.next_key, os.fsencode(prefix)),
            "loading": loading,
            "prefix": prefix,
            "at": at,
            "limit": int(limit),
            "limits": COUNTS,
        }

    def _versions(self, name: str, key: str, at: str) -> dict[str, Any]:
        stream = self._seen(name)
        handle, loading, raw = self._showing.handle(name), "", os.fsencode(key)
        found: list[Any] = []
        try:
            found = self._replicas().versions(name, raw, at=_moment(at), timeout=self._timeout)
        except NotReady as error:
            loading = str(error)
        return {
            "stream": stream,
            "is_table": True,
            "key": laid_out(raw, raw, _VALUE),
            "raw": raw,
            "found": [(one, shown(handle, one.key, one.value)) for one in found],
            "loading": loading,
        }

    def _replicas(self) -> Tables:
        if self._tables is None:
            need("rocksdict", extra="tables")
            from anabranch.web.tables import Tables

            with self._lock:
                if self._closed:
                    raise NotReady("the process ends")
                self._tables = Tables(self._client)
        return self._tables


def shown(
    handle: Stream[Any, Any] | None,
    key: bytes | None,
    value: bytes | None,
    event: Event | None = None,
) -> Shown:
    """An event or row for a page, decoded if its stream has a handle."""
    found: list[Laid | None] = []
    trouble = ""
    for part, data in (("key", key), ("value", value)):
        if data is None:
            found.append(None)
            continue
        laid = None
        if handle is not None and len(data) <= _DECODED:
            try:
                laid = laid_out(data, _decoded(handle, part, key, data, event), _VALUE)
            except Exception as error:  # noqa: BLE001 - a codec and its values may do anything
                trouble = trouble or _trouble(error)
        found.append(laid or laid_out(data, data, _VALUE))
    headers: list[tuple[str, Laid | None]] = []
    for name, data in event.headers[:_MOST_HEADERS] if event is not None else ():
        raw = name.encode("utf-8", "surrogateescape")
        headers.append(
            (laid_out(raw, raw, 200).text, None if data is None else laid_out(data, data, 200))
        )
    raw_key = key if key is not None and len(key) <= _MOST_LINKED else None
    return Shown(found[0], found[1], headers, trouble, raw_key, event)


def _decoded(
    handle: Stream[Any, Any], part: str, key: bytes | None, data: bytes, event: Event | None
) -> Any:
    """A key or value. Raises: UndecodableValue, which names the event, or the row; NotReady."""
    try:
        return handle.decode_key(data) if part == "key" else handle.decode_value(key or b"", data)
    except UndecodableValue as error:
        cause = error.__cause__
        if event is None or not isinstance(cause, Exception):
            raise
        raise undecodable(handle.key, handle.value, event, cause) from cause


def _trouble(error: Exception) -> str:
    """Why a value is not decoded, in one line. A codec's text may quote all of the value."""
    known = isinstance(error, UndecodableValue | NotReady)
    text = str(error) if known else f"the decoded value can't be shown ({text_of(error)})"
    return escaped(text[:_TROUBLE]) + ("…" if len(text) > _TROUBLE else "")


def _wanted(handle: Stream[Any, Any] | None, key: str, text: str) -> Callable[[Event], bool] | None:
    """Whether an event has this key, and this text in its key or value; None: all are wanted."""
    if not key and not text:
        return None
    raw, part = os.fsencode(key), os.fsencode(text)

    def has_key(event: Event) -> bool:
        if not key or event.key == raw:
            return True
        if event.key is None or len(event.key) > _DECODED:
            return False
        # How a page shows bytes that are no text.
        if "\\" in key and len(event.key) <= _MOST_LINKED and bytes_text(event.key) == key:
            return True
        if handle is None:
            return False
        try:
            return value_text(handle.decode_key(event.key)) == key
        except Exception:  # noqa: BLE001 - as in `shown`; a key without a text equals none
            return False

    def is_wanted(event: Event) -> bool:
        return has_key(event) and (
            not part or part in (event.value or b"") or part in (event.key or b"")
        )

    return is_wanted


def _listed(show: str, scope: str, most: int) -> tuple[str, str, str, int]:
    """The identity of a list of transactions in `_Memory`."""
    return "transactions", show, scope, most


def _moment(text: str) -> int | None:
    """The hybrid time of a field; None for an empty one. Raises: InvalidArgument."""
    if not text:
        return None
    moment = read_moment(text)
    if moment is None:
        raise InvalidArgument(
            f"time {text[:60]!r} must be a commit timestamp, or an ISO 8601 time with its zone, as "
            "2026-01-31T12:00:00Z"
        )
    return moment if isinstance(moment, int) else from_datetime(moment)


def _number(text: str, what: str) -> int:
    """The number of a field; 0 for an empty one. Raises: InvalidArgument."""
    if text and not (text.isascii() and text.isdigit() and len(text) < 20):
        raise InvalidArgument(f"{what} {text[:20]!r} must be a commit timestamp")
    return int(text or 0)


KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    name: getattr(Pages, f"_{name}")
    for name in (
        "overview", "streams", "stream", "events", "rows", "versions", "transactions", "transaction", "groups",
        "processor", "controllers",
    )
}  # fmt: skip
