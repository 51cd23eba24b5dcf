"""A world whose journals are cut and moved, as the shell does it."""

from __future__ import annotations

import dataclasses
from typing import Any

from anabranch.core.decisions.cleanup import Copied, has_moved, moved, not_now, runs_to_move
from tests.core.harness import World, nyc
from tests.core.labels import MINUTE

PLACE = ("nyc/a", 0)
OFTEN: dict[str, Any] = {"clean_ms": 0, "clean_records": 1, "clean_bytes": 1}


def cleaning(world: World, **changes: Any) -> World:
    """Cut whenever it is possible, unless said otherwise."""
    world.settings = dataclasses.replace(world.settings, **(OFTEN | changes))
    world.memory.cleaning.next_ms = world.now_ms + world.settings.clean_ms
    return world


def opened(*labels: str, **changes: Any) -> World:
    world = cleaning(nyc(), **changes)
    for label in labels:
        world.begin(label, keepalive_ms=60 * MINUTE)
        world.touch(label)
    return world


def end(world: World, label: str) -> None:
    """Commit all that it wrote."""
    writers = sorted(
        {w for w, n in world.writers.items() for b in world.journals.get(PLACE, ())
         if (b.run.txn_id, b.run.writer) == (world.id(label), n)}
    )  # fmt: skip
    world.commit(label, own=[world.receipt(label, w) for w in writers])
    world.wait(300)
    assert world.row(label).state == "COMMITTED"


def low(world: World) -> int:
    world.wait(300)
    return world.state.low_water.get(PLACE, 0)


def relocate(world: World) -> int:
    """Move as the shell does; how many runs."""
    turn = world.new_turn()
    lying = runs_to_move(turn, PLACE)
    if not lying:
        not_now(turn, PLACE)
        return 0
    copies = []
    for one in lying:
        at = world.ends[PLACE]
        world.ends[PLACE] = at + one.run.end - one.run.first
        copies.append(Copied(at, at, one.run.pure))
    moved(turn, PLACE, lying, copies)
    world.close(turn)
    has_moved(turn, PLACE, lying, copies)
    return len(lying)


def rebuild(world: World) -> None:
    """A leader with an empty table, as the shell begins."""
    world.lead(keep_table=False)
    begin(world)


def begin(world: World) -> None:
    world.table.write(world.index.sweep(world.state))
    for place, offset in world.state.low_water.items():
        world.index.positions[place] = max(offset, world.index.positions.get(place, 0))


def crowd(world: World, size: int = 10_000) -> None:
    """Something comes and goes."""
    label = world.new_id(f"young {len(world.ids)}")
    world.begin(label)
    world.touch(label)
    world.write(label, f"w {label}", size=size)
    end(world, label)
