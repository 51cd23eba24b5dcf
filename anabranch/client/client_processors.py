"""The calls of a client about processors and their tasks (``docs/processing.md``)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from anabranch.client.client_reads import Reading
from anabranch.client.client_streams import Streams
from anabranch.client.receipt_account import RECORD_OVERHEAD
from anabranch.client.session import Session
from anabranch.core import defaults
from anabranch.core.ids import TENURE_SIZE
from anabranch.core.legal_names import check_scope, check_type, is_plain, split_stream, state_stream
from anabranch.core.limits import Room
from anabranch.core.stream_settings import PROCESSOR, is_table, latest_time
from anabranch.errors import AnabranchError, IllegalState, InvalidArgument, NotAuthorized, NotReady
from anabranch.reading.history_search import Start
from anabranch.reading.tasks.groups import Mirror, group_inputs
from anabranch.reading.tasks.lag import InputLag, input_lags
from anabranch.reading.tasks.stored import stored
from anabranch.schemas import records as r
from anabranch.topics.names import journal_topic, mirror_group
from anabranch.types import Tenure

_ROOMS_S = 3.0  # to ask for what outputs take; below the session of a worker, which waits for it
_PAUSE_S = 0.02  # before a commit that is being merged is asked about again


class Processors(Reading, Streams):
    """See `Client`, which has these calls."""

    _session: Session

    def create_processor(
        self,
        processor: str,
        inputs: str | Sequence[str | r.ProcessorInput],
        tasks: int = defaults.TASKS,
        start: Start = "begin",
        *,
        stores: Sequence[str] | Mapping[str, str] = (),
        timeout: float | None = None,
    ) -> r.ProcessorInfo:
        """Make a processor (``scope/name``, of an existing scope). Repeating it changes nothing, but adds stores.

        ``inputs``: streams, of any scopes, or where to begin in each. ``tasks``: a power of two up to 1,024; the
        most that work side by side, it never changes. ``start``: where its tasks begin, as of `read`; logged once.
        ``stores``: names; with one or more it has state, the stream ``scope/name.state``. None of them is ever
        taken away. As a mapping: to what each is; another kind under that name is refused until a reset.

        Raises: UnknownScope, UnknownStream, IllegalState (it exists with other tasks, inputs or kinds of stores),
        InvalidArgument, NotAuthorized (the right process), NotReady, DeadlineExceeded, and for its state as
        `create_stream`.
        """
        deadline = self._alone("create_processor", timeout)
        check_type("tasks", tasks, int)
        given = [inputs] if isinstance(inputs, str) else inputs
        names = [one for one in given if isinstance(one, str)]
        first = tuple(one for one in given if isinstance(one, r.ProcessorInput))
        if names:
            first += self._readers().first_inputs(names, start, deadline, self._session.together)
        kinds = tuple(stores.values()) if isinstance(stores, Mapping) else ()
        command = r.CreateProcessor(processor, tasks, first, tuple(stores), kinds)
        info = self._ask_processor(processor, command, deadline)
        if info.stores:
            state = r.CreateStream(state_stream(processor), tasks, {PROCESSOR: processor})
            self._session.ask_of(processor, state, r.StreamList, deadline)
        return info

    def check_outputs(
        self, processor: str, streams: Iterable[str], *, timeout: float | None = None
    ) -> dict[str, Room]:
        """Check that commits of a processor can write to these streams.

        Returns each stream's limits of events, where they can be known. Raises: CrossScope, UnknownScope,
        UnknownStream, NotReady, DeadlineExceeded.
        """
        deadline, names = self._deadline(timeout), sorted(streams)
        self._session.check_together(names, deadline, beside=split_stream(processor)[0])
        found: dict[str, Room] = {}
        now_ms = int(self._ports.clock.wall() * 1000)
        until = min(deadline, self._ports.clock.monotonic() + _ROOMS_S)
        journal = self._shared.journals.writer()
        try:
            for name in names:
                room, partitions = Room(name), [0]
                with suppress(NotAuthorized):  # a client may be allowed to write only
                    info = self._session.describe(name, deadline)
                    partitions = sorted({segment.partition for segment in info.segments})
                    latest = latest_time(info.settings, now_ms)
                    room = Room(name, None, is_table(info.settings), latest)
                with suppress(AnabranchError):  # the first write to a lost stream gets the answer
                    opened = journal.open(journal_topic(name), partitions, until)
                    found[name] = room._replace(most=opened.max_event_bytes - RECORD_OVERHEAD)
        finally:
            journal.discard()
        return found

    def reset_processor(
        self,
        processor: str,
        start: Start | None = None,
        *,
        keep_state: bool = False,
        timeout: float | None = None,
    ) -> r.ProcessorInfo:
        """Let a processor begin again, from ``start`` (as of `read`), without its state: all of its tenures end.

        ``keep_state``: its stores stay as they are; then without a ``start`` its positions do, too. Streams
        keep what it has written. Each call resets once more.

        Raises: UnknownScope, UnknownStream, UnknownProcessor, InvalidArgument (neither start nor keep_state),
        IllegalState (another one reset it at the same time), NotReady (a commit of it is being merged),
        NotAuthorized (the right process), DeadlineExceeded.
        """
        deadline = self._alone("reset_processor", timeout)
        info = self._described(processor, deadline)
        inputs: tuple[r.ProcessorInput, ...] = ()
        if start is not None:
            streams = [one.stream for one in info.inputs]
            inputs = self._readers().first_inputs(streams, start, deadline, self._session.together)
        command = r.ResetProcessor(processor, info.resets, inputs, bool(keep_state))
        return self._ask_processor(processor, command, deadline)

    def import_group(
        self,
        processor: str,
        group: str,
        inputs: str | Sequence[str] = (),
        tasks: int = defaults.TASKS,
        *,
        timeout: float | None = None,
    ) -> r.ProcessorInfo:
        """Let a processor begin where a consumer group of Kafka's stands in the topics of its inputs.

        With ``inputs`` it is made, else it is there and is reset, without its state. The processor begins with the
        first commit of each input that the group has not read whole: nothing is left out, some events may come
        again. Stop the group's members before.

        Raises: as `create_processor` and `reset_processor`; InvalidArgument (the group has no offsets there, or is
        the processor's own mirror), IllegalState (with inputs: it begins elsewhere already), SnapshotExpired.
        """
        if group == mirror_group(processor):
            raise InvalidArgument(
                f"the group {group} is the mirror of {processor} itself, which anybody may move: it is never read"
            )
        deadline = self._alone("import_group", timeout)
        if not inputs:
            info = self._described(processor, deadline)
            if is_plain(info.inputs[0].stream):
                raise InvalidArgument(
                    "it reads plain topics: `anabranch bridge --group` imports those"
                )
            first = self._group_inputs(group, [one.stream for one in info.inputs])
            command = r.ResetProcessor(processor, info.resets, first, keep_state=False)
            return self._ask_processor(processor, command, deadline)
        names = [inputs] if isinstance(inputs, str) else list(inputs)
        first = self._group_inputs(group, names)
        info = self._ask_processor(processor, r.CreateProcessor(processor, tasks, first), deadline)
        if info.inputs != first:
            raise IllegalState(f"{processor} is there already: without inputs it is reset")
        return info

    def stored(
        self, processor: str, store: str, key: bytes, task: int | None = None
    ) -> bytes | None:
        """The committed value of a key in a processor's store, None if there is none. Reads a whole partition.

        ``task``: of a store that is local, which task's; None: that of the key.

        Raises: UnknownScope, UnknownProcessor, InvalidArgument (no such store or task), NotReady, NotAuthorized.
        """
        readers, info = self._readers(), self.processor(processor)
        with readers.source() as source:
            return stored(source, info, store, key, task, readers.timeout)

    def mirror(self, processor: str, ask: Callable[[], r.ProcessorInfo] | None = None) -> Mirror:
        """A mirror of a processor's positions for Kafka's tools: call its `step` every few seconds; close it.

        ``ask``: describes the processor; None: `processor` does.
        """
        readers = self._readers()
        ask = ask or partial(self.processor, processor)
        return Mirror(readers.ports, processor, ask, readers.timeout)

    def delete_processor(self, processor: str, *, timeout: float | None = None) -> None:
        """Take a processor away, with its state. One of that name that is made later begins without it.

        The topics of its state are deleted behind the answer.

        Raises: as `reset_processor`.
        """
        deadline = self._alone("delete_processor", timeout)
        resets = self._described(processor, deadline).resets
        command = r.DeleteProcessor(processor, resets)
        self._session.ask_of(processor, command, r.ProcessorList, deadline)

    def processors(self, scope: str, *, timeout: float | None = None) -> list[r.ProcessorInfo]:
        """The processors of a scope, by name, without their tasks. Raises: UnknownScope, NotReady."""
        deadline = self._deadline(timeout)
        wanted = r.DescribeProcessors(check_scope(scope), None)
        return self._session.in_pages(
            wanted, r.ProcessorList, lambda part: part.processors, deadline
        )

    def processor(self, processor: str, *, timeout: float | None = None) -> r.ProcessorInfo:
        """A processor, and where its tasks stand. Raises: UnknownScope, UnknownProcessor, NotReady."""
        return self._described(processor, self._deadline(timeout))

    def lag(self, info: r.ProcessorInfo) -> list[InputLag]:
        """How far the tasks of a processor, as `processor` told of it, are behind each of its inputs.

        Read from the inputs' histories. An input in trouble says why, and is no error.
        """
        readers = self._readers()
        with readers.source() as source:
            return input_lags(source, info, readers.timeout)

    def take(
        self,
        processor: str,
        tasks: Iterable[int] | None = None,
        *,
        holder: str | None = None,
        timeout: float | None = None,
    ) -> Tenure:
        """Take tasks of a processor (None: all): no other tenure commits for them from now on.

        The answer comes once their commits that were decided before are merged: so where the tasks stand is final.
        ``holder``: for people; None: this host and process.

        Raises: TenureLost (another one took a task at the same time, nothing was changed: take them if they are
        yours), UnknownScope, UnknownProcessor, InvalidArgument, NotAuthorized, NotReady, DeadlineExceeded.
        """
        deadline = self._deadline(timeout)
        known = self._described(processor, deadline)
        wanted = range(known.task_count) if tasks is None else sorted(set(tasks))
        terms = {task.task: task.term for task in known.tasks}
        secret = self._ports.entropy(TENURE_SIZE)
        who = f"{socket.gethostname()}:{os.getpid()}" if holder is None else holder
        seen = tuple(terms.get(task, 0) for task in wanted)
        command = r.Take(processor, secret, who, tuple(wanted), seen)
        while True:
            info = self._ask_processor(processor, command, deadline)
            merging = {task.in_progress for task in info.tasks} - {None}
            if not merging:
                break
            if self._session.now() + _PAUSE_S >= deadline:
                ids = ", ".join(sorted(one.hex() for one in merging if one is not None))
                raise NotReady(f"the tasks are taken, but {ids} is still being merged: take again")
            self._ports.clock.sleep(_PAUSE_S)
        found = {task.task: task for task in info.tasks}
        return Tenure(
            processor, info.task_count, info.inputs, found, secret, info.stores, info.incarnation
        )

    def release(self, tenure: Tenure, *, timeout: float | None = None) -> None:
        """Give up tasks. Those that another one has taken are left alone. Repeating it is fine."""
        command = r.Release(tenure.processor, tenure.secret, tuple(sorted(tenure.tasks)))
        self._ask_processor(tenure.processor, command, self._deadline(timeout))

    def _group_inputs(self, group: str, streams: Sequence[str]) -> tuple[r.ProcessorInput, ...]:
        readers = self._readers()
        return group_inputs(readers.ports, group, streams, readers.timeout)

    def _described(self, processor: str, deadline: float) -> r.ProcessorInfo:
        scope = split_stream(processor)[0]
        found: tuple[r.TaskInfo, ...] = ()
        first = 0
        while True:
            command = r.DescribeProcessors(scope, processor, None, first)
            info = self._ask_processor(processor, command, deadline)
            found += info.tasks
            if info.more is None:
                return replace(info, tasks=found)
            first = info.more

    def _ask_processor(self, processor: str, command: object, deadline: float) -> r.ProcessorInfo:
        return self._session.ask_of(processor, command, r.ProcessorList, deadline).processors[0]
