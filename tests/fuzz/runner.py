"""Runs targets in child processes and gathers what they found; a child that died is a finding, too."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from tests.fuzz.child import CPU_S, CURRENT, ROOM

ROOT = Path(__file__).resolve().parents[2]
_SAVED = Path(tempfile.gettempdir()) / "anabranch-fuzz"


@dataclass(frozen=True)
class Finding:
    """An input and its fault."""

    target: str
    number: int
    data: bytes
    why: str

    def save(self) -> Path:
        """Keep the input in a file."""
        _SAVED.mkdir(exist_ok=True)
        file = _SAVED / f"{self.target}-{sha256(self.data).hexdigest()[:12]}.bin"
        file.write_bytes(self.data)
        return file

    def text(self, seed: int) -> str:
        """For people: what, and how to see it again."""
        shown = self.data[:200].hex() + ("…" if len(self.data) > 200 else "")
        return (
            f"{self.target}: input {self.number} of seed {seed}: {_brief(self.why)}\n"
            f"  {len(self.data)} bytes: {shown}\n"
            f"  again: scripts/fuzz --only {self.target} --replay {self.save()}"
        )


def _brief(why: str) -> str:
    """The places that count in a traceback: the last of the product's."""
    lines = why.strip().splitlines()
    places = [i for i, line in enumerate(lines) if "/anabranch/" in line and "File " in line]
    shown = lines[-12:] if not places else lines[places[-1] : places[-1] + 2] + lines[-3:]
    return "\n    ".join(shown)


@dataclass
class Report:
    """How many inputs each target had, and the findings."""

    done: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)


def fuzz(
    names: Sequence[str],
    seed: int,
    *,
    inputs: int = 0,
    seconds: float = 0.0,
    limit: float = 600.0,
    most: int = 20,
) -> Report:
    """Try inputs on each target. ``inputs``: of each, besides its seeds (0: no limit); ``seconds``: of each.

    ``limit``: seconds of all; a child that still runs then waits for something, which is a finding.
    """
    report = Report()
    deadline = time.monotonic() + limit
    place, number = 0, 0
    with tempfile.TemporaryDirectory(prefix="anabranch-fuzz-") as made:
        folder = Path(made)
        (folder / "current").write_bytes(bytes(ROOM))
        while place < len(names) and len(report.findings) < most:
            (folder / "told").write_text("")
            where = [str(folder), ",".join(names)]
            how = [str(seed), str(inputs), str(seconds), str(place), str(number)]
            code, said = _child([*where, *how], deadline)
            _take(folder, report)
            if code == 0:
                break
            data = (folder / "current").read_bytes()
            place, number, size = CURRENT.unpack_from(data)
            tried = data[CURRENT.size : CURRENT.size + size]
            report.findings.append(Finding(names[place], number, tried, _death(code, said)))
            if number < 0 or time.monotonic() > deadline:
                break
            number += 1
    return report


def _child(arguments: Sequence[str], deadline: float) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.fuzz.child", *arguments]
    left = max(1.0, deadline - time.monotonic())
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=left, check=False
        )
    except subprocess.TimeoutExpired as error:
        return 1, f"it waits for something: stopped at the time limit\n{error.stderr!r}"
    return done.returncode, done.stderr[-3000:]


def _take(folder: Path, report: Report) -> None:
    for line in (folder / "told").read_text().splitlines():
        told = json.loads(line)
        if "done" in told:
            report.done[told["target"]] += told["done"]
        else:
            data = bytes.fromhex(told["data"])
            report.findings.append(Finding(told["target"], told["number"], data, told["why"]))


def _death(code: int, said: str) -> str:
    if code == -signal.SIGPROF:
        return f"a hang: more than {CPU_S:.0f} s of CPU time\n{said}"
    what = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"the process died: {what}\n{said}"
