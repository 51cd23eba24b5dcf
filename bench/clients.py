"""One-shots of 10 events, 64 in flight, by the Python, the Go and the JVM client in turn.

All use one broker and controller. Each client is one process, the child of the conformance kit: 64 threads (Go:
goroutines), each of which waits for its commit before it begins the next one. The figures are medians over
rounds. CPU is that of a commit, in the process of the client, the controller, and the broker. A client whose
toolchain (Go; Java and Maven) is missing is left out.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from anabranch.conformance.child import Child
from bench.setting import WARM_S, Place, cpu_s

CLIENTS = Path(__file__).parents[1] / "clients"
KINDS = {"python": (), "go": ("go",), "jvm": ("mvn", "java")}  # the programs that each needs
PREFIX = "anabranch"
IN_FLIGHT = 64
EVENTS = 10
VALUE_BYTES = 100
BUILD_S = 600
FIGURES = ("per_s", "cpu_us_client", "cpu_us_controller", "cpu_us_broker")

Figures = dict[str, float]


def missing(client: str) -> list[str]:
    """The programs that a client needs and that are not installed."""
    return [program for program in KINDS[client] if shutil.which(program) is None]


def built(client: str, folder: Path) -> list[str]:
    """Build a client; the command that starts it as the child of the kit. ``folder``: for its program."""
    if client == "go":
        program = str(folder / "child")
        _build(CLIENTS / "go", "go", "build", "-o", program, "./conformance")
        return [program]
    if client == "jvm":
        own = CLIENTS / "jvm"
        _build(own, "mvn", "-q", "compile", "dependency:copy-dependencies")
        places = f"{own}/target/classes:{own}/target/dependency/*"
        return ["java", "-XX:+UseSerialGC", "-cp", places, "anabranch.Conformance"]
    return [sys.executable, "-m", "anabranch.conformance.python_client"]


def _build(folder: Path, *words: str) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=BUILD_S)
    if done.returncode != 0:
        raise RuntimeError(done.stdout + done.stderr)


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Medians of interleaved rounds, by client."""
    rounds, seconds, warm_s = (1, 3.0, 5.0) if quick else (5, 8.0, WARM_S)
    stream = place.new_stream(segments=2)
    found: dict[str, list[Figures]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="anabranch-clients-")))
        children = {}
        for client in KINDS:
            if not missing(client):
                child = Child(built(client, folder), folder / f"{client}.log")
                children[client] = stack.enter_context(closing(child))
                child.ask(
                    "connect", 60, bootstrap=place.bootstrap, prefix=PREFIX, timeout_ms=30_000
                )
                _measure(place, child, stream, warm_s)
        for _ in range(rounds):
            for client, child in children.items():
                found.setdefault(client, []).append(_measure(place, child, stream, seconds))
    return {
        "in_flight": IN_FLIGHT,
        "events_per_transaction": EVENTS,
        "value_bytes": VALUE_BYTES,
        "rounds": rounds,
        "seconds_each": seconds,
        "left_out": {client: missing(client) for client in KINDS if missing(client)},
        "rows": {
            client: {key: statistics.median(one[key] for one in each) for key in each[0]}
            for client, each in found.items()
        },
    }


def _measure(place: Place, child: Child, stream: str, seconds: float) -> Figures:
    parts = {"client": child.pid, "controller": place.controller, "broker": place.broker}
    spent = {part: -cpu_s(process) for part, process in parts.items()}
    done = child.ask(
        "load",
        seconds + 60,
        scope=stream.partition("/")[0],
        stream=stream,
        in_flight=IN_FLIGHT,
        duration_s=seconds,
        count=EVENTS,
        value_bytes=VALUE_BYTES,
    )
    cpu = {part: spent[part] + cpu_s(process) for part, process in parts.items()}
    figures = {f"cpu_us_{part}": used / done["committed"] * 1e6 for part, used in cpu.items()}
    return {"per_s": done["committed"] / done["seconds"], **figures}


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = ["client", "commits/s", "CPU of a commit, µs: client", "controller", "broker"]
    rows = [
        [client, *(f"{figures[key]:,.0f}" for key in FIGURES)]
        for client, figures in result["rows"].items()
    ]
    for client, programs in result["left_out"].items():
        rows.append([client, f"left out: {', '.join(programs)} not installed", "", "", ""])
    return head, rows
