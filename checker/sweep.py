"""Finds the answers that came before a request in real time, without comparing all pairs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from checker.reading import Operation

T = TypeVar("T")


class Told(Generic[T]):
    """Facts with a rank. Finds the highest one whose answer surely came before a request.

    Times in different files decide only if they differ, lines of one file always (`Operation.ended_before`).
    """

    def __init__(self, facts: Iterable[tuple[Operation, int, T]]) -> None:
        """``facts``: the operation with the answer, the fact's rank, and the fact."""
        self._all = sorted((fact for fact in facts if fact[0].told_at is not None), key=_told_at)
        self._files: dict[str, list[tuple[Operation, int, T]]] = defaultdict(list)
        for fact in self._all:
            self._files[fact[0].file].append(fact)
        for of_file in self._files.values():
            of_file.sort(key=_told_line)

    def before(
        self, questions: Iterable[tuple[Operation, Any]]
    ) -> Iterator[tuple[Operation, Any, int, T]]:
        """For each request (its operation, and a label), in the order of time: both, and the highest earlier fact
        with its rank. Requests without an earlier fact are left out.
        """
        asked = sorted(questions, key=lambda question: (question[0].at, question[0].line))
        places: dict[str, int] = defaultdict(int)
        bests: dict[str, tuple[int, T]] = {}
        best: tuple[int, T] | None = None
        at = 0
        for op, payload in asked:
            while at < len(self._all) and _told_at(self._all[at]) < op.at:
                best = _higher(best, self._all[at])
                at += 1
            of_file = self._files.get(op.file, [])
            while places[op.file] < len(of_file) and _told_line(of_file[places[op.file]]) < op.line:
                found = _higher(bests.get(op.file), of_file[places[op.file]])
                bests[op.file] = found
                places[op.file] += 1
            own = bests.get(op.file)
            known = best if own is None or (best is not None and best[0] >= own[0]) else own
            if known is not None:
                yield op, payload, *known


def _told_at(fact: tuple[Operation, int, Any]) -> int:
    return fact[0].told_at or 0


def _told_line(fact: tuple[Operation, int, Any]) -> int:
    return fact[0].told_line or 0


def _higher(best: tuple[int, T] | None, fact: tuple[Operation, int, T]) -> tuple[int, T]:
    return best if best is not None and best[0] >= fact[1] else (fact[1], fact[2])
