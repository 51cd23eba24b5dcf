"""The thread of one control partition: it becomes leader, makes passes, and begins again after a failure."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from anabranch.backoff import Backoff
from anabranch.clock import OnceAMinute
from anabranch.controller.controller import OVERLAP_FROM, Controller
from anabranch.controller.metrics import Metrics
from anabranch.controller.rocksdb_table import open_checkpoint, size_on_disk, touch_checkpoint
from anabranch.core.decisions.turn import Settings
from anabranch.errors import AnabranchError, InvariantViolation, NotLeader
from anabranch.kafka.probe import NEVER_PASSES
from anabranch.logs import about
from anabranch.ports import Clock, Log, LogError, LogFenced, LogRefused, Table, TableError
from anabranch.protocol.schemas.records import TermRow

log = logging.getLogger("anabranch.controller")

IDLE_WAIT_S = 0.5
FENCED_PAUSE_S = 1.0
TROUBLE_PAUSE_S = 0.2  # the first pause after a failure
DEFECT_PAUSE_S = 1.0  # the first pause after a defect
LONGEST_PAUSE_S = 60.0
PATIENCE_S = 10.0  # failures for less than this don't make the pause grow
# After this long with failures and without a round, other processes should try.
ASIDE_AFTER_S = 30.0
ASIDE_S = 15.0
TOUCH_S = 60.0


class Leader:
    """A thread that is leader of a control partition until it is stopped.

    A `TableError` ends it for good, so that another process, with a healthy disk, takes over. So does a refusal
    that waiting does not change: a call that brokers don't offer, or a time-out that they don't accept.
    ``on_failure`` gets the error. After any other failure, also a defect, this leader pauses, longer each time, and
    tries again. If that does not help, it calls ``on_stuck`` with the seconds for which other processes should try.
    """

    controller: ClassVar[Callable[..., Controller]] = Controller  # tests replace it

    def __init__(
        self,
        make_log: Callable[[], Log],
        clock: Clock,
        settings: Settings,
        *,
        folder: Path,
        leader: str,
        native_timeout: float,
        on_change: Callable[[], None],
        on_failure: Callable[[Exception], None],
        on_stuck: Callable[[float], None] = lambda seconds: None,
        terms: list[TermRow] | None = None,
        former: Leader | None = None,
    ) -> None:
        """``terms``: see `become_leader`.

        ``former``: a leader that was stopped and may still have the folder open: the new leader waits for that one.
        """
        self._make_log = make_log
        self._clock = clock
        self._settings = settings
        self._folder = folder
        self._leader = leader
        self.former = former
        self._terms = [] if terms is None else terms
        self._native_timeout = native_timeout
        self._on_change = on_change
        self._on_failure = on_failure
        self._on_stuck = on_stuck
        self._troubles = Backoff(TROUBLE_PAUSE_S, LONGEST_PAUSE_S, clock)
        self._defects = Backoff(DEFECT_PAUSE_S, LONGEST_PAUSE_S, clock)
        self._failing_since = self._failed_at = -LONGEST_PAUSE_S
        self._rounds = 0  # the count of rounds when failures began
        self._trouble = OnceAMinute(log, clock.monotonic)
        self._stop = threading.Event()
        self.leading = False
        self.term = 0
        self.metrics = Metrics()
        self._about: dict[str, object] = {}  # what lines of the log have as fields
        name = f"control-{settings.control_partition}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Finish the round under way and resign. False if the thread did not end within ``timeout`` seconds."""
        self._stop.set()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        with about(control_partition=self._settings.control_partition) as self._about:
            self._lead()

    def _lead(self) -> None:
        partition = self._settings.control_partition
        source: Log | None = None
        table: Table | None = None
        try:
            source = self._make_log()
            table = self._open(source)
            if table is not None:
                self._loop(source, table)
        except (TableError, AnabranchError, LogRefused) as error:
            log.error("control partition %d: %s", partition, error)
            self._on_failure(error)
        except Exception as error:
            log.exception("control partition %d: a defect; it has resigned", partition)
            self._on_failure(error)
        finally:
            self._lead_is(False)
            if source is not None:
                source.close()
            if table is not None:
                table.close()

    def _open(self, source: Log) -> Table | None:
        """Open the status table, once brokers' answers show whether it can be trusted. None: stopped before."""
        aside_at = self._clock.monotonic() + ASIDE_AFTER_S
        while not self._stop.is_set():
            if self.former is not None:
                if self.former.stop(TROUBLE_PAUSE_S):
                    self.former = self.former.former  # the leader for which that one waited
                elif self._clock.monotonic() > aside_at:
                    aside_at += ASIDE_AFTER_S
                    what = "control partition %d: its former leader does not stop; others may become leader"
                    log.warning(what, self._settings.control_partition)
                    self._on_stuck(ASIDE_S)
                continue
            try:
                return open_checkpoint(
                    self._folder,
                    source,
                    self._clock,
                    self._settings.prefix,
                    self._settings.control_partition,
                )
            except LogError as error:
                self._trouble.warning(
                    "control partition %d: %s", self._settings.control_partition, error
                )
                self._pause(TROUBLE_PAUSE_S)
        return None

    def _loop(self, source: Log, table: Table) -> None:
        controller = self.controller(
            source,
            table,
            self._clock,
            self._settings,
            leader=self._leader,
            native_timeout=self._native_timeout,
            threads=True,
            overlap_from=OVERLAP_FROM,
            terms=self._terms,
            metrics=self.metrics,
        )
        try:
            while not self._stop.is_set():
                try:
                    controller.lead()
                    self._about["term"] = self.term = (
                        controller.lease.term if controller.lease else 0
                    )
                    self.metrics.passed()
                    self._lead_is(True)
                    touched = 0.0
                    while not self._stop.is_set():
                        controller.step(IDLE_WAIT_S)
                        controller.took(time.thread_time_ns() // 1000)
                        if self.metrics.passed():
                            controller.update_metrics()
                            self.metrics.set("table_bytes", size_on_disk(self._folder))
                        if self._clock.monotonic() - touched > TOUCH_S:
                            touched = self._clock.monotonic()
                            touch_checkpoint(table, self._clock)
                except (LogFenced, NotLeader) as error:
                    self._note(error)
                    self._pause(FENCED_PAUSE_S)
                except LogError as error:
                    refused = isinstance(error, LogRefused) and error.error in NEVER_PASSES
                    # While brokers are upgraded, this refusal may be a passing one.
                    if refused and self._keeps_failing():
                        raise
                    self._note(error)
                    self._failed(controller, self._troubles)
                except TableError:
                    raise
                except Exception as error:
                    if isinstance(error, AnabranchError) and not isinstance(
                        error, InvariantViolation
                    ):
                        raise
                    self._note(error)
                    self._failed(controller, self._defects)
            with suppress(LogError, AnabranchError):  # only a hint for the successor
                controller.hand_over()
        finally:
            controller.resign()

    def _note(self, error: Exception) -> None:
        """Log and count the end of a leadership."""
        partition = self._settings.control_partition
        if isinstance(error, LogError | NotLeader):
            self._trouble.warning("control partition %d: %s", partition, error)
        else:
            log.error("control partition %d: a defect", partition, exc_info=error)
        self.metrics.add("leadership_failures", type(error).__name__)

    def _failed(self, controller: Controller, pauses: Backoff) -> None:
        """Resign and pause, longer each time. Let other processes try if no round was written for too long."""
        now = self._clock.monotonic()
        if now - self._failed_at > LONGEST_PAUSE_S or controller.rounds != self._rounds:
            self._failing_since = now
            self._rounds = controller.rounds
            if now - self._failed_at > LONGEST_PAUSE_S:
                self._troubles.reset()
                self._defects.reset()
        self._failed_at = now
        pause = TROUBLE_PAUSE_S
        if pauses is self._defects or now - self._failing_since > PATIENCE_S:
            pause = pauses.begin()
        controller.resign()
        if now - self._failing_since > ASIDE_AFTER_S:
            self._failing_since = now
            self._trouble.warning(
                "control partition %d: no round for %.0f s: others may try",
                self._settings.control_partition,
                ASIDE_AFTER_S,
            )
            self._on_stuck(ASIDE_S)
        self._pause(pause)

    def _keeps_failing(self) -> bool:
        """Whether failures have lasted for more than `PATIENCE_S`."""
        lately = self._clock.monotonic() - self._failed_at < LONGEST_PAUSE_S
        return lately and self._failed_at - self._failing_since > PATIENCE_S

    def _pause(self, seconds: float) -> None:
        self._lead_is(False)
        self._stop.wait(seconds)

    def _lead_is(self, leading: bool) -> None:
        if self.leading != leading:
            self.leading = leading
            self.metrics.set("leading", int(leading))
            self.metrics.set("term", self.term)
            log.info(
                "control partition %d: %s",
                self._settings.control_partition,
                f"leading, term {self.term}" if leading else "leads no more",
            )
            self._on_change()
