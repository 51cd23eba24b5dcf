"""Native handles of librdkafka: how they are made, watched and freed, and, after a fork, never freed.

librdkafka forgets all brokers when one that has just started names none, and may then never connect again (decision
0010). No callback reports that. So after a long silence a handle's owner makes a request, and a new handle if only
another handle is answered. This is the state of a handle, not of a broker: librdkafka chooses brokers by itself and
does not say which one is silent. So it is kept here, and not in `anabranch.kafka.health`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, TypeVar

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, ClusterMetadata

from anabranch.errors import AnabranchError, NotReady, UnsupportedSetting
from anabranch.kafka.oauth_tokens import answer_of
from anabranch.waits import here

log = logging.getLogger("anabranch.kafka")

SILENCE_S = 30.0  # the handle is tested after this time without a message
SUSPECT_S = 5.0  # … or after this time, if it reported an error, or failed the last test
_ANSWER_S = 2.0
_ALL_DOWN = KafkaError._ALL_BROKERS_DOWN  # noqa: SLF001

T = TypeVar("T")


class Handle(Protocol):
    """A producer, consumer or admin client of confluent-kafka."""

    def list_topics(self, topic: str, timeout: float) -> ClusterMetadata:
        """Metadata of a topic and of the brokers."""


class HandleHealth:
    """Whether one handle still knows brokers, as seen on the thread that uses it."""

    def __init__(self, handle: Handle, common: Mapping[str, Any], topic: str = "") -> None:
        """``common``: options for any handle on these brokers. ``topic``: the topic to ask for, or empty."""
        self._handle = handle
        self._common = dict(common)
        self.topic = topic
        # When the handle last received something, or was tested.
        self._since = time.monotonic()
        self._unanswered = 0
        self.complained = False  # since the last sign of a broker

    def complaint(self, error: KafkaError) -> None:
        """Note an error of the handle's ``error_cb``."""
        if error.code() == _ALL_DOWN:
            self.complained = True

    def answered(self) -> None:
        """Note that something came from a broker."""
        self._since = time.monotonic()
        self._unanswered = 0
        self.complained = False

    def lost(self) -> bool:
        """Whether to make a new handle: this handle failed two tests, and another handle gets an answer.

        The call is cheap, except after a silence of `SILENCE_S`: then it takes up to 4 seconds.
        """
        suspect = self.complained or self._unanswered
        patience = SUSPECT_S if suspect else SILENCE_S
        if time.monotonic() - self._since < patience or not self.topic:
            return False
        if _is_answered(self._handle, self.topic):
            self.answered()
            return False
        lost = self._unanswered > 0 and self._others_are()
        self._unanswered += 1
        self._since = time.monotonic()
        return lost

    def _others_are(self) -> bool:
        quiet = self._common | {"log_level": 0}  # the handle itself has logged enough
        try:
            found = _is_answered(made(AdminClient, quiet), self.topic)
        except AnabranchError as error:
            log.warning("brokers that a handle has lost can't be looked for: %s", error)
            return False
        if found:
            log.warning(
                "a handle has lost all brokers, and another one finds them: a new one takes its place"
            )
        return found


def _is_answered(handle: Handle, topic: str) -> bool:
    """Whether a broker answers, and names at least one broker."""
    try:
        return bool(handle.list_topics(topic, timeout=_ANSWER_S).brokers)
    except (KafkaException, RuntimeError):  # `RuntimeError`: the handle was closed meanwhile
        return False


def made(kind: Callable[[dict[str, Any]], T], config: dict[str, Any]) -> T:
    """A handle of librdkafka.

    Raises: NotReady (no valid token for OAUTHBEARER), UnsupportedSetting (an option that librdkafka does not take).
    """
    try:
        return kind(_with_first_token(config) if "oauth_cb" in config else config)
    except (KafkaException, TypeError, ValueError) as error:
        first = error.args[0] if error.args else None
        if not isinstance(first, KafkaError):
            raise UnsupportedSetting(f"librdkafka refuses the options: {error}") from error
        if first.code() == KafkaError.SASL_AUTHENTICATION_FAILED:  # the token expired meanwhile
            raise NotReady(f"no token for OAUTHBEARER: {first.str()}; call again") from error
        raise UnsupportedSetting(f"librdkafka refuses the options: {first.str()}") from error


def _with_first_token(config: dict[str, Any]) -> dict[str, Any]:
    """The config, with ``oauth_cb`` called now for the first token.

    confluent-kafka would wait for a token for 10 seconds, and not report what is wrong with it.
    """
    theirs = config["oauth_cb"]
    try:
        first = [here().run(lambda: answer_of(theirs, config.get("sasl.oauthbearer.config")))]
    except OSError as error:
        raise NotReady(f"no token for OAUTHBEARER: {error}; mend that, then call again") from error
    return config | {"oauth_cb": lambda given: first.pop() if first else theirs(given)}


def with_error_callback(config: dict[str, Any], ours: Callable[[Any], None]) -> dict[str, Any]:
    """The config with an ``error_cb`` that calls ``ours``, then the caller's callback if there is one."""
    theirs = config.get("error_cb")

    def both(error: Any) -> None:
        ours(error)
        if theirs is not None:
            theirs(error)

    return config | {"error_cb": both}


LAST_WORDS_S = 1.0  # how long a close waits for requests under way
_YOUNG_S = 1.0
_last_made = [-_YOUNG_S]  # when a handle of librdkafka was made last, monotonic seconds


def make(
    kind: Callable[[dict[str, Any]], Any], config: dict[str, Any], on_error: Callable[[Any], None]
) -> Any:
    """A producer or consumer. Raises: as `made`."""
    return made(partial(create, kind), with_error_callback(config, on_error))


def create(kind: Callable[[dict[str, Any]], Any], config: dict[str, Any]) -> Any:
    """Make a handle, and note the time: the process must not fork for a while (`_rest_before_fork`)."""
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
    """Never free this object. In a forked child, freeing would wait for threads that the child lacks."""
    if thing is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
