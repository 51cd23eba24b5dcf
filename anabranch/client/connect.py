"""`connect` makes a client of a real cluster."""

from __future__ import annotations

import _thread
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from anabranch.client.client import Client
from anabranch.client.ports import ClientPorts
from anabranch.clock import SystemClock, SystemEntropy
from anabranch.errors import InvalidArgument, NotSupported
from anabranch.kafka.log import KafkaLog
from anabranch.kafka.settings import addresses, parse_settings
from anabranch.librdkafka.admin import KafkaAdmin
from anabranch.librdkafka.command_bus import KafkaBus
from anabranch.librdkafka.configuration import BOOTSTRAP, LANE, PREFIX, Named
from anabranch.librdkafka.groups import KafkaGroupMember, KafkaGroups
from anabranch.librdkafka.journal_writer import KafkaJournals
from anabranch.librdkafka.options import Options, named_options
from anabranch.protocol import defaults
from anabranch.protocol.legal_names import check_lane
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.iteration import Readers
from anabranch.topics.names import check_prefix


def connect(
    bootstrap: str | None = None,
    *,
    prefix: str | None = None,
    lane: str | None = None,
    timeout: float = defaults.TIMEOUT_S,
    one_shot_bytes: int = defaults.ONE_SHOT_BYTES,
    commit_wait: bool = False,
    max_clock_skew: float = defaults.MAX_CLOCK_SKEW_S,
    config: Mapping[str, Any] | None = None,
    **librdkafka_options: Any,
) -> Client:
    """A client of the cluster at ``bootstrap`` (``host:port``, several with commas; default $ANABRANCH_BOOTSTRAP).

    Nothing is sent before the first call. Close the client, or use it as a context manager. The
    file that $ANABRANCH_CONFIG names, if any, has what neither an argument nor a variable says.

    Args:
        bootstrap: the brokers to ask first.
        prefix: the prefix of the topics that controllers and clients share; default $ANABRANCH_PREFIX, or
            ``anabranch``.
        lane: the lane whose topics this client uses, and so its identity; default $ANABRANCH_LANE, or ``open``.
        timeout: seconds that a call without its own timeout may take.
        one_shot_bytes: the most bytes that a transaction keeps in memory before it opens; it also opens at 5,001
            events.
        commit_wait: a commit returns only when its timestamp is past on the clocks of all controllers, so that
            transactions that any client begins afterwards commit above it. The controllers need
            ``--clock-error-ms``.
        max_clock_skew: how many seconds a timestamp from others may be ahead of this machine's clock.
        config: librdkafka options by their names; and ``max.event.bytes``, the most bytes that a batch of events
            may unpack to in a reader. They override the options in the file that $ANABRANCH_KAFKA_FILE names, which
            override those in the configuration file.
        librdkafka_options: the same as keywords, with underscores for dots: ``security_protocol="SSL"``.

    Raises:
        UnsupportedSetting: an option that would break a guarantee, or that readers can't support.
        InvalidArgument: no address, or an argument out of its range.
        NotSupported: gevent or eventlet has replaced Python's threads.
    """
    named = Named()
    bootstrap = named.value(BOOTSTRAP, bootstrap)
    if not bootstrap:
        raise InvalidArgument(f"no address: give host:port, or set {BOOTSTRAP.variable}")
    return connect_to(
        bootstrap,
        named.text(PREFIX, prefix),
        named.text(LANE, lane),
        named.options() | named_options(config, librdkafka_options),
        timeout=timeout,
        one_shot_bytes=one_shot_bytes,
        commit_wait=commit_wait,
        max_clock_skew=max_clock_skew,
    )


def connect_to(
    bootstrap: str,
    prefix: str,
    lane: str,
    given: Mapping[str, Any],
    *,
    timeout: float,
    one_shot_bytes: int = defaults.ONE_SHOT_BYTES,
    commit_wait: bool = False,
    max_clock_skew: float = defaults.MAX_CLOCK_SKEW_S,
) -> Client:
    """As `connect`, without the environment. ``given``: librdkafka's options by their names."""
    _check_threads()
    if not isinstance(bootstrap, str):
        raise InvalidArgument(f"an address is a text, host:port, not {type(bootstrap).__name__}")
    addresses(bootstrap)
    options = Options(bootstrap, given)
    clock, entropy = SystemClock(), SystemEntropy()
    admin = KafkaAdmin(options, clock)
    check_lane(lane)
    bus = KafkaBus(options, admin, check_prefix(prefix), lane, clock, entropy)
    journals = KafkaJournals(options, admin, clock, timeout)
    reading = replace(reader_ports(bootstrap, given), groups=KafkaGroups(admin))
    ports = ClientPorts(
        bus,
        journals,
        clock,
        entropy,
        Readers(reading, timeout),
        prefix,
        lane,
        lambda seconds: closing(reading.open_log(seconds)),
        admin,
        commit_wait,
        max_clock_skew,
    )
    return Client(ports, timeout=timeout, one_shot_bytes=one_shot_bytes)


def _check_threads() -> None:
    """Raise `NotSupported` if threads are greenlets: a call that waits for one thread would block them all."""
    for call in (_thread.start_new_thread, _thread.allocate_lock):
        library = (getattr(call, "__module__", None) or "").partition(".")[0]
        if library in ("gevent", "eventlet"):
            raise NotSupported(
                f"{library} has replaced Python's threads, so each call would wait without end: leave them as they "
                "are, by `patch_all(thread=False)` of gevent, `monkey_patch(thread=False)` of eventlet"
            )


def reader_ports(bootstrap: str, config: Mapping[str, Any]) -> ReaderPorts:
    """The ports of readers on a real cluster. ``config``: librdkafka options by their names.

    Raises: UnsupportedSetting (also for an option that connections without librdkafka can't support).
    """
    options = Options(bootstrap, config)
    settings = parse_settings(options.bootstrap, options.raw_reader())

    def open_log(seconds: float) -> KafkaLog:
        return KafkaLog(replace(settings, request_timeout=min(seconds, settings.request_timeout)))

    member, most = partial(KafkaGroupMember, options), options.max_event_bytes
    return ReaderPorts(open_log, member, SystemClock(), max_event_bytes=most)
