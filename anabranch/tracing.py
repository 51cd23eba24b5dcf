"""Spans of OpenTelemetry, and the trace context (W3C `traceparent`) in headers of events and commands.

All that knows OpenTelemetry is here. A program traces if it has configured a tracer provider before it connects;
then `opentelemetry.trace` is imported already, so a program that does not trace imports nothing and pays one test
of ``None`` for each call.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
)

from anabranch.protocol.ids import CORRELATION_HEADER

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, SpanContext, Tracer
    from opentelemetry.trace import Span as Span

P = ParamSpec("P")
T = TypeVar("T")
TRACE_HEADER = "traceparent"
_HEADER_BYTES = 55  # of a traceparent
# The header's part of an event's size: name, value, and their framing in a record and in a command.
TRACED_BYTES = len(TRACE_HEADER) + _HEADER_BYTES + 8
_SAMPLED = 1  # a bit of a trace's flags
_KNOWN_FORM = re.compile(rb"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")  # of a traceparent
MOST_LINKS = 128  # of a span; OpenTelemetry's default limit
_MOST_SERVED = 10_000  # commands whose answer is awaited
_MOST_HEADER_BYTES = (
    128  # of a trace context, or of a command's number, that is kept until the answer
)
Kind = Literal["CLIENT", "PRODUCER", "CONSUMER", "SERVER"]


class _Event(Protocol):
    """An event that a reader returned."""

    @property
    def stream(self) -> str: ...

    @property
    def headers(self) -> Sequence[tuple[str, bytes | None]]: ...


class _Here(NamedTuple):
    """The context of a call. ``span``: the current one; None without one. ``sampled``: whether it makes spans."""

    context: Context
    span: Span | None
    sampled: bool


class Tracing:
    """Makes the spans of a program that has configured OpenTelemetry.

    A trace that the sampler has not chosen has no spans here: none is started under a span that is not sampled, as
    that would take most of the time of a sampled one.
    """

    def __init__(self, tracer: Tracer) -> None:
        from opentelemetry import context, trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._attach, self._detach = context.attach, context.detach
        self._api, self._empty = trace, context.Context()
        self._current, self._context = trace.get_current_span, context.get_current
        # One commit asks for the same context four times.
        self._here = _Here(self._empty, None, sampled=False)
        self._kinds = {kind.name: kind for kind in trace.SpanKind}
        self._last: tuple[SpanContext | None, bytes] = (None, b"")  # whose header was made last
        self._extract = TraceContextTextMapPropagator().extract

    def look(self) -> _Here:
        """The current context."""
        context, here = self._context(), self._here
        if here.context is not context:
            span = self._current(context)
            valid = span.get_span_context().is_valid
            here = _Here(context, span if valid else None, valid and _is_sampled(span))
            self._here = here  # by one assignment: other threads use it, too
        return here

    def start(
        self,
        name: str,
        kind: Kind,
        parent: Span | None = None,
        links: Sequence[Link] | None = None,
        attributes: dict[str, Any] | None = None,
        start_ns: int | None = None,
    ) -> Span:
        """Start a span. ``parent``: None: the current span, or none. The caller ends it."""
        return self._tracer.start_span(
            f"anabranch {name}",
            None if parent is None else self._api.set_span_in_context(parent),
            kind=self._kinds[kind],
            attributes=attributes,
            links=links,
            start_time=start_ns,
        )

    def within(self, span: Span) -> _Within:
        """A ``with`` block in which the span is the current one, and which ends it."""
        return _Within(self, span)

    def enter(self, span: Span) -> object:
        """Make a span the current one, until `leave`."""
        return self._attach(self._api.set_span_in_context(span))

    def leave(self, entered: Any) -> None:
        self._detach(entered)

    def failed(self, span: Span, error: BaseException) -> None:
        """Note the error by which a span ends."""
        span.set_attribute("error.type", type(error).__name__)
        span.set_status(self._api.StatusCode.ERROR, str(error))

    def header(self, span: Span | None = None) -> bytes | None:
        """The traceparent of a span, or of the current one; None without one, or if it is not sampled.

        Events are kept for long, so those of traces that are not collected don't get the header.
        """
        if span is None:
            _, span, sampled = self.look()
            if span is None or not sampled:
                return None
        found = span.get_span_context()
        if not (found.is_valid and found.trace_flags & _SAMPLED):
            return None
        context, header = self._last
        if context is not found:
            header = b"00-%032x-%016x-%02x" % (found.trace_id, found.span_id, found.trace_flags)
            self._last = found, header
        return header

    def remote(self, header: bytes | None) -> Span | None:
        """The span of another process that a traceparent names; None if the header is missing or malformed."""
        if header is None:
            return None
        if known := _KNOWN_FORM.fullmatch(header):
            trace_id, span_id, flags = known.groups()
            found = self._api.SpanContext(
                int(trace_id, 16), int(span_id, 16), True, self._api.TraceFlags(int(flags, 16))
            )
            return self._api.NonRecordingSpan(found) if found.is_valid else None
        context = self._extract({TRACE_HEADER: header.decode("ascii", "replace")}, self._empty)
        span = self._current(context)
        return span if span.get_span_context().is_valid else None

    def link(self, span: Span) -> Link:
        return self._api.Link(span.get_span_context())


def _is_sampled(span: Span) -> bool:
    return span.is_recording() or bool(span.get_span_context().trace_flags & _SAMPLED)


class _Within:
    """As `Tracing.within`."""

    __slots__ = ("_entered", "_span", "_tracing")

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing, self._span = tracing, span
        self._entered: object = None

    def __enter__(self) -> Span:
        self._entered = self._tracing.enter(self._span)
        return self._span

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        self._tracing.leave(self._entered)
        if error is not None:
            self._tracing.failed(self._span, error)
        self._span.end()


_known: tuple[object, Tracing] | None = None


def current() -> Tracing | None:
    """The tracing of this program, or None if it has configured none."""
    global _known
    api: Any = sys.modules.get("opentelemetry.trace")
    if not hasattr(api, "get_tracer_provider"):  # or another thread imports it just now
        return None
    provider = api.get_tracer_provider()
    if isinstance(provider, (api.ProxyTracerProvider, api.NoOpTracerProvider)):
        return None
    if _known is None or _known[0] is not provider:
        _known = provider, Tracing(provider.get_tracer("anabranch"))
    return _known[1]


# -- of a client ------------------------------------------------------------------------------------------


class Trace:
    """The spans of one handle: of a transaction, or of a writer of it.

    A span's parent is the current one. Without a current span, as in a thread that the program started, it is the
    span that was current when the handle was made, or else the handle's first span. So the handle's spans are of
    one trace, wherever its calls are made.
    """

    __slots__ = ("_base", "_tracing")

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._base = tracing.look().span

    def start(self, name: str, kind: Kind, txn_id: bytes | None = None) -> Span | None:
        """Start a span, which the caller ends; None if its trace is not sampled."""
        tracing, base = self._tracing, self._base
        _, now, sampled = tracing.look()
        if now is None:
            sampled = base is None or _is_sampled(base)
        if not sampled:
            return None
        links = None
        if now is not None and base is not None and base is not now:
            other = base.get_span_context()
            if other.trace_id != now.get_span_context().trace_id:
                links = [tracing.link(base)]
        attributes = None if txn_id is None else {_TXN: txn_id.hex()}
        span = tracing.start(name, kind, base if now is None else None, links, attributes)
        if base is None:
            self._base = span
        return span if _is_sampled(span) else None

    def within(self, span: Span) -> _Within:
        """As `Tracing.within`."""
        return self._tracing.within(span)

    def header(self, span: Span | None = None) -> bytes | None:
        """As `Tracing.header`."""
        return self._tracing.header(span)


_TXN = "anabranch.txn_id"


def name_txn(span: Span, txn_id: bytes | None) -> None:
    """Give a span the id of its transaction."""
    if txn_id is not None and span.is_recording():
        span.set_attribute(_TXN, txn_id.hex())


class Traced(Protocol):
    """A handle whose calls are traced."""

    @property
    def trace(self) -> Trace | None: ...

    @property
    def txn_id(self) -> bytes | None: ...


H = TypeVar("H", bound=Traced)
Method = Callable[Concatenate[H, P], T]


def traced(name: str, kind: Kind = "CLIENT") -> Callable[[Method[H, P, T]], Method[H, P, T]]:
    """Make calls of a handle's method spans, if the handle has a `Trace`."""

    def around(method: Method[H, P, T]) -> Method[H, P, T]:
        @wraps(method)
        def call(handle: H, /, *args: P.args, **named: P.kwargs) -> T:
            trace = handle.trace
            if trace is None:
                return method(handle, *args, **named)
            txn_id = handle.txn_id
            span = trace.start(name, kind, txn_id)
            if span is None:
                return method(handle, *args, **named)
            with trace.within(span):
                try:
                    return method(handle, *args, **named)
                finally:
                    if txn_id is None:  # it may have been made only now
                        name_txn(span, handle.txn_id)

        return call

    return around


# -- of a reader ------------------------------------------------------------------------------------------


def consume(events: _Event | Iterable[_Event]) -> AbstractContextManager[object]:
    """A ``with`` block for the work on an event, or on events of one stream, that a reader returned: a span of it.

        for event in client.read("shop/orders"):
            with anabranch.tracing.consume(event):
                ship(event)

    The span continues the trace in the events' headers if there is no current span and they have one trace context;
    otherwise it links to up to 128 of them. Without a tracer the block does nothing.
    """
    tracing = current()
    if tracing is None:
        return nullcontext()
    given: list[Any] = [events] if hasattr(events, "headers") else list(events)
    attributes: dict[str, Any] = {"messaging.batch.message_count": len(given)}
    stream = given[0].stream if given else ""
    if stream:
        attributes["messaging.destination.name"] = stream
    name = f"consume {stream}".rstrip()
    return tracing.within(consuming(tracing, name, traces_of(given), attributes))


def traces_of(events: Iterable[_Event]) -> set[bytes]:
    """The different traceparents of events."""
    return {
        value for one in events for name, value in one.headers if name == TRACE_HEADER and value
    }


def consuming(
    tracing: Tracing,
    name: str,
    traces: Iterable[bytes],
    attributes: dict[str, Any],
) -> Span:
    """Start a span of work on events with these traceparents. A single one is its parent, without a current span.

    Otherwise the span links to up to `MOST_LINKS` of them.
    """
    spans = [span for each in sorted(traces) if (span := tracing.remote(each)) is not None]
    parent = None
    if len(spans) == 1 and tracing.look().span is None:
        parent = spans.pop()
    links = [tracing.link(each) for each in spans[:MOST_LINKS]]
    return tracing.start(name, "CONSUMER", parent, links, attributes)


# -- of a controller --------------------------------------------------------------------------------------


class Served:
    """The commands with a trace context that a leader has read and not answered. Each answer makes a span."""

    def __init__(self, tracing: Tracing, control_partition: int) -> None:
        self._tracing = tracing
        self._attributes = {"anabranch.control_partition": control_partition}
        self._commands: dict[tuple[str, bytes], tuple[bytes, int]] = {}

    def arrived(self, lane: str, headers: Mapping[str, bytes | None]) -> None:
        """Note a command; a copy of a noted one changes nothing. At the limit the oldest is forgotten."""
        header, correlation_id = headers.get(TRACE_HEADER), headers.get(CORRELATION_HEADER)
        if header is None or len(header) > _MOST_HEADER_BYTES:
            return
        if not correlation_id or len(correlation_id) > _MOST_HEADER_BYTES:
            return
        if (lane, correlation_id) in self._commands:
            return
        key = lane, correlation_id
        if len(self._commands) >= _MOST_SERVED:
            del self._commands[next(iter(self._commands))]
        self._commands[key] = header, time.time_ns()

    def answered(self, lane: str, correlation_id: bytes, result: Any) -> None:
        """Make the span of an answered command, from its arrival at this leader until now."""
        if not self._commands:
            return
        found = self._commands.pop((lane, correlation_id), None)
        sender = None if found is None else self._tracing.remote(found[0])
        if found is None or sender is None:
            return
        attributes: dict[str, Any] = dict(self._attributes)
        if code := getattr(result, "code", ""):
            attributes["error.type"] = code
        if timestamp := getattr(result, "commit_timestamp", 0):
            attributes["anabranch.commit_timestamp"] = timestamp
        if txn_id := getattr(result, "txn_id", None):
            attributes[_TXN] = txn_id.hex()
        self._tracing.start("decide", "SERVER", sender, None, attributes, found[1]).end()
