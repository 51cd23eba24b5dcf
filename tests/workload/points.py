"""Where a controller is cut: every port call, by its name and its callers.

A point is ``name|site|n|phase``: the n-th call of that name from that site, before or after it. The site is
the chain of the shell's own functions on the stack and, inside a round, what the round holds: so two uses of one
port call are two points, and a new one needs no list. Name and site may be patterns:
``name|*|n|phase`` is the n-th call of that name from anywhere.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import FrameType
from typing import NamedTuple

from anabranch.controller.durability import write_round
from anabranch.core import rows as k
from anabranch.core.round import Round
from anabranch.protocol.schemas.codec import decode

_SHELL = ("anabranch.controller.", "anabranch.topics.creation")


class Point(NamedTuple):
    """One place to cut."""

    name: str
    site: str
    n: int
    phase: str

    def __str__(self) -> str:
        return "|".join((self.name, self.site, str(self.n), self.phase))

    @classmethod
    def parse(cls, text: str) -> Point:
        """The point of its text."""
        name, site, n, phase = text.split("|")
        return cls(name, site, int(n), phase)

    @property
    def title(self) -> str:
        """For people."""
        times = f", time {self.n}" if self.n > 1 else ""
        return f"{self.phase} {self.name} in {self.site}{times}"


def site() -> str:
    """The callers of the port: the shell's functions on the stack, the outermost first."""
    names: list[str] = []
    held = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(_SHELL):
            names.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            if frame.f_code is write_round.__code__:
                held = f" of a round with {holds(frame.f_locals['round_'])}"
        frame = frame.f_back
    return ">".join(reversed(names)) + held


def holds(round_: Round) -> str:
    """The kinds of rows and effects of a round."""
    kinds = {k.split_key(key)[1].name.lower() for key in round_.rows} - {"round", "txn"}
    for key, value in round_.rows.items():
        if k.split_key(key)[1] is k.Entry.TXN and value is not None:
            kinds.add(decode(value).state)
    if round_.commits:
        kinds.add("data")
    if round_.replies:
        kinds.add("reply")
    return "+".join(sorted(kinds))


@dataclass
class Cut:
    """A hook that traces all calls, and kills or stops this process at one of them."""

    point: Point | None
    action: signal.Signals
    armed: bool
    trace: str

    def __post_init__(self) -> None:
        self._hits = 0
        self._seen: Counter[tuple[str, str, str]] = Counter()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._file = os.open(self.trace, flags, 0o600) if self.trace else -1

    def arm(self) -> None:
        """Count from here on."""
        self.armed = True

    def __call__(self, name: str, phase: str) -> None:
        """A call is about to be made, or was made."""
        if not self.armed or (self.point is None and self._file < 0):
            return
        where = site()
        self._seen[name, where, phase] += 1
        if self._file >= 0:
            here = Point(name, where, self._seen[name, where, phase], phase)
            os.write(self._file, f"{here}\n".encode())
        wanted = self.point
        if wanted is None or wanted.phase != phase or not fnmatchcase(name, wanted.name):
            return
        if fnmatchcase(where, wanted.site):
            self._hits += 1
            if self._hits == wanted.n:
                # This very thread stops at once; a signal to the process may reach another first.
                signal.pthread_kill(threading.get_ident(), self.action)
