"""Commands of hostile content, one in a thousand, under a load of one-shots: others are served all the same.

``scripts/hostile --minutes 10`` runs it for longer, on a broker and a controller of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from confluent_kafka import Producer

import anabranch
from anabranch.core import limits
from anabranch.infra.broker import EmbeddedBroker
from anabranch.kafka.log import KafkaLog
from anabranch.schemas import records as r
from anabranch.schemas.codec import TYPES, encode
from tests.cluster import Cluster, start_cluster
from tests.crash.raw import Raw, make_txn_id
from tests.fuzz.samples import sample

SLOWEST_S = 2.0
CALM_S = 2.0  # so long nothing is attacked, to measure slowness of other causes
LEVEL_BYTES = 300 << 20  # what a controller may grow by once it has seen each kind of attack
BATCH = 500  # one-shots of the load at a time
SCOPE = "honest"
STREAM = f"{SCOPE}/events"
SMALL = f"{SCOPE}/small"
Attack = Callable[[Random], Any]


def _text(size: int) -> str:
    return "x" * size


def _shot(*events: r.Event, name: str | None = None) -> r.OneShot:
    return r.OneShot(make_txn_id(), SCOPE, name, events)


def _event(stream: str = STREAM, size: int = 1, headers: int = 0, at: int = -1) -> r.Event:
    few = tuple(r.EventHeader("h", b"") for _ in range(headers))
    return r.Event(stream, -1, b"k", bytes(size), few, at)


def _setting(name: str, value: str) -> Attack:
    return lambda random: r.CreateStream(f"{SCOPE}/s{random.getrandbits(64):x}", 1, {name: value})


def _garbage(random: Random) -> bytes:
    return bytes((1, random.choice(list(TYPES)))) + random.randbytes(random.randrange(200))


def _mutated(random: Random) -> bytes:
    data = bytearray(encode(sample(random.choice(list(TYPES.values())), random.getrandbits(32))))
    for _ in range(random.randrange(1, 4)):
        data[random.randrange(2, len(data)) if len(data) > 2 else 0] = random.randrange(256)
    return bytes(data)


# By name, what makes a command's payload. What is big is packed to next to nothing.
ATTACKS: dict[str, Attack] = {
    "a bomb": lambda _: bytes(limits.BATCH.value + 1),
    "a big one": lambda _: bytes(limits.BATCH.value - 1000),
    "a scope of 14 MB": lambda _: r.FindScope(_text(14 << 20), True),
    "a scope of 900 KB": lambda _: r.FindScope(_text(900 << 10), True),
    "a reason of 900 KB": lambda _: r.Abort(b"t" * 60, _text(900 << 10)),
    "4M tokens": lambda _: b"\x01\x0c" + b"\x80\x92\xf4\x03" + bytes(4_000_001),
    "400,000 tokens": lambda _: b"\x01\x0c" + b"\x80\xea\x30" + bytes(400_001),
    "5,000 digits": _setting("scale.events.per.second", "1" * 5_000),
    "40,000 digits": _setting("retention.ms", "1" * 40_000),
    "no room for markers": _setting("max.message.bytes", "70"),
    "an unknown setting": _setting("x" * 5_000, "1"),
    "an event that is too big": lambda _: _shot(_event(SMALL, 50_000)),
    "an event of the year 146,140,482": lambda _: _shot(_event(at=1 << 62)),
    "20,000 headers": lambda _: _shot(_event(headers=20_000)),
    "20,000 events": lambda _: _shot(*[_event(size=0)] * 20_000),
    "one name again": lambda _: _shot(_event(), name="again"),
    "a name that is begun again": lambda _: r.Begin(
        make_txn_id(), SCOPE, "again and again", 1000, bytes(32)
    ),
    "a long list": lambda _: r.ListTransactions(None, True, 10_000),
    "all streams": lambda _: r.DescribeStreams(None, None),
    "100,000 segments": lambda _: r.Scale(STREAM, 0, tuple(range(100_000)), ()),
    "30,000 extents": lambda _: r.Register(
        b"t" * 60, r.Receipt(bytes(16), 1, 1, True, (r.Extent(STREAM, 0, 0, 0, 0, 0),) * 30_000)
    ),
    "branch -1 of a union": lambda _: b"\x01\x04" + make_txn_id() + b"\x0chonest\x01\x06abc" + b"\xc0\xa9\x07",
    "garbage": _garbage,
    "mutated": _mutated,
    "any record": lambda random: sample(random.choice(list(TYPES.values())), random.getrandbits(32)),
    "nothing": lambda _: b"",
}  # fmt: skip


@dataclass
class Seen:
    """The outcome of a run; seconds and bytes."""

    commands: int = 0
    slowest: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    resident: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _terms(cluster: Cluster) -> dict[str, int]:
    return dict(json.loads(cluster.controller.status_file.read_text())["terms"])


def run(cluster: Cluster, seconds: float, seed: int, each: int = 1_000) -> Seen:
    """Attack for so long; each kind at least once. ``each``: one in so many commands is hostile."""
    random, seen, over = Random(seed), Seen(), threading.Event()
    client = anabranch.connect(cluster.bootstrap, prefix=cluster.prefix)
    client.create_stream(STREAM, segments=2)
    client.create_stream(SMALL, settings={"max.message.bytes": 20_000})
    log = KafkaLog(cluster.bootstrap, {})
    raw = Raw(cluster.bootstrap, cluster.prefix, log).start()
    packing = {"compression.type": "zstd", "message.max.bytes": 100 << 20, "linger.ms": 0}
    attacker = Producer({"bootstrap.servers": cluster.bootstrap, "log_level": 0, **packing})
    terms, attacks = _terms(cluster), ["none"]
    calm, bound = threading.Event(), [SLOWEST_S]

    def commit() -> None:
        while not over.is_set():
            began = time.monotonic()
            try:
                with client.begin(SCOPE) as txn:
                    txn.write(STREAM, b"v", key=b"k")
                    txn.commit()
            except Exception as error:  # noqa: BLE001 - it is told
                seen.problems.append(f"a commit: {error!r}")
            took = time.monotonic() - began
            if not calm.is_set():
                bound.append(4 * took)  # the machine may be busy with others' work
            elif took > max(bound):
                seen.problems.append(f"a commit took {took:.1f} s, after {attacks[-3:]}")
            seen.slowest = max(seen.slowest, took)
            over.wait(0.05)

    def attack(name: str) -> None:
        attacks.append(name)
        made = ATTACKS[name](random)
        headers = [("ab.cid", random.randbytes(random.choice((16, 16, 15, 80))))]
        headers.append(("ab.reply", random.choice((bytes(4), bytes(4), bytes(8)))))
        payload = made if isinstance(made, bytes) else encode(made)
        attacker.produce(f"{cluster.prefix}.commands", payload, None, 0, headers=headers)  # type: ignore[arg-type]
        attacker.flush(20)

    committer = threading.Thread(target=commit, daemon=True)
    committer.start()
    time.sleep(CALM_S)
    calm.set()
    until, names, sent = time.monotonic() + seconds, list(ATTACKS), 0
    while time.monotonic() < until or names:
        while sent * each <= seen.commands:
            attack(names.pop() if names else random.choice(list(ATTACKS)))
            sent += 1
        for answer in raw.ask_all([_shot(_event()) for _ in range(BATCH)]):
            seen.refused[
                getattr(answer, "code", answer.state if hasattr(answer, "state") else "")
            ] += 1
        raw.answers.clear()
        seen.commands += BATCH
        seen.resident.append(_resident(cluster.controller.pid))
        if not cluster.controller.running or _terms(cluster) != terms:
            seen.problems.append(f"the leader restarted: {terms}, {_terms(cluster)}")
            break
    over.set()
    committer.join(20)
    if set(seen.refused) != {"COMMITTED"}:
        seen.problems.append(f"honest one-shots: {dict(seen.refused)}")
    half = seen.resident[len(seen.resident) // 2 :]
    if max(half) - half[0] > LEVEL_BYTES:
        seen.problems.append(f"the controller grew by {max(half) - half[0] >> 20} MB")
    client.close()
    log.close()
    return seen


def main() -> int:
    """``scripts/hostile``."""
    parser = argparse.ArgumentParser(prog="scripts/hostile", description=__doc__)
    parser.add_argument("--minutes", type=float, default=0.5, help="how long")
    parser.add_argument("--seed", type=int, default=None, help="of all chance")
    parser.add_argument("--each", type=int, default=1_000, help="one in so many is hostile")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else int(time.time())
    with (
        tempfile.TemporaryDirectory(prefix="anabranch-hostile-") as folder,
        EmbeddedBroker(Path(folder) / "broker") as broker,
    ):
        cluster = start_cluster(broker.bootstrap, Path(folder))
        try:
            seen = run(cluster, options.minutes * 60, seed, options.each)
        finally:
            cluster.controller.kill()
    print(
        f"seed {seed}: {seen.commands:,} one-shots, the slowest commit beside them {seen.slowest:.2f} s, "
        f"{min(seen.resident) >> 20} to {max(seen.resident) >> 20} MB"
    )
    for problem in seen.problems:
        print(problem)
    return 1 if seen.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
