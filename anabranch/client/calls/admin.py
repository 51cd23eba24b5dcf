"""Calls of a client for operators: lanes, grants, the audit log, commands (``docs/security.md``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import attrgetter, or_
from typing import Any, TypeVar

from anabranch.client.shared import Shared
from anabranch.core.authorize import ADD, changed
from anabranch.errors import (
    IllegalState,
    InvalidArgument,
    NotAuthorized,
    NotReady,
    UnknownLane,
    UnsupportedVersion,
)
from anabranch.ports import Log, LogDenied, LogError, LogRefused
from anabranch.protocol import limits
from anabranch.protocol.defaults import FIRST_RETRY_S
from anabranch.protocol.ids import AS_NOW, DIRECTORY, MAX_CONTROL_PARTITION
from anabranch.protocol.legal_names import ADMIN_LANE, check_lane, check_type
from anabranch.protocol.schemas import records as r
from anabranch.topics.creation import (
    create_lane_topics,
    grow_control_topics,
    grow_lane_topic,
    lane_topic_ids,
    refusal_of,
)
from anabranch.topics.rights import Acl, client_rights
from anabranch.types import (
    AuditEntry,
    CommandsInfo,
    FeatureLevel,
    Grant,
    Lane,
    LeaderInfo,
    Listed,
    right_words,
)

A = TypeVar("A")
T = TypeVar("T")


class Administration:
    """Calls of `Client` for operators, with its arguments and errors; names are the same unless one is given.

    They ask all control partitions.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._session = shared.session

    def lanes(self, deadline: float) -> list[Lane]:
        return _lanes(self._session.ask_each(r.ListLanes(), r.LaneList, deadline))

    def add_lane(
        self,
        name: str,
        acls: Sequence[Acl],
        quotas: Mapping[str, int | None] | None,
        deadline: float,
        *,
        apply: bool,
        adopt: bool,
    ) -> Lane:
        """As `Client.add_lane`. ``acls``: the ACLs of its principals."""
        if unknown := [quota for quota in quotas or () if quota not in limits.QUOTAS]:
            raise InvalidArgument(f"{unknown[0]!r} is no quota: {', '.join(limits.QUOTAS)}")
        if apply and not acls:
            raise InvalidArgument("name the principals whose rights are to be applied, User:NAME")
        found = {lane.name: lane for lane in self.lanes(deadline)}.get(name)
        if apply:
            if self._shared.ports.acls is None:
                raise IllegalState("this client can't tell brokers who may do what")
            self._shared.ports.acls.allow(acls, deadline)
        # The list has all quotas; those equal to the default stay the default when they are sent back.
        asked = {**(found.quotas if found else {}), **(quotas or {})}
        chosen = {quota: most for quota, most in asked.items() if most is not None}
        ids = self._lane_topics(name, found, adopt, deadline)
        return self._set_lane(r.SetLane(name, bool(found and found.blocked), ids, chosen), deadline)

    def block(self, name: str, blocked: bool, deadline: float) -> Lane:
        """As `Client.block_lane` and `Client.unblock_lane`."""
        lane = {lane.name: lane for lane in self.lanes(deadline)}.get(check_lane(name))
        if lane is None:
            raise UnknownLane(f"there is no lane {name!r}: `anabranch lane list` shows them")
        return self._set_lane(r.SetLane(name, blocked, lane.topic_ids, lane.quotas), deadline)

    def grants(self, deadline: float) -> list[Grant]:
        return _grants(self._session.ask_each(r.ListGrants(), r.GrantList, deadline))

    def set_grant(self, lane: str, pattern: str, change: int, deadline: float) -> Grant:
        """Add or remove rights in each control partition; returns the lane's rights on this pattern.

        The change is sent, not the result: other operators may change grants at the same time. A control
        partition without this grant gets the rights that others have, with the change.
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
            try:
                answer = self._session.ask(number, command, r.GrantList, deadline)
            except InvalidArgument as error:
                if number == parts[0][0]:
                    raise
                raise NotReady(
                    f"control partition {number} does not know lane {lane!r} yet, as the cluster grows: call again"
                ) from error
            left |= answer.grants[0].rights
        return Grant(lane, pattern, right_words(left))

    def audit_log(self, limit: int, deadline: float) -> list[AuditEntry]:
        found: list[AuditEntry] = []
        for number, part in self._session.ask_each(r.ListAudit(), r.AuditList, deadline):
            rows = list(part.entries)
            while part.more is not None and len(rows) < limit:
                part = self._session.ask(number, r.ListAudit(part.more), r.AuditList, deadline)
                rows += part.entries
            found += [AuditEntry(x.at_ms, x.lane, x.command, x.what, number) for x in rows]
        return sorted(found, key=lambda entry: -entry.at_ms)[:limit]

    def feature_level(self, raise_to: int | None, deadline: float) -> FeatureLevel:
        # All leaders have to know the level before the first one writes records of it.
        found = self._feature_levels(None, deadline)
        known = min(each.known for each in found)
        if raise_to is not None:
            if raise_to > known:
                raise UnsupportedVersion(
                    f"a leader knows feature levels up to {known}, not {raise_to}: upgrade all controllers"
                )
            if not 1 <= raise_to <= min(each.level for each in found):
                found = self._feature_levels(raise_to, deadline)
        return FeatureLevel(min(each.level for each in found), known)

    def _feature_levels(self, level: int | None, deadline: float) -> list[r.FeatureLevel]:
        command = r.SetFeatureLevel(level)
        return [each for _, each in self._session.ask_each(command, r.FeatureLevel, deadline)]

    def grow(self, control_partitions: int, deadline: float) -> int:
        """As `Client.grow_cluster`."""
        check_type("control partitions", control_partitions, int)
        if not 1 <= control_partitions <= MAX_CONTROL_PARTITION + 1:
            raise InvalidArgument(
                f"{control_partitions} control partitions: 1 to {MAX_CONTROL_PARTITION + 1:,}"
            )
        if self._shared.ports.log is None:
            raise IllegalState("this client can't add partitions to topics")
        # The present number is logged before partitions are added: else a scope could get one without a leader.
        in_use = self._in_use(AS_NOW, deadline)
        if control_partitions == in_use:
            return in_use  # repeated, after an answer was lost
        if control_partitions < in_use:
            raise InvalidArgument(
                f"the cluster has {in_use} control partitions, and they never become fewer: ask for more"
            )
        # A mistyped number can't be taken back.
        if control_partitions > in_use + limits.GROWTH.value:
            raise InvalidArgument(
                f"{control_partitions:,} control partitions are asked for: the cluster has {in_use}, and one call "
                f"adds at most {limits.GROWTH.value}"
            )
        # Partitions can't be removed: a lane without the right admin is refused before any is added.
        self._await_leaders(range(in_use), deadline)
        prefix, new = self._shared.ports.prefix, range(in_use, control_partitions)
        seconds = max(deadline - self._session.now(), 0.1)
        with _refusals("call it again, and it continues"), self._shared.ports.log(seconds) as log:
            grow_control_topics(log, prefix, control_partitions)
            self._await_leaders(new, deadline)
            for _ in range(2):  # other operators may change grants and lanes during the first time
                self._make_alike(range(in_use), new, log, deadline)
        for number in reversed(range(control_partitions)):
            # The directory is last: then a scope may be on a new one, of which all others know.
            in_use = self._in_use(control_partitions, deadline, number)
        return in_use

    def _in_use(self, control_partitions: int, deadline: float, there: int = DIRECTORY) -> int:
        command = r.SetFeatureLevel(None, control_partitions)
        return self._session.ask(there, command, r.FeatureLevel, deadline).control_partitions

    def _await_leaders(self, new: Iterable[int], deadline: float) -> None:
        """Wait until each of these control partitions is led. Raises: NotReady, DeadlineExceeded."""
        for number in new:
            try:
                self._session.ask(number, r.ListLanes(), r.LaneList, deadline)
            except InvalidArgument as error:  # a broker does not show the partition yet
                raise NotReady(
                    f"brokers don't show control partition {number} yet: call again, and it continues"
                ) from error

    def _make_alike(
        self, old: Sequence[int], new: Sequence[int], log: Log, deadline: float
    ) -> None:
        """Give new control partitions the feature level, lanes and grants of the old ones. Safe to repeat."""
        ask, prefix = self._session.ask, self._shared.ports.prefix
        level = max(ask(n, r.SetFeatureLevel(None), r.FeatureLevel, deadline).level for n in old)
        lanes: dict[str, r.LaneInfo] = {}
        for n in old:
            for lane in ask(n, r.ListLanes(), r.LaneList, deadline).lanes:
                lanes.setdefault(lane.lane, lane)
        grants = _rights(ask(n, r.ListGrants(), r.GrantList, deadline) for n in old)
        for lane in lanes.values():
            try:
                if lane.topic_ids:
                    grow_lane_topic(log, prefix, lane.lane, like=ADMIN_LANE)
            except NotReady as error:
                # A blocked lane may be without its topic. Its name can't be used again.
                if not lane.blocked:
                    raise NotReady(f"{error}; if the topic was deleted, block the lane") from error
        for n in new:
            ask(n, r.SetFeatureLevel(level), r.FeatureLevel, deadline)
            there = {lane.lane: lane for lane in ask(n, r.ListLanes(), r.LaneList, deadline).lanes}
            for lane in lanes.values():
                its = there.get(lane.lane)
                if its is None or (its.blocked, its.quotas) != (lane.blocked, lane.quotas):
                    command = r.SetLane(lane.lane, lane.blocked, lane.topic_ids, lane.quotas)
                    ask(n, command, r.LaneList, deadline)
            have = _rights([ask(n, r.ListGrants(), r.GrantList, deadline)])
            for (name, pattern), rights in grants.items():
                if have.get((name, pattern)) != rights:
                    ask(n, r.SetGrant(name, pattern, rights), r.GrantList, deadline)

    def commands(self, deadline: float) -> Listed[CommandsInfo]:
        def info(n: int, got: r.CommandList) -> CommandsInfo:
            return CommandsInfo(
                n, got.position, got.end, got.quarantined, got.open_transactions, got.outcomes
            )

        return self._each_leader(r.ListCommands(), r.CommandList, info, deadline)

    def leaders(self, deadline: float) -> Listed[LeaderInfo]:
        def info(n: int, got: r.LeaderInfo) -> LeaderInfo:
            return LeaderInfo(
                n,
                got.term,
                got.leader,
                got.since_ms,
                got.committed,
                got.uncommitted_bytes,
                got.busy_us,
                got.waiting,
            )

        return self._each_leader(r.DescribeLeader(), r.LeaderInfo, info, deadline)

    def _each_leader(
        self, command: Any, expected: type[A], info: Callable[[int, A], T], deadline: float
    ) -> Listed[T]:
        """The leaders' answers, in the order of their control partitions."""

        def ask(n: int, until: float) -> list[T]:
            return [info(n, self._session.ask(n, command, expected, until))]

        found = self._session.of_each(None, ask, deadline)
        found.sort(key=attrgetter("control_partition"))
        return found

    def acls(self, deadline: float) -> list[Acl]:
        if self._shared.ports.acls is None:
            raise IllegalState("this client can't ask brokers who may do what")
        return self._shared.ports.acls.listed(deadline)

    def _set_lane(self, command: r.SetLane, deadline: float) -> Lane:
        found = _lanes(self._session.ask_each(command, r.LaneList, deadline))
        return next(lane for lane in found if lane.name == command.lane)

    def _lane_topics(
        self, name: str, lane: Lane | None, adopt: bool, deadline: float
    ) -> tuple[str, ...]:
        """The ids of a lane's topics; the topics are made if there is no such lane."""
        if lane is not None and not lane.topic_ids:  # the lane `open`, which always exists
            return ()
        if self._shared.ports.log is None:
            raise IllegalState("this client can't make topics")
        prefix, own = self._shared.ports.prefix, self._shared.ports.lane
        seconds = max(deadline - self._session.now(), 0.1)
        with _refusals(), self._shared.ports.log(seconds) as log:
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
        """The ids of a lane's topics. Waits until the broker that answers knows them; raises `NotReady`."""
        while True:
            try:
                return lane_topic_ids(log, self._shared.ports.prefix, lane)
            except NotReady:
                if self._session.now() + FIRST_RETRY_S > deadline:
                    raise
            self._shared.ports.clock.sleep(FIRST_RETRY_S)


def lane_acls(prefix: str, lane: str, principals: Iterable[str]) -> list[Acl]:
    """The ACLs that let principals use a lane. Raises `InvalidArgument`."""
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
    """The lanes, from the answers of all control partitions."""
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
    """The grants, from the answers of all control partitions; a right counts if any partition has it."""
    found = _rights(part for _, part in parts)
    return [
        Grant(lane, pattern, right_words(bits)) for (lane, pattern), bits in sorted(found.items())
    ]


def _rights(parts: Iterable[r.GrantList]) -> dict[tuple[str, str], int]:
    """Lane and pattern -> the rights that any of these control partitions has granted."""
    found: dict[tuple[str, str], int] = {}
    for part in parts:
        for row in part.grants:
            key = row.lane, row.pattern
            found[key] = found.get(key, 0) | row.rights
    return found


@contextmanager
def _refusals(again: str = "repeat it, then with --adopt") -> Iterator[None]:
    """Convert errors of the brokers about topics into errors that say what to do. ``again``: how to repeat it."""
    try:
        yield
    except LogRefused as error:
        raise refusal_of(error) from error
    except LogDenied as error:
        raise NotAuthorized(str(error)) from error
    except LogError as error:
        raise NotReady(f"{error}; {again}") from error
