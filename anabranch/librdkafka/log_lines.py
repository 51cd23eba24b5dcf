"""A filter for librdkafka's log lines."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

EVERY_S = 30.0
_REPEATED = frozenset(("FAIL", "ERROR", "REQTMOUT"))
_MOST_KINDS = 1000

logger = logging.getLogger("anabranch.kafka")


class Seldom(logging.Filter):
    """Lets a new failure through at once, then every 30 seconds with the number left out.

    While a broker is away, librdkafka logs each connection that it tries, several times a second. Two lines are the
    same if facility, client and thread are (each broker has a thread).
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._told: dict[tuple[str, str, str], tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log the record; confluent-kafka's are ``"%s [%s] %s" % (facility, client, text)``."""
        args = record.args
        if not isinstance(args, tuple) or len(args) != 3:
            return True
        if args[0] == "GETPID" and str(args[2]).endswith("retrying"):
            return False  # brokers that have just started; a later line says if it lasts
        if args[0] not in _REPEATED:
            return True
        facility, client, text = map(str, args)
        kind = facility, client, text.partition("]")[0]
        now = self._monotonic()
        with self._lock:
            if len(self._told) >= _MOST_KINDS:
                self._told.clear()
            since, left_out = self._told.get(kind, (now - EVERY_S, 0))
            if now - since < EVERY_S:
                self._told[kind] = since, left_out + 1
                return False
            self._told[kind] = now, 0
        if left_out:
            record.msg = f"{record.msg} (and %d more)"
            record.args = (*args, left_out)
        return True


logger.addFilter(Seldom())
