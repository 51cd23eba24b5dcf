"""One trace over processes: begun in this one, written in another, committed here, consumed in a third."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.propagate import inject
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import anabranch
from tests.cluster import Cluster
from tests.plain_reader import read_all

pytestmark = [pytest.mark.broker, pytest.mark.long]

# The start of a program that traces, and prints its spans at its end.
OTHER = """
import json, sys
from opentelemetry import context, propagate, trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

spans, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(spans))
trace.set_tracer_provider(provider)
given = json.loads(sys.argv[1])
import anabranch
from anabranch.tracing import consume

client = anabranch.connect(given["bootstrap"])
"""
WRITER = """
context.attach(propagate.extract(given))
with client.join(bytes.fromhex(given["token"]), label="loader") as writer:
    writer.write(given["stream"], b"3 apples", key=b"ann")
found = {"receipt": writer.finish().to_bytes().hex()}
"""
CONSUMER = """
for event in client.read(given["stream"], timeout=1):
    with consume(event):
        pass
found = {"header": dict(event.headers)["traceparent"].decode()}
"""
END = """
client.close()
found["spans"] = [
    [span.name, f"{span.context.trace_id:032x}", span.parent and f"{span.parent.span_id:016x}"]
    for span in spans.get_finished_spans()
]
print(json.dumps(found))
"""


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The ended spans of this process."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


def run(program: str, **given: str) -> Any:
    """What another process found."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", OTHER + program + END, json.dumps(given)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_one_trace_spans_all_processes(
    cluster: Cluster, scope: str, spans: InMemorySpanExporter
) -> None:
    stream, handed = f"{scope}/events", dict[str, str]()
    with anabranch.connect(cluster.bootstrap) as client:
        client.create_stream(stream, segments=2)
        tracer = trace.get_tracer_provider().get_tracer("program")
        with tracer.start_as_current_span("job") as job, client.begin(scope) as txn:
            inject(handed)
            handed |= {
                "bootstrap": cluster.bootstrap, "stream": stream, "token": txn.token().hex()
            }  # fmt: skip
            written = run(WRITER, **handed)
            result = txn.commit([bytes.fromhex(written["receipt"])])
        timeline = client.timeline(result.txn_id)
    consumed = run(CONSUMER, bootstrap=cluster.bootstrap, stream=stream)
    trace_id = f"{job.get_span_context().trace_id:032x}"
    assert [name for name, *_ in written["spans"]] == ["anabranch write", "anabranch flush"]
    ((name, _, parent),) = consumed["spans"]
    assert name == f"anabranch consume {stream}"
    assert consumed["header"].split("-")[1:3] == [trace_id, parent]
    mine = [span.name for span in spans.get_finished_spans()]
    assert [n for n in mine if n != "anabranch flush"] == [
        "anabranch begin",
        "anabranch commit",
        "job",
    ]
    all_ids = {span.context.trace_id for span in spans.get_finished_spans() if span.context}
    assert {f"{one:032x}" for one in all_ids} == {trace_id}
    assert {one for _, one, _ in [*written["spans"], *consumed["spans"]]} == {trace_id}
    # A plain consumer gets the header, too.
    (event,) = read_all(cluster.bootstrap, stream)
    assert event.headers == (("traceparent", consumed["header"].encode()),)
    # The same commit's timeline.
    steps = {step.what: step for step in timeline.steps}
    assert [what for what in steps if what != "commit asked"] == [
        "id made", "begun", "touched", "joined", "receipt", "decided", "merged", "readable"
    ]  # fmt: skip
    assert "(loader)" in steps["receipt"].about
    assert steps["readable"].clock == "broker"
    assert 0 <= steps["readable"].at_ms - steps["merged"].at_ms < 60_000
    assert timeline.gaps == ()
