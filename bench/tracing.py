"""One-shots of 10 events, 64 in flight: CPU of client and controller for each, traced by OpenTelemetry or not.

Sides, each with a client process of its own that keeps its connection: tracing is off in both processes; the
controller alone has a tracer; the client has one, too, and each one-shot is in a request, of which none or 1 in
10 is sampled; or each one-shot begins a trace of its own, of which 1 in 10 is sampled, or all. Two controllers
with topics of their own, on one broker: one traces. Both processes hand their spans to a `BatchSpanProcessor` whose
exporter drops them: what an exporter takes is not in the figures.

Each side has a partner, a client for which tracing is off; their turns follow each other. So all clients are idle
for the same time, and both controllers serve the same number of turns. A request is a current span of another
process; its web framework makes it so, whether anabranch traces or not, so the partner's one-shots are in requests,
too. Ratios are those of such pairs: the median of the rounds. Goal: ≤ 1.05 in a request. One-shots that begin
traces have none: OpenTelemetry's SDK takes more than that to decide about a trace, and to make a span.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anabranch
from anabranch.infra.broker import EmbeddedBroker
from bench.setting import WARM_S, controller, cpu_s, one_shots

IN_FLIGHT = 64
LEAD_S = 1.0  # of load before a turn counts: the memory of a process that was idle may be paged out
GOAL = 1.05
# Side -> whether its controller traces, and its name in the table.
SIDES = {
    "off": (False, "off"),
    "controller": (True, "the controller alone has a tracer"),
    "unsampled": (True, "in requests that are not sampled"),
    "requests": (True, "in requests, 1 in 10 sampled"),
    "tenth": (True, "each begins a trace, 1 in 10 sampled"),
    "all": (True, "each begins a trace, all sampled"),
}
Pair = dict[str, dict[str, float]]  # side -> CPU of a one-shot by part
SAMPLED = {"unsampled": 0, "requests": 1}  # side -> how many requests in 10 are sampled


def run(*, quick: bool = False) -> dict[str, Any]:
    """CPU µs of a one-shot by side, and ratios to tracing that is off."""
    rounds, seconds, warm_s = (1, 1.0, 1.0) if quick else (7, 3.0, WARM_S)
    with EmbeddedBroker() as broker, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="anabranch-bench-")))
        controllers = {}
        for traces, module in ((False, "anabranch.cli"), (True, "bench.tracing")):
            more = ("--cluster-prefix", _prefix(traces=traces))
            started = controller(broker.bootstrap, folder / more[1], more, module=module)
            controllers[traces] = stack.enter_context(started)
        pairs: dict[str, list[Pair]] = {side: [] for side in SIDES if side != "off"}
        clients = {
            (pair, side): stack.enter_context(_client(broker.bootstrap, pair, side))
            for pair in pairs
            for side in ("off", pair)
        }

        def turn(pair: str, side: str, seconds: float) -> dict[str, float]:
            return _measured(clients[pair, side], controllers[SIDES[side][0]], seconds)

        for pair, side in clients:
            turn(pair, side, warm_s / len(clients))
        for number in range(rounds):
            for pair, found in pairs.items():
                order = ("off", pair) if number % 2 else (pair, "off")
                found.append({side: turn(pair, side, seconds) for side in order})
    return {
        "rounds": rounds,
        "seconds_each": seconds,
        "in_flight": IN_FLIGHT,
        "cpu_us": {
            "off": _medians([pair["off"] for found in pairs.values() for pair in found]),
            **{side: _medians([pair[side] for pair in found]) for side, found in pairs.items()},
        },
        "ratio": {
            side: statistics.median(_sum(pair[side]) / _sum(pair["off"]) for pair in found)
            for side, found in pairs.items()
        },
        "goal": GOAL,
    }


def _medians(turns: list[dict[str, float]]) -> dict[str, float]:
    return {part: statistics.median(one[part] for one in turns) for part in turns[0]}


def _sum(parts: dict[str, float]) -> float:
    return sum(parts.values())


def _prefix(*, traces: bool) -> str:
    return "traced" if traces else "plain"


def _measured(client: subprocess.Popen[str], controller: int, seconds: float) -> dict[str, float]:
    """CPU µs of a one-shot, in the client and in the controller."""
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(f"{seconds}\n")
    client.stdin.flush()
    client.stdout.readline()  # its load has begun
    before = cpu_s(client.pid), cpu_s(controller)
    client.stdin.write("\n")
    client.stdin.flush()
    count = int(client.stdout.readline()) or 1  # a short one that warms up may end before the first
    after = cpu_s(client.pid), cpu_s(controller)
    client.stdin.write("\n")
    client.stdin.flush()
    client.stdout.readline()  # it has ended
    of_client, of_controller = (b - a for a, b in zip(before, after, strict=True))
    return {"client": of_client / count * 1e6, "controller": of_controller / count * 1e6}


@contextmanager
def _client(bootstrap: str, pair: str, side: str) -> Iterator[subprocess.Popen[str]]:
    line = [sys.executable, "-m", "bench.tracing", "client", bootstrap, pair, side]
    with subprocess.Popen(
        line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            process.stdin.close()


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    rows = []
    for side, (_, name) in SIDES.items():
        parts = result["cpu_us"][side]
        ratio = result["ratio"].get(side)
        goal = f"≤ {GOAL} ×" if side in ("controller", *SAMPLED) else ""
        rows.append(
            [
                name,
                f"{parts['client']:.0f} µs",
                f"{parts['controller']:.0f} µs",
                "" if ratio is None else f"{ratio:.3f} ×",
                goal,
            ]
        )
    return ["", "client", "controller", "of off", "goal"], rows


# -- the processes ----------------------------------------------------------------------------------------


def set_tracer(share: float) -> None:
    """Let this process trace. ``share``: this part of the traces that begin here is sampled."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    class Dropped(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider(sampler=ParentBasedTraceIdRatio(share))
    provider.add_span_processor(BatchSpanProcessor(Dropped()))
    trace.set_tracer_provider(provider)


def work(bootstrap: str, pair: str, side: str) -> None:
    """A client. A line of standard input, with seconds, begins a load; two more ask for its count and end it.

    ``side``: "off", or that of the pair.
    """
    traces, _ = SIDES[side]
    stream = f"bench/{pair}-{side}"
    if side not in ("off", "controller"):
        set_tracer(0.1 if side == "tenth" else 1.0)
    with anabranch.connect(bootstrap, prefix=_prefix(traces=traces), timeout=60) as client:
        client.create_stream(stream, 2)
        for line in sys.stdin:
            _load(client, stream, float(line), SAMPLED.get(pair))


def _load(client: anabranch.Client, stream: str, seconds: float, sampled: int | None) -> None:
    """One-shots until standard input says so. ``sampled``: of ten requests; None: they are in no request."""
    counts, stop = [0] * IN_FLIGHT, threading.Event()

    def commit(number: int) -> None:
        call = one_shots(client, [stream], number * 1_000_003)
        if sampled is not None:
            call = _in_requests(call, sampled)
        while not stop.is_set():
            call()
            counts[number] += 1

    threads = [threading.Thread(target=commit, args=(number,)) for number in range(IN_FLIGHT)]
    for thread in threads:
        thread.start()
    time.sleep(LEAD_S)
    _say(os.getpid())
    sys.stdin.readline()
    before = sum(counts)
    time.sleep(seconds)
    _say(sum(counts) - before)
    sys.stdin.readline()
    stop.set()
    for thread in threads:
        thread.join()
    _say(0)


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _in_requests(call: Callable[[], None], sampled: int) -> Callable[[], None]:
    """The call in a request, of ten of which some are sampled: a span of another process is the current one."""
    from opentelemetry import context, trace

    contexts = []
    for number in range(10):
        flags = trace.TraceFlags(int(number < sampled))
        span = trace.SpanContext(number + 1, 1, is_remote=True, trace_flags=flags)
        contexts.append(trace.set_span_in_context(trace.NonRecordingSpan(span)))
    turns = itertools.cycle(contexts)

    def request() -> None:
        entered = context.attach(next(turns))
        call()
        context.detach(entered)

    return request


if __name__ == "__main__":
    if sys.argv[1] == "client":
        work(*sys.argv[2:])
    else:
        from anabranch.cli import app

        set_tracer(1.0)
        app()
