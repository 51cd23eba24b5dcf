"""`anabranch doctor`: looks at brokers, rights, topics, clocks, disks and controllers, and says what to do."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from anabranch.cli.controller import AskedOfBrokers
from anabranch.cli.errors import CheckFailed
from anabranch.cli.options import ClusterOptions, option
from anabranch.cli.output import Column, print_json, print_table
from anabranch.core import defaults
from anabranch.errors import AnabranchError, FixCallError, NotAuthorized
from anabranch.ports import LogError
from anabranch.presentation.words import count_of

if TYPE_CHECKING:
    from anabranch import Client
    from anabranch.cli.session import Target
    from anabranch.kafka.settings import Settings
    from anabranch.kafka.wire.cluster import Cluster
    from anabranch.types import OpenTransaction, StreamDescription

_ANSWER_S = 2.0  # each question
_WARN_FREE = 0.2  # of a disk
_BAD_FREE = 0.05
OK, WARN, BAD = "ok", "warn", "bad"


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was looked at. ``state``: ok, warn or bad. ``to_do``: empty if it is ok."""

    what: str
    state: str
    told: str
    to_do: str = ""


def command(
    asked: AskedOfBrokers,
    options: ClusterOptions,
    broker: Annotated[
        bool,
        option(
            "--broker",
            "Try instead what anabranch needs of a cluster, on topics of its own that are deleted again.",
        ),
    ] = False,
) -> None:
    """Look at brokers, rights, topics, clocks, disks and controllers: each ok, warn or bad, with what to do.

    Nothing is changed, and no question takes longer than 2 seconds. The exit code is 1 if something is bad.
    With --broker, no controller need run. Each need works, works with a loss, or does not work: then the exit
    code is 1. Give the options that controllers will have, too: the answer is for these.
    """
    from anabranch.cli.session import connected, raw_settings
    from anabranch.kafka.wire.cluster import Cluster

    target = replace(options.target(), timeout=_ANSWER_S)
    rows: list[Row] = []
    settings = raw_settings(target)
    if broker:
        _probe(settings, options, asked)
        return
    with closing(Cluster(replace(settings, request_timeout=_ANSWER_S))) as cluster:
        rows += _brokers(cluster, target)
        if rows[0].state != BAD:
            rows += _topics(cluster, target)
            with connected(target) as client:
                rows += _controllers(client, cluster, target.bootstrap)
    bad = sum(row.state == BAD for row in rows)
    if options.json:
        print_json({"rows": [asdict(row) for row in rows], "bad": bad})
    else:
        columns = ("what", "state", Column("found", "told"), Column("what to do", "to_do"))
        print_table("Doctor", map(asdict, rows), columns)
    if bad:
        raise CheckFailed(f"{count_of(bad, 'check')} bad, shown above")


def _probe(settings: Settings, options: ClusterOptions, asked: AskedOfBrokers) -> None:
    """Try all needs of a cluster. `CheckFailed`: no controller could be leader, or no stream could be made."""
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
    if options.json:
        print_json({"rows": [one._asdict() for one in tried], "bad": bad})
    else:
        columns = ("need", "state", "found", Column("what to do", "to_do"))
        print_table("What the cluster gives", (one._asdict() for one in tried), columns)
    if bad:
        raise CheckFailed(f"{count_of(bad, 'need')} not met", "see what to do in the rows above")


def _brokers(cluster: Cluster, target: Target) -> Iterator[Row]:
    """Reachability, versions and disks of all brokers."""
    from anabranch.kafka import needs
    from anabranch.kafka.look import look_at
    from anabranch.kafka.needs import BROKERS_PAGE
    from anabranch.librdkafka.admin import no_broker

    if found := no_broker(target.bootstrap):
        yield Row("brokers", BAD, found, "start a broker, or mend --bootstrap")
        return
    try:
        brokers = look_at(cluster, _ANSWER_S)
    except (AnabranchError, LogError) as error:
        yield Row("brokers", BAD, str(error), "look at the broker, and at security.protocol")
        return
    silent = [b.address for b in brokers if b.trouble]
    told = ", ".join(f"{b.address} in {b.seconds * 1000:.0f} ms" for b in brokers if not b.trouble)
    to_do = f"start {', '.join(silent)}" if silent else ""
    yield Row("brokers", WARN if silent else OK, told, to_do)
    for broker in brokers:
        name = f"broker {broker.address}"
        if broker.trouble:
            yield Row(name, BAD, broker.trouble, "start it, or look at its log")
        elif broker.too_old:
            vital = needs.obstacles(broker.too_old)
            told = "; ".join(vital + needs.losses(broker.too_old))
            yield Row(name, BAD if vital else WARN, told, f"{BROKERS_PAGE} says who has them")
        else:
            yield Row(name, OK, f"speaks all that is needed; {broker.features}".rstrip("; "))
        for path, usable, total, trouble in broker.disks:
            what = f"disk {path} of {broker.address}"
            if trouble:
                yield Row(what, BAD, trouble, "mend the disk, then start the broker again")
            elif total > 0:
                free = usable / total
                state = BAD if free < _BAD_FREE else WARN if free < _WARN_FREE else OK
                told = f"{usable / 1e9:,.1f} of {total / 1e9:,.1f} GB free"
                yield Row(what, state, told, "" if state == OK else "make room, or keep less")
        if not broker.trouble and broker.disk_trouble:
            yield Row(f"disk of {broker.address}", WARN, broker.disk_trouble, "look at it there")


def _topics(cluster: Cluster, target: Target) -> Iterator[Row]:
    """The topics that clients and controllers share, and their replicas."""
    from anabranch.topics.names import commands_topic, replies_topic

    lane = target.lane
    names = (commands_topic(target.prefix, lane), replies_topic(target.prefix, lane))
    try:
        found = cluster.refresh(names, cluster.deadline(_ANSWER_S))
    except (AnabranchError, LogError) as error:
        yield Row("topics", BAD, str(error), "look at the rights of this client")
        return
    for name in names:
        topic = found.get(name)
        if topic is None:
            told = "it is not there, or may not be seen"
            do = "start `anabranch controller`; compare --prefix and --lane; grant Describe"
            yield Row(f"topic {name}", BAD, told, do)
            continue
        told = f"{topic.in_sync} of {count_of(topic.replication_factor, 'replica')} in sync"
        lacks = topic.in_sync < topic.replication_factor
        do = "start the brokers that are down" if lacks else ""
        yield Row(f"topic {name}", WARN if lacks else OK, told, do)


def _controllers(client: Client, cluster: Cluster, bootstrap: str) -> Iterator[Row]:
    """Controllers, rights, clocks and streams, as answers of controllers tell."""
    from anabranch.types import Listed

    begun = time.monotonic()
    rows: list[Row] = []
    do = "start `anabranch controller`, or look at its log"
    opened: Listed[OpenTransaction] = Listed()
    with _asked(rows, "controllers", do):
        opened = client.open_transactions(limit=10_000)
        told = f"all control partitions answered in {(time.monotonic() - begun) * 1000:.0f} ms"
        if not opened.missing:
            told = f"{told}; {count_of(len(opened), 'open transaction')}"
            rows.append(Row("controllers", OK, told))
        for partition, error in opened.missing.items():
            rows.append(Row("controllers", BAD, f"control partition {partition}: {error}", do))
    yield from rows
    if rows[0].state == BAD and not opened.missing:
        return
    rows = []
    with _asked(rows, "quarantined commands", ""):
        aside = sum(len(one.quarantined) for one in client.commands())
        do = "look at them: `anabranch command list --lane admin`" if aside else ""
        rows.append(Row("quarantined commands", WARN if aside else OK, f"{aside:,}", do))
    streams: list[StreamDescription] = []
    with _asked(rows, "streams", "look at the controllers' logs"):
        streams = client.streams()
        ill = [one for one in streams if one.state != "ACTIVE"]
        told = f"{len(streams) - len(ill):,} of {count_of(len(streams), 'stream')} ACTIVE"
        rows.append(Row("streams", BAD if ill else OK, told, "see below" if ill else ""))
        for one in ill:
            do = 'operations.md, "Streams that are lost"' if one.state == "LOST" else "mend that"
            rows.append(Row(f"stream {one.stream}", BAD, f"{one.state} {one.trouble}".strip(), do))
        for one in streams:
            if one.rejected:
                found = ", ".join(f"{n:,} {why}" for why, n in sorted(one.rejected.items()))
                told = f"records in its journal that are in no commit: {found}"
                do = 'operations.md, "Rejected records"; the controller\'s log names partitions'
                rows.append(Row(f"stream {one.stream}", WARN, told, do))
            if one.foreign:
                told = f"{count_of(one.foreign, 'foreign record')} in its topic"
                do = "let only controllers write to it: docs/security.md"
                rows.append(Row(f"stream {one.stream}", WARN, told, do))
        rows.append(_partitions(bootstrap, sum(one.partitions for one in streams)))
    if streams:
        with _asked(rows, "settings", ""):
            rows += _settings(cluster, streams)
        with _asked(rows, "clocks", ""):
            rows.append(_clock(client, streams[0].stream))
    yield from rows


def _partitions(bootstrap: str, count: int) -> Row:
    """Partitions of streams and journals, and the open files that the broker may have, if it is on this machine."""
    count *= 2
    most = next((found for one in bootstrap.split(",") if (found := _files_of(one))), None)
    told = f"{count:,} of streams and their journals"
    if most is None:
        return Row("partitions", OK, told)
    many = count > most // 2  # each has several files
    told += f"; the broker may have {most:,} files open"
    do = "raise its limit of open files before it starts again; delete streams; lower --max-partitions"
    return Row("partitions", BAD if many else OK, told, do if many else "")


def _files_of(address: str) -> int | None:
    """The limit of open files of the process that listens there; None: it is elsewhere, or can't be seen."""
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
    """Streams whose topics have other settings than the stream: brokers apply the topics' settings."""
    from anabranch.core.stream_settings import REPLICATION, RETENTION_MS, TOPIC
    from anabranch.kafka.admin import describe_topics
    from anabranch.kafka.wire.cluster import Again
    from anabranch.topics.declarations import of_stream
    from anabranch.topics.names import stream_topic

    names = [stream_topic(one.stream) for one in streams]
    try:
        found = describe_topics(cluster, names, cluster.deadline(_ANSWER_S))
    except (LogError, Again) as error:
        yield Row("settings", OK, f"not checked: {error}")
        return
    for one, name in zip(streams, names, strict=True):
        asked = {s.name: s.value for s in of_stream(one.stream) if s.name == RETENTION_MS}
        asked |= {k: v for k, v in one.settings.items() if k in TOPIC and k != REPLICATION}
        config = found[name].config if name in found else {}
        for setting, value in asked.items():
            if config.get(setting, value) != value:
                told = f"its topic has {setting}={config[setting]}, and {value} was asked for"
                do = f"`anabranch stream alter {one.stream} --setting {setting}=…`"
                yield Row(f"stream {one.stream}", WARN, told, do)


def _clock(client: Client, stream: str) -> Row:
    """How far the controllers' time is from this machine's clock."""
    from anabranch.core.hybrid_time import to_us

    before = time.time()
    at = to_us(client.snapshot(stream).timestamp) / 1e6
    ahead = at - time.time() if at > time.time() else min(0.0, at - before)
    state = OK
    if abs(ahead) > defaults.CLOCK_BAD_S:
        state = BAD
    elif abs(ahead) > defaults.CLOCK_WARN_S:
        state = WARN
    told = f"controllers' time is {ahead:+.3f} s from this machine's, at least"
    return Row("clocks", state, told, "" if state == OK else "set the clocks, by NTP for example")


@contextmanager
def _asked(rows: list[Row], what: str, to_do: str) -> Iterator[None]:
    """Errors of questions as rows."""
    try:
        yield
    except NotAuthorized as error:
        rows.append(Row(what, OK, f"not checked: {error}"))
    except FixCallError as error:
        rows.append(Row(what, BAD, f"{type(error).__name__}: {error}", to_do or "mend that"))
    except AnabranchError as error:
        rows.append(Row(what, BAD, f"{type(error).__name__}: {error}", to_do or "run it again"))
