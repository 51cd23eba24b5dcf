"""Hostile commands and records, one in a thousand, under a load of one-shots: others are served all the same.

Those of hostile content are of `open`; those of legal floods of the lane that `tests.behaviour.floods` names.
``scripts/hostile --minutes 10`` runs it for longer, on a broker and a controller of its own.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from confluent_kafka import Producer

import anabranch
from anabranch.infra.broker import EmbeddedBroker
from anabranch.kafka.log import KafkaLog
from anabranch.protocol.schemas.codec import encode
from tests.behaviour.attacks import ATTACKS, SCOPE, STREAM, event, shot
from tests.behaviour.floods import FLOODS, GOOD, Sender, Sent, prepare, resident, terms
from tests.cluster import Cluster, start_cluster
from tests.crash.raw import Raw

SLOWEST_S = 2.0
CALM_S = 2.0  # so long nothing is attacked, to measure slowness of other causes
LEVEL_BYTES = 300 << 20  # what a controller may grow by once it has seen each kind of attack
BATCH = 500  # one-shots of the load at a time
FEW = 20  # messages of a legal flood at a time


@dataclass
class Seen:
    """The outcome of a run; seconds and bytes."""

    commands: int = 0
    slowest: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)
    resident: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def run(cluster: Cluster, seconds: float, seed: int, each: int = 1_000) -> Seen:
    """Attack for so long; each kind at least once. ``each``: one in so many commands is hostile."""
    random, seen, over = Random(seed), Seen(), threading.Event()
    client = prepare(cluster)
    with anabranch.connect(cluster.bootstrap, prefix=cluster.prefix, lane="admin") as admin:
        admin.add_lane(GOOD, quotas={"work": 1_000_000})
    log = KafkaLog(cluster.bootstrap, {})
    raw = Raw(cluster.bootstrap, cluster.prefix, log, lane=GOOD).start()
    packing = {"compression.type": "zstd", "message.max.bytes": 1_000_000_000, "linger.ms": 0}
    attacker = Producer({"bootstrap.servers": cluster.bootstrap, "log_level": 0, **packing})
    began_with, attacks = terms(cluster), ["none"]
    floods: dict[str, Iterator[Sent]] = {}
    senders: list[Sender] = []
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

    def flood(name: str) -> None:
        if name not in floods:
            lane, made = FLOODS[name]
            senders.append(Sender(cluster.bootstrap, cluster.prefix, random, lane))
            floods[name] = made(senders[-1])
        for one in itertools.islice(floods[name], 1 if name == "journal-bombs" else FEW):
            attacker.produce(
                one.topic, one.value, one.key,
                0, timestamp=one.timestamp, headers=one.headers,  # type: ignore[arg-type]
            )  # fmt: skip
        attacker.flush(20)

    def attack(name: str) -> None:
        attacks.append(name)
        if name in FLOODS:
            flood(name)
            return
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
    kinds = [*ATTACKS, *FLOODS]
    until, names, sent = time.monotonic() + seconds, list(kinds), 0
    while time.monotonic() < until or names:
        while sent * each <= seen.commands:
            attack(names.pop() if names else random.choice(kinds))
            sent += 1
        for answer in raw.ask_all([shot(event()) for _ in range(BATCH)]):
            seen.refused[
                getattr(answer, "code", answer.state if hasattr(answer, "state") else "")
            ] += 1
        raw.answers.clear()
        seen.commands += BATCH
        seen.resident.append(resident(cluster.controller.pid))
        if not cluster.controller.running or terms(cluster) != began_with:
            seen.problems.append(f"the leader restarted: {began_with}, {terms(cluster)}")
            break
    over.set()
    committer.join(20)
    if set(seen.refused) != {"COMMITTED"}:
        seen.problems.append(f"honest one-shots: {dict(seen.refused)}")
    half = seen.resident[len(seen.resident) // 2 :]
    if max(half) - half[0] > LEVEL_BYTES:
        seen.problems.append(f"the controller grew by {max(half) - half[0] >> 20} MB")
    for sender in senders:
        sender.close()
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
        cluster = start_cluster(broker.bootstrap, Path(folder), trusts_open=False)
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
