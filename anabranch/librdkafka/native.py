"""Native handles of librdkafka: how they are made, freed at once, or, after a fork, never freed."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from confluent_kafka import Consumer, Producer

from anabranch.librdkafka.broker_contact import made, with_error_callback
from anabranch.librdkafka.options import Options
from anabranch.librdkafka.reconnecting_consumer import LastingConsumer

LAST_WORDS_S = 1.0  # how long a close waits for requests under way
_YOUNG_S = 1.0
_last_made = [-_YOUNG_S]  # when a handle of librdkafka was made last, monotonic seconds


def make(
    kind: Callable[[dict[str, Any]], Any], config: dict[str, Any], on_error: Callable[[Any], None]
) -> Any:
    """A producer or consumer. Raises: as `made`."""
    return made(partial(_make, kind), with_error_callback(config, on_error))


def make_consumer(
    options: Options, config: dict[str, Any], on_error: Callable[[Any], None]
) -> LastingConsumer:
    """A consumer that replaces its handle if that loses all brokers. Raises: as `made`."""
    return LastingConsumer(
        config, options.admin(), make=partial(_make, Consumer), on_error=on_error
    )


def _make(kind: Callable[[dict[str, Any]], Any], config: dict[str, Any]) -> Any:
    _last_made[0] = time.monotonic()
    return kind(config)


def _rest_before_fork() -> None:
    """Wait until the threads of a new handle are idle.

    At first they look up names and open connections, under locks of the C library. A child forked at that moment
    inherits locks that no thread releases, and its own client would hang (measured: 1 fork in 5).
    """
    time.sleep(max(0.0, _last_made[0] + _YOUNG_S - time.monotonic()))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_rest_before_fork)


def drop(producer: Producer) -> None:
    """Free a producer at once; undelivered records are lost."""
    producer.purge(in_queue=True, in_flight=True, blocking=False)
    producer.flush(LAST_WORDS_S)
    if not len(producer):
        producer.close()


def leak(thing: object) -> None:
    """Never free this object. In a forked child, freeing would wait for threads that it lacks."""
    if thing is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
