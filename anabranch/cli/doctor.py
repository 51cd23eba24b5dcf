"""`anabranch doctor`: checks brokers, rights, topics, clocks, disks and controllers, and says what to do."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from anabranch.cli.controller import AskedOfBrokers
from anabranch.cli.errors import CheckFailed
from anabranch.cli.options import ClusterOptions, option
from anabranch.cli.output import Column, Grid, print_result
from anabranch.errors import AnabranchError, FixCallError, NotAuthorized, count_of
from anabranch.ports import LogError
from anabranch.protocol import defaults

if TYPE_CHECKING:
    from anabranch import Client
    from anabranch.cli.options import Target
    from anabranch.kafka.cluster import Cluster
    from anabranch.kafka.settings import Settings
    from anabranch.types import OpenTransaction, StreamDescription

_ANSWER_S = 2.0  # each question
_WARN_FREE = 0.2  # of a disk
_BAD_FREE = 0.05
_TO_DO = Column("what to do", "to_do")


class State(StrEnum):
    """The result of a check."""

    OK = "ok"
    WARN = "warn"
    BAD = "bad"
    UNKNOWN = "not checked"


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one check. ``to_do``: empty if nothing is to be done."""

    what: str
    state: State
    found: str
    to_do: str = ""


def command(
    asked: AskedOfBrokers,
    options: ClusterOptions,
    broker: Annotated[
        bool,
        option(
            "--broker",
            "Try instead what controllers with these options need of a cluster, on temporary topics.",
        ),
    ] = False,
) -> None:
    """Check brokers, rights, topics, clocks, disks and controllers: each is ok, warn, bad
    or not checked, with what to do.

    Nothing is changed. The exit code is 1 if a check is bad.
    """
    from anabranch.cli.options import connected, raw_settings
    from anabranch.kafka.cluster import Cluster

    target = replace(options.target(), timeout=_ANSWER_S)
    rows: list[Row] = []
    settings = raw_settings(target)
    if broker:
        _probe(settings, options, asked)
        return
    with closing(Cluster(replace(settings, request_timeout=_ANSWER_S))) as cluster:
        rows += _brokers(cluster, target)
        if rows[0].state != State.BAD:
            rows += _topics(cluster, target)
            with connected(target) as client:
                rows += _controllers(client, cluster, target.bootstrap)
    bad = sum(row.state == State.BAD for row in rows)
    documents = [asdict(row) for row in rows]
    table = Grid("Doctor", documents, ("what", "state", "found", _TO_DO))
    print_result({"rows": documents, "bad": bad}, table, as_json=options.json)
    if bad:
        raise CheckFailed(f"{count_of(bad, 'check')} bad, shown above")


def _probe(settings: Settings, options: ClusterOptions, asked: AskedOfBrokers) -> None:
    """Try all that anabranch needs. Raises: CheckFailed if controllers or streams could not work."""
    from anabranch.kafka.probe import FAILS, Probe

    probe = Probe(
        settings,
        options.prefix,
        control_partitions=asked.control_partitions,
        replication_factor=asked.replication_factor,
        session_timeout=asked.session_timeout_s,
        max_message_bytes=asked.max_message_bytes,
        native_timeout=asked.native_timeout_s,
    )
    with closing(probe):
        tried = list(probe.run())
    bad = sum(one.state == FAILS for one in tried)
    documents = [one._asdict() for one in tried]
    table = Grid("What the cluster offers", documents, ("need", "state", "found", _TO_DO))
    print_result({"rows": documents, "bad": bad}, table, as_json=options.json)
    if bad:
        raise CheckFailed(f"{count_of(bad, 'need')} not met", "follow the advice in the rows above")


def _brokers(cluster: Cluster, target: Target) -> Iterator[Row]:
    """Reachability, versions and disks of all brokers."""
    from anabranch.kafka import needs
    from anabranch.kafka.needs import BROKERS_PAGE, look_at
    from anabranch.librdkafka.admin import no_broker

    if found := no_broker(target.bootstrap):
        yield Row("brokers", State.BAD, found, "start a broker, or correct --bootstrap")
        return
    try:
        brokers = look_at(cluster, _ANSWER_S)
    except (AnabranchError, LogError) as error:
        yield Row("brokers", State.BAD, str(error), "check the broker's log, and security.protocol")
        return
    silent = [b.address for b in brokers if b.trouble]
    text = ", ".join(f"{b.address} in {b.seconds * 1000:.0f} ms" for b in brokers if not b.trouble)
    to_do = f"start {', '.join(silent)}" if silent else ""
    yield Row("brokers", State.WARN if silent else State.OK, text, to_do)
    for broker in brokers:
        name = f"broker {broker.address}"
        if broker.trouble:
            yield Row(name, State.BAD, broker.trouble, "start it, or read its log")
        elif broker.too_old:
            vital = needs.obstacles(broker.too_old)
            text = "; ".join(vital + needs.losses(broker.too_old))
            yield Row(
                name,
                State.BAD if vital else State.WARN,
                text,
                f"{BROKERS_PAGE} lists brokers that have them",
            )
        else:
            yield Row(name, State.OK, f"offers all that is needed; {broker.features}".rstrip("; "))
        for path, usable, total, trouble in broker.disks:
            what = f"disk {path} of {broker.address}"
            if trouble:
                yield Row(what, State.BAD, trouble, "repair the disk, then start the broker again")
            elif total > 0:
                free = usable / total
                state = (
                    State.BAD if free < _BAD_FREE else State.WARN if free < _WARN_FREE else State.OK
                )
                text = f"{usable / 1e9:,.1f} of {total / 1e9:,.1f} GB free"
                yield Row(what, state, text, "" if state == State.OK else "make room, or keep less")
        if not broker.trouble and broker.disk_trouble:
            yield Row(
                f"disk of {broker.address}", State.WARN, broker.disk_trouble, "check it there"
            )


def _topics(cluster: Cluster, target: Target) -> Iterator[Row]:
    """The topics that clients and controllers share, and their replicas."""
    from anabranch.topics.names import commands_topic, replies_topic

    lane = target.lane
    names = (commands_topic(target.prefix, lane), replies_topic(target.prefix, lane))
    try:
        found = cluster.refresh(names, cluster.deadline(_ANSWER_S))
    except (AnabranchError, LogError) as error:
        yield Row("topics", State.BAD, str(error), "check the rights of this client")
        return
    for name in names:
        topic = found.get(name)
        if topic is None:
            text = "it is not there, or may not be seen"
            do = "start `anabranch controller`; compare --cluster-prefix and --lane; grant Describe"
            yield Row(f"topic {name}", State.BAD, text, do)
            continue
        text = f"{topic.in_sync} of {count_of(topic.replication_factor, 'replica')} in sync"
        lacks = topic.in_sync < topic.replication_factor
        do = "start the brokers that are down" if lacks else ""
        yield Row(f"topic {name}", State.WARN if lacks else State.OK, text, do)


def _controllers(client: Client, cluster: Cluster, bootstrap: str) -> Iterator[Row]:
    """Controllers, rights, clocks and streams, by the answers of controllers."""
    from anabranch.types import Listed

    begun = time.monotonic()
    rows: list[Row] = []
    do = "start `anabranch controller`, or read its log"
    opened: Listed[OpenTransaction] = Listed()
    with _asked(rows, "controllers", do):
        opened = client.open_transactions(limit=10_000)
        text = f"all control partitions answered in {(time.monotonic() - begun) * 1000:.0f} ms"
        if not opened.missing:
            text = f"{text}; {count_of(len(opened), 'open transaction')}"
            rows.append(Row("controllers", State.OK, text))
        for partition, error in opened.missing.items():
            rows.append(
                Row("controllers", State.BAD, f"control partition {partition}: {error}", do)
            )
    yield from rows
    if rows[0].state == State.BAD and not opened.missing:
        return
    rows = []
    with _asked(rows, "quarantined commands", ""):
        count = sum(len(one.quarantined) for one in client.commands())
        state = State.WARN if count else State.OK
        do = "see `anabranch command list --lane admin`" if count else ""
        rows.append(Row("quarantined commands", state, f"{count:,}", do))
    streams: list[StreamDescription] = []
    with _asked(rows, "streams", "read the controllers' logs"):
        streams = client.streams()
        ill = [one for one in streams if one.state != "ACTIVE"]
        text = f"{len(streams) - len(ill):,} of {count_of(len(streams), 'stream')} ACTIVE"
        rows.append(
            Row(
                "streams", State.BAD if ill else State.OK, text, "see the rows below" if ill else ""
            )
        )
        for one in ill:
            do = 'runbook.md, "A stream is LOST"' if one.state == "LOST" else "remove the cause"
            rows.append(
                Row(f"stream {one.stream}", State.BAD, f"{one.state} {one.trouble}".strip(), do)
            )
        for one in streams:
            if one.rejected:
                found = ", ".join(f"{n:,} {why}" for why, n in sorted(one.rejected.items()))
                text = f"rejected records in its journal: {found}"
                do = 'operations.md, "Rejected records"; the controller\'s log names partitions'
                rows.append(Row(f"stream {one.stream}", State.WARN, text, do))
            if one.foreign:
                text = f"{count_of(one.foreign, 'foreign record')} in its topic"
                do = "allow only controllers to write to it (docs/security.md)"
                rows.append(Row(f"stream {one.stream}", State.WARN, text, do))
        rows.append(_partitions(bootstrap, sum(one.partitions for one in streams)))
    if streams:
        with _asked(rows, "settings", ""):
            rows += _settings(cluster, streams)
        with _asked(rows, "clocks", ""):
            rows.append(_clock(client, streams[0].stream))
    yield from rows


def _partitions(bootstrap: str, count: int) -> Row:
    """The number of partitions, and the limit of open files of a broker on this machine."""
    count *= 2
    most = next((found for one in bootstrap.split(",") if (found := _files_of(one))), None)
    text = f"{count:,} of streams and their journals"
    if most is None:
        return Row("partitions", State.OK, text)
    many = count > most // 2  # each has several files
    text += f"; the broker may have {most:,} files open"
    do = "raise its limit of open files before it starts again; delete streams; lower --max-partitions"
    return Row("partitions", State.BAD if many else State.OK, text, do if many else "")


def _files_of(address: str) -> int | None:
    """The limit of open files of the process that listens at an address; None if it is not visible here."""
    host, _, port = address.strip().rpartition(":")
    if host not in ("localhost", "127.0.0.1", "::1", "[::1]") or not port.isdecimal():
        return None
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            lines = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            at = f":{int(port):04X}"
            inodes |= {line[9] for line in lines if line[1].endswith(at) and line[3] == "0A"}
    links = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if any(os.readlink(each) in links for each in (process / "fd").iterdir()):
                (line,) = [
                    line
                    for line in (process / "limits").read_text().splitlines()
                    if line.startswith("Max open files")
                ]
                soft = line.split()[3]
                return int(soft) if soft.isdecimal() else None
    return None


def _settings(cluster: Cluster, streams: list[StreamDescription]) -> Iterator[Row]:
    """Streams with other settings than their topics, which brokers apply."""
    from anabranch.core.stream_settings import REPLICATION, RETENTION_MS, TOPIC
    from anabranch.kafka.admin import describe_topics
    from anabranch.kafka.cluster import Again
    from anabranch.topics.declarations import of_stream
    from anabranch.topics.names import stream_topic

    names = [stream_topic(one.stream) for one in streams]
    try:
        found = describe_topics(cluster, names, cluster.deadline(_ANSWER_S))
    except (LogError, Again) as error:
        yield Row("settings", State.UNKNOWN, str(error), "check the rights of this client")
        return
    for one, name in zip(streams, names, strict=True):
        asked = {s.name: s.value for s in of_stream(one.stream) if s.name == RETENTION_MS}
        asked |= {k: v for k, v in one.settings.items() if k in TOPIC and k != REPLICATION}
        config = found[name].config if name in found else {}
        for setting, value in asked.items():
            if config.get(setting, value) != value:
                text = f"its topic has {setting}={config[setting]}, but {value} was requested"
                do = f"`anabranch stream alter {one.stream} --setting {setting}=…`"
                yield Row(f"stream {one.stream}", State.WARN, text, do)


def _clock(client: Client, stream: str) -> Row:
    """The difference between the controllers' time and this machine's clock."""
    from anabranch.protocol.hybrid_time import to_us

    before = time.time()
    at = to_us(client.snapshot(stream).timestamp) / 1e6
    ahead = at - time.time() if at > time.time() else min(0.0, at - before)
    state = State.OK
    if abs(ahead) > defaults.CLOCK_BAD_S:
        state = State.BAD
    elif abs(ahead) > defaults.CLOCK_WARN_S:
        state = State.WARN
    text = f"the controllers' time differs by {ahead:+.3f} s or more from this machine's"
    return Row(
        "clocks", state, text, "" if state == State.OK else "set the clocks, for example by NTP"
    )


@contextmanager
def _asked(rows: list[Row], what: str, to_do: str) -> Iterator[None]:
    """Turn errors of questions into rows."""
    try:
        yield
    except NotAuthorized as error:
        text = str(error).replace("; nothing was changed", "")  # a check changes nothing
        rows.append(Row(what, State.UNKNOWN, text, "repeat the command with --lane admin"))
    except FixCallError as error:
        rows.append(
            Row(what, State.BAD, f"{type(error).__name__}: {error}", to_do or "correct this")
        )
    except AnabranchError as error:
        rows.append(
            Row(what, State.BAD, f"{type(error).__name__}: {error}", to_do or "repeat the command")
        )
