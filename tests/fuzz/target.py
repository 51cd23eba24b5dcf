"""A decoder of outside bytes, as the fuzzer sees it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from tests.fuzz.mutate import Mutate, mutated

Run: TypeAlias = Callable[[bytes], object]
Make: TypeAlias = Callable[[], Run]


def always(run: Run) -> Make:
    """Of what needs no preparation."""
    return lambda: run


@dataclass(frozen=True)
class Target:
    """A decoder, valid inputs for it, and the errors by which it may refuse others.

    ``make`` is called once in a process, after which only the inputs cost: it returns what takes an input, and
    raises anything but ``allowed`` (AssertionError too) for a finding.
    ``memory``: MB that one input may take beyond what the process had.
    """

    name: str
    seeds: Callable[[], Sequence[bytes]]
    make: Make
    allowed: tuple[type[Exception], ...]
    mutate: Mutate = mutated
    memory: int = 200

    def input(self, seed: int, number: int, seeds: Sequence[bytes]) -> bytes:
        """The input of this number: first the seeds as they are, then mutations of them."""
        if number < len(seeds):
            return seeds[number]
        random = Random(f"{seed}/{self.name}/{number}")
        return self.mutate(random, random.choice(seeds), seeds)
