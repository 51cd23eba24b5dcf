"""`anabranch lane`: lanes, by which clients send commands; `command`: quarantined commands; and `audit-log`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from anabranch.cli.options import (
    App,
    Limit,
    OperatorOptions,
    Yes,
    argument,
    confirm,
    option,
)
from anabranch.cli.output import Column, Row, print_line, print_result, print_table, show
from anabranch.errors import InvalidArgument
from anabranch.presentation.rows import commands_row
from anabranch.presentation.words import time_text

if TYPE_CHECKING:
    from anabranch import Lane

app = App(no_args_is_help=True, help="Make, list, block and unblock lanes.")
Name = Annotated[str, argument("LANE", "The lane's name.")]


@app.command("add")
def add(
    options: OperatorOptions,
    name: Name,
    principal: Annotated[
        list[str] | None, option("--principal User:NAME", "One that may use it. May be repeated.")
    ] = None,
    quota: Annotated[
        list[str] | None,
        option(
            "--quota NAME=NUMBER",
            "A quota to set; NAME=default: as if it was never set. May be repeated.",
        ),
    ] = None,
    apply: Annotated[
        bool, option("--apply", "Tell the brokers what the principals may do, too.")
    ] = False,
    adopt: Annotated[
        bool, option("--adopt", "Its topics are there, from an attempt cut short.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Make a lane for principals; or change the quotas of one.

    The brokers' rules come first: with --apply it makes them, else it shows the commands that do, and asks. Then
    come two new topics, then the lane in all control partitions. Repeating it is safe.
    """
    from anabranch.client.admin import lane_acls
    from anabranch.topics.rights import acl_commands

    principals, quotas = principal or [], quotas_of(quota)
    acls = lane_acls(options.prefix, name, principals)
    lines = [
        line
        for one in dict.fromkeys(principals)
        for line in acl_commands(one, (acl.right for acl in acls if acl.principal == one))
    ]
    connecting = options.client()
    if lines and not apply:
        if not options.json:
            for line in lines:
                print_line(line)
        confirm(f"Lane {name!r} is safe only once the brokers know these rules.", yes=yes)
    with connecting as client:
        former = {lane.name: lane for lane in client.lanes()}.get(name)
        made = client.add_lane(name, principals, quotas, apply=apply, adopt_topics=adopt)
        granted = any(grant.lane == name and grant.rights for grant in client.grants())
    notes = [f"lane {name} is there"]
    if former is not None and quotas:
        notes = _changes(former, made) or [f"{name}: its quotas are as they were"]
    if not granted:
        notes.append(f"grant it something: anabranch grants add {name} 'SCOPE/*' write")
    if reset := [quota for quota, most in (quotas or {}).items() if most is not None]:
        notes.append(f"back to the default: anabranch lane add {name} --quota {reset[0]}=default")
    print_result(asdict(made) | {"acls": lines}, *notes, as_json=options.json)


@app.command("list")
def list_lanes(options: OperatorOptions) -> None:
    """List the lanes: what they cost and use of their quotas, what waits, and trouble."""
    with options.client() as client:
        found = client.lanes()
    show("lanes", map(asdict, found), _LANE_COLUMNS, as_json=options.json)


@app.command("block")
def block(options: OperatorOptions, name: Name) -> None:
    """Read no more commands of a lane. Commits of it that wait undecided are refused."""
    with options.client() as client:
        found = client.block_lane(name)
    print_result(asdict(found), f"{name} is {_state(found)}", as_json=options.json)


@app.command("unblock")
def unblock(options: OperatorOptions, name: Name) -> None:
    """Read a lane's commands again, from now on: those sent meanwhile are never carried out."""
    with options.client() as client:
        found = client.unblock_lane(name)
    print_result(asdict(found), f"{name} is {_state(found)}", as_json=options.json)


def audit_log(
    options: OperatorOptions,
    limit: Limit = 100,
) -> None:
    """Show what operators did, the newest first: when, by which lane, what."""
    with options.client() as client:
        found = client.audit_log(limit)
    rows = [asdict(entry) | {"at": time_text(entry.at_ms)} for entry in found]
    columns = ("at", "lane", "command", "what", "control_partition")
    show("entries", rows, columns, as_json=options.json, title="Audit log")


commands_app = App(no_args_is_help=True, help="See which commands are quarantined.")


@commands_app.callback()
def root() -> None:
    """See which commands are quarantined."""


@commands_app.command("list")
def list_commands(options: OperatorOptions) -> None:
    """Show how far each control partition is with its commands, which it quarantined, and what it keeps."""
    with options.client() as client:
        found = client.commands()
    rows = [commands_row(each) for each in found]
    show("control_partitions", rows, _COMMAND_COLUMNS, as_json=options.json, title="Commands")
    aside = [
        {**one, "control_partition": row["control_partition"]}
        for row in rows
        for one in row["quarantined"]
    ]
    if aside and not options.json:
        print_table("Quarantined", aside, _ASIDE_COLUMNS)
    found.check()


def quotas_of(texts: Sequence[str] | None) -> dict[str, int | None] | None:
    """``["open=1000,streams=default"]`` as numbers, None for a default; None for none. `InvalidArgument`."""
    found: dict[str, int | None] = {}
    for text in ",".join(texts).split(",") if texts else ():
        name, _, number = text.partition("=")
        if name and number == "default":
            found[name] = None
            continue
        if not name or not number.isdecimal() or len(number) > _MOST_DIGITS:
            raise InvalidArgument(
                f"--quota {text!r} is not of the form NAME=NUMBER or NAME=default"
            )
        found[name] = int(number)
    return found or None


_MOST_DIGITS = 18


def _changes(former: Lane, lane: Lane) -> list[str]:
    """The quotas that changed: ``etl: work 1,000 a second (was 20,000)``."""
    found = []
    for name in sorted({*former.quotas, *lane.quotas}):
        was, most = former.quotas.get(name), lane.quotas.get(name)
        if was != most:
            rate = " a second" if name == "work" else ""
            new = f"{most:,}{rate}" if most else "without a limit"
            old = f"{was:,}" if was else "without a limit"
            found.append(f"{lane.name}: {name} {new} (was {old})")
    return found


def _state(lane: Lane) -> str:
    return _state_of(asdict(lane))


def _state_of(row: Row) -> str:
    return "blocked" if row["blocked"] else "in trouble" if row["trouble"] else "read"


def _work(row: Row) -> str:
    """Units of work: in all, what its quota allows, what it owes, and what journals of its streams cost."""
    rate, usage = row["quotas"].get("work"), row["usage"]
    debt, journals = usage.get("debt", 0), usage.get("journals", 0)
    text = f"{usage.get('work', 0):,}" + (f", {rate:,} a second" if rate else "")
    text += f", owes {debt:,}" if debt else ""
    return text + (f"; its journals {journals:,}" if journals else "")


def _uses(row: Row) -> str:
    quotas, usage = row["quotas"], row["usage"]
    kinds = sorted({*quotas, *usage} - {"work", "debt", "journals"})
    return ", ".join(f"{k} {usage.get(k, 0):,} of {quotas.get(k, '-')}" for k in kinds)


_LANE_COLUMNS = (
    Column("lane", "name"),
    Column("state", _state_of),
    "waiting",
    Column("work", _work),
    Column("uses", _uses),
    "trouble",
)
_COMMAND_COLUMNS = (
    "control_partition",
    "position",
    Column("waiting", lambda row: row["end"] - row["position"]),
    Column("quarantined", lambda row: len(row["quarantined"])),
    "open_transactions",
    "outcomes",
)
_ASIDE_COLUMNS = (
    "control_partition",
    "lane",
    "offset",
    Column("at", lambda row: time_text(row["at_ms"])),
    "what",
    "reason",
)
