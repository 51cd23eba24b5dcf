"""The declared settings of all topics, as data. Names are Kafka's topic-level settings; each has its reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anabranch.core import stream_settings
from anabranch.core.stream_settings import MAX_MESSAGE
from anabranch.protocol import limits
from anabranch.protocol.legal_names import is_state

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
MAX_LONG = (1 << 63) - 1
# 64 bits of nanoseconds, in milliseconds: 292 years. Some brokers accept no longer time.
MAX_NANOSECONDS = MAX_LONG // 1_000_000
_CENTURY_MS = 100 * 366 * DAY_MS
_SIZES = limits.RECORD.value, 8 << 20, limits.LEAST_RECORD.value


@dataclass(frozen=True, slots=True)
class Setting:
    """A topic setting: its value at creation, which values of an existing topic are accepted, and why.

    ``instead``: values to try, in this order, if brokers refuse ``value``. ``formerly``: the setting that older
    brokers have in its place. ``free``: any value is accepted.
    """

    name: str
    value: str
    accepts: Callable[[str], bool]
    why: str
    instead: tuple[str, ...] = ()
    formerly: str = ""
    free: bool = False


def _is(name: str, value: str, why: str) -> Setting:
    return Setting(name, value, lambda found: found == value, why)


def _at_least(
    name: str, least: int, why: str, *, created: int | None = None, formerly: str = ""
) -> Setting:
    value = str(least if created is None else created)
    return Setting(name, value, lambda found: int(found) >= least, why, formerly=formerly)


def _kept(least: int, why: str, *, created: int) -> Setting:
    """The retention time; -1 means unlimited."""
    return Setting(
        "retention.ms", str(created), lambda found: int(found) < 0 or int(found) >= least, why
    )


def _records(why: str, most: int = limits.RECORD.value) -> Setting:
    """The size of a message. If brokers allow less, the limits of a message's content are smaller, too."""
    return Setting(
        MAX_MESSAGE,
        str(most),
        lambda found: int(found) >= limits.LEAST_RECORD.value,
        why,
        instead=tuple(str(size) for size in _SIZES if size < most),
    )


def sized(settings: tuple[Setting, ...], most: int) -> tuple[Setting, ...]:
    """The settings with another size of messages."""
    return tuple(_records(s.why, most) if s.name == MAX_MESSAGE else s for s in settings)


def _any_time(name: str, why: str) -> Setting:
    """A limit of event times that no event reaches. Brokers may allow less."""
    return Setting(
        name,
        str(MAX_LONG),
        lambda found: int(found) >= _CENTURY_MS,
        why,
        instead=(str(MAX_NANOSECONDS),),
        formerly=_BOTH_TIMES,
    )


def _forever(name: str, why: str) -> Setting:
    return Setting(name, "-1", lambda found: int(found) < 0, why)


def _created(name: str, value: str, why: str) -> Setting:
    """A setting for creation only: an operator may change it."""
    return Setting(name, value, lambda _: True, why, free=True)


_AHEAD = "message.timestamp.after.max.ms"
_BOTH_TIMES = "message.timestamp.difference.max.ms"  # before Kafka 3.6
_VERBATIM = _is(
    "compression.type", "producer", "spliced batches are stored as they come, not packed again"
)
_CREATE_TIME = _is("message.timestamp.type", "CreateTime", "events carry their own time")
_ANY_FUTURE = _any_time(
    _AHEAD,
    "an event's own time may be ahead of the broker's, and a refused batch would block its merge",
)
_ANY_PAST = _any_time(
    "message.timestamp.before.max.ms", "events may be old, as those of a backfill are"
)
_CLEAN = _is(
    "unclean.leader.election.enable",
    "false",
    "a replica that lags must not undo what was acknowledged",
)
_SMALL_SEGMENTS = (
    _created("segment.ms", str(HOUR_MS), "only closed segments are compacted"),
    _created("segment.bytes", str(64 << 20), "only closed segments are compacted"),
)
_OF_EVENTS = _VERBATIM, _CREATE_TIME, _ANY_FUTURE, _ANY_PAST, _CLEAN
_ANY_SIZE = _forever("retention.bytes", "size must not delete unread records")

COMMANDS: tuple[Setting, ...] = (
    _is("cleanup.policy", "delete", "requests are not keyed"),
    _kept(
        DAY_MS,
        "a request must be there until a controller reads it, and none may run for a while",
        created=7 * DAY_MS,
    ),
    _ANY_SIZE,
    _CREATE_TIME,
    _at_least(
        _AHEAD,
        2 * DAY_MS,
        "a client's clock may be a day ahead; a controller refuses one that is further ahead",
        formerly=_BOTH_TIMES,
    ),
    _CLEAN,
)
CONTROL: tuple[Setting, ...] = (
    _is("cleanup.policy", "delete", "what controllers say to each other is not keyed"),
    _kept(
        DAY_MS,
        "it must be there until the controller that it is for reads it",
        created=7 * DAY_MS,
    ),
    _ANY_SIZE,
    _CREATE_TIME,
    _CLEAN,
)
REPLIES: tuple[Setting, ...] = (
    _is("cleanup.policy", "delete", "answers are not keyed by anything that lasts"),
    _kept(
        10 * 60_000,
        "an answer must be there until its client reads it",
        created=HOUR_MS,
    ),
    _records("an answer lists a transaction's writers"),
    _CREATE_TIME,
    _CLEAN,
)
STATUS: tuple[Setting, ...] = (
    _is("cleanup.policy", "compact", "it is the changelog of the status table"),
    _at_least(
        "delete.retention.ms",
        7 * DAY_MS,
        "a checkpoint that was away must still see that a row was deleted",
    ),
    _records("a row names all writers of a commit"),
    *_SMALL_SEGMENTS,
    _created(
        "min.cleanable.dirty.ratio",
        "0.2",
        "a successor reads it whole: keep it near its table's size",
    ),
    _CREATE_TIME,
    _CLEAN,
)
JOURNAL: tuple[Setting, ...] = (
    _is("cleanup.policy", "delete", "the controller deletes unneeded records"),
    _forever("retention.ms", "an open transaction may be old; time must not delete its writes"),
    _ANY_SIZE,
    _created("segment.ms", str(HOUR_MS), "only closed segments are freed once they are cut"),
    *_OF_EVENTS,
)
HISTORY: tuple[Setting, ...] = (
    _is("cleanup.policy", "delete", "each record is a step of the stream"),
    _forever("retention.ms", "readers find their way by it"),
    _ANY_SIZE,
    _created("segment.ms", str(DAY_MS), "only closed segments are freed once they are cut"),
    _created("segment.bytes", str(64 << 20), "only closed segments are freed once they are cut"),
    _records("a record names every segment"),
    _VERBATIM,
    _is(
        "message.timestamp.type",
        "CreateTime",
        "a record's time is its commit timestamp's millisecond",
    ),
    _ANY_FUTURE,
    _ANY_PAST,
    _CLEAN,
)
STREAM: tuple[Setting, ...] = (
    _is("cleanup.policy", "delete", "compaction would tear transactions apart"),
    _created(
        "retention.ms",
        "-1",
        "brokers judge by the events' own times: a backfill of old events would be deleted at once",
    ),
    *_OF_EVENTS,
)
STATE: tuple[Setting, ...] = (
    _is("cleanup.policy", "compact", "the newest row of each key is the state"),
    _at_least(
        "delete.retention.ms",
        DAY_MS,
        "a worker that was away must still see that a row was deleted",
        created=7 * DAY_MS,
    ),
    _created("min.cleanable.dirty.ratio", "0.2", "who takes a task over reads it whole"),
    *_SMALL_SEGMENTS,
    *_OF_EVENTS,
)


def of_stream(stream: str) -> tuple[Setting, ...]:
    """The settings of a stream's own topic."""
    return STATE if is_state(stream) else STREAM


# Settings in which a stream's topic must not have a lower value than its journal, and why.
AS_JOURNAL = (
    (MAX_MESSAGE, "the journal's records must fit into the stream"),
    (_ANY_FUTURE.name, "the stream must take the times that the journal took"),
    (_ANY_PAST.name, "the stream must take the times that the journal took"),
)

# Settings that a user may choose for a stream's topic (settings of scaling are no topic's). Those of size and
# durability apply to its journal, too.
STREAM_SETTINGS = frozenset(stream_settings.TOPIC)
