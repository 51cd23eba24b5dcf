"""Aggregates, which stores and windows compute by name: `count`, `sum`, `reduce`, `top`, or an own `Aggregate`.

from anabranch import aggregates as agg

delays = app.windows("delays", 3600, into=agg.sum(lambda event: event.value["delay"]))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from anabranch.errors import InvalidArgument
from anabranch.protocol.legal_names import check_type

Of = Callable[[Any], Any]  # what of an event is aggregated


def _value(event: Any) -> Any:
    return event.value


def _same(state: Any) -> Any:
    return state


@dataclass(frozen=True, slots=True)
class Aggregate:
    """How a state follows from events. States have to suit the codec of the store: by default JSON.

    ``first``: the state after one item. ``add``: the state after one item more. ``merge``: the state of two parts,
    the earlier one first. ``of``: the item of an event. ``remove``: the state without an item; None if that can't
    be computed. ``result``: what users get of a state. ``name``: part of a store's format.
    """

    name: str
    first: Callable[[Any], Any]
    add: Callable[[Any, Any], Any]
    merge: Callable[[Any, Any], Any]
    of: Of = _value
    remove: Callable[[Any, Any], Any] | None = None
    result: Callable[[Any], Any] = _same

    def __post_init__(self) -> None:
        """Raises: InvalidArgument."""
        check_type("the name of an aggregate", self.name, str)
        for part in ("first", "add", "merge", "of", "remove", "result"):
            call = getattr(self, part)
            if not (callable(call) or (call is None and part == "remove")):
                raise InvalidArgument(f"{self.name}: {part}={call!r:.100} is no function")

    def after(self, state: Any, event: Any) -> Any:
        """The state after one event more. ``state``: None before the first."""
        item = self.of(event)
        return self.first(item) if state is None else self.add(state, item)

    def without(self, state: Any, event: Any) -> Any:
        """The state without an event that is in it. Raises: InvalidArgument (it can't be computed)."""
        if self.remove is None or state is None:
            raise InvalidArgument(
                f"{self.name} can't take an event back: use count or sum, or keep the rows and compute it from them"
                if self.remove is None
                else f"{self.name} has no event to take back"
            )
        return self.remove(state, self.of(event))


def count() -> Aggregate:
    """The number of events."""
    return Aggregate(
        "count",
        first=lambda _: 1,
        add=lambda state, _: state + 1,
        merge=lambda one, two: one + two,
        of=_same,
        remove=lambda state, _: state - 1,
    )


def sum(of: Of = _value) -> Aggregate:  # noqa: A001 - the word that users look for
    """The sum of the events' values, or of what ``of`` takes from each event."""
    return Aggregate(
        "sum",
        first=_same,
        add=lambda state, item: state + item,
        merge=lambda one, two: one + two,
        of=of,
        remove=lambda state, item: state - item,
    )


def reduce(call: Callable[[Any, Any], Any], of: Of = _value) -> Aggregate:
    """The events' items, joined by an associative function of two: ``reduce(max)``, ``reduce(min)``."""
    if not callable(call):
        raise InvalidArgument(f"reduce({call!r:.100}): a function of two items, such as max")
    return Aggregate("reduce", first=_same, add=call, merge=call, of=of)


def top(most: int, of: Of = _value, *, by: Callable[[Any], Any] = _same) -> Aggregate:
    """The ``most`` greatest items by ``by``, the greatest first; of equal items the earliest ones.

    Raises: InvalidArgument.
    """
    check_type("top", most, int)
    if not 1 <= most <= 10_000:
        raise InvalidArgument(f"top({most}): 1 to 10,000 items")

    def merge(one: list[Any], two: list[Any]) -> list[Any]:
        return sorted([*one, *two], key=by, reverse=True)[:most]

    return Aggregate(
        f"top {most}",
        first=lambda item: [item],
        add=lambda state, item: merge(state, [item]),
        merge=merge,
        of=of,
    )
