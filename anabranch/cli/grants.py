"""`anabranch grants`: what lanes may do, and whether brokers' rules agree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, NamedTuple

from anabranch.cli.errors import CheckFailed
from anabranch.cli.options import App, OperatorOptions, argument
from anabranch.cli.output import Column, print_result, show
from anabranch.core.legal_names import OPEN_LANE
from anabranch.presentation.words import count_of

if TYPE_CHECKING:
    from anabranch import Grant
    from anabranch.topics.rights import Acl

app = App(no_args_is_help=True, help="List, add, remove and check what lanes may do.")
Lane = Annotated[str, argument("LANE", "The lane.")]
Pattern = Annotated[str, argument("PATTERN", "SCOPE/STREAM, SCOPE/* or * (in quotes).")]
EVERYBODY = "User:*"


@app.command("list")
def list_grants(
    options: OperatorOptions,
    name: Annotated[str | None, argument("LANE", "Only this lane.")] = None,
) -> None:
    """List the rights of lanes, those that they have from the start included."""
    with options.client() as client:
        found = [grant for grant in client.grants() if name in (None, grant.lane)]
    rows = (grant._asdict() for grant in found)
    rights = Column("rights", lambda row: ",".join(row["rights"]))  # as `grants add` takes them
    show("grants", rows, ("lane", "pattern", rights), as_json=options.json)


@app.command("add")
def add(
    options: OperatorOptions,
    name: Lane,
    pattern: Pattern,
    rights: Annotated[str, argument("RIGHTS", "Such as write,describe,safe-time.")],
) -> None:
    """Give a lane rights on a pattern, beside those that it has there."""
    with options.client() as client:
        grant = client.grant(name, pattern, _words(rights))
    _show(grant, as_json=options.json)


@app.command("remove")
def remove(
    options: OperatorOptions,
    name: Lane,
    pattern: Pattern,
    rights: Annotated[str | None, argument("RIGHTS", "Only these (default: all there).")] = None,
) -> None:
    """Take rights on exactly this pattern from a lane; those on other patterns stay."""
    with options.client() as client:
        grant = client.revoke(name, pattern, None if rights is None else _words(rights))
    _show(grant, as_json=options.json)


@app.command("check")
def check(options: OperatorOptions) -> None:
    """Compare grants with the brokers' rules about journals, and say where they disagree.

    A lane's principals are those who may write to its commands. Principals that brokers let do everything
    (super.users) stand in no rule, so they are not judged.
    """
    from anabranch.topics.names import commands_topic

    with options.client() as client:
        acls, grants = client.acls(), client.grants()
        commands = {lane.name: commands_topic(options.prefix, lane.name) for lane in client.lanes()}
        streams = [stream.stream for stream in client.streams().check()]
    found = list(differences(acls, grants, commands, streams))
    rows = (each._asdict() for each in found)
    if options.json or found:
        show("differences", rows, Difference._fields, as_json=options.json)
    if found:
        raise CheckFailed(
            f"grants and the brokers' rules disagree in {count_of(len(found), 'case')}"
        )


class Difference(NamedTuple):
    """A place where grants and brokers disagree about a principal of a lane."""

    principal: str
    lane: str
    stream: str | None
    what: str


def differences(
    acls: Sequence[Acl], grants: Sequence[Grant], commands: dict[str, str], streams: Sequence[str]
) -> Iterator[Difference]:
    """Principals that may write to a journal and whose lanes may not, and the other way round.

    ``commands``: the commands topic of each lane. Rights that lanes have from the start ask for no rule.
    """
    from anabranch.topics.names import journal_topic

    named = sorted({acl.principal for acl in acls if acl.principal != EVERYBODY})
    for lane, topic in commands.items():
        if lane != OPEN_LANE and may_write(acls, EVERYBODY, topic):
            yield Difference(EVERYBODY, lane, None, f"everybody may write to {topic}")
    for principal in named:
        lanes = [lane for lane, topic in commands.items() if may_write(acls, principal, topic)]
        for stream in streams if lanes else ():
            writes = may_write(acls, principal, journal_topic(stream))
            patterns = {p for lane in lanes for p in _granted(grants, lane, stream)}
            if writes and not patterns:
                line = f"may write to {journal_topic(stream)}, without the right `write`"
                yield Difference(principal, ",".join(lanes), stream, line)
            elif not writes and patterns - {"*"}:
                line = f"has the right `write`, and may not write to {journal_topic(stream)}"
                yield Difference(principal, ",".join(lanes), stream, line)


def _granted(grants: Iterable[Grant], lane: str, stream: str) -> set[str]:
    """The patterns by which a lane may write to a stream."""
    fitting = ("*", stream.partition("/")[0] + "/*", stream)
    return {
        g.pattern for g in grants if g.lane == lane and g.pattern in fitting and "write" in g.rights
    }


def may_write(acls: Iterable[Acl], principal: str, topic: str) -> bool:
    """Whether brokers let a principal write to a topic: a rule allows it, and none denies it."""
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


def _show(grant: Grant, *, as_json: bool) -> None:
    line = f"{grant.lane} on {grant.pattern}: {','.join(grant.rights) or 'none'}"
    print_result(grant._asdict(), line, as_json=as_json)
