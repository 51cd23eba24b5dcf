"""The calls of a client for operators: lanes, grants, the audit log, commands (``docs/security.md``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import or_

from anabranch.client.client_streams import Streams
from anabranch.client.ports import ClientPorts
from anabranch.core.authorize import ADD, ALL, TAKE, changed
from anabranch.core.defaults import FIRST_RETRY_S
from anabranch.core.legal_names import check_lane, check_type
from anabranch.errors import (
    IllegalState,
    InvalidArgument,
    NotAuthorized,
    NotReady,
    UnknownLane,
)
from anabranch.ports import Log, LogDenied, LogError, LogRefused
from anabranch.schemas import records as r
from anabranch.topics.creation import (
    create_lane_topics,
    grow_lane_topic,
    lane_topic_ids,
    refusal_of,
)
from anabranch.topics.rights import Acl, client_rights
from anabranch.types import AuditEntry, CommandsInfo, Grant, Lane, Listed, right_bits, right_words


class Administration(Streams):
    """The part of `Client` for operators: its lane needs the right ``admin``, and ``operate`` for `commands`."""

    _ports: ClientPorts

    def lanes(self, *, timeout: float | None = None) -> list[Lane]:
        """All lanes, by name. Raises: NotAuthorized, NotReady, DeadlineExceeded."""
        return self._lanes(self._deadline(timeout))

    def add_lane(
        self,
        name: str,
        principals: Iterable[str] = (),
        quotas: Mapping[str, int] | None = None,
        *,
        apply: bool = False,
        adopt_topics: bool = False,
        timeout: float | None = None,
    ) -> Lane:
        """Make a lane: its two topics, then the lane itself in all control partitions. Repeating it is safe.

        A lane that exists gets more partitions for its commands if control partitions were added.

        Before that its ``principals`` (``User:etl``) must be the only ones who may write to its commands and read
        its answers: with ``apply`` the brokers are told so first, else `anabranch.topics.rights.client_rights` says
        what to grant. ``quotas``: beside the defaults; of a lane that exists, None leaves them. ``adopt_topics``:
        the topics may exist, empty and as they should be, as an attempt leaves them that was cut short.

        Raises: InvalidArgument, NotAuthorized, IllegalState (a topic exists; the brokers keep no rules), NotReady,
        DeadlineExceeded (repeat it, then with ``adopt_topics``).
        """
        acls = lane_acls(self._ports.prefix, name, principals)
        deadline = self._deadline(timeout)
        if apply and not acls:
            raise InvalidArgument("name the principals whose rights are to be applied, User:NAME")
        found = {lane.name: lane for lane in self._lanes(deadline)}.get(name)
        if apply:
            if self._ports.acls is None:
                raise IllegalState("this client can't tell brokers who may do what")
            self._ports.acls.allow(acls, deadline)
        chosen = found.quotas if quotas is None and found else dict(quotas or {})
        ids = self._lane_topics(name, found, adopt_topics, deadline)
        return self._set_lane(r.SetLane(name, bool(found and found.blocked), ids, chosen), deadline)

    def block_lane(self, name: str, *, timeout: float | None = None) -> Lane:
        """Read no more commands of a lane; commits of it that wait undecided are refused. Repeating it is fine.

        Raises: UnknownLane, NotAuthorized, NotReady, DeadlineExceeded (repeating is safe).
        """
        return self._block(name, True, self._deadline(timeout))

    def unblock_lane(self, name: str, *, timeout: float | None = None) -> Lane:
        """Read a lane's commands again, from its end as of now: those sent meanwhile are never carried out.

        Raises: as `block_lane`.
        """
        return self._block(name, False, self._deadline(timeout))

    def grants(self, *, timeout: float | None = None) -> list[Grant]:
        """All grants, by lane and pattern. Raises: NotAuthorized, NotReady, DeadlineExceeded."""
        return _grants(self._session.ask_each(r.ListGrants(), r.GrantList, self._deadline(timeout)))

    def grant(
        self, lane: str, pattern: str, rights: Iterable[str], *, timeout: float | None = None
    ) -> Grant:
        """Give a lane rights, such as ``("write", "describe")``, beside those that it has on this pattern.

        Patterns are ``scope/stream``, ``scope/*`` and ``*``. Returns all rights of the lane on exactly this one.

        Raises: InvalidArgument, UnknownLane, NotAuthorized, NotReady, DeadlineExceeded (repeating is safe).
        """
        return self._set_grant(lane, pattern, ADD | right_bits(rights), self._deadline(timeout))

    def revoke(
        self,
        lane: str,
        pattern: str,
        rights: Iterable[str] | None = None,
        *,
        timeout: float | None = None,
    ) -> Grant:
        """Take rights (None: all) on exactly this pattern from a lane; returns those left. Others' stay.

        Raises: as `grant`.
        """
        taken = int(ALL) if rights is None else right_bits(rights)
        return self._set_grant(lane, pattern, TAKE | taken, self._deadline(timeout))

    def audit_log(self, limit: int = 100, *, timeout: float | None = None) -> list[AuditEntry]:
        """Commands of operators, the newest first: once for each control partition that carried them out.

        Raises: InvalidArgument, NotAuthorized, NotReady, DeadlineExceeded.
        """
        check_type("a limit", limit, int)
        if limit < 1:
            raise InvalidArgument(f"limit {limit}: 1 or more")
        deadline = self._deadline(timeout)
        found: list[AuditEntry] = []
        for number, part in self._session.ask_each(r.ListAudit(), r.AuditList, deadline):
            rows = list(part.entries)
            while part.more is not None and len(rows) < limit:
                part = self._session.ask(number, r.ListAudit(part.more), r.AuditList, deadline)
                rows += part.entries
            found += [AuditEntry(x.at_ms, x.lane, x.command, x.what, number) for x in rows]
        return sorted(found, key=lambda entry: -entry.at_ms)[:limit]

    def commands(self, *, timeout: float | None = None) -> Listed[CommandsInfo]:
        """How many commands each control partition has handled, and which it set aside.

        ``missing``: control partitions that don't answer. Raises: NotReady, DeadlineExceeded (none answers).
        """

        def ask(n: int, until: float) -> list[CommandsInfo]:
            got = self._session.ask(n, r.ListCommands(), r.CommandList, until)
            numbers = got.position, got.end, got.set_aside, got.open_transactions, got.outcomes
            return [CommandsInfo(n, *numbers)]

        found = self._session.of_each(None, ask, self._deadline(timeout))
        found.sort(key=lambda info: info.control_partition)
        return found

    def acls(self, *, timeout: float | None = None) -> list[Acl]:
        """The brokers' own rules about who may do what. Raises: NotAuthorized, IllegalState (they keep none)."""
        if self._ports.acls is None:
            raise IllegalState("this client can't ask brokers who may do what")
        return self._ports.acls.listed(self._deadline(timeout))

    def _set_grant(self, lane: str, pattern: str, change: int, deadline: float) -> Grant:
        """Have each control partition make the change itself: another operator's may come in between.

        One that has no such grant yet, where others do, gets all of theirs.
        """
        check_lane(lane)
        parts = self._session.ask_each(r.ListGrants(), r.GrantList, deadline)
        place = lane, pattern
        rows = {
            n: x.rights for n, part in parts for x in part.grants if place == (x.lane, x.pattern)
        }
        whole = ADD | changed(reduce(or_, rows.values(), 0), change)
        left = 0
        for number, _ in parts:
            command = r.SetGrant(lane, pattern, change if number in rows else whole)
            answer = self._session.ask(number, command, r.GrantList, deadline)
            left |= answer.grants[0].rights
        return Grant(lane, pattern, right_words(left))

    def _lanes(self, deadline: float) -> list[Lane]:
        return _lanes(self._session.ask_each(r.ListLanes(), r.LaneList, deadline))

    def _block(self, name: str, blocked: bool, deadline: float) -> Lane:
        lane = {lane.name: lane for lane in self._lanes(deadline)}.get(check_lane(name))
        if lane is None:
            raise UnknownLane(f"there is no lane {name!r}: `anabranch lane list` shows them")
        return self._set_lane(r.SetLane(name, blocked, lane.topic_ids, lane.quotas), deadline)

    def _set_lane(self, command: r.SetLane, deadline: float) -> Lane:
        found = _lanes(self._session.ask_each(command, r.LaneList, deadline))
        return next(lane for lane in found if lane.name == command.lane)

    def _lane_topics(
        self, name: str, lane: Lane | None, adopt: bool, deadline: float
    ) -> tuple[str, ...]:
        """The ids of a lane's topics; new ones if there is no such lane."""
        if lane is not None and not lane.topic_ids:  # it is there from the start
            return ()
        if self._ports.log is None:
            raise IllegalState("this client can't make topics")
        prefix, own = self._ports.prefix, self._ports.lane
        seconds = max(deadline - self._session.now(), 0.1)
        with _refusals(), self._ports.log(seconds) as log:
            if lane is None:
                create_lane_topics(log, prefix, name, like=own, adopt=adopt)
            ids = self._ids_at_last(log, name, deadline)
            if lane is not None and ids != lane.topic_ids:
                raise IllegalState(
                    f"the topics of lane {name!r} are not those that it was made with: its name can't be used again"
                )
            grow_lane_topic(log, prefix, name, like=own)
        return ids

    def _ids_at_last(self, log: Log, lane: str, deadline: float) -> tuple[str, ...]:
        """The ids, once the broker that is asked knows them."""
        while True:
            try:
                return lane_topic_ids(log, self._ports.prefix, lane)
            except NotReady:
                if self._session.now() + FIRST_RETRY_S > deadline:
                    raise
            self._ports.clock.sleep(FIRST_RETRY_S)


def lane_acls(prefix: str, lane: str, principals: Iterable[str]) -> list[Acl]:
    """The rules that let principals use a lane. `InvalidArgument`."""
    check_lane(lane)
    names = [principals] if isinstance(principals, str) else list(principals)
    for name in names:
        kind, colon, rest = name.partition(":")
        if not (kind and colon and rest) or rest == "*":
            raise InvalidArgument(
                f"{name!r} is not one principal: the brokers' name of it, such as User:etl"
            )
    return [Acl(name, right) for name in names for right in client_rights(prefix, lane)]


def _lanes(parts: Sequence[tuple[int, r.LaneList]]) -> list[Lane]:
    """Lanes as all control partitions together see them."""
    found: dict[str, dict[int, r.LaneInfo]] = {}
    for number, part in parts:
        for info in part.lanes:
            found.setdefault(info.lane, {})[number] = info
    return [_lane(name, infos, [n for n, _ in parts]) for name, infos in sorted(found.items())]


def _lane(name: str, infos: Mapping[int, r.LaneInfo], numbers: Sequence[int]) -> Lane:
    every = list(infos.values())
    troubles = [
        f"control partition {n}: {info.trouble}" for n, info in infos.items() if info.trouble
    ]
    if lacking := [str(n) for n in numbers if n not in infos]:
        troubles.append(
            f"control partition {', '.join(lacking)} lacks it: repeat `anabranch lane add {name}`"
        )
    usage: dict[str, int] = {}
    for info in every:
        for kind, much in info.usage.items():
            usage[kind] = usage.get(kind, 0) + much
    return Lane(
        name,
        any(info.blocked for info in every),
        "; ".join(troubles),
        every[0].quotas,
        usage,
        sum(info.end - info.position for info in every),
        every[0].topic_ids,
    )


def _grants(parts: Iterable[tuple[int, r.GrantList]]) -> list[Grant]:
    """Grants of all control partitions: a pattern's rights are those that any of them knows."""
    found: dict[tuple[str, str], int] = {}
    for _, part in parts:
        for row in part.grants:
            key = row.lane, row.pattern
            found[key] = found.get(key, 0) | row.rights
    return [Grant(*key, right_words(bits)) for key, bits in sorted(found.items())]


@contextmanager
def _refusals() -> Iterator[None]:
    """Errors of the brokers about a lane's topics, as those that say what to do."""
    try:
        yield
    except LogRefused as error:
        raise refusal_of(error) from error
    except LogDenied as error:
        raise NotAuthorized(str(error)) from error
    except LogError as error:
        raise NotReady(f"{error}; repeat it, then with --adopt") from error
