"""`anabranch controller`: the process that is leader of the control partitions that its consumer group assigns.

The library `mode` handles its lifecycle: signals, graceful stop, supervision of tasks. All that a commit depends on
runs on threads of our own (`Leader`); docs/inside/evidence/faust.md has the reasons. Any number of controllers may
run. The group's assignment names the controller that tries to become leader; the steps in `leadership` decide.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import math
import os
import signal
import socket
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import mode

from anabranch import logs
from anabranch.batches.framing import warm
from anabranch.clock import OnceAMinute, SystemClock
from anabranch.controller.config import ControllerOptions, parse_place
from anabranch.controller.leader import Leader
from anabranch.controller.leadership import last_term
from anabranch.controller.metrics import TABLE, Metrics
from anabranch.controller.monitor import Monitor
from anabranch.core.decisions.turn import Settings
from anabranch.errors import (
    AnabranchError,
    FixCallError,
    NotAuthorized,
    NotReady,
    TopicMisconfigured,
    UnsupportedSetting,
)
from anabranch.infra.storage import hold
from anabranch.kafka.cluster import Cluster
from anabranch.kafka.log import KafkaLog
from anabranch.kafka.needs import BROKERS_PAGE, lacking_of, look_at, losses, lost_calls
from anabranch.kafka.probe import LOOK_S, NEVER_PASSES, before_leading, way_out
from anabranch.kafka.settings import parse_settings
from anabranch.librdkafka.groups import Membership
from anabranch.ports import (
    Log,
    LogDenied,
    LogError,
    LogRefused,
    LogUnavailable,
    TableError,
    TopicPartition,
)
from anabranch.protocol import limits
from anabranch.protocol.schemas.records import TermRow
from anabranch.topics.creation import (
    INVALID_REPLICATION_FACTOR,
    ControlTopics,
    create_control_topics,
)
from anabranch.topics.names import commands_topic, controllers_group, status_topic
from anabranch.topics.new_topics import NewTopics

log = logging.getLogger("anabranch.controller")

STATUS_S = 1.0  # the longest time between two writes of the status file
TERMS_S = 5.0  # how long a starting process looks for the last leaders
SILENT_S = 10.0  # if a leader's pass takes longer, `/ready` says no
STOP_LEADER_S = 20.0
LEAVE_GROUP_S = 10.0
PREPARE_AGAIN_S = 0.2
# How long to try again while topics seem wrong, or brokers seem too few: brokers may lag, or be restarted.
LATE_S = 8.0
BROKERS_AGAIN_S = 60.0  # how often brokers are asked what they offer
EXIT_OK = 0
EXIT_FIX_CALL = 2
EXIT_ENVIRONMENT = 6
EXIT_DEFECT = 70


class CompilationFailed(AnabranchError):
    """Code can't be compiled or loaded on this machine: numba's installation, memory or disk."""


class ControllerService(mode.Service):
    """Starts a `Leader` for each control partition that the group assigns to this process."""

    def __init__(self, options: ControllerOptions, **kwargs: Any) -> None:
        self.options = options
        self.exit_code = EXIT_OK
        self.failure: Exception | None = None
        self._leader_failed = False
        self._leaders: dict[int, Leader] = {}
        self._slow: dict[int, Leader] = {}  # the last leaders that did not stop in time
        # The terms of ended leaders of this process: docs/inside/decisions/0013.
        self._terms: dict[int, list[TermRow]] = {}
        self._lock = threading.Lock()
        self._monitor: Monitor | None = None
        if options.http:
            self._monitor = Monitor(options.http, TABLE, self._counts, self._trouble)
        self._topics = ControlTopics(options.control_partitions, 1, limits.COMMAND.value)
        self._skip = [parse_place(text) for text in options.skip_commands]
        if "client.rack" in options.kafka:
            raise UnsupportedSetting(
                "client.rack: controllers read from leaders only; leave it out"
            )
        self._since = time.time()
        self._said_at = 0.0
        self._lacks: tuple[str, ...] = ()  # calls that brokers do not offer
        self._brokers = 0  # brokers that were up at the start
        self._membership: Membership | None = None
        super().__init__(**kwargs)

    # -- lifecycle (mode) -----------------------------------------------------------------------------

    async def on_start(self) -> None:
        if not await self._prepared():
            return
        if self._membership is not None:
            self._membership.start()
        threading.Thread(target=self._ask_again, name="brokers", daemon=True).start()
        self._write_status()

    @mode.Service.task
    async def _watch(self) -> None:
        """End the process if a leader or the membership has failed, so that other processes take over."""
        while not self.should_stop:
            await self.sleep(0.2)
            try:
                if time.monotonic() - self._said_at > STATUS_S:
                    self._write_status()
            except OSError as error:
                self.failure = error
            membership = self._membership
            if membership is not None and membership.error is not None:
                self.failure = membership.error
            if self.failure is not None:
                self.exit_code = _exit_code(self.failure)
                said = self._leader_failed  # the leader has logged it, with its control partition
                if said or isinstance(self.failure, AnabranchError | LogError):
                    if not said:
                        log.error("%s: %s", type(self.failure).__name__, self.failure)
                    # The message says what to do, so no traceback is logged. Mode stops a worker by a signal.
                    signal.raise_signal(signal.SIGTERM)
                    return
                self.set_shutdown()
                await self.crash(self.failure)
                return

    async def on_stop(self) -> None:
        await asyncio.to_thread(self._leave)

    async def _prepared(self) -> bool:
        """Run `_prepare` on a thread. False if the process is stopped before it ends, or if it fails."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[bool] = loop.create_future()

        def end(found: bool) -> None:
            if not ended.done():
                ended.set_result(found)

        def run() -> None:
            found = False
            try:
                found = self._prepare()
            except Exception as error:  # noqa: BLE001 - `_watch` ends the process with it
                self.failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed, so no task waits
                loop.call_soon_threadsafe(end, found)

        # Not one of asyncio's threads: the end of the process would wait for it.
        threading.Thread(target=run, name="prepare", daemon=True).start()
        return await ended

    def _member(self) -> Membership:
        options = self.options
        return Membership(
            options.bootstrap,
            group=controllers_group(options.prefix),
            topic=commands_topic(options.prefix),
            session_timeout_s=options.session_timeout_s,
            options=options.kafka,
            on_gained=self._gained,
            on_lost=self._lost,
        )

    def _prepare(self) -> bool:
        """Prepare to be leader: topics, compiled code, membership. False if stopped before.

        Waits while brokers can't be reached, or a token can't be had.
        """
        source = KafkaLog(self.options.bootstrap, self.options.kafka)
        until = math.inf
        asked = compiled = False
        new = NewTopics()
        waiting = OnceAMinute(log, time.monotonic)
        try:
            while not self.should_stop:
                try:
                    if not asked:
                        self._ask_brokers()
                        asked = True
                    self._topics = create_control_topics(
                        source,
                        self.options.prefix,
                        control_partitions=self.options.control_partitions,
                        replication_factor=self.options.replication_factor,
                        max_message_bytes=self.options.max_message_bytes,
                        new=new,
                    )
                    if not compiled:  # compiling takes long, so all that may be refused comes first
                        self._compile()
                        compiled = True
                    self._stand_by(source)
                    self._membership = self._member()
                    return True
                except LogDenied as error:
                    raise NotAuthorized(f"{error}{new}") from error
                except (LogUnavailable, NotReady) as error:
                    # A broker that has just started, or lags, may not know the topics yet.
                    waiting.warning("waiting for the brokers: %s", error)
                except (TopicMisconfigured, LogRefused) as error:
                    # A broker that has just started, or lags, may also know former settings, or too few brokers.
                    if isinstance(error, LogRefused) and error.error != INVALID_REPLICATION_FACTOR:
                        raise self._final(error) from error
                    until = min(until, time.monotonic() + LATE_S)
                    if time.monotonic() >= until:
                        if isinstance(error, LogRefused):
                            raise self._final(error) from error
                        raise TopicMisconfigured(f"{error}{new.undo(source)}") from error
                    waiting.warning("waiting for the brokers: %s", error)
                time.sleep(PREPARE_AGAIN_S)
        finally:
            source.close()
        return False

    def _final(self, error: LogRefused) -> AnabranchError | LogRefused:
        """The error for a refusal, with a text that says what to do."""
        if error.forbidden:
            return NotAuthorized(str(error))
        if error.error in NEVER_PASSES:
            return error  # its text says what to do
        way = way_out(error, self.options.control_partitions, self._brokers)
        return LogRefused(f"{error}; {way}", error.error, error.topics)

    def _ask_brokers(self) -> None:
        """Check that the brokers support a leader, before any topic is created.

        Raises: LogRefused, LogUnavailable: as `before_leading`.
        """
        settings = parse_settings(self.options.bootstrap, self.options.kafka)
        soon = replace(settings, request_timeout=LOOK_S)
        with contextlib.closing(Cluster(soon)) as cluster:
            self._lack(before_leading(cluster, self.options.prefix, self.options.native_timeout_s))
            self._brokers = len(cluster.nodes)

    def _ask_again(self) -> None:
        """Ask brokers from time to time which calls they offer, since their versions may change."""
        settings = parse_settings(self.options.bootstrap, self.options.kafka)
        with contextlib.closing(Cluster(settings)) as cluster:
            while not self.should_stop:
                time.sleep(BROKERS_AGAIN_S)
                with contextlib.suppress(LogError):
                    brokers = look_at(cluster, LOOK_S, disks=False)
                    if not any(broker.trouble for broker in brokers):
                        self._lack(lost_calls(lacking_of(brokers)))

    def _lack(self, lacks: tuple[str, ...]) -> None:
        """Show in log and metrics which calls brokers do not offer."""
        if lacks != self._lacks:
            for text in losses(lacks):
                log.warning("%s (%s)", text, BROKERS_PAGE)
        self._lacks = lacks
        for metrics in self._counts().values():
            metrics.lacks(lacks)

    def _compile(self) -> None:
        """Load compiled code before this process becomes leader, so that no round waits for the code or fails."""
        log.info("loading compiled code; the first time it takes half a minute")
        try:
            warm(self.options.data_dir / "compiled")
            gc.collect()
            gc.freeze()  # loaded code stays, so collections between rounds need not visit it
            gc.set_threshold(20_000, 20, 20)  # a round with many commits creates that many objects
        except Exception as error:
            raise CompilationFailed(f"compiled code can't be made or loaded: {error}") from error

    def _stand_by(self, source: Log) -> None:
        """Read the last term of each control partition: checks the right to read it, and logs the last leader."""
        clock = SystemClock()
        deadline = clock.monotonic() + TERMS_S
        topic = status_topic(self.options.prefix)
        for n in range(self._topics.control_partitions):
            term = last_term(source, TopicPartition(topic, n), clock, deadline)
            if term is not None:
                log.info(
                    "control partition %d: standing by; %s led last, term %d",
                    n,
                    term.leader,
                    term.term,
                    extra={"control_partition": n, "term": term.term},
                )

    def _leave(self) -> None:
        with self._lock:
            partitions = set(self._leaders)
        self._lost(partitions)
        if self._membership is not None:
            self._membership.stop(LEAVE_GROUP_S)
        self._write_status()
        if self._monitor is not None:
            self._monitor.close()

    # -- metrics and health ---------------------------------------------------------------------------

    def _counts(self) -> dict[int, Metrics]:
        with self._lock:
            return {partition: leader.metrics for partition, leader in self._leaders.items()}

    def _trouble(self) -> str | None:
        """The reason why the process is neither leader nor ready to become one."""
        if self.failure is not None:
            return str(self.failure)
        if self._membership is None or not self._membership.alive:
            return "starting, or leaving"
        with self._lock:
            leaders = dict(self._leaders)
        if not leaders and self._membership.trouble:
            return self._membership.trouble
        for partition, leader in leaders.items():
            if not leader.leading:
                return f"control partition {partition}: becoming leader"
            silent_s = time.monotonic() - leader.metrics.passed_at
            if silent_s > SILENT_S:
                return f"control partition {partition}: no round or pass ended for {silent_s:.0f} s"
        return None

    # -- the group's assignment -----------------------------------------------------------------------

    def _gained(self, partitions: set[int]) -> None:
        for partition in sorted(partitions):
            leader = Leader(
                lambda: KafkaLog(self.options.bootstrap, self.options.kafka, in_sessions=True),
                SystemClock(),
                self._settings(partition),
                folder=self.options.data_dir / f"control-{partition}",
                leader=f"{socket.gethostname()}/{os.getpid()}/{self._since:.0f}",
                native_timeout=self.options.native_timeout_s,
                on_change=self._changed,
                on_failure=self._failed,
                on_stuck=self._stand_aside,
                terms=self._terms.setdefault(partition, []),
                former=self._slow.get(partition),
            )
            leader.metrics.lacks(self._lacks)
            with self._lock:
                self._leaders[partition] = leader
            leader.start()

    def _lost(self, partitions: set[int]) -> None:
        for partition in sorted(partitions):
            with self._lock:
                leader = self._leaders.pop(partition, None)
            if leader is not None and not leader.stop(STOP_LEADER_S):
                said = "control partition %d did not stop in time; it gets fenced"
                log.warning(said, partition, extra={"control_partition": partition})
                self._slow[partition] = leader
                self._terms.pop(partition, None)  # its producers may still be open

    def _stand_aside(self, seconds: float) -> None:
        if self._membership is not None:
            self._membership.stand_aside(seconds)

    def _failed(self, error: Exception) -> None:
        self._leader_failed = True
        self.failure = error

    def _settings(self, partition: int) -> Settings:
        return Settings(
            control_partition=partition,
            **self._topics._asdict(),
            prefix=self.options.prefix,
            retention_ms=int(self.options.retention_s * 1000),
            max_open=self.options.max_open,
            max_streams=self.options.max_streams,
            max_partitions=self.options.max_partitions,
            skip_commands=frozenset((lane, at) for lane, n, at in self._skip if n == partition),
            lanes_only=self.options.lanes_only,
            trusts_open=self.options.trusts_open,
            max_uncommitted_bytes=self.options.max_uncommitted_bytes,
            round_bytes=self.options.chunk_bytes,
            chunk_bytes=self.options.chunk_bytes,
            collate_ms=int(self.options.collate_s * 1000),
            move_bytes=self.options.move_bytes,
            lost_after_ms=int(self.options.lost_after_s * 1000),
            max_clock_skew_ms=int(self.options.max_clock_skew_s * 1000),
            clock_error_ms=self.options.clock_error_ms,
        )

    def _changed(self) -> None:
        """Let the watch write the status file soon, so that no leader waits or fails because of the file."""
        self._said_at = -STATUS_S

    def _write_status(self) -> None:
        """Write which control partitions this process leads. Regular writes let an old file show that it hangs."""
        self._said_at = time.monotonic()
        path = self.options.status_file
        if path is None:
            return
        with self._lock:
            leading = {p: leader.term for p, leader in self._leaders.items() if leader.leading}
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        status = {
            "pid": os.getpid(),
            "written_at": now,
            "leading": sorted(leading),
            "terms": leading,
        }
        temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        temporary.write_text(json.dumps(status))
        temporary.replace(path)


def _exit_code(error: Exception) -> int:
    if isinstance(error, FixCallError):
        return EXIT_FIX_CALL
    surroundings = (TableError, LogError, OSError, CompilationFailed)
    return EXIT_ENVIRONMENT if isinstance(error, surroundings) else EXIT_DEFECT


class _Worker(mode.Worker):
    """Mode's worker, but it ends without a wait: all leaders have stopped by then."""

    async def _sentinel_task(self) -> None:
        await asyncio.sleep(0)  # lets cancelled tasks end; mode waits for a second here


def run_controller(options: ControllerOptions) -> int:
    """Run until SIGTERM or SIGINT, which hand over cleanly, or until a failure. Returns the exit code.

    Raises: InvalidArgument, FolderInUse, FolderUnusable, PortTaken: the process can't start.
    """
    logs.start(options.log_format, logging.INFO)
    with hold(options.data_dir):
        service = ControllerService(options)
        worker = _Worker(service, loglevel="INFO", daemon=True, override_logging=False)
        try:
            worker.execute_from_commandline()
        except SystemExit as end:
            if service.exit_code == EXIT_OK and end.code not in (None, 0):
                return EXIT_DEFECT
        return service.exit_code
