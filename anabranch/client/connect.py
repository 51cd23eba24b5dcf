"""`connect`: a client on a real cluster."""

from __future__ import annotations

import _thread
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from anabranch.client.client import Client
from anabranch.client.ports import ClientPorts
from anabranch.clock import SystemClock, SystemEntropy
from anabranch.core import defaults
from anabranch.core.legal_names import OPEN_LANE, check_lane
from anabranch.errors import InvalidArgument, NotSupported
from anabranch.kafka.log import KafkaLog
from anabranch.kafka.settings import addresses, parse_settings
from anabranch.librdkafka.admin import KafkaAdmin
from anabranch.librdkafka.command_bus import KafkaBus
from anabranch.librdkafka.group_member import KafkaGroupMember
from anabranch.librdkafka.groups import KafkaGroups
from anabranch.librdkafka.journal_writer import KafkaJournals
from anabranch.librdkafka.options import Options, named_options
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.reader_factory import Readers
from anabranch.topics.names import DEFAULT_PREFIX, check_prefix

BOOTSTRAP_VARIABLE = "ANABRANCH_BOOTSTRAP"
LANE_VARIABLE = "ANABRANCH_LANE"


def connect(
    bootstrap: str | None = None,
    *,
    prefix: str = DEFAULT_PREFIX,
    lane: str | None = None,
    timeout: float = defaults.TIMEOUT_S,
    one_shot_bytes: int = defaults.ONE_SHOT_BYTES,
    commit_wait: bool = False,
    max_clock_skew: float = defaults.MAX_CLOCK_SKEW_S,
    config: Mapping[str, Any] | None = None,
    **librdkafka_options: Any,
) -> Client:
    """A client of the cluster at ``bootstrap`` (``host:port``, several with commas; default $ANABRANCH_BOOTSTRAP).

    Nothing is sent before the first call. Close the client, or use it as a context manager.

    Args:
        bootstrap: the brokers to ask first.
        prefix: of the topics that controllers and clients share.
        lane: whose topics to ask by, and so who this client is; default $ANABRANCH_LANE, or ``open``.
        timeout: seconds until a call ends that has no timeout of its own.
        one_shot_bytes: how much a transaction keeps in memory before it opens; it opens at 5,001 events, too.
        commit_wait: a commit returns once its timestamp is past by the clocks of all controllers. Then what anybody
            begins later commits above it, also who was told nothing. The controllers need ``--clock-error-ms``.
        max_clock_skew: how many seconds ahead of this machine's clock a time may be that others tell.
        config: librdkafka options by their names; and ``max.event.bytes``, to how many bytes a batch of events may
            unpack in a reader.
        librdkafka_options: the same as keywords, dots as underscores: ``security_protocol="SSL"``.

    Raises:
        UnsupportedSetting: an option that would break a promise, or that readers can't honour.
        InvalidArgument: no address, or an argument out of its range.
        NotSupported: gevent or eventlet has replaced Python's threads.
    """
    _check_threads()
    bootstrap = bootstrap or os.environ.get(BOOTSTRAP_VARIABLE)
    if not bootstrap:
        raise InvalidArgument(f"no address: give host:port, or set {BOOTSTRAP_VARIABLE}")
    if not isinstance(bootstrap, str):
        raise InvalidArgument(f"an address is a text, host:port, not {type(bootstrap).__name__}")
    addresses(bootstrap)
    given = named_options(config, librdkafka_options)
    options = Options(bootstrap, given)
    clock, entropy = SystemClock(), SystemEntropy()
    admin = KafkaAdmin(options, clock)
    lane = check_lane(given_lane(lane))
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
    """`NotSupported` if threads are greenlets: a call that waits for another thread would stop all of them."""
    for call in (_thread.start_new_thread, _thread.allocate_lock):
        library = (getattr(call, "__module__", None) or "").partition(".")[0]
        if library in ("gevent", "eventlet"):
            raise NotSupported(
                f"{library} has replaced Python's threads, so each call would wait without end: leave them as they "
                "are, by `patch_all(thread=False)` of gevent, `monkey_patch(thread=False)` of eventlet"
            )


def given_lane(lane: str | None) -> str:
    """The lane, or the one of $ANABRANCH_LANE, or ``open``."""
    return lane or os.environ.get(LANE_VARIABLE) or OPEN_LANE


def reader_ports(bootstrap: str, config: Mapping[str, Any]) -> ReaderPorts:
    """The ports that readers need of a real cluster. ``config``: librdkafka options by their names.

    Raises: UnsupportedSetting (also: an option that connections without librdkafka can't honour).
    """
    options = Options(bootstrap, config)
    settings = parse_settings(options.bootstrap, options.raw_reader())

    def open_log(seconds: float) -> KafkaLog:
        return KafkaLog(replace(settings, request_timeout=min(seconds, settings.request_timeout)))

    member, most = partial(KafkaGroupMember, options), options.max_event_bytes
    return ReaderPorts(open_log, member, SystemClock(), max_event_bytes=most)
