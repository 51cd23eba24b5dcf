"""CPU of a commit by two builds of anabranch: the one of this checkout, and another one, in turn on one broker.

On a busy machine a rate can't show a difference of five percent; CPU time can. Each build has a controller and a
client process of its own for the whole run, with topics of its own on the same warm broker. A pair is one turn of
each build; a turn does the same work, and counts the CPU seconds of client, controller and broker from its begin to
its end. The figures are medians over all pairs; the ratio is the median of the pairs' ratios, this build / the
other one.

Works: single-request transactions of ten events, 1 and 64 in flight; transfers between two of 10,000 rows, 64 in
flight; a processor that copies 20,000 events (there the figure is CPU of an event, with the worker's start and
end).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from anabranch.infra.broker import EmbeddedBroker
from bench.setting import WARM_S, controller, cpu_s

ROOT = Path(__file__).resolve().parent.parent
WORKS = ("one-shots, 1 in flight", "one-shots, 64 in flight", "transfers, 64 in flight", "map")
PARTS = ("client", "controller", "broker")
GOAL = 1.03


def run(other: Path, *, pairs: int = 7, quick: bool = False) -> dict[str, Any]:
    """Microseconds of CPU a commit, by work, part and build. ``other``: a folder that holds another `anabranch`."""
    if not (other / "anabranch" / "__init__.py").is_file():
        raise FileNotFoundError(
            f"{other} has no folder anabranch: unpack a wheel there, or name a checkout"
        )
    seconds = 1.0 if quick else 4.0
    found: dict[str, list[dict[str, dict[str, float]]]] = {work: [] for work in WORKS}
    with ExitStack() as stack:
        broker = stack.enter_context(EmbeddedBroker())
        builds = {
            name: stack.enter_context(_build(name, folder, broker))
            for name, folder in (("this", ROOT), ("other", other.resolve()))
        }
        for turn in range(-1, pairs):  # the first one warms all processes
            for work in WORKS:
                order = list(builds) if turn % 2 else list(reversed(builds))
                took = {
                    name: builds[name].turn(work, seconds if turn >= 0 or quick else WARM_S)
                    for name in order
                }
                if turn >= 0:
                    found[work].append(took)
    return {"pairs": pairs, "seconds": seconds, "works": {w: _medians(t) for w, t in found.items()}}


def _medians(turns: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for part in (*PARTS, "all"):
        both = [
            {
                name: sum(one[p] for p in (PARTS if part == "all" else (part,)))
                for name, one in turn.items()
            }
            for turn in turns
        ]
        ratios = sorted(one["this"] / max(one["other"], 0.1) for one in both)
        rows[part] = {name: statistics.median(one[name] for one in both) for name in both[0]}
        rows[part] |= {"ratio": statistics.median(ratios), "least": ratios[0], "most": ratios[-1]}
    return rows


class _Build:
    """A client process of one build, and whose CPU to count."""

    def __init__(self, client: subprocess.Popen[str], parts: dict[str, int]) -> None:
        self._client = client
        self._parts = parts

    def turn(self, work: str, seconds: float) -> dict[str, float]:
        """Microseconds of CPU a commit, by part."""
        before = {part: cpu_s(process) for part, process in self._parts.items()}
        count = self.ask({"work": work, "seconds": seconds})["count"]
        spent = {part: cpu_s(process) - before[part] for part, process in self._parts.items()}
        return {part: 1e6 * used / count for part, used in spent.items()}

    def ask(self, question: dict[str, Any]) -> Any:
        """Send a line, and wait for the answer."""
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        self._client.stdin.write(json.dumps(question) + "\n")
        self._client.stdin.flush()
        answer = self._client.stdout.readline()
        if not answer:
            raise RuntimeError("a client process ended: its errors are above")
        return json.loads(answer)


@contextmanager
def _build(name: str, folder: Path, broker: EmbeddedBroker) -> Iterator[_Build]:
    """A controller and a client process that import `anabranch` from this folder."""
    # Safe path: the process must not import from the folder that it starts in.
    where = {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTHONSAFEPATH": "1"}
    prefix = f"bench-{name}"
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="anabranch-bench-")))
        trusts = "--trusts-open" in (folder / "anabranch/cli/controller.py").read_text()
        where["ANABRANCH_PREFIX"] = prefix  # its option has another name in older builds
        leading = controller(broker.bootstrap, place, (), where, trusts_open=trusts)
        pid = stack.enter_context(leading)
        client = subprocess.Popen(
            [sys.executable, "-m", "bench.builds_client", broker.bootstrap, prefix, name],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=place, env={**os.environ, **where},
        )  # fmt: skip
        stack.callback(client.wait, 60)
        assert client.stdin is not None
        stack.callback(client.stdin.close)
        parts = dict(zip(PARTS, (client.pid, pid, broker.pid), strict=True))
        build = _Build(client, parts)
        imported = Path(build.ask({"work": "begin"})["from"])
        if not imported.is_relative_to(folder):
            raise RuntimeError(f"{imported} was imported, not {folder}")
        yield build


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    rows = []
    for work, parts in result["works"].items():
        for part, one in parts.items():
            ratio = f"{one['ratio']:.3f} × ({one['least']:.2f} to {one['most']:.2f})"
            figures = (f"{one['this']:,.0f} µs", f"{one['other']:,.0f} µs", ratio)
            rows.append([work, part, *figures, f"≤ {GOAL} ×"])
    return ["work", "CPU of a commit in", "this build", "the other", "ratio", "goal"], rows
