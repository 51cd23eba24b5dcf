"""Processors of a client: making, resetting and deleting them, and task ownership (``docs/processing.md``)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from anabranch.client.calls.reading import Reading
from anabranch.client.receipts import RECORD_OVERHEAD
from anabranch.client.shared import Shared
from anabranch.core.stream_settings import PROCESSOR, is_table, latest_time
from anabranch.errors import (
    AnabranchError,
    FeatureNotEnabled,
    IllegalState,
    InvalidArgument,
    NotAuthorized,
    NotReady,
    UnsupportedVersion,
)
from anabranch.protocol.ids import FENCING_TOKEN_SIZE
from anabranch.protocol.legal_names import (
    COPYING,
    check_scope,
    check_type,
    is_plain,
    split_stream,
    state_stream,
)
from anabranch.protocol.limits import Room
from anabranch.protocol.schemas import records as r
from anabranch.reading.history import Start
from anabranch.reading.positions import group_inputs
from anabranch.topics.names import journal_topic, mirror_group
from anabranch.types import TaskOwnership

_ROOMS_S = 3.0  # limit for asking about outputs: a worker waits meanwhile, and its session must not time out
_GIVE_BACK_S = 3.0
_PAUSE_S = 0.02  # before asking again whether a commit is merged


class Processors:
    """Calls of `Client` about processors, with its arguments and errors; names are the same unless one is given."""

    def __init__(self, shared: Shared, reading: Reading) -> None:
        self._shared = shared
        self._session = shared.session
        self._reading = reading

    def create(
        self,
        processor: str,
        inputs: str | Sequence[str | r.ProcessorInput],
        tasks: int,
        start: Start,
        deadline: float,
        *,
        stores: Sequence[str] | Mapping[str, str],
        topology: str,
    ) -> r.ProcessorInfo:
        """As `Client.create_processor`."""
        check_type("tasks", tasks, int)
        given = [inputs] if isinstance(inputs, str) else inputs
        names = [one for one in given if isinstance(one, str)]
        first = tuple(one for one in given if isinstance(one, r.ProcessorInput))
        if names:
            first += self._reading.first_inputs(names, start, deadline)
        kinds = tuple(stores.values()) if isinstance(stores, Mapping) else ()
        command = r.CreateProcessor(processor, tasks, first, tuple(stores), kinds, topology)
        try:
            info = self.ask(processor, command, deadline)
        except (FeatureNotEnabled, UnsupportedVersion):
            if not topology:
                raise
            info = self.ask(processor, replace(command, topology=""), deadline)
        self._make_state(info, deadline)
        return info

    def reset(
        self, processor: str, start: Start | None, keep_state: bool, deadline: float
    ) -> r.ProcessorInfo:
        """As `Client.reset_processor`."""
        info = self.described(processor, deadline)
        inputs: tuple[r.ProcessorInput, ...] = ()
        if start is not None:
            streams = [one.stream for one in info.inputs]
            inputs = self._reading.first_inputs(streams, start, deadline)
        command = r.ResetProcessor(processor, info.resets, inputs, keep_state)
        return self.ask(processor, command, deadline)

    def mark_copy(
        self,
        processor: str,
        origin: str,
        phase: str,
        origin_resets: int,
        resets: int,
        deadline: float,
    ) -> r.ProcessorInfo:
        """As `Client.mark_copy`."""
        command = r.CopyProcessor(processor, origin, origin_resets, resets, phase)
        info = self.ask(processor, command, deadline)
        if phase == COPYING:
            self._make_state(info, deadline)
        return info

    def _make_state(self, info: r.ProcessorInfo, deadline: float) -> None:
        """Create the state stream of a processor with stores."""
        if info.stores:
            name = info.processor
            state = r.CreateStream(state_stream(name), info.task_count, {PROCESSOR: name})
            self._session.ask_of(name, state, r.StreamList, deadline)

    def alter(
        self,
        processor: str,
        add: Sequence[str],
        start: Start | None,
        drop: Sequence[str],
        deadline: float,
    ) -> r.ProcessorInfo:
        """As `Client.alter_processor`."""
        add, drop = list(dict.fromkeys(add)), list(dict.fromkeys(drop))
        if both := sorted(set(add) & set(drop)):
            raise InvalidArgument(
                f"{', '.join(both)} is to be added and dropped: drop it first, then add it with its new start"
            )
        if bool(add) != (start is not None):
            raise InvalidArgument("a start belongs to inputs that are added: begin, end or a time")
        if plain := [one for one in add if is_plain(one)]:
            raise InvalidArgument(
                f"{', '.join(plain)}: only streams can be added to a processor: bridge the topic into one "
                "(`anabranch bridge`), or make a processor of another name that has all inputs from the start"
            )
        info = self.described(processor, deadline)
        known = {one.stream: one for one in info.inputs}
        begun: tuple[r.ProcessorInput, ...] = ()
        if add and start is not None:
            begun = self._reading.first_inputs(add, start, deadline)
        for one in begun:
            if one.stream in known and known[one.stream].topic_id not in ("", one.topic_id):
                raise IllegalState(f"{one.stream} was created again since: drop it, then add it")
        more = tuple(one for one in begun if one.stream not in known)
        less = tuple(one for one in drop if one in known)
        if not more and not less:
            return info  # a repeated call
        return self.ask(processor, r.AlterProcessor(processor, info.resets, less, more), deadline)

    def import_group(
        self, processor: str, group: str, inputs: str | Sequence[str], tasks: int, deadline: float
    ) -> r.ProcessorInfo:
        if not inputs:
            info = self.described(processor, deadline)
            if is_plain(info.inputs[0].stream):
                raise InvalidArgument(
                    "it reads plain topics: `anabranch bridge --group` imports those"
                )
            first = self._group_inputs(group, [one.stream for one in info.inputs])
            command = r.ResetProcessor(processor, info.resets, first, keep_state=False)
            return self.ask(processor, command, deadline)
        names = [inputs] if isinstance(inputs, str) else list(inputs)
        first = self._group_inputs(group, names)
        info = self.ask(processor, r.CreateProcessor(processor, tasks, first), deadline)
        if info.inputs != first:
            raise IllegalState(f"{processor} is there already: without inputs it is reset")
        return info

    def delete(self, processor: str, deadline: float) -> None:
        """As `Client.delete_processor`."""
        resets = self.described(processor, deadline).resets
        command = r.DeleteProcessor(processor, resets)
        self._session.ask_of(processor, command, r.ProcessorList, deadline)

    def listed(self, scope: str, deadline: float) -> list[r.ProcessorInfo]:
        """As `Client.processors`."""
        wanted = r.DescribeProcessors(check_scope(scope), None)
        return self._session.in_pages(
            wanted, r.ProcessorList, lambda part: part.processors, deadline
        )

    def described(
        self, processor: str, deadline: float, *, topology: bool = False
    ) -> r.ProcessorInfo:
        """As `Client.processor`."""
        scope = split_stream(processor)[0]
        found: tuple[r.TaskInfo, ...] = ()
        first = 0
        while True:
            command = r.DescribeProcessors(scope, processor, None, first, topology)
            try:
                info = self.ask(processor, command, deadline)
            except UnsupportedVersion:  # of a controller of an older release
                if not topology:
                    raise
                return self.described(processor, deadline)
            found += info.tasks
            if info.more is None:
                return replace(info, tasks=found)
            first = info.more

    def check_outputs(
        self, processor: str, streams: Iterable[str], deadline: float
    ) -> dict[str, Room]:
        names = sorted(streams)
        found: dict[str, Room] = {}
        now_ms = int(self._shared.ports.clock.wall() * 1000)
        until = min(deadline, self._shared.ports.clock.monotonic() + _ROOMS_S)
        journal = self._shared.ports.journals.writer()
        try:
            for name in names:
                room, partitions = Room(name), [0]
                with suppress(NotAuthorized):  # a client may be allowed to write only
                    info = self._session.describe(name, deadline)
                    partitions = sorted({segment.partition for segment in info.segments})
                    latest = latest_time(info.settings, now_ms)
                    room = Room(name, None, is_table(info.settings), latest)
                with suppress(AnabranchError):  # the first write to a lost stream will raise
                    opened = journal.open(journal_topic(name), partitions, until)
                    found[name] = room._replace(most=opened.max_event_bytes - RECORD_OVERHEAD)
        finally:
            journal.discard()
        return found

    def take_tasks(
        self, processor: str, tasks: Iterable[int] | None, holder: str | None, deadline: float,
        *, copying: bool = False,
    ) -> TaskOwnership:  # fmt: skip
        known = self.described(processor, deadline)
        wanted = range(known.task_count) if tasks is None else sorted(set(tasks))
        terms = {task.task: task.term for task in known.tasks}
        secret = self._shared.ports.entropy(FENCING_TOKEN_SIZE)
        who = f"{socket.gethostname()}:{os.getpid()}" if holder is None else holder
        seen = tuple(terms.get(task, 0) for task in wanted)
        command = r.TakeTasks(processor, secret, who, tuple(wanted), seen, copying)
        try:
            info = self._taken(command, deadline)
        except AnabranchError:
            # Their workers would wait for this holder for half a minute.
            back = r.ReleaseTasks(processor, secret, tuple(wanted))
            with suppress(AnabranchError):
                self.ask(processor, back, self._session.now() + _GIVE_BACK_S)
            raise
        found = {task.task: task for task in info.tasks}
        return TaskOwnership(
            processor, info.task_count, info.inputs, found, secret, info.stores, info.incarnation
        )

    def _taken(self, command: r.TakeTasks, deadline: float) -> r.ProcessorInfo:
        """The processor once the tasks are taken, and no commit of a former owner moves them any more."""
        while True:
            info = self.ask(command.processor, command, deadline)
            merging = {task.in_progress for task in info.tasks} - {None}
            if not merging:
                return info
            if self._session.now() + _PAUSE_S >= deadline:
                ids = ", ".join(sorted(one.hex() for one in merging if one is not None))
                raise NotReady(
                    f"{ids} moves these tasks, and is still being merged: take them again"
                )
            self._shared.ports.clock.sleep(_PAUSE_S)

    def release_tasks(self, ownership: TaskOwnership, deadline: float) -> None:
        command = r.ReleaseTasks(
            ownership.processor, ownership.fencing_token, tuple(sorted(ownership.tasks))
        )
        self.ask(ownership.processor, command, deadline)

    def _group_inputs(self, group: str, streams: Sequence[str]) -> tuple[r.ProcessorInput, ...]:
        readers = self._reading.readers()
        return group_inputs(readers.ports, group, streams, readers.timeout)

    def ask(self, processor: str, command: object, deadline: float) -> r.ProcessorInfo:
        """Send a command about a processor; returns the processor as the controller describes it."""
        return self._session.ask_of(processor, command, r.ProcessorList, deadline).processors[0]


def check_imported(processor: str, group: str) -> None:
    """Raise `InvalidArgument` if the group is the mirror of this processor."""
    if group == mirror_group(processor):
        raise InvalidArgument(
            f"the group {group} is the mirror of {processor} itself, which anybody may move: it is never read"
        )
