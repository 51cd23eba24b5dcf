"""`anabranch lane`, `grants`, `command`, `audit-log` and `cluster`: what operators do for lanes and clusters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, NamedTuple

from anabranch.cli.errors import CheckFailed
from anabranch.cli.options import (
    App,
    Limit,
    OperatorOptions,
    Yes,
    argument,
    confirm,
    option,
)
from anabranch.cli.output import Column, Grid, Row, print_line, print_result, show
from anabranch.errors import InvalidArgument, count_of
from anabranch.presentation.rows import time_text
from anabranch.protocol.legal_names import OPEN_LANE

if TYPE_CHECKING:
    from anabranch import Grant, Lane
    from anabranch.topics.rights import Acl


app = App(no_args_is_help=True, help="Add, list, block and unblock lanes.")
Name = Annotated[str, argument("LANE", "The lane.")]


@app.command("add")
def add(
    options: OperatorOptions,
    name: Name,
    principal: Annotated[
        list[str] | None,
        option("--principal User:NAME", "A Kafka principal that may use the lane. Repeatable."),
    ] = None,
    quota: Annotated[
        list[str] | None,
        option(
            "--quota NAME=NUMBER",
            "A quota; NAME=default removes it. Repeatable.",
        ),
    ] = None,
    apply: Annotated[
        bool, option("--apply", "Also create the brokers' ACLs of the principals.")
    ] = False,
    adopt: Annotated[
        bool, option("--adopt", "Use its existing topics, from an interrupted attempt.")
    ] = False,
    yes: Yes = False,
) -> None:
    """Make a lane for principals, or change a lane's quotas.

    The brokers' ACLs come first: --apply creates them, else the command shows them, and asks. Then it makes two
    topics, and the lane.
    """
    from anabranch.client.calls.admin import lane_acls
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
        confirm(f"Lane {name!r} is safe only once the brokers have these ACLs.", yes=yes)
    with connecting as client:
        former = {lane.name: lane for lane in client.lanes()}.get(name)
        made = client.add_lane(name, principals, quotas, apply=apply, adopt_topics=adopt)
        granted = any(grant.lane == name and grant.rights for grant in client.grants())
    notes = [f"lane {name} exists"]
    if former is not None and quotas:
        notes = _changes(former, made) or [f"{name}: its quotas did not change"]
    if not granted:
        notes.append(f"grant it rights: anabranch grants add {name} 'SCOPE/*' write")
    if reset := [quota for quota, most in (quotas or {}).items() if most is not None]:
        notes.append(
            f"to restore the default: anabranch lane add {name} --quota {reset[0]}=default"
        )
    print_result(asdict(made) | {"acls": lines}, *notes, as_json=options.json)


@app.command("list")
def list_lanes(options: OperatorOptions) -> None:
    """List the lanes: their state, waiting commands, work, and use of quotas."""
    with options.client() as client:
        found = client.lanes()
    show("lanes", map(asdict, found), _LANE_COLUMNS, as_json=options.json)


@app.command("block")
def block(options: OperatorOptions, name: Name) -> None:
    """Stop reading a lane's commands. Its undecided commits are refused."""
    with options.client() as client:
        found = client.block_lane(name)
    print_result(asdict(found), f"{name} is {_state(found)}", as_json=options.json)


@app.command("unblock")
def unblock(options: OperatorOptions, name: Name) -> None:
    """Read a lane's new commands again. Those sent while it was blocked are skipped."""
    with options.client() as client:
        found = client.unblock_lane(name)
    print_result(asdict(found), f"{name} is {_state(found)}", as_json=options.json)


def audit_log(
    options: OperatorOptions,
    limit: Limit = 100,
) -> None:
    """Show the commands of operators, the newest first: time, lane, command."""
    with options.client() as client:
        found = client.audit_log(limit)
    rows = [asdict(entry) | {"at": time_text(entry.at_ms)} for entry in found]
    columns = ("at", "lane", "command", "what", "control_partition")
    show("entries", rows, columns, as_json=options.json, title="Audit log")


cluster_app = App(
    no_args_is_help=True, help="See how a cluster is, let it grow, and raise its feature level."
)


@cluster_app.callback()
def cluster() -> None:
    """See how a cluster is, let it grow, and raise its feature level."""


@cluster_app.command("feature")
def feature(
    options: OperatorOptions,
    raise_to: Annotated[
        int | None,
        option("--raise LEVEL", "Raise the level: afterwards no older release can lead."),
    ] = None,
    yes: Yes = False,
) -> None:
    """Show up to which feature level controllers may write, or raise it.

    Raise the level once all controllers are upgraded, standby controllers included. A level can't be lowered, so no
    older release can lead afterwards.
    """
    with options.client() as client:
        if raise_to is not None:
            confirm(
                f"Level {raise_to} can't be lowered again. Are all controllers upgraded?", yes=yes
            )
        found = client.feature_level(raise_to=raise_to)
    line = f"feature level {found.level}; the controllers that lead know levels up to {found.known}"
    print_result(asdict(found), line, as_json=options.json)


@cluster_app.command("status")
def status(
    options: OperatorOptions,
    seconds: Annotated[
        float, option("--seconds S", "How long to measure.", min=0.1, max=3600)
    ] = 2.0,
) -> None:
    """Show the load of each control partition, and which one another controller should lead.

    The column busy is the share of a core that its leader takes; leaders in one process share a core.
    """
    from anabranch.presentation.load import advice, loads

    with options.client() as client:
        before, begun = client.leaders(), time.monotonic()
        time.sleep(seconds)
        after = client.leaders()
        found = loads(before, after, time.monotonic() - begun)
        open_ = {each.control_partition: each.open_transactions for each in client.commands()}
    rows = [load.row | {"open": open_.get(load.control_partition)} for load in found]
    texts = advice(found)
    print_result(
        {"control_partitions": rows, "advice": texts},
        Grid("Control partitions", rows, _LOAD_COLUMNS),
        *texts,
        as_json=options.json,
    )
    after.check()


@cluster_app.command("grow")
def grow(
    options: OperatorOptions,
    control_partitions: Annotated[
        int, option("--control-partitions N", "How many there shall be: at most 64 more than now.")
    ],
    yes: Yes = False,
) -> None:
    """Add control partitions while the cluster runs. Controllers lead them without a restart.

    New scopes get the control partition with the fewest scopes; existing scopes stay where they are. The number
    never falls. After an interruption repeat the command: it continues.
    """
    with options.client() as client:
        confirm(f"{control_partitions} control partitions can't become fewer again.", yes=yes)
        found = client.grow_cluster(control_partitions)
    line = f"{found} control partitions are in use: new scopes get those with the fewest scopes"
    print_result({"control_partitions": found}, line, as_json=options.json)


commands_app = App(no_args_is_help=True, help="List quarantined commands.")


@commands_app.callback()
def root() -> None:
    """List quarantined commands."""


@commands_app.command("list")
def list_commands(options: OperatorOptions) -> None:
    """Show each control partition's position in its commands, its quarantined commands, and its size."""
    with options.client() as client:
        found = client.commands()
    rows = [asdict(each) for each in found]
    quarantined = [
        {**one, "control_partition": row["control_partition"]}
        for row in rows
        for one in row["quarantined"]
    ]
    print_result(
        {"control_partitions": rows},
        Grid("Commands", rows, _COMMAND_COLUMNS),
        *([Grid("Quarantined", quarantined, _QUARANTINED_COLUMNS)] if quarantined else ()),
        as_json=options.json,
    )
    found.check()


def quotas_of(texts: Sequence[str] | None) -> dict[str, int | None] | None:
    """``["open=1000,streams=default"]`` as numbers, None for a default; None without quotas. `InvalidArgument`."""
    found: dict[str, int | None] = {}
    for text in ",".join(texts).split(",") if texts else ():
        name, _, number = text.partition("=")
        if name and number == "default":
            found[name] = None
            continue
        if not name or not number.isdecimal() or len(number) > _MOST_DIGITS:
            raise InvalidArgument(
                f"--quota {text!r} must have the form NAME=NUMBER or NAME=default"
            )
        found[name] = int(number)
    return found or None


_MOST_DIGITS = 18


def _known(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


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
    """Units of work: in total, the quota, the debt, and the share of its streams' journals."""
    rate, usage = row["quotas"].get("work"), row["usage"]
    debt, journals = usage.get("debt", 0), usage.get("journals", 0)
    text = f"{usage.get('work', 0):,}" + (f", {rate:,} a second" if rate else "")
    text += f", owes {debt:,}" if debt else ""
    return text + (f"; its journals {journals:,}" if journals else "")


def _uses(row: Row) -> str:
    quotas, usage = row["quotas"], row["usage"]
    kinds = sorted({*quotas, *usage} - {"work", "debt", "journals"})
    most = {kind: f" of {quota}" for kind, quota in quotas.items()}
    return ", ".join(f"{kind} {usage.get(kind, 0):,}{most.get(kind, '')}" for kind in kinds)


_LANE_COLUMNS = (
    Column("lane", "name"),
    Column("state", _state_of),
    "waiting",
    Column("work", _work),
    Column("uses", _uses),
    "trouble",
)
_LOAD_COLUMNS = (
    "control_partition",
    Column("commits a second", lambda row: _known(row["commits"], "{:,.1f}"), True),
    Column("busy", lambda row: _known(row["busy"], "{:.0%}"), True),
    "waiting",
    "open",
    Column("bytes in journals", "uncommitted_bytes"),
    "leader",
)
_COMMAND_COLUMNS = (
    "control_partition",
    "position",
    Column("waiting", lambda row: row["end"] - row["position"]),
    Column("quarantined", lambda row: len(row["quarantined"])),
    "open_transactions",
    "outcomes",
)
_QUARANTINED_COLUMNS = (
    "control_partition",
    "lane",
    "offset",
    Column("at", lambda row: time_text(row["at_ms"])),
    "what",
    "reason",
)


grants_app = App(no_args_is_help=True, help="List, add, remove and check the rights of lanes.")
Pattern = Annotated[str, argument("PATTERN", "SCOPE/STREAM, SCOPE/* or * (in quotes).")]
EVERYBODY = "User:*"


@grants_app.command("list")
def list_grants(
    options: OperatorOptions,
    name: Annotated[str | None, argument("LANE", "Only this lane.")] = None,
) -> None:
    """List the rights of lanes, default rights included."""
    with options.client() as client:
        found = [grant for grant in client.grants() if name in (None, grant.lane)]
    rows = (grant._asdict() for grant in found)
    rights = Column("rights", lambda row: ",".join(row["rights"]))  # as `grants add` takes them
    show("grants", rows, ("lane", "pattern", rights), as_json=options.json)


@grants_app.command("add")
def add_grant(
    options: OperatorOptions,
    name: Name,
    pattern: Pattern,
    rights: Annotated[str, argument("RIGHTS", "Such as write,describe,safe-time.")],
) -> None:
    """Give a lane more rights on a pattern."""
    with options.client() as client:
        grant = client.grant(name, pattern, _words(rights))
    _show_grant(grant, as_json=options.json)


@grants_app.command("remove")
def remove_grant(
    options: OperatorOptions,
    name: Name,
    pattern: Pattern,
    rights: Annotated[str | None, argument("RIGHTS", "Only these (default: all).")] = None,
) -> None:
    """Remove a lane's rights on exactly this pattern. Those on other patterns stay."""
    with options.client() as client:
        grant = client.revoke(name, pattern, None if rights is None else _words(rights))
    _show_grant(grant, as_json=options.json)


@grants_app.command("check")
def check_grants(options: OperatorOptions) -> None:
    """Compare grants with the brokers' ACLs of journals, and list the differences.

    A lane's principals are those that may write to its command topic. Super users are not checked, as they have no
    ACLs. The exit code is 1 if there are differences.
    """
    from anabranch.topics.names import commands_topic

    with options.client() as client:
        acls, grants = client.acls(), client.grants()
        commands = {lane.name: commands_topic(options.prefix, lane.name) for lane in client.lanes()}
        streams = [stream.stream for stream in client.streams().check()]
    found = list(differences(acls, grants, commands, streams))
    rows = [each._asdict() for each in found]
    table = Grid("Differences", rows, Difference._fields)
    print_result({"differences": rows}, *([table] if rows else ()), as_json=options.json)
    if found:
        raise CheckFailed(
            f"grants and the brokers' ACLs disagree in {count_of(len(found), 'case')}"
        )


class Difference(NamedTuple):
    """A principal of a lane for which grants and ACLs disagree."""

    principal: str
    lane: str
    stream: str | None
    what: str


def differences(
    acls: Sequence[Acl], grants: Sequence[Grant], commands: dict[str, str], streams: Sequence[str]
) -> Iterator[Difference]:
    """Principals that may write to a journal while their lanes may not, and the reverse.

    ``commands``: the command topic of each lane. Default rights need no ACL.
    """
    from anabranch.topics.names import journal_topic

    named = sorted({acl.principal for acl in acls if acl.principal != EVERYBODY})
    for lane, topic in commands.items():
        if lane != OPEN_LANE and may_write(acls, EVERYBODY, topic):
            yield Difference(EVERYBODY, lane, None, f"every principal may write to {topic}")
    for principal in named:
        lanes = [lane for lane, topic in commands.items() if may_write(acls, principal, topic)]
        for stream in streams if lanes else ():
            writes = may_write(acls, principal, journal_topic(stream))
            patterns = {p for lane in lanes for p in _granted(grants, lane, stream)}
            if writes and not patterns:
                line = f"may write to {journal_topic(stream)}, but lacks the right `write`"
                yield Difference(principal, ",".join(lanes), stream, line)
            elif not writes and patterns - {"*"}:
                line = f"has the right `write`, but may not write to {journal_topic(stream)}"
                yield Difference(principal, ",".join(lanes), stream, line)


def _granted(grants: Iterable[Grant], lane: str, stream: str) -> set[str]:
    """The patterns by which a lane may write to a stream."""
    fitting = ("*", stream.partition("/")[0] + "/*", stream)
    return {
        g.pattern for g in grants if g.lane == lane and g.pattern in fitting and "write" in g.rights
    }


def may_write(acls: Iterable[Acl], principal: str, topic: str) -> bool:
    """Whether a principal may write to a topic: an ACL allows writing, and no ACL denies it."""
    found = [
        acl.allowed
        for acl in acls
        if acl.principal in (principal, EVERYBODY)
        and acl.right.kind == "topic"
        and acl.right.operation in ("Write", "All")
        and (
            topic.startswith(acl.right.name)
            if acl.right.prefixed
            else acl.right.name in (topic, "*")
        )
    ]
    return bool(found) and all(found)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",")]


def _show_grant(grant: Grant, *, as_json: bool) -> None:
    line = f"{grant.lane} on {grant.pattern}: {','.join(grant.rights) or 'none'}"
    print_result(grant._asdict(), line, as_json=as_json)
