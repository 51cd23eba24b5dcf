"""The heartbeats that keep a client's open transactions from being aborted."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Collection

from anabranch.client.session import Session
from anabranch.client.shared import Handle
from anabranch.core.tokens import peek
from anabranch.errors import AnabranchError

log = logging.getLogger("anabranch.client")

BEATS_PER_KEEPALIVE = 3
_IDLE_S = 3600.0
_AFTER_TROUBLE_S = 1.0
_JOIN_S = 10.0


class Heart:
    """Sends heartbeats for handles, and calls `Handle.gone` when a reply says that a transaction is over.

    References to handles are weak: the transaction of a handle that the program dropped is aborted in time.
    """

    def __init__(self, session: Session, *, thread: bool) -> None:
        self._session = session
        self._with_thread = thread
        self._thread: threading.Thread | None = None
        self._handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._wake = threading.Condition()
        self._correlation_id = session.new_correlation_id()  # of the last heartbeats
        self._digests: Collection[bytes] = ()
        self._due = math.inf
        self._sent = False  # whether heartbeats were sent since the last handle was added
        self._closed = False

    def add(self, handle: Handle) -> None:
        """Send heartbeats for this handle while it has a `live_token`."""
        with self._wake:
            self._handles.add(handle)
            due = self._session.now() + handle.keepalive_ms / 1000 / BEATS_PER_KEEPALIVE
            if due < self._due:
                self._due, self._sent = due, False
                self._session.forget(self._correlation_id)
                self._wake.notify_all()
            if self._with_thread and self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="anabranch-heartbeats", daemon=True
                )
                self._thread.start()

    def step(self) -> float:
        """Send the heartbeats that are due. Returns when the next ones are due, in monotonic seconds."""
        with self._wake:
            alive = [(h.live_token, h.keepalive_ms) for h in self._handles]
            tokens = [token for token, _ in alive if token is not None]
            if not tokens:
                self._due = math.inf
                return math.inf
            now = self._session.now()
            if now < self._due:
                return self._due
            shortest_s = min(ms for token, ms in alive if token is not None) / 1000
            self._due = now + shortest_s / BEATS_PER_KEEPALIVE
            self._session.forget(self._correlation_id)
            self._correlation_id = self._session.new_correlation_id()
            self._sent = True
        self._digests = self._session.beat(self._correlation_id, tokens, self._due)
        return self._due

    def hear(self, deadline: float) -> None:
        """Wait for one reply until the deadline, and call `gone` on the handles whose transactions are over."""
        gone = self._session.hear_beat(self._correlation_id, self._digests, deadline)
        over = {outcome.txn_id: outcome for outcome in gone}
        if over:
            with self._wake:
                handles = list(self._handles)
            for handle in handles:
                token = handle.live_token
                outcome = over.get(peek(token).txn_id) if token is not None else None
                if outcome is not None:
                    handle.gone(outcome)

    def _run(self) -> None:
        while not self._closed:
            pause = 0.0
            try:
                due = self.step()
                if due < math.inf and self._sent:
                    self.hear(due)
                    continue
            except AnabranchError as error:
                log.warning("heartbeats can't be sent: %s", error)
                pause = _AFTER_TROUBLE_S
            with self._wake:
                if not self._closed:
                    left = _IDLE_S if self._due == math.inf else self._due - self._session.now()
                    self._wake.wait(max(0.0, pause or left))

    def close(self) -> None:
        """Stop the thread."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        self._session.forget(self._correlation_id)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
