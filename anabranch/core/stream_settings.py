"""Settings that a user may choose for a stream: their names, their ranges, and the checks before one is logged."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

from anabranch.errors import InvalidArgument, UnsupportedSetting
from anabranch.protocol import limits
from anabranch.protocol.legal_names import base_stream, check_type, split_stream

if TYPE_CHECKING:
    from anabranch.protocol.schemas import records as r

REPLICATION = "replication.factor"
MIN_ISR = "min.insync.replicas"
MAX_MESSAGE = "max.message.bytes"
RETENTION_MS = "retention.ms"
TABLE = "table"  # whether the stream is a table
VERSIONS_MS = "table.history.ms"  # how long replicas keep versions
DEFAULT_VERSIONS_MS = 3_600_000
LEAST_HISTORY_MS = 1_000  # replicas keep versions for this long at least
# `table compact --watch` makes a base when there are more events for each row than this.
RATIO = "table.compact.ratio"
BASE = "table.base"  # the table whose bases are written to the stream
PROCESSOR = "processor"  # the processor whose state the stream is
DERIVED = "derived"  # the derivation that a derived table is of
DERIVE = "derive."  # the beginning of the settings of a source: the versions in force, by name
# Set on a derived table once it is ready, so that `derive` need not read it. Look-ups don't rely on it.
BUILT = "derived.built"
EXCLUSIVE = "exclusive"  # one transaction at a time writes a segment
HOLD_MS = "exclusive.hold.ms"  # how long an open transaction may have segments locked
DEFAULT_HOLD_MS = 600_000
_LONG = (1 << 63) - 1
_INT = (1 << 31) - 1
_REPLICAS = (1 << 15) - 1
# The settings of a stream's topic, with the least and the greatest value that makes sense.
TOPIC = {
    RETENTION_MS: (-1, _LONG),
    "retention.bytes": (-1, _LONG),
    "segment.bytes": (1, _INT),
    "segment.ms": (1, _LONG),
    MAX_MESSAGE: (1, limits.MESSAGE.value),
    MIN_ISR: (1, _REPLICAS),
    REPLICATION: (-1, _REPLICAS),
}
EVENTS = "scale.events.per.second"
BYTES = "scale.bytes.per.second"
SEGMENT_BYTES = "scale.segment.bytes"
MIN_SEGMENTS = "scale.min.segments"
MAX_SEGMENTS = "scale.max.segments"
COOLDOWN = "scale.cooldown.ms"
_ANY = (1, _LONG)
_HOLD = (1_000, 86_400_000)
_SEGMENTS = (1, 10_000)
# Field of `Policy` -> the setting of scaling, with the least and the greatest value that makes sense.
_SCALING = {
    "events_per_s": (EVENTS, _ANY),
    "bytes_per_s": (BYTES, _ANY),
    "segment_bytes": (SEGMENT_BYTES, _ANY),
    "min_segments": (MIN_SEGMENTS, _SEGMENTS),
    "max_segments": (MAX_SEGMENTS, _SEGMENTS),
    "cooldown_ms": (COOLDOWN, (1000, 86_400_000)),
}
_OF_TIME = ".ms"  # the end of the names of settings in milliseconds
_SPAN = re.compile(r"([0-9]{1,9})(ms|s|m|h|d)")
_MS_OF = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
KINDS = frozenset((TABLE, BASE, PROCESSOR, DERIVED))  # these make a stream one of another kind
FIXED = KINDS | {REPLICATION, EXCLUSIVE}  # these can't be altered
_OF_TABLE = {VERSIONS_MS: (0, _LONG), RATIO: (2, _LONG)}
KNOWN = TOPIC.keys() | {name for name, _ in _SCALING.values()} | {TABLE, DERIVED, BUILT, *_OF_TABLE}
KNOWN |= {EXCLUSIVE, HOLD_MS}
# A row lives until it is replaced or deleted, and its versions as long as a snapshot may need them.
_NOT_OF_TABLE = frozenset((RETENTION_MS, "retention.bytes", "cleanup.policy"))
# A state keeps the newest row of each key, whatever its age, and has as many segments as tasks.
_OF_STATE = frozenset((PROCESSOR, REPLICATION, MIN_ISR, MAX_MESSAGE, "segment.bytes", "segment.ms"))
_OF_BASE = _OF_STATE - {PROCESSOR} | {BASE}

HISTORY = 32  # whole buckets of loads that are kept
_COOLDOWN_BUCKETS = HISTORY // 4
# Loads arrive about once a second: shorter buckets would show false peaks.
_LEAST_BUCKET_MS = 500


class Policy(NamedTuple):
    """The targets of scaling in a stream's settings; None for a target that they do not name."""

    events_per_s: int | None = None
    bytes_per_s: int | None = None
    segment_bytes: int | None = None
    min_segments: int = 1
    max_segments: int = 64
    cooldown_ms: int = 60_000

    @property
    def bucket_ms(self) -> int:
        """The length of the buckets in which loads are counted."""
        return max(self.cooldown_ms // _COOLDOWN_BUCKETS, _LEAST_BUCKET_MS)


def setting_text(name: str, value: Any) -> str:
    """The value of a setting as brokers spell it. ``7d`` and a `timedelta` become milliseconds if it is a time."""
    if isinstance(value, bool):
        return str(value).lower()
    if not name.endswith(_OF_TIME):
        return str(value)
    if isinstance(value, timedelta):
        return str(value // timedelta(milliseconds=1))
    span = _SPAN.fullmatch(str(value))
    return str(int(span[1]) * _MS_OF[span[2]]) if span else str(value)


def differences(
    asked: Mapping[str, str], found: Mapping[str, str], *, only_asked: bool = False
) -> list[str]:
    """How a stream's settings differ from the requested ones, in words. ``only_asked``: others may have any value.

    The settings that make it a table, or the companion of something, always count, and its derivations never.
    """
    names = asked.keys() | (found.keys() & KINDS if only_asked else found.keys() - in_force(found))
    return [
        f"{name} is {found.get(name, 'not set')} (asked: {asked.get(name, 'not set')})"
        for name in sorted(names)
        if asked.get(name) != found.get(name)
    ]


def segments_differ(asked: int, found: int) -> list[str]:
    """As `differences`, of the number of segments."""
    return [] if asked == found else [f"segments are {found:,} (asked: {asked:,})"]


def descriptions_differ(asked: str, found: str) -> list[str]:
    """As `differences`, of the description. A repetition need not give it."""
    if asked in ("", found):
        return []
    return [f"the description is {found!r:.100} (asked: {asked!r:.100})"]


def check_settings(settings: Mapping[str, str]) -> None:
    """`UnsupportedSetting` for a setting that a stream does not take, `InvalidArgument` for an illegal value."""
    for name, value in settings.items():
        limits.SETTING.check(len(name), "a setting's name")
        limits.SETTING.check(len(value), f"the value of {name}")
    what, known = "a stream", frozenset(KNOWN)
    if PROCESSOR in settings:
        what, known = "a processor's state", _OF_STATE
    elif BASE in settings:
        what, known = "the stream of a table's bases", _OF_BASE
    _check_table(settings)
    _check_exclusive(settings)
    unknown = sorted(settings.keys() - known - in_force(settings))
    if unknown:
        raise UnsupportedSetting(
            f"{what} has no setting {', '.join(unknown)}; it takes {', '.join(sorted(known))}"
        )
    for name in settings.keys() & TOPIC.keys():
        if whole_number(name, settings[name], *TOPIC[name]) == 0 and name == REPLICATION:
            raise InvalidArgument(f"{name}=0: a number from 1, or -1 for the broker's default")
    size = int(settings.get(MAX_MESSAGE, limits.MESSAGE.value))
    if size < limits.LEAST_MESSAGE.value:
        raise InvalidArgument(
            f"{MAX_MESSAGE}={size}: set {limits.LEAST_MESSAGE.value} or more; brokers hold the markers of native "
            "transactions against it, too"
        )
    parse_policy(settings)


def _check_exclusive(settings: Mapping[str, str]) -> None:
    if EXCLUSIVE not in settings:
        if HOLD_MS in settings:
            raise UnsupportedSetting(
                f"{HOLD_MS} is a setting of exclusive streams: set {EXCLUSIVE}=true, too"
            )
        return
    if settings[EXCLUSIVE] != "true":
        raise InvalidArgument(f"{EXCLUSIVE}={settings[EXCLUSIVE]}: true, or leave it out")
    if is_table(settings):
        raise UnsupportedSetting(
            "a table is not exclusive: transactions lock its rows, not its segments"
        )
    whole_number(HOLD_MS, settings.get(HOLD_MS, str(DEFAULT_HOLD_MS)), *_HOLD)


def hold_ms(settings: Mapping[str, str]) -> int:
    """How long an open transaction may have segments of an exclusive stream locked, milliseconds."""
    return int(settings.get(HOLD_MS, DEFAULT_HOLD_MS))


def latest_time(settings: Mapping[str, str], now_ms: int) -> int:
    """The latest time that an event of a stream with these settings may have now, Unix milliseconds.

    Brokers delete the oldest part of a log when the latest time in that part is older than the retention. So no
    event may delay the deletion by more than the retention, or by more than an hour if an hour is longer.
    """
    retention_ms = int(settings.get(RETENTION_MS, -1))
    if retention_ms < 0:
        return limits.LATEST
    return min(limits.LATEST, now_ms + max(retention_ms, limits.AHEAD_MS))


def is_table(settings: Mapping[str, str]) -> bool:
    return TABLE in settings


def versions_ms(settings: Mapping[str, str]) -> int:
    """How long replicas keep versions of a table with these settings, milliseconds."""
    return int(settings.get(VERSIONS_MS, DEFAULT_VERSIONS_MS))


def _check_table(settings: Mapping[str, str]) -> None:
    if not is_table(settings):
        for name in settings.keys() & (_OF_TABLE.keys() | {DERIVED, BUILT}) | in_force(settings):
            raise UnsupportedSetting(f"{name} is a setting of tables: set {TABLE}=true, too")
        return
    if settings[TABLE] != "true":
        raise InvalidArgument(f"{TABLE}={settings[TABLE]}: true, or leave it out")
    if wrong := sorted(settings.keys() & _NOT_OF_TABLE):
        raise UnsupportedSetting(
            f"a table has no {', '.join(wrong)}: a row lives until it is replaced or deleted, and `anabranch table "
            "compact` takes former versions away"
        )
    for name in settings.keys() & _OF_TABLE.keys():
        whole_number(name, settings[name], *_OF_TABLE[name])
    if settings.get(BUILT, "true") != "true" or (BUILT in settings and DERIVED not in settings):
        raise InvalidArgument(f"{BUILT}={settings[BUILT]}: `client.derive` sets it to true")
    if DERIVED in settings:
        derived_from(settings)
        if in_force(settings):
            raise UnsupportedSetting("a derived table is no source of others")
    limits.DERIVATIONS.check(len(in_force(settings)), "a table")
    for name in in_force(settings):
        check_derivation(name.removeprefix(DERIVE))
        versions_of(settings, name.removeprefix(DERIVE))


# -- derivations ----------------------------------------------------------------------------------------

_DERIVATION = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
_VERSION = (1, 999_999)


# A derived table has entries of values, entries of values that occur once, totals by group, or entries that a
# worker writes.
Kind = Literal["index", "unique", "totals", "asynchronous"]
_KINDS: tuple[Kind, ...] = get_args(Kind)


class Derived(NamedTuple):
    """The derivation of a derived table, and its kind.

    ``since``: the hybrid time of the base of the source that a worker begins with: the table can't be read as of an
    earlier time. 0: it has the rows of all times.
    """

    of: r.Derivation
    kind: Kind
    since: int = 0

    @property
    def asynchronous(self) -> bool:
        """Whether a worker writes the rows."""
        return self.kind == "asynchronous"

    @property
    def text(self) -> str:
        """The setting of the derived table."""
        kind = [] if self.kind == "index" else [self.kind]
        return " ".join((*map(str, self.of), *kind, *([str(self.since)] if self.since else [])))


def check_derivation(name: str) -> str:
    """The name of a derivation; `InvalidArgument` if it is not legal."""
    check_type("the name of a derivation", name, str)
    if not _DERIVATION.fullmatch(name):
        raise InvalidArgument(
            f"{name!r:.100} is no name of a derivation: small letters, digits and - (at most 40), not - in front"
        )
    return name


@lru_cache(1_000)
def derived_table(of: r.Derivation) -> str:
    """The name of the table that has the rows of a version of a derivation. `InvalidArgument`: it is too long."""
    table = f"{of.source}-{of.name}-v{of.version}"
    split_stream(base_stream(table))
    return table


def derived_from(settings: Mapping[str, str]) -> Derived | None:
    """The derivation of a derived table; None for other streams. `InvalidArgument` for an illegal setting."""
    text = settings.get(DERIVED)
    if text is None:
        return None
    words = text.split(" ")
    kind, since = words[3:4], words[4:]
    if (
        len(words) < 3
        or kind not in ([], *([kind] for kind in _KINDS[1:]))
        or len(since) > (kind == ["asynchronous"])
    ):
        raise InvalidArgument(
            f"{DERIVED}={text}: give a table, a name and a version, and {' or '.join(_KINDS[1:])} if it is that"
        )
    from anabranch.protocol.schemas import records as r  # not for each command of the shell

    source, name, version = words[:3]
    split_stream(source)
    of = r.Derivation(source, check_derivation(name), whole_number("version", version, *_VERSION))
    at = whole_number(DERIVED, since[0], 1, (1 << 63) - 1) if since else 0
    return Derived(of, cast("Kind", kind[0]) if kind else "index", at)


def is_by_worker(settings: Mapping[str, str]) -> bool:
    """Whether a stream is a derived table that a worker writes."""
    derived = derived_from(settings)
    return derived is not None and derived.asynchronous


def in_force(settings: Mapping[str, str]) -> frozenset[str]:
    """The names of the settings that make a table the source of derivations."""
    return frozenset([name for name in settings if name.startswith(DERIVE)])


def versions_of(settings: Mapping[str, str], name: str) -> tuple[int, ...]:
    """The versions of a derivation that are in force, rising; at most 2. `InvalidArgument`: an illegal setting."""
    text = settings.get(DERIVE + name)
    if text is None:
        return ()
    found = tuple([whole_number(DERIVE + name, each, *_VERSION) for each in text.split(",")])
    if len(found) > 2 or sorted(set(found)) != list(found):
        raise InvalidArgument(f"{DERIVE}{name}={text}: one version, or two that rise: 1,2")
    return found


def whole_version(setting: str, text: str) -> int:
    """The version in a text. Raises: InvalidArgument."""
    return whole_number(setting, text, *_VERSION)


def derivations_at(table: str, settings: Mapping[str, str]) -> tuple[r.Derivation, ...] | None:
    """The derivations in force of a source, or the one of a derived table; None for other streams."""
    derived = derived_from(settings)
    return (derived.of,) if derived is not None else derivations_of(table, settings) or None


def derivations_of(source: str, settings: Mapping[str, str]) -> tuple[r.Derivation, ...]:
    """The derivations of a source that are in force."""
    if not in_force(settings):
        return ()
    from anabranch.protocol.schemas import records as r

    return tuple(
        [
            r.Derivation(source, name, version)
            for name in sorted(each.removeprefix(DERIVE) for each in in_force(settings))
            for version in versions_of(settings, name)
        ]
    )


def parse_policy(settings: Mapping[str, str]) -> Policy | None:
    """The policy in a stream's settings; None if they name no target. `InvalidArgument` for an illegal value."""
    named = {
        field: whole_number(name, settings[name], *bounds)
        for field, (name, bounds) in _SCALING.items()
        if name in settings
    }
    policy = Policy(**named)
    if policy.min_segments > policy.max_segments:
        raise InvalidArgument(
            f"{MIN_SEGMENTS}={policy.min_segments} is above {MAX_SEGMENTS}={policy.max_segments}: "
            f"raise {MAX_SEGMENTS}"
        )
    targets = (policy.events_per_s, policy.bytes_per_s, policy.segment_bytes)
    return None if all(target is None for target in targets) else policy


def whole_number(name: str, text: str, least: int, most: int) -> int:
    """The number in a setting's text. `InvalidArgument`: it is no whole number, or out of range."""
    limits.DIGITS.check(len(text), f"the value of {name}")
    digits = text.removeprefix("-")
    if digits.isascii() and digits.isdigit() and least <= int(text) <= most:
        return int(text)
    or_span = ", or a span of time such as 90s, 12h or 7d" if name.endswith(_OF_TIME) else ""
    raise InvalidArgument(f"{name}={text}: set a whole number from {least:,} to {most:,}{or_span}")
