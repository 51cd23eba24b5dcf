"""New topics of all tries at making some: if these are refused at last, they are deleted again, or named."""

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
    """Topics that were made for one purpose. Keep it from one try to the next.

    ``ids``: of each. ``without``: the first refusal of a setting that they were made without.
    """

    def __init__(self) -> None:
        self.ids: dict[str, str] = {}
        self.without: LogRefused | None = None

    def __str__(self) -> str:
        """The words of an error for them, if they are left as they are; empty if nothing was made."""
        return f"; these topics are made already: {self._names}" if self.ids else ""

    @property
    def _names(self) -> str:
        return ", ".join(sorted(self.ids))

    def note(self, made: Mapping[str, str], without: LogRefused | None = None) -> None:
        """These were made, and without a setting that was refused."""
        self.ids |= made
        self.without = self.without or without

    def refuse(self, wrong: Sequence[str]) -> None:
        """`TopicMisconfigured` with these problems, if there are any; `LogRefused`: they follow from a refusal."""
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
        """Delete them when the ``with`` is refused, or name them if that may pass; the error says so.

        ``again``: errors after which the caller tries again; these are left as they are.
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
        """Delete those, if no one has written to any; returns what an error has to say of them."""
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
