"""Actions of people: each has a plan, which says what will happen, and the call that a confirmed plan makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from anabranch.client.client import Client
from anabranch.core.segments import even_plan
from anabranch.errors import IllegalState, InvalidArgument, count_of
from anabranch.presentation.rows import events_of, segment_name, topic_id_of
from anabranch.protocol.ids import parse_txn_text, segment_number
from anabranch.protocol.limits import SEGMENTS
from anabranch.types import TransactionInfo

_REASON = "by an operator, in the browser"
_FINAL = "This can't be undone."


@dataclass(frozen=True, slots=True)
class Plan:
    """An action on a transaction or stream. ``title``: the action as a question. ``now``: the current state.

    ``effects``: what will happen, in sentences that people confirm. ``act``: makes the call, and returns a sentence
    about it; raises as the client.
    """

    title: str
    now: str
    effects: tuple[str, ...]
    verb: str
    act: Callable[[], str]


def plan(client: Client, action: str, about: str, given: Mapping[str, str]) -> Plan:
    """The plan of an action on a transaction (its id) or a stream (its name). ``given``: the form's fields.

    Making a plan changes nothing in the cluster. Raises: InvalidArgument, IllegalState, and as the client.
    """
    return PLANS[action](client, about, given)


def _abort(client: Client, about: str, _given: Mapping[str, str]) -> Plan:
    info = client.state(txn_id := parse_txn_text(about))
    if info.state not in ("OPEN", "COMMIT_IN_PROGRESS", "ABORT_IN_PROGRESS"):
        raise IllegalState(f"transaction {about} is {info.state}: it can't be aborted")

    def act() -> str:
        client.abort(txn_id, reason=f"aborted {_REASON}")
        return f"transaction {about} is aborted"

    effects = (
        "None of its events will ever be read. Programs that write to it get TransactionAborted.",
        _FINAL,
    )
    return Plan(f"Abort transaction {about}?", _state_text(info), effects, "Abort it", act)


def _force(client: Client, about: str, given: Mapping[str, str]) -> Plan:
    info = client.state(txn_id := parse_txn_text(about))
    how = given.get("outcome", "")
    prepared = info.state == "PREPARED"
    if prepared and how not in ("commit", "abort"):
        raise InvalidArgument(f"outcome {how!r} must be commit or abort for a PREPARED transaction")
    if not prepared and info.state != "FINALIZE_IN_PROGRESS":
        raise IllegalState(f"transaction {about} is {info.state}: abort it, or let it finish")

    def act() -> str:
        outcome = how == "commit" if prepared else None
        client.force(txn_id, reason=f"forced {_REASON}", outcome=outcome)
        return f"transaction {about} is forced"

    effects = (
        "It will be aborted in all its streams. This is allowed only while its merge can't continue.",
        "Plain consumers keep seeing those of its events that are in the topics.",
    )
    if prepared:
        effects = (
            f"It will end by {how}, whatever its coordinator decided.",
            "If a database decided otherwise, its rows and the events will differ.",
        )
    title = f"Force transaction {about}?"
    return Plan(title, _state_text(info), (*effects, _FINAL), "Force it", act)


def _state_text(info: TransactionInfo) -> str:
    name = f", has the name {info.name}," if info.name else ""
    writers = count_of(len(info.writers), "writer")
    streams = ", ".join(info.streams) or "no stream so far"
    return f"It is {info.state}, of lane {info.owner}{name} with {writers} in {streams}."


def _scale(client: Client, about: str, given: Mapping[str, str]) -> Plan:
    text = given.get("segments", "")
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= SEGMENTS.value):
        raise InvalidArgument(
            f"segments {text[:20]!r} must be a number from 1 to {SEGMENTS.value:,}"
        )
    found = client.describe(about)
    numbers, opened = even_plan(found.segments, int(text))
    sealed = [s.segment_id for s in found.segments if segment_number(s.segment_id) in numbers]
    if not sealed:
        raise InvalidArgument(f"{about} has {text} even segments already")

    def act() -> str:
        # The call names these segments, so it is refused if the stream was scaled meanwhile.
        now = client.scale(about, seal=sealed, ranges=[(one.low, one.high) for one in opened])
        return f"{about} has {count_of(len(now.segments), 'segment')}, in stream epoch {now.stream_epoch}"

    names = ", ".join(map(segment_name, sealed[:20])) + (" and others" if len(sealed) > 20 else "")
    effects = (
        f"{count_of(len(sealed), 'segment')} will be sealed ({names}), and {len(opened):,} opened over their keys.",
        "Open transactions continue. Partitions are added if needed, and never removed.",
    )
    now = f"It has {count_of(len(found.segments), 'segment')}."
    return Plan(
        f"Scale {about} to {count_of(int(text), 'segment')}?", now, effects, "Scale it", act
    )


def _delete(client: Client, about: str, _given: Mapping[str, str]) -> Plan:
    found = client.describe(about)
    topic_id = topic_id_of(lambda: client.topic_id(about)) or "unknown"

    def act() -> str:
        client.delete_stream(about)
        return f"{about} is deleted"

    effects = (
        f"Its topics (id {topic_id}) with all its events, and the positions of its groups, are deleted for good.",
        "Readers get UnknownStream. This is refused while open transactions write to it or a processor reads it.",
        _FINAL,
    )
    segments, partitions = (
        count_of(n, noun)
        for n, noun in ((len(found.segments), "segment"), (found.partitions, "partition"))
    )
    events = events_of(lambda: client.count_events(about))
    now = f"It has {segments} on {partitions}, and {events}."
    return Plan(f"Delete stream {about}?", now, effects, "Delete it", act)


PLANS: dict[str, Callable[[Client, str, Mapping[str, str]], Plan]] = {
    "abort": _abort,
    "force": _force,
    "scale": _scale,
    "delete": _delete,
}
