"""The bodies of pages: the client's answers, rendered by templates in the poller's thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from operator import itemgetter
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from anabranch.client.client import Client
from anabranch.errors import AnabranchError, NotAuthorized
from anabranch.presentation.history import Follower, draw
from anabranch.presentation.rows import (
    group_row,
    lag_text,
    open_transaction_row,
    processor_row,
    segment_name,
    span_text,
    stream_row,
    time_text,
    timeline_row,
)
from anabranch.protocol.hybrid_time import to_text
from anabranch.protocol.ids import parse_txn_text
from anabranch.types import Listed, OpenTransaction, StreamDescription
from anabranch.web.hub import View

LIMITS = (100, 1000, 10_000)
_MOST_RIVERS = 16  # pictures of streams that are kept up to date
_MOST_TIMELINES = 64
# State of a transaction -> what it waits for.
WAITS = {
    "OPEN": "its programs: they write, and one of them commits. It is aborted if none of them says it is alive",
    "PREPARED": "the word of its coordinator, which alone knows how it ends",
    "COMMIT_IN_PROGRESS": "the journals to show all that its writers wrote, and its turn",
    "FINALIZE_IN_PROGRESS": "its merge: the decision is made, and the events are on their way into the streams",
    "ABORT_IN_PROGRESS": "its streams to note that it is aborted",
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
        "at": time_text, "hybrid": to_text, "lag": lag_text, "segment": segment_name, "span": span_text,
        "waits": _waits,
    }  # fmt: skip
    return made


def _waits(state: str) -> str:
    return WAITS.get(state, "")


class Pages:
    """Makes the bodies of pages. For one thread."""

    def __init__(
        self, client: Client, templates: Environment, timeout: float, *, acts: bool
    ) -> None:
        """``timeout``: seconds for a call of the client. ``acts``: whether pages offer actions."""
        self._client = client
        self._templates = templates
        self._timeout = timeout
        self._acts = acts
        self._rivers: dict[str, Follower] = {}
        # By transaction: all that it was made from, and the timeline.
        self._timelines: dict[bytes, tuple[object, dict[str, Any]]] = {}

    def body(self, view: View) -> str:
        """A page's body as HTML. Raises: as the client."""
        facts = KINDS[view.kind](self, *view.about)
        return self._templates.get_template(f"{view.kind}.html").render(acts=self._acts, **facts)

    def close(self) -> None:
        for river in self._rivers.values():
            river.close()

    def _overview(self) -> dict[str, Any]:
        streams = self._client.streams(timeout=self._timeout)
        oldest = self._client.open_transactions(limit=5, timeout=self._timeout)
        parts, hidden = self._parts()
        return {
            "streams": streams,
            "missing": streams.missing | oldest.missing | parts.missing,
            "troubled": [s for s in streams if s.state != "ACTIVE" or s.trouble],
            "segments": sum(len(s.segments) for s in streams),
            "uncommitted": sum(s.uncommitted_bytes for s in streams),
            "oldest": oldest.each(open_transaction_row),
            "open": sum(part["open_transactions"] for part in parts),
            "hidden": hidden,
            "behind": sum(max(0, part["end"] - part["position"]) for part in parts),
            "quarantined": sum(len(part["quarantined"]) for part in parts),
        }

    def _streams(self) -> dict[str, Any]:
        found = self._client.streams(timeout=self._timeout)
        return {
            "streams": sorted(map(stream_row, found), key=itemgetter("stream")),
            "missing": found.missing,
        }

    def _stream(self, name: str) -> dict[str, Any]:
        stream = self._client.describe(name, timeout=self._timeout)
        river, trouble = self._river(stream)
        return {"stream": stream, "river": river, "trouble": trouble}

    def _transactions(self, scope: str, limit: str) -> dict[str, Any]:
        found = self._client.open_transactions(scope or None, int(limit), timeout=self._timeout)
        streams = self._client.streams(timeout=self._timeout)
        return {
            "found": found.each(open_transaction_row),
            "missing": found.missing,
            "scope": scope,
            "limit": int(limit),
            "limits": LIMITS,
            "scopes": sorted({one.stream.partition("/")[0] for one in streams} | {scope} - {""}),
        }

    def _transaction(self, txn: str) -> dict[str, Any]:
        found = self._client.open_transaction(parse_txn_text(txn), timeout=self._timeout)
        unfinished = sum(1 for one in found.writers if not one.finished)
        return {
            "txn": found.info,
            "now": found,
            "unfinished": unfinished,
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
                known = now, made | {"trouble": ""}
            except AnabranchError as error:
                return {"trouble": f"{type(error).__name__}: {error}"}
            while len(self._timelines) >= _MOST_TIMELINES:
                self._timelines.pop(next(iter(self._timelines)))
            self._timelines[txn_id] = known
        return known[1]

    def _groups(self) -> dict[str, Any]:
        scopes = {s.stream.partition("/")[0] for s in self._client.streams(timeout=self._timeout)}
        found = []
        for scope in sorted(scopes):
            for one in self._client.processors(scope, timeout=self._timeout):
                info = self._client.processor(one.processor, timeout=self._timeout)
                found.append(processor_row(info, self._client.lag(info, timeout=self._timeout)))
        groups = self._client.groups(timeout=self._timeout)
        return {"processors": found, "groups": [group_row(one) for one in groups]}

    def _controllers(self) -> dict[str, Any]:
        parts, hidden = self._parts()
        return {"parts": parts, "hidden": hidden, "missing": parts.missing}

    def _parts(self) -> tuple[Listed[dict[str, Any]], str]:
        """A row for each control partition, or the reason why the lane may not see them."""
        try:
            return self._client.commands(timeout=self._timeout).each(asdict), ""
        except NotAuthorized as error:
            return Listed(), str(error)

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


KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    "overview": Pages._overview,  # noqa: SLF001
    "streams": Pages._streams,  # noqa: SLF001
    "stream": Pages._stream,  # noqa: SLF001
    "transactions": Pages._transactions,  # noqa: SLF001
    "transaction": Pages._transaction,  # noqa: SLF001
    "groups": Pages._groups,  # noqa: SLF001
    "controllers": Pages._controllers,  # noqa: SLF001
}
