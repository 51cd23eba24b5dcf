"""The topology of a processor's program as text: handlers, stores and outputs, and what uses what.

The program knows its handlers, and for what each is called. Names in a handler's code, which is not run, show its
stores, outputs and tables, also those of functions of the same module. A store that a handler finds in another way,
such as in a dict, is shown without a line to the handler.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from anabranch.processing.joins import Join, KeyJoin
from anabranch.processing.program import Output, Program, Registered
from anabranch.processing.stores import Keyed
from anabranch.processing.tables import SharedReplica, SharedTable
from anabranch.protocol.limits import TOPOLOGY

_MOST_SEEN = 2_000  # objects that are searched for one handler
_OTHERS = FunctionType | type | Keyed | Output | Program  # attributes of these are not looked up
_CALLS = ("_call", "_closed")  # attributes of stores that are a program's functions


def topology_of(app: Program) -> str:
    """The topology as JSON. Parts are left out if it would be too long."""
    calls = list(_calls(app))
    written = {stream for one in calls for stream in one["writes"]}
    found = {
        "calls": calls,
        "stores": {name: store.kind for name, store in app.stores.items()},
        "late": {name: late.stream for name, store in app.stores.items() if (late := _late(store))},
        "outputs": sorted((set(app.outputs) | written) - {app.dead_letter}),
        "tables": sorted(app.tables),
        "replicas": sorted({name for one in app.replicas for name in one.tables}),
        "dead_letter": app.dead_letter,
    }
    for left_out in ("", "calls", "stores"):
        found.pop(left_out, None)
        text = json.dumps(found, separators=(",", ":"))
        if len(text) <= TOPOLOGY.value:
            return text
    return ""


def _calls(app: Program) -> Iterator[dict[str, Any]]:
    """Functions of the program: what each is called for, uses and writes."""
    made: dict[Any, dict[str, Any]] = {}
    for stream in app.handlers:
        for one in app.drawn(stream):
            store = _store_of(one.call)
            call = made.setdefault(
                id(store) if store else id(one.call),
                _call(app, _name(one, store), one.call, one.also),
            )
            if stream not in call["of"]:
                call["of"].append(stream)
    for name, store in app.stores.items():
        for function in _functions_of(store):
            if not isinstance(store, Join | KeyJoin):  # theirs are called by handlers, too
                made[id(function), name] = _call(app, _text(function), function) | {"of": [name]}
    yield from made.values()


def _call(app: Program, name: str, call: Any, also: Iterable[Any] = ()) -> dict[str, Any]:
    uses, writes = list[str](), list[str]()
    for one in _named_by(app, call, also):
        if isinstance(one, str):
            known, into, name_of = True, writes, one
        elif isinstance(one, Output):
            known, into = one.stream in app.outputs, writes
            name_of = one.stream
        elif isinstance(one, SharedReplica):
            if one in app.replicas:
                uses += [each for each in one.tables if each not in uses]
            continue
        else:
            known = one in (app.stores.get(one.name), app.tables.get(one.name))
            name_of, into = one.name, uses
        if known and name_of not in into:
            into.append(name_of)
    return {"name": name, "of": [], "uses": uses, "writes": writes}


def _name(one: Registered, store: Keyed | None) -> str:
    if one.passes_on:
        return "rekey"
    if store is None:
        return _text(one.call)
    functions = ", ".join(map(_text, _functions_of(store)))
    return f"{store.name}: {functions}" if functions else store.name


def _text(call: Any) -> str:
    name = getattr(call, "__qualname__", None) or type(call).__qualname__
    return str(name).rpartition("<locals>.")[2]


def _store_of(call: Any) -> Keyed | None:
    """The store whose method a handler is, as of `Processor.join`."""
    owner = getattr(call, "__self__", None)
    return owner if isinstance(owner, Keyed) else None


def _functions_of(store: Keyed) -> list[Callable[..., Any]]:
    """The program's functions that a store calls."""
    found = [vars(store).get(name) for name in _CALLS]
    return [one for one in found if one is not None]


def _late(store: Keyed) -> Output | None:
    late = vars(store).get("late")
    return late if isinstance(late, Output) else None


def _named_by(
    app: Program, call: Any, also: Iterable[Any]
) -> Iterator[Keyed | Output | SharedTable | SharedReplica | str]:
    """Parts of a program that a function names, itself or in other functions of its module; and ``also``.

    A text is the name of a stream that it writes.
    """
    homes = {_home(call)}
    waiting, seen = [call, *also], set[int]()
    while waiting and len(seen) < _MOST_SEEN:
        one = waiting.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        kind = type(one)
        if issubclass(kind, Output | SharedTable | SharedReplica | Keyed):
            yield one
        elif (part := app.part_of(one)) is not None:
            yield part
        elif issubclass(kind, MethodType):
            if issubclass(type(one.__self__), Keyed):  # a word of the program
                yield one.__self__
                functions, parts = _functions_of(one.__self__), vars(one.__self__)
                homes.update(map(_home, functions))
                waiting += functions
                waiting += _outputs_in(part for name, part in parts.items() if name != "late")
            else:
                waiting += [one.__func__, *_attributes(one.__self__, one.__func__)]
        elif issubclass(kind, functools.partial):
            waiting += [one.func, *one.args, *one.keywords.values()]
        elif issubclass(kind, FunctionType):
            if _home(one) in homes or _home(one).startswith("anabranch.processing"):
                waiting += _values_in(one)
        elif issubclass(type(vars(kind).get("__call__")), FunctionType):
            waiting += [vars(kind)["__call__"], *_attributes(one, vars(kind)["__call__"])]


def _outputs_in(values: Iterable[Any]) -> list[Output]:
    """Outputs among values, or in tuples of them."""
    flat = [each for one in values for each in (one if type(one) is tuple else (one,))]
    return [one for one in flat if isinstance(one, Output)]


def _home(call: Any) -> str:
    """The module of a function."""
    return str(getattr(call, "__module__", "") or "")


def _values_in(function: FunctionType) -> list[Any]:
    """The present values of names in a function's code."""
    names = dict.fromkeys(
        _names_in(function.__code__)
    )  # in order: each worker declares the same text
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # it has no value yet
            continue
    found += function.__defaults__ or ()
    wrapped = vars(function).get("__wrapped__")
    found += [] if wrapped is None else [wrapped]
    for one in list(found):
        if issubclass(type(one), ModuleType) or not issubclass(type(one), _OTHERS):
            found += _attributes(one, function)
    return found


def _attributes(owner: Any, function: FunctionType) -> list[Any]:
    """Attributes of a module or object that a function's code names."""
    try:
        held = object.__getattribute__(owner, "__dict__")  # a proxy has its own, too
    except AttributeError:
        return []
    if type(held) is not dict:
        return []
    return [held[name] for name in _names_in(function.__code__) if name in held]


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
