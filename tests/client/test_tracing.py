"""Spans of OpenTelemetry's SDK, of a client and a leader in memory, and the trace context in headers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Decision, StaticSampler
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import anabranch
from anabranch import errors, tracing
from anabranch.tracing import TRACE_HEADER, consume
from tests.client.answers import STREAM
from tests.client.world import World

STRANGE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """Tracing is on; the spans that have ended."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


@pytest.fixture
def traced(spans: InMemorySpanExporter) -> World:
    """A cluster whose client and leader trace."""
    world = World()
    world.client.create_stream(STREAM, segments=2)
    spans.clear()
    return world


def named(spans: InMemorySpanExporter, name: str) -> ReadableSpan:
    found = [span for span in spans.get_finished_spans() if span.name == f"anabranch {name}"]
    assert len(found) == 1, [span.name for span in spans.get_finished_spans()]
    return found[0]


def header_of(span: ReadableSpan) -> str:
    assert span.context is not None
    found = span.context
    return f"00-{found.trace_id:032x}-{found.span_id:016x}-{found.trace_flags:02x}"


def trace_ids(spans: InMemorySpanExporter) -> set[int]:
    return {span.context.trace_id for span in spans.get_finished_spans() if span.context}


def carried(world: World) -> list[list[str]]:
    """The trace contexts of each committed event, in the order of their values."""
    events = sorted(world.events(STREAM), key=lambda event: event.value or b"")
    return [
        [(value or b"").decode() for name, value in event.headers if name == TRACE_HEADER]
        for event in events
    ]


def test_a_one_shot_is_one_span_of_the_client_and_its_events_carry_it(
    traced: World, spans: InMemorySpanExporter
) -> None:
    with traced.client.begin("nyc") as txn:
        txn.write(STREAM, b"1", key=b"a")
        txn.write(STREAM, b"2", key=b"b", headers={TRACE_HEADER: STRANGE.encode(), "h": b"x"})
        result = txn.commit()
    commit, decide = named(spans, "commit"), named(spans, "decide")
    assert {span.name for span in spans.get_finished_spans()} == {
        "anabranch commit",
        "anabranch decide",
    }
    assert commit.attributes is not None
    assert commit.attributes["anabranch.txn_id"] == result.txn_id.hex()
    assert commit.kind == trace.SpanKind.PRODUCER
    assert decide.parent is not None
    assert commit.context is not None
    assert decide.parent.span_id == commit.context.span_id
    assert decide.attributes is not None
    assert decide.attributes["anabranch.commit_timestamp"] == result.commit_timestamp
    assert carried(traced) == [[header_of(commit)], [STRANGE]]


def test_an_open_transaction_s_spans_are_of_the_caller_s_trace(
    traced: World, spans: InMemorySpanExporter
) -> None:
    tracer = trace.get_tracer_provider().get_tracer("program")
    with tracer.start_as_current_span("request") as request, traced.client.begin("nyc") as txn:
        txn.token()
        txn.write(STREAM, b"1", key=b"a", headers={"h": b"x"})
        txn.flush()
        txn.commit()
    assert trace_ids(spans) == {request.get_span_context().trace_id}
    names = [span.name.removeprefix("anabranch ") for span in spans.get_finished_spans()]
    assert [name for name in names if name != "decide"] == [
        "begin", "flush", "flush", "write", "commit", "request"
    ]  # fmt: skip
    write = named(spans, "write")
    assert write.attributes is not None
    assert write.attributes["messaging.batch.message_count"] == 1
    assert carried(traced) == [[header_of(write)]]


def test_without_a_current_span_a_handle_s_calls_are_one_trace_in_all_threads(
    traced: World, spans: InMemorySpanExporter
) -> None:
    with traced.client.begin("nyc") as txn:
        txn.token()
        thread = threading.Thread(target=txn.write, args=(STREAM, b"1", b"a"))
        thread.start()
        thread.join()
        txn.commit()
    assert len(trace_ids(spans)) == 1
    assert named(spans, "begin").parent is None


def test_a_commit_in_another_trace_links_to_the_first(
    traced: World, spans: InMemorySpanExporter
) -> None:
    tracer = trace.get_tracer_provider().get_tracer("program")
    with tracer.start_as_current_span("first") as first:
        txn = traced.client.begin("nyc")
        txn.write(STREAM, b"1", key=b"a")
    with tracer.start_as_current_span("second") as second:
        txn.commit()
    commit = named(spans, "commit")
    assert commit.context is not None
    assert commit.context.trace_id == second.get_span_context().trace_id
    assert [link.context for link in commit.links] == [first.get_span_context()]


def test_a_writer_and_a_commit_by_token_continue_the_trace_that_was_handed_on(
    traced: World, spans: InMemorySpanExporter
) -> None:
    tracer = trace.get_tracer_provider().get_tracer("program")
    with tracer.start_as_current_span("job") as job:
        txn = traced.client.begin("nyc")
        token = txn.token("all")
        with traced.new_client() as other, other.join(token) as writer:
            writer.write_many(STREAM, [(b"1", b"a"), (b"2", b"b", {"h": b"x"})])
        traced.client.commit(token, [writer.finish()])
    assert trace_ids(spans) == {job.get_span_context().trace_id}
    assert carried(traced) == 2 * [[header_of(named(spans, "write"))]]
    commit = named(spans, "commit")
    assert commit.attributes is not None
    assert commit.attributes["anabranch.txn_id"] == writer.txn_id.hex()


def test_a_refused_commit_is_an_error_of_its_span(
    traced: World, spans: InMemorySpanExporter
) -> None:
    with traced.client.begin("nyc") as txn:
        txn.write("nyc/missing", b"1")
        with pytest.raises(errors.UnknownStream):
            txn.commit()
    commit, decide = named(spans, "commit"), named(spans, "decide")
    assert not commit.status.is_ok
    for span in (commit, decide):
        assert span.attributes is not None
        assert span.attributes["error.type"] == "UnknownStream"


def test_consuming_continues_the_trace_of_an_event(
    traced: World, spans: InMemorySpanExporter
) -> None:
    with traced.client.begin("nyc") as txn:
        txn.write(STREAM, b"1", key=b"a")
        txn.commit()
    with traced.client.begin("nyc") as txn:
        txn.write(STREAM, b"2", key=b"a")
        txn.commit()
    first, second = [span for span in spans.get_finished_spans() if span.name.endswith("commit")]
    events = sorted(traced.client.read(STREAM, timeout=0.1), key=lambda event: event.value or b"")
    spans.clear()
    with consume(events[0]):
        assert trace.get_current_span().get_span_context().is_valid
    found = named(spans, f"consume {STREAM}")
    assert found.kind == trace.SpanKind.CONSUMER
    assert found.parent is not None
    assert first.context is not None
    assert found.parent.span_id == first.context.span_id
    spans.clear()
    with pytest.raises(KeyError), consume(events):
        raise KeyError("stop")
    both = named(spans, f"consume {STREAM}")
    assert both.parent is None
    assert not both.status.is_ok
    assert {link.context.span_id for link in both.links} == {
        span.context.span_id for span in (first, second) if span.context
    }


def test_a_trace_that_is_not_sampled_costs_no_header(monkeypatch: pytest.MonkeyPatch) -> None:
    provider = TracerProvider(sampler=ALWAYS_OFF)
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    world = World()
    world.client.create_stream(STREAM)
    with world.client.begin("nyc") as txn:
        txn.write(STREAM, b"1", key=b"a")
        txn.commit()
    with world.client.begin("nyc") as txn:
        txn.token()
        txn.write(STREAM, b"2", key=b"a")
        txn.commit()
    assert carried(world) == [[], []]


def test_a_trace_that_is_not_sampled_has_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a parent that is not sampled, OpenTelemetry is not even asked; a trace of one's own it decides once."""
    asked: list[str] = []

    class Counted(StaticSampler):
        def should_sample(self, *given: Any, **named: Any) -> Any:
            asked.append(given[2])
            return super().should_sample(*given, **named)

    provider = TracerProvider(sampler=Counted(Decision.DROP))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    world = World()
    world.client.create_stream(STREAM)

    def commit() -> None:
        for opens in (False, True):
            with world.client.begin("nyc") as txn:
                if opens:
                    txn.token()
                txn.write(STREAM, b"1", key=b"a")
                txn.commit()

    parent = trace.SpanContext(1, 1, is_remote=True, trace_flags=trace.TraceFlags(0))
    with trace.use_span(trace.NonRecordingSpan(parent)):
        commit()
    assert asked == []
    commit()
    assert asked == ["anabranch commit", "anabranch begin"]


@pytest.mark.parametrize(
    ("header", "is_known"),
    [
        (STRANGE, True),
        (STRANGE.replace("00-", "01-", 1) + "-more", True),
        (STRANGE.replace("00-", "ff-", 1), False),
        (STRANGE + "-more", False),
        (STRANGE.upper(), False),
        ("00-" + "0" * 32 + STRANGE[35:], False),
        (STRANGE[:36] + "0" * 16 + STRANGE[52:], False),
        (STRANGE.replace("b7ad", "+_ad"), False),
        ("", False),
    ],
)
def test_a_traceparent_is_read_as_opentelemetry_reads_it(
    spans: InMemorySpanExporter, header: str, is_known: bool
) -> None:
    found: Any = tracing.current()
    span = found.remote(header.encode())
    theirs = trace.get_current_span(TraceContextTextMapPropagator().extract({TRACE_HEADER: header}))
    assert (span is not None) == is_known == theirs.get_span_context().is_valid
    assert span is None or span.get_span_context() == theirs.get_span_context()


def test_a_malformed_header_makes_no_trouble(traced: World, spans: InMemorySpanExporter) -> None:
    with traced.client.begin("nyc") as txn:
        txn.write(STREAM, b"1", key=b"a", headers={TRACE_HEADER: b"\xff nonsense"})
        txn.commit()
    (event,) = traced.client.read(STREAM, timeout=0.1)
    with consume(event):
        pass
    assert named(spans, f"consume {STREAM}").parent is None


def test_an_asyncio_task_s_span_is_the_parent(traced: World, spans: InMemorySpanExporter) -> None:
    from anabranch.aio.loop import LoopWaits

    tracer = trace.get_tracer_provider().get_tracer("program")

    def commit() -> None:
        with traced.client.begin("nyc") as txn:
            txn.write(STREAM, b"1", key=b"a")
            txn.commit()

    async def task() -> None:
        waits = LoopWaits(asyncio.get_running_loop())
        with tracer.start_as_current_span("task"):
            await waits.call(commit)
        assert not trace.get_current_span().get_span_context().is_valid
        waits.close()

    asyncio.run(task())
    parent, task_span = named(spans, "commit").parent, spans.get_finished_spans()[-1]
    assert task_span.name == "task"
    assert parent is not None
    assert task_span.context is not None
    assert parent.span_id == task_span.context.span_id


def test_a_leader_forgets_the_oldest_commands(
    monkeypatch: pytest.MonkeyPatch, spans: InMemorySpanExporter
) -> None:
    monkeypatch.setattr(tracing, "_MOST_SERVED", 2)
    found: Any = tracing.current()
    served = tracing.Served(found, 0)
    for cid in (b"1", b"2", b"2", b"3"):
        served.arrived("open", {"ab.cid": cid, TRACE_HEADER: STRANGE.encode()})
    served.arrived("open", {"ab.cid": b"4"})
    for cid in (b"1", b"2", b"3", b"3", b"4"):
        served.answered("open", cid, None)
    assert len(spans.get_finished_spans()) == 2


# -- off --------------------------------------------------------------------------------------------------


def test_without_a_provider_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    for provider in (trace.NoOpTracerProvider(), trace.ProxyTracerProvider()):
        monkeypatch.setattr(trace, "get_tracer_provider", lambda provider=provider: provider)
        assert tracing.current() is None
        world = World()
        world.client.create_stream(STREAM)
        with world.client.begin("nyc") as txn:
            assert txn.trace is None
            txn.write(STREAM, b"1", key=b"a")
            txn.commit()
        assert carried(world) == [[]]
        (event,) = world.client.read(STREAM, timeout=0.1)
        with consume(event):
            assert not trace.get_current_span().get_span_context().is_valid


def test_a_program_that_does_not_trace_imports_nothing_of_it() -> None:
    assert anabranch.__version__
    code = (
        "import sys, anabranch.client.client, anabranch.controller.controller, anabranch.tracing as t\n"
        "assert t.current() is None\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
