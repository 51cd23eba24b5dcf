"""Rows for `--json`, tables and pages; and numbers, times and names as texts for people.

A row is a dictionary of JSON values: the fields of a stream, transaction, group or processor. `--json` prints all
of it; a table or a page shows a part.
"""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from anabranch.errors import AnabranchError, count_of
from anabranch.protocol.hybrid_time import to_text
from anabranch.protocol.ids import segment_epoch, segment_number
from anabranch.protocol.legal_names import COPYING

if TYPE_CHECKING:
    from anabranch.protocol.schemas import records as r
    from anabranch.protocol.schemas.records import ProcessorInfo
    from anabranch.reading.group_lag import ConsumerGroup, InputLag, Lag
    from anabranch.types import OpenTransaction, StreamDescription, Timeline, TransactionInfo


def events_of(count: Callable[[], tuple[int, int, bool]]) -> str:
    """The number of events that ``count`` (as of a `Lag`) returns, as text; the number may be unknown."""
    try:
        events, _, is_exact = count()
    except AnabranchError:  # the stream may be LOST
        return "an unknown number of events"
    return f"{'' if is_exact else 'about '}{count_of(events, 'event')}"


def topic_id_of(ask: Callable[[], str]) -> str:
    """The id of a stream's topic, or "" if ``ask`` fails. A stream made again under its name has another id."""
    try:
        return ask()
    except AnabranchError:  # the stream may be LOST
        return ""


def segment_name(id_: int) -> str:
    """A segment as number@epoch."""
    return f"{segment_number(id_)}@{segment_epoch(id_)}"


def time_text(unix_ms: int) -> str | None:
    """Unix milliseconds as ISO 8601 in UTC; None for 0, which means "not yet"."""
    if not unix_ms:
        return None
    return datetime.fromtimestamp(unix_ms / 1000, UTC).isoformat(timespec="milliseconds")


def span_text(seconds: float) -> str:
    """A span of time in one unit: ``90s``, ``5m``, ``3h``, ``2d``."""
    whole = max(0, int(seconds))
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if whole >= 2 * size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def bytes_text(data: bytes) -> str:
    r"""Bytes as text in one line: a backslash, and all but printable UTF-8, become `\\`, `\t`, `\n` or `\xff`."""
    text = data.decode("utf-8", "surrogateescape")
    return "".join(c if c.isprintable() and c != "\\" else _escaped(c) for c in text)


@lru_cache(1024)  # a value may have millions of equal characters
def _escaped(one: str) -> str:
    if "\udc80" <= one <= "\udcff":  # a byte that is not UTF-8
        return f"\\x{ord(one) - 0xDC00:02x}"
    return repr(one)[1:-1]


def stream_row(found: StreamDescription) -> dict[str, Any]:
    return {
        "stream": found.stream,
        "stream_epoch": found.stream_epoch,
        "reference_epoch": found.reference_epoch,
        "segments": [asdict(segment) for segment in found.segments],
        "partitions": found.partitions,
        "settings": dict(found.settings),
        "rejected": dict(found.rejected),
        "journal": {str(partition): end for partition, end in sorted(found.journal.items())},
        "low_water": {str(partition): at for partition, at in sorted(found.low_water.items())},
        "uncommitted_bytes": found.uncommitted_bytes,
        "state": found.state,
        "trouble": found.trouble,
        "foreign": found.foreign,
        "description": found.description,
        "locked_segments": [_segment_row(one) for one in found.locked_segments],
    }


def _segment_row(found: r.LockedSegment) -> dict[str, Any]:
    return {
        "stream": found.stream,
        "segment": found.segment,
        "txn_id": found.txn_id.hex(),
        "owner": found.owner,
        "held_s": found.held_ms / 1000,
        "left_s": None if found.left_ms < 0 else found.left_ms / 1000,
        "waiting": [txn_id.hex() for txn_id in found.waiting],
    }


def _part_row(found: r.PartInfo) -> dict[str, Any]:
    """The part of a transaction on another control partition."""
    return {
        "control_partition": found.partition,
        "scopes": list(found.scopes),
        "state": found.state,
        "votes_round": found.votes_round,
        "vote": found.vote,
        "waited_s": None if found.waited_ms < 0 else found.waited_ms / 1000,
    }


def segment_text(found: r.LockedSegment) -> str:
    """A locked segment of an exclusive stream, and who waits for it."""
    waiting = f"; {len(found.waiting):,} wait: " if found.waiting else ""
    waiting += ", ".join(txn_id.hex() for txn_id in found.waiting)
    left = f", {span_text(found.left_ms / 1000)} more at most" if found.left_ms >= 0 else ""
    return (
        f"segment {found.segment} of {found.stream}: locked by {found.txn_id.hex()} of lane {found.owner} for "
        f"{span_text(found.held_ms / 1000)}{left}{waiting}"
    )


def transaction_row(info: TransactionInfo) -> dict[str, Any]:
    return {
        "txn_id": info.txn_id.hex(),
        "state": info.state,
        "scope": info.scope,
        "owner": info.owner,
        "name": info.name,
        "commit_timestamp": info.commit_timestamp,
        "committed_at": to_text(info.commit_timestamp) if info.commit_timestamp else None,
        "counts": {
            "committed": info.counts.committed,
            "rejected": info.counts.rejected,
            "left_out": info.counts.left_out,
        },
        "reason": info.reason,
        "begun_at": time_text(info.begun_ms),
        "finished_at": time_text(info.finished_ms),
        "keepalive_s": info.keepalive,
        "streams": list(info.streams),
        "prepared_at": time_text(info.prepared_ms),
        "prepared_by": info.prepared_by.hex() or None,
        "writers": [
            {"writer": _writer_text(w.writer), "events": w.events, "finished": w.finished}
            for w in info.writers
        ],
    }


def _writer_text(writer: int) -> str:
    return f"{writer & 0xFFFFFFFFFFFFFFFF:016x}"


def open_transaction_row(found: OpenTransaction) -> dict[str, Any]:
    """An open transaction, with the resources that it has reserved, and the reason why it waits."""
    row = transaction_row(found.info) | {
        "uncommitted_bytes": found.uncommitted_bytes,
        "age_s": found.age,
        "silent_s": found.silent,
        "keepalive_left_s": found.left,
        "writer_count": found.writer_count,
        "locks": found.locks,
        "locks_frozen": found.frozen,
        "journal_bytes": dict(found.journals),
        "waits_for": None if found.waits is None else found.waits.text,
        "waits_since": None
        if found.waits is None or found.waits.age_ms < 0
        else span_text(found.waits.age_ms / 1000),
        "ended_by": found.ends,
        "locked_segments": [_segment_row(one) for one in found.locked_segments],
        "waits_for_segments": [_segment_row(one) for one in found.asks],
        "control_partitions": [_part_row(one) for one in found.partitions],
    }
    if found.writers:
        row["writers"] = [
            {
                "writer": _writer_text(w.writer),
                "label": w.label,
                "lane": w.lane,
                "events": w.events,
                "finished": w.finished,
            }
            for w in found.writers
        ]
    if found.staged_merges:
        row["merge"] = [
            {
                "stream": c.stream,
                "partition": c.partition,
                "events_done": c.staged,
                "events": c.events,
                "chunks_done": c.chunks if c.done else c.chunks * c.staged // max(1, c.events),
                "chunks": c.chunks,
            }
            for c in found.staged_merges
        ]
    return row


def timeline_row(found: Timeline) -> dict[str, Any]:
    """A timeline, with the milliseconds of each step since a controller's first step, and since the step before.

    Steps have times of several clocks (``clock``), so a span between two clocks may be wrong by their difference.
    """
    begun = next((step.at_ms for step in found.steps if step.clock != "client"), 0)
    before = [found.steps[0].at_ms if found.steps else 0, *[step.at_ms for step in found.steps]]
    return {
        "txn_id": found.txn_id.hex(),
        "steps": [
            {
                "at": time_text(step.at_ms),
                "clock": step.clock,
                "since_begun_ms": step.at_ms - begun,
                "since_step_ms": step.at_ms - last,
                "step": step.what,
                "about": step.about,
                "waited_for": step.waited_for,
            }
            for step, last in zip(found.steps, before, strict=False)
        ],
        "waits": found.waits,
        "gaps": list(found.gaps),
    }


def group_row(group: ConsumerGroup) -> dict[str, Any]:
    """A consumer group, with its position in each stream."""
    return {
        "group": group.name,
        "state": group.state,
        "members": list(group.members),
        "streams": [
            {
                "stream": one.stream,
                "reads": "transactions" if one.by_transactions else "events",
                "offsets": {}
                if one.by_transactions
                else {str(p): o for p, o in one.offsets.items()},
                **lag_fields(None if one.trouble else one.lag),
                "trouble": one.trouble,
            }
            for one in group.streams
        ],
    }


def processor_row(info: ProcessorInfo, lags: Sequence[InputLag]) -> dict[str, Any]:
    """A processor, with the lag of each of its inputs."""
    commits = [task.commit_timestamp for task in info.tasks if task.commit_timestamp]
    held = sum(1 for task in info.tasks if task.holder)
    return {
        "processor": info.processor,
        "tasks": info.task_count,
        "origin": info.origin or None,
        "phase": info.phase or None,
        "trouble": _trouble(info, info.task_count - held),
        "inputs": [
            {
                "stream": lag.stream,
                **lag_fields(None if lag.trouble else lag.most),
                "trouble": lag.trouble,
            }
            for lag in lags
        ],
        "held": held,
        "holders": sorted({task.holder for task in info.tasks if task.holder}),
        "oldest_last_commit": to_text(min(commits)) if commits else None,
    }


def _trouble(info: ProcessorInfo, idle: int) -> str:
    """The trouble of a processor, or an empty text. ``idle``: how many tasks have no worker."""
    if info.phase == COPYING:
        return f"an incomplete copy of {info.origin}"
    if not idle or info.phase:  # a savepoint is never run
        return ""
    return f"{idle:,} of {count_of(info.task_count, 'task')} without a worker"


def lag_fields(lag: Lag | None) -> dict[str, Any]:
    """The fields of a lag; None if it is unknown."""
    if lag is None:
        return {"events_behind": None, "seconds_behind": None, "exact": None}
    seconds = round(lag.age_s(time.time()), 3)
    return {"events_behind": lag.events, "seconds_behind": seconds, "exact": lag.exact}


def lag_text(row: Mapping[str, Any]) -> str:
    """The number of events of a lag."""
    return events_text(row["events_behind"], row["exact"])


def events_text(events: int | None, exact: bool | None) -> str:
    """A number of events: ``~`` marks an estimate, ``?`` an unknown number."""
    return "?" if events is None else f"{'' if exact else '~'}{events:,}"


def bytes_fields(**data: bytes | None) -> dict[str, Any]:
    """Bytes as JSON: under their name as text, or under ``name_base64`` if they are not UTF-8."""
    row: dict[str, Any] = {}
    for name, some in data.items():
        try:
            row[name] = None if some is None else some.decode("utf-8")
        except UnicodeDecodeError:
            row[f"{name}_base64"] = base64.b64encode(some or b"").decode("ascii")
    return row


def value_fields(**data: Any) -> dict[str, Any]:
    """Bytes as `bytes_fields`, decoded keys and values as JSON."""
    row: dict[str, Any] = {}
    for name, each in data.items():
        if each is None or isinstance(each, bytes):
            row |= bytes_fields(**{name: each})
        else:
            row[name] = json.loads(json_of(each))
    return row


def value_text(value: Any) -> str:
    """A decoded key or value as one cell: a text as it is, others as JSON. Raises: as `json_of`."""
    if isinstance(value, bytes):
        return bytes_text(value)
    text = value if isinstance(value, str) else json_of(value)
    return bytes_text(text.encode("utf-8", "surrogatepass"))  # JSON may have half a character


class Laid(NamedTuple):
    """A key or value for people. ``text``: printable lines; ``line``: its beginning as one line.

    ``size``: bytes of what is stored. ``cut``: whether ``text`` is only the beginning.
    """

    text: str
    line: str
    size: int
    cut: bool


_LINE = 120  # characters
_LAID_OUT = 256 << 10  # bytes of a JSON text that is laid out, and not only shown
_DEEPEST = 24  # levels of JSON that are indented
_JSON_PART = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{},:]|[^\s\[\]{},:"]+')


def laid_out(data: bytes, decoded: Any, most: int) -> Laid:
    """A key or value, with JSON on several lines. ``decoded``: by the codec; the bytes themselves without one.

    ``most``: characters of the text. Raises: as `json_of`, but for bytes nothing.
    """
    whole = True
    if isinstance(decoded, bytes):
        # A character has at most 4 bytes.
        part = data if len(data) <= _LAID_OUT else data[: 4 * most]
        whole = len(part) == len(data)
        text = part.decode("utf-8", "surrogateescape")
    else:
        text = decoded if isinstance(decoded, str) else json_of(decoded)
    lines = _indented(text, most) if len(data) <= _LAID_OUT else text
    line = _printable(text[:_LINE].replace("\n", " ")) + ("…" if len(text) > _LINE else "")
    return Laid(_printable(lines[:most]), line, len(data), not whole or len(lines) > most)


def _printable(text: str) -> str:
    """The text with all but line ends and printable characters escaped."""
    return "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in text)


def _indented(text: str, most: int) -> str:
    """A JSON object or list on several lines, with its numbers and names as they are; other text unchanged.

    ``most``: characters, after which the text ends with the next part of the JSON.
    """
    if text[:1] not in ("{", "["):
        return text
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text
    made: list[str] = []
    depth, last, size = 0, "", 0
    for each in _JSON_PART.finditer(text):
        part = each[0]
        before = len(made)
        if part in "]}":
            depth -= 1
            if last not in "[{":
                made.append("\n" + "  " * min(depth, _DEEPEST))
        elif last in ("[", "{", ","):
            made.append("\n" + "  " * min(depth, _DEEPEST))
        made.append(": " if part == ":" else part)
        depth += part in ("[", "{")
        last = part
        size += sum(map(len, made[before:]))
        if size > most:
            break
    return "".join(made)


def json_of(value: Any) -> str:
    """A decoded value as JSON; as a string if it has none.

    Raises: RecursionError, TypeError (a key of a dictionary is no text), and what a class raises.
    """

    def plain(each: Any) -> Any:
        if hasattr(each, "model_dump"):
            return each.model_dump(mode="json")
        if hasattr(each, "__struct_fields__"):
            import msgspec

            return msgspec.to_builtins(each)
        if hasattr(each, "DESCRIPTOR"):  # a message of Protobuf
            from google.protobuf.json_format import MessageToDict

            return MessageToDict(each)
        return str(each)

    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=plain)


# Moments of system tables are shown as the hybrid times in these columns, which commands accept as times.
_MOMENTS = {
    "committed_at": "commit_timestamp",
    "newest_at": "newest",
    "since": "mincsn",
    "until": "maxcsn",
}
_TEXTS = ("key", "value")  # other bytes are ids


def system_row(found: NamedTuple) -> dict[str, Any]:
    """A row of a system table (`anabranch.presentation.system_tables`)."""
    row: dict[str, Any] = {}
    for column, value in found._asdict().items():
        moment = getattr(found, _MOMENTS.get(column, ""), None)
        if moment is not None:
            row[column] = to_text(moment)
        elif isinstance(value, bytes) and column in _TEXTS:
            row |= bytes_fields(**{column: value})
        elif isinstance(value, tuple):
            row[column] = [_plain(each) for each in value]
        else:
            row[column] = _plain(value)
    return row


def _plain(value: object) -> object:
    if isinstance(value, bytes):
        return value.hex()
    return dict(value) if isinstance(value, Mapping) else value
