"""Draws a processor's topology: as lines of text, and as an SVG.

A worker declared the topology: it is text of other people. This module checks it, and shows no character that
acts on a screen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

from anabranch.logs import escaped
from anabranch.presentation.rows import lag_text

_MOST = 500  # names of a kind that are drawn
_WIDTH = 220.0
_HEIGHT = 40.0
_GAP_X = 80.0
_GAP_Y = 16.0
_MARGIN = 12.0
_NAME = 28  # characters of a name in a box
_NOTE = 36


@dataclass(frozen=True, slots=True)
class Call:
    """A function of a program, the inputs or stores that it is called for, what it uses, and what it writes."""

    name: str
    of: tuple[str, ...]
    uses: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Topology:
    """A program. ``stores``: name -> kind. ``late``: store -> the stream of its late events."""

    calls: tuple[Call, ...] = ()
    stores: Mapping[str, str] = field(default_factory=dict)
    late: Mapping[str, str] = field(default_factory=dict)
    outputs: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    replicas: tuple[str, ...] = ()
    dead_letter: str = ""


def read_topology(text: str) -> Topology | None:
    """The topology that a processor's row holds; None without a topology."""
    try:
        found = json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    calls = found.get("calls")
    return Topology(
        calls=tuple(
            Call(
                name=_text(one.get("name")),
                of=_texts(one.get("of")),
                uses=_texts(one.get("uses")),
                writes=_texts(one.get("writes")),
            )
            for one in (calls if isinstance(calls, list) else ())[:_MOST]
            if isinstance(one, dict)
        ),
        stores=_pairs(found.get("stores")),
        late=_pairs(found.get("late")),
        outputs=_texts(found.get("outputs")),
        tables=_texts(found.get("tables")),
        replicas=_texts(found.get("replicas")),
        dead_letter=_text(found.get("dead_letter")),
    )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _texts(value: Any) -> tuple[str, ...]:
    some = value if isinstance(value, list) else ()
    return tuple(one for one in some[:_MOST] if isinstance(one, str))


def _pairs(value: Any) -> dict[str, str]:
    some = value if isinstance(value, dict) else {}
    return {name: one for name, one in list(some.items())[:_MOST] if isinstance(one, str)}


def topology_row(found: Topology) -> dict[str, Any]:
    """The topology as JSON has it."""
    return {
        "handlers": [
            {"name": one.name, "of": one.of, "uses": one.uses, "writes": one.writes}
            for one in found.calls
        ],
        "stores": dict(found.stores),
        "late": dict(found.late),
        "outputs": found.outputs,
        "tables": found.tables,
        "replicas": found.replicas,
        "dead_letter": found.dead_letter or None,
    }


def behind_text(row: Mapping[str, Any]) -> str:
    """The lag of an input (a row of `processor_row`)."""
    if row["trouble"]:
        return str(row["trouble"])
    seconds = row["seconds_behind"]
    return f"{lag_text(row)} behind" + (f", {seconds:,.1f} s" if seconds else "")


def tree(found: Topology, inputs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The topology as lines. ``inputs``: as of `processor_row`."""
    drawn = set[str]()  # names, and numbers of handlers whose parts were shown
    for row in inputs:
        yield f"{row['stream']}  ({behind_text(row)})"
        yield from _branches(found, row["stream"], drawn)
    for store, kind in found.stores.items():
        calls = [one for one in found.calls if store in one.of]
        if calls or store in found.late:
            drawn.add(store)
            yield f"[{store}]  ({kind})"
            yield from _branches(found, store, drawn)
    used = drawn | set(found.late.values())
    for title, names in (
        ("outputs", found.outputs),
        ("stores", tuple(found.stores)),
        ("tables", found.tables),
        ("replicas", found.replicas),
    ):
        if rest := [name for name in names if name not in used]:
            yield f"{title} of no handler that is known: {', '.join(rest)}"
    if found.dead_letter:
        yield f"dead letters: {found.dead_letter}"


def _branches(found: Topology, source: str, drawn: set[str]) -> Iterator[str]:
    calls = [(number, one) for number, one in enumerate(found.calls) if source in one.of]
    late = [found.late[source]] if source in found.late else []
    drawn.update(late)
    for place, (number, call) in enumerate(calls, 1):
        is_last = place == len(calls) and not late
        leaves = [f"[{name}]" for name in call.uses] + [f"> {name}" for name in call.writes]
        is_known = f"#{number}" in drawn and bool(leaves)
        yield f"{'└' if is_last else '├'}─ {call.name}{' …' if is_known else ''}"
        drawn.update(call.uses, call.writes, (f"#{number}",))
        for at, leaf in enumerate(() if is_known else leaves, 1):
            yield f"{' ' if is_last else '│'}  {'└' if at == len(leaves) else '├'}─ {leaf}"
    for name in late:
        yield f"└─ late events > {name}"


# -- the picture ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Box:
    """A box of the picture. ``note``: a second line; empty without one."""

    kind: str
    name: str
    note: str = ""
    x: float = 0.0
    y: float = 0.0


def picture(found: Topology, inputs: Sequence[Mapping[str, Any]], title: str) -> str:
    """The topology as an SVG, of four columns: inputs, handlers, state, outputs. Colours are those of the page."""
    columns = [column for column in _columns(found, inputs) if column]
    height = 2 * _MARGIN + _height_of(max(map(len, columns), default=1))
    width = 2 * _MARGIN + len(columns) * (_WIDTH + _GAP_X) - _GAP_X
    boxes: dict[_Key, _Box] = {}
    for number, column in enumerate(columns):
        x, first = _MARGIN + number * (_WIDTH + _GAP_X), (height - _height_of(len(column))) / 2
        for place, (key, box) in enumerate(column.items()):
            boxes[key] = replace(box, x=x, y=first + place * (_HEIGHT + _GAP_Y))
    edges = (
        _edge(boxes.get(source), boxes.get(target), kind) for source, target, kind in _edges(found)
    )
    drawn = "".join(map(_drawn, boxes.values()))
    return (
        f"<svg class='topology' viewBox='0 0 {width:g} {height:g}' width='{width:g}' height='{height:g}' "
        f"role='img'>"
        f"<title>{_shown(title)}</title>{''.join(edges)}{drawn}</svg>"
    )


def _height_of(boxes: int) -> float:
    return boxes * (_HEIGHT + _GAP_Y) - _GAP_Y


# Kind and name of a box; of a function its number, as several may have one name.
_Key = tuple[str, str | int]


def _columns(found: Topology, inputs: Sequence[Mapping[str, Any]]) -> tuple[dict[_Key, _Box], ...]:
    """The boxes by column, without their places."""
    state = (
        dict(found.stores)
        | dict.fromkeys(found.replicas, "a replica")
        | dict.fromkeys(found.tables, "a table")
    )
    outputs = dict.fromkeys(found.outputs, "")
    if found.dead_letter:
        outputs[found.dead_letter] = "dead letters"
    return (
        {
            ("input", row["stream"]): _Box("input", row["stream"], behind_text(row))
            for row in inputs
        },
        {("call", number): _Box("call", one.name) for number, one in enumerate(found.calls)},
        {("store", name): _Box("store", name, note) for name, note in state.items()},
        {("output", name): _Box("output", name, note) for name, note in outputs.items()},
    )


def _edges(found: Topology) -> Iterator[tuple[_Key, _Key, str]]:
    """The lines between boxes: from, to, and the kind of the line."""
    for number, call in enumerate(found.calls):
        here: _Key = ("call", number)
        for name in call.of:
            if name in found.stores:
                yield ("store", name), here, "due"
            else:
                yield ("input", name), here, "flow"
        for name in call.uses:
            yield here, ("store", name), "use"
        for name in call.writes:
            yield here, ("output", name), "flow"
    for store, name in found.late.items():
        yield ("store", store), ("output", name), "flow"


def _edge(source: _Box | None, target: _Box | None, kind: str) -> str:
    """A curve between two boxes. From state back to a handler it is another one than that of its use."""
    if source is None or target is None:
        return ""
    is_back = source.x > target.x
    x0, y0 = source.x + (0 if is_back else _WIDTH), source.y + _HEIGHT / 2
    x1, y1 = target.x + (_WIDTH if is_back else 0), target.y + _HEIGHT / 2
    if is_back:
        y0, y1 = y0 + 9, y1 + 9
    bend = max(40.0, abs(x1 - x0) / 2)
    bend = -bend if is_back else bend
    return (
        f"<path class='{kind}' d='M{x0:g},{y0:g} C{x0 + bend:g},{y0:g} {x1 - bend:g},{y1:g} {x1:g},{y1:g}'/>"
        f"<circle class='{kind}' cx='{x1:g}' cy='{y1:g}' r='3'/>"
    )


def _drawn(box: _Box) -> str:
    name, note = box.name, box.note
    x, y = box.x + 10, box.y + (17 if note else 25)
    lines = f"<text class='name' x='{x:g}' y='{y:g}'>{_shown(_cut(name, _NAME))}</text>"
    if note:
        lines += f"<text class='note' x='{box.x + 10:g}' y='{box.y + 32:g}'>{_shown(_cut(note, _NOTE))}</text>"
    corner = 20 if box.kind == "call" else 5
    return (
        f"<g class='{box.kind}'><title>{_shown(f'{name}: {note}' if note else name)}</title>"
        f"<rect x='{box.x:g}' y='{box.y:g}' width='{_WIDTH:g}' height='{_HEIGHT:g}' rx='{corner}'/>{lines}</g>"
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _shown(text: str) -> str:
    return escape(escaped(text))
