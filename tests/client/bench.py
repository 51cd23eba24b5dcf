"""A client under test whose controller is a script and whose journal is a list."""

from __future__ import annotations

from typing import Any

from anabranch.client.client import Client
from tests.client.answers import obliging
from tests.client.doubles import ListJournals, ManualClock, ScriptedBus, scripted_ports

SMALL = 2000  # one_shot_bytes


class Bench:
    """A client whose controller is a script and whose journal is a list."""

    def __init__(self, script: Any = obliging, **options: Any) -> None:
        self.journals = ListJournals(options.pop("limit", 1000))
        self.bus: ScriptedBus
        self.clock: ManualClock
        self.bus, self.clock, ports = scripted_ports(script, journals=self.journals)
        self.client = Client(ports, threads=False, **({"one_shot_bytes": SMALL} | options))

    def written(self, journal: int = 0) -> list[Any]:
        return self.journals.made[journal].written


def override(**by_name: Any) -> Any:
    """`obliging`, but for some commands; a list is given answer by answer, its last again and again."""

    def script(command: Any) -> Any:
        name = type(command).__name__
        if name not in by_name:
            return obliging(command)
        answer = by_name[name]
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        return obliging(command) if answer is ... else answer

    return script
