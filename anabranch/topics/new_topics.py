"""Notes the topics created for one purpose, so that a failure can delete these topics, or name them in its
error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from anabranch.errors import AnabranchError, NotReady, TopicMisconfigured
from anabranch.ports import (
    UNKNOWN_TOPIC_OR_PARTITION,
    Log,
    LogError,
    LogRefused,
    LogUnavailable,
    LogUncertain,
    TopicInfo,
    TopicPartition,
    answered,
)

OF_NEW_TOPICS = "let brokers give new topics what it says to set"


class NewTopics:
    """Topics that were created for one purpose. Use the same object for all tries.

    ``ids``: topic ids by name. ``without``: the first refusal of a setting that topics were then created without.
    """

    def __init__(self) -> None:
        self.ids: dict[str, str] = {}
        self.without: LogRefused | None = None

    def __str__(self) -> str:
        """The end of an error's text if these topics are left as they are; empty if no topic was created."""
        return f"; these topics are made already: {self._names}" if self.ids else ""

    @property
    def _names(self) -> str:
        return ", ".join(sorted(self.ids))

    def note(self, made: Mapping[str, str], without: LogRefused | None = None) -> None:
        """Note topics that were created. ``without``: the refusal of a setting that they don't have."""
        self.ids |= made
        self.without = self.without or without

    def refuse(self, wrong: Sequence[str]) -> None:
        """Raise `TopicMisconfigured` if there are problems; `LogRefused` if they follow from a refused setting."""
        if not wrong:
            return
        text, first = "; ".join(wrong), self.without
        if first is None:
            raise TopicMisconfigured(text)
        error = LogRefused(f"{first}; without that: {text}", first.error, first.topics)
        error.to_do = OF_NEW_TOPICS
        raise error

    @contextmanager
    def undone(self, log: Log, *, again: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Delete the new topics if the ``with`` block fails; if the failure may pass, only name them in the error.

        ``again``: errors after which the caller tries again. They are not changed, and the topics stay.
        """
        passing = NotReady, LogUnavailable, LogUncertain
        try:
            yield
        except again:
            raise
        except (AnabranchError, LogError) as error:
            code = error.error if isinstance(error, LogRefused) else 0
            passes = isinstance(error, passing) or code == UNKNOWN_TOPIC_OR_PARTITION
            error.args = (f"{error}{self if passes else self.undo(log)}", *error.args[1:])
            raise

    def undo(self, log: Log) -> str:
        """Delete the new topics, unless somebody has written to one. Returns the end of the error's text."""
        if not self.ids:
            return ""
        names = self._names
        left = f"; these new topics are left, delete them: {names}"
        try:
            if self._are_written_to(log):
                return f"{left} (unless you know who wrote to them by now)"
            log.delete_topics([TopicInfo(name, 0, 0, {}, id_) for name, id_ in self.ids.items()])
        except LogError as error:
            return f"{left} ({error})"
        self.ids, self.without = {}, None
        return f"; these new topics are deleted again: {names}"

    def _are_written_to(self, log: Log) -> bool:
        counts = log.partition_counts(list(self.ids))
        places = [TopicPartition(name, p) for name, count in counts.items() for p in range(count)]
        ends = answered(lambda failed: log.end_offsets(places, committed=False, failed=failed))
        return any(ends.values())
