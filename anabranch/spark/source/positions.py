"""The position of a streaming query: the JSON that Spark keeps in its checkpoint.

Each stream has an offset in its history (the topic with one record for each commit), a vector (an offset for each
partition of its topic), and the ids of these two topics. Spark compares positions as texts, so equal positions must
give equal text.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from anabranch.errors import MalformedRecord
from anabranch.reading.committed_log import UNKNOWN_IDS, StreamIds

_NEW = "new"


class Position(NamedTuple):
    """A position in a stream: after the record ``after`` of the history (-1: before all), and at these offsets.

    A partition missing in ``vector`` is at 0. The vector is the record's, or later: inside the next transaction if
    that is split, or after events that retention had removed when the query began. ``ids``: of the topics of these
    offsets; a checkpoint of an older version has no ids.
    """

    after: int
    vector: dict[int, int]
    ids: StreamIds = UNKNOWN_IDS

    def moved(self, after: int, ends: Mapping[int, int]) -> Position:
        """The position after a later record, with the ends that have moved since."""
        return self._replace(after=after, vector=raised(self.vector, ends))

    def is_of(self, ids: StreamIds) -> bool:
        """Whether the position is in these topics. True if the position's or the topics' ids are unknown."""
        return all(
            not ours or not theirs or ours == theirs
            for ours, theirs in zip(self.ids, ids, strict=True)
        )


BEGIN = Position(-1, {})


def raised(ours: Mapping[int, int], theirs: Mapping[int, int]) -> dict[int, int]:
    """The higher offset of each partition, by partition; zeros are left out."""
    return {
        partition: offset
        for partition in sorted({*ours, *theirs})
        if (offset := max(ours.get(partition, 0), theirs.get(partition, 0)))
    }


def to_json(positions: Mapping[str, Position], *, new: bool = False) -> dict[str, Any]:
    """The JSON for Spark. ``new``: mark that Spark has not stored a position yet."""
    streams = {
        stream: {
            "after": position.after,
            "vector": {str(p): offset for p, offset in sorted(position.vector.items())},
        }
        | ({"ids": list(position.ids)} if any(position.ids) else {})
        for stream, position in sorted(positions.items())
    }
    return {_NEW: True, **streams} if new else streams


def is_new(offset: Mapping[str, Any]) -> bool:
    """Whether these positions are marked as new, see `to_json`."""
    return bool(offset.get(_NEW))


def lag(source: Mapping[str, Any]) -> dict[str, int] | None:
    """A query's lag, from its progress: stream -> unread offsets (of events and a few markers).

        anabranch.spark.lag(query.lastProgress["sources"][0])

    None if the query has no position yet, or could not ask for the streams' ends. Raises: MalformedRecord (a source
    of another format).
    """
    ends = [source["endOffset"], source["latestOffset"]]
    if any(end in (None, "", "null") for end in ends):
        return None
    at, latest = (from_json(_object(end)) for end in ends)
    return {
        stream: sum(
            max(0, offset - at.get(stream, BEGIN).vector.get(partition, 0))
            for partition, offset in position.vector.items()
        )
        for stream, position in latest.items()
    }


def _object(text: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """An offset in a query's progress, given as JSON or parsed."""
    try:
        found = json.loads(text) if isinstance(text, str) else text
    except ValueError:
        found = _python(str(text))
    except RecursionError:
        found = None
    if not isinstance(found, Mapping):
        raise MalformedRecord(f"{str(text)[:200]} is no position of this source")
    return found


def _python(text: str) -> Any:
    """The offset in a text that PySpark 4.0 or 4.1 wrote with ``repr``; None if the text is not of that form."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None


def _number(given: Any, least: int, bits: int = 63) -> int:
    if not isinstance(given, int) or not least <= given < 1 << bits:
        raise ValueError(f"{given!r} is no such number")
    return given


def from_json(offset: Mapping[str, Any]) -> dict[str, Position]:
    """Positions from Spark's JSON. Raises: MalformedRecord (it is other JSON)."""
    try:
        return {
            stream: Position(
                _number(found["after"], -1),
                {_number(int(p), 0, 31): _number(o, 0) for p, o in found["vector"].items()},
                StreamIds(*map(str, found.get("ids", ()))),
            )
            for stream, found in offset.items()
            if stream != _NEW
        }
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise MalformedRecord(
            f"the checkpoint holds {str(offset)[:200]}, which is no position of this source: is it another "
            "query's? Give a new checkpointLocation"
        ) from error
