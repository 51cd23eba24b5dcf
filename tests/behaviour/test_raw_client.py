"""The raw client, which knows only the protocol page and the schemas, against a real controller."""

from __future__ import annotations

import ast
import csv
import json
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import pytest

import anabranch
from anabranch.client.table_transaction import TableTransaction
from anabranch.protocol.partitioner import position_of

pytestmark = pytest.mark.broker

ROOT = Path(__file__).parents[2]
RAW_CLIENT = ROOT / "examples" / "raw_client.py"
TIMEOUT_S = 90


class Cluster(Protocol):
    """The parts of the fixture that these tests need."""

    @property
    def bootstrap(self) -> str: ...

    @property
    def prefix(self) -> str: ...


def raw(cluster: Cluster, *arguments: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
    """Run the raw client, isolated from this project's packages."""
    # -I: neither PYTHONPATH nor the working directory; anabranch may still be installed, see below.
    command = [sys.executable, "-I", str(RAW_CLIENT), "--bootstrap", cluster.bootstrap]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=TIMEOUT_S, cwd="/"
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done


def outcome(done: subprocess.CompletedProcess[str]) -> Any:
    return json.loads(done.stdout)


def committed(cluster: Cluster, stream: str) -> list[Any]:
    return [json.loads(line) for line in raw(cluster, stream, "--read").stdout.splitlines()]


@pytest.fixture
def stream(client: anabranch.Client, unique: str) -> str:
    """A new stream of three segments."""
    name = f"raw{unique}/flights"
    client.create_stream(name, segments=3)
    return name


def test_it_imports_nothing_of_anabranch() -> None:
    imported = set()
    for node in ast.walk(ast.parse(RAW_CLIENT.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add((node.module or "").partition(".")[0])
    assert imported - set(sys.stdlib_module_names) == {"confluent_kafka", "fastavro"}


def test_a_transaction_of_its_own(cluster: Cluster, client: anabranch.Client, stream: str) -> None:
    done = outcome(raw(cluster, stream, "--rows", "500"))
    assert (done["state"], done["committed"]) == ("COMMITTED", 500)
    assert (done["rejected"], done["left_out"]) == (0, 0)
    events = committed(cluster, stream)
    assert sorted(json.loads(e["value"])["row"] for e in events) == list(range(500))
    assert {e["txn_id"] for e in events} == {done["txn_id"]}
    by_key: dict[str, list[int]] = {}
    for event in events:
        by_key.setdefault(event["key"], []).append(json.loads(event["value"])["row"])
        assert event["partition"] == position_of(event["key"].encode()) * 3 >> 32
    assert all(rows == sorted(rows) for rows in by_key.values())
    info = client.state(done["txn_id"])
    assert (info.state, info.counts.committed) == ("COMMITTED", 500)
    assert (info.commit_timestamp, info.streams) == (done["commit_timestamp"], (stream,))
    assert [(one.finished, one.events) for one in info.writers] == [(True, 500)]


@pytest.mark.soak
def test_rows_of_a_csv_file(cluster: Cluster, stream: str, tmp_path: Path) -> None:
    file = tmp_path / "flights.csv"
    rows = [
        {"carrier": carrier, "flight": str(flight)}
        for flight, carrier in enumerate(["UA", "AA", "B6", "Zürich", ""])
    ]
    with file.open("w", newline="", encoding="utf-8") as opened:
        writer = csv.DictWriter(opened, ["carrier", "flight"])
        writer.writeheader()
        writer.writerows(rows)
    done = outcome(raw(cluster, stream, "--csv", str(file), "--key", "carrier"))
    assert done["committed"] == 5
    done = outcome(raw(cluster, stream, "--csv", str(file)))  # null keys
    assert done["committed"] == 5
    events = committed(cluster, stream)
    by_flight = lambda row: row["flight"]  # noqa: E731
    for wanted in (True, False):
        found = [json.loads(e["value"]) for e in events if (e["key"] is not None) == wanted]
        assert sorted(found, key=by_flight) == rows
    assert {e["key"] for e in events} == {"UA", "AA", "B6", "Zürich", "", None}


def test_it_joins_a_transaction_of_the_library(
    cluster: Cluster, client: anabranch.Client, stream: str
) -> None:
    scope = stream.partition("/")[0]
    with client.begin(scope) as txn:
        txn.write(stream, b"mine", key=b"k")
        one = raw(cluster, stream, "--rows", "30", "--token", txn.token().hex())
        two = raw(cluster, stream, "--rows", "12", "--token", txn.token().hex())
        receipts = [bytes.fromhex(done.stdout) for done in (one, two)]
        assert [anabranch.Receipt.from_bytes(r).events for r in receipts] == [30, 12]
        assert committed(cluster, stream) == []
        result = txn.commit(receipts=receipts[:1])
    assert (result.counts.committed, result.counts.left_out) == (31, 12)
    events = committed(cluster, stream)
    assert len(events) == 31
    assert {e["txn_id"] for e in events} == {result.txn_id.hex()}


@pytest.mark.long
def test_it_asks_by_a_lane_and_has_its_rights(
    cluster: Cluster, client: anabranch.Client, stream: str
) -> None:
    scope = stream.partition("/")[0]
    with anabranch.connect(cluster.bootstrap, prefix=cluster.prefix, lane="admin") as admin:
        admin.add_lane("raw-client")
        admin.grant("raw-client", f"{scope}/*", "describe")
        refused = raw(cluster, stream, "--rows", "5", "--lane", "raw-client", fails=True)
        assert "NotAuthorized" in refused.stderr
        admin.grant("raw-client", f"{scope}/*", "write")
        done = outcome(raw(cluster, stream, "--rows", "5", "--lane", "raw-client"))
        assert admin.state(done["txn_id"]).owner == "raw-client"
    assert done["committed"] == len(committed(cluster, stream)) == 5
    with client.begin(scope) as txn:
        txn.write(stream, b"mine", key=b"k")
        raw(cluster, stream, "--rows", "3", "--lane", "raw-client", "--token", txn.token().hex())
        assert txn.commit().counts.committed == 4, "a token works by any lane"


@pytest.mark.soak
def test_a_name_commits_once(cluster: Cluster, stream: str) -> None:
    first = outcome(raw(cluster, stream, "--rows", "10", "--name", "night"))
    again = outcome(raw(cluster, stream, "--rows", "10", "--name", "night"))
    assert again == first
    assert len(committed(cluster, stream)) == 10


@pytest.mark.soak
def test_it_consumes_by_tasks(cluster: Cluster, client: anabranch.Client, stream: str) -> None:
    """Beside the library, which leaves off in the middle of a commit; over scalings, and without keys."""
    scope = stream.partition("/")[0]
    output, processor = f"{scope}/copy", f"{scope}/copier"
    client.create_stream(output, segments=2)
    written: list[tuple[bytes | None, bytes]] = []

    def write(count: int) -> None:
        some = [(b"v%d" % i, None if i % 3 else b"k%d" % (i % 7)) for i in range(count)]
        with client.begin(scope) as txn:
            txn.write_many(stream, some)
            txn.commit()
        written.extend((key, value.upper()) for value, key in some)

    def library(tasks: list[int] | None, most: int) -> int:
        ownership = client.take_tasks(processor, tasks)
        with client.read(stream, timeout=1, ownership=ownership) as reader:
            some = [(event.value or b"", event.key) for event in islice(reader, most)]
            with client.begin(scope, ownership=ownership) as txn:
                txn.write_many(output, [(value.upper(), key) for value, key in some])
                txn.commit(consumed=reader.consumed())
        return len(some)

    def copied(*more: str) -> int:
        done = raw(cluster, output, "--processor", processor, *more)
        return int(json.loads(done.stdout)["copied"])

    write(40)
    assert copied("--input", stream) == 40
    client.scale(stream, segments=5)
    for count in (9, 30, 21):
        write(count)
    taken = [library(None, 20), library([1], 100)]
    parts = [copied("--task", f"{number}") for number in (0, 2, 3)]
    assert sum(taken) + sum(parts) == 60
    assert min(taken + parts) > 0
    assert copied() == 0
    with client.read(output, timeout=1) as reading:
        found = [(event.key, event.value) for event in reading]
    assert Counter(found) == Counter(written)
    keyed = [[pair for pair in pairs if pair[0] == b"k0"] for pairs in (found, written)]
    assert keyed[0] == keyed[1], "in order"


@pytest.mark.soak
def test_it_moves_money_with_locks(cluster: Cluster, client: anabranch.Client, unique: str) -> None:
    """Two of them against each other and the library, over a scaling: no money is made, or lost."""
    name = f"raw{unique}/accounts"
    client.create_table(name, segments=2)
    with client.replica(name) as bank:
        refused = raw(cluster, name, "--transfer", "ann", "bob", "5", fails=True)
        assert "ann has 0, not 5" in refused.stderr
        with client.begin(name.partition("/")[0]) as opening:
            for who in (b"ann", b"bob", b"cat"):
                opening.write(name, b"500", key=who)
            result = opening.commit()
        pairs = [("ann", "bob", "3"), ("bob", "ann", "2")]
        told: list[dict[str, Any]] = []
        rounds = mine = 0
        with ThreadPoolExecutor(2) as pool:
            while not any(part["looked_again"] for part in told):  # they may miss each other
                rounds += 1
                assert rounds <= 5, told
                runs = [
                    pool.submit(raw, cluster, name, "--transfer", *pair, "--times", "8")
                    for pair in pairs
                ]
                while not all(run.done() for run in runs):
                    mine += 1

                    def move(txn: TableTransaction) -> None:
                        ann, cat = (int(txn.get(name, who) or b"") for who in (b"ann", b"cat"))
                        txn.put(name, b"ann", b"%d" % (ann + 1))
                        txn.put(name, b"cat", b"%d" % (cat - 1))

                    bank.transact(move)
                    time.sleep(0.5)  # the raw client is much slower, and would always lose
                    if mine == 2:
                        client.scale(name, segments=3)
                told += [json.loads(run.result().stdout) for run in runs]
        with bank.snapshot() as now:
            rows = {key: int(row) for key, row in now.scan(name)}
        moved = 8 * rounds
        assert rows == {b"ann": 500 - moved + mine, b"bob": 500 + moved, b"cat": 500 - mine}
        commits = client.system("commits", name, start=result.commit_timestamp)
        assert len(commits) == 2 * moved + mine
        for one in commits:
            with bank.snapshot(at=one.commit_timestamp) as then:
                assert sum(int(row) for _, row in then.scan(name)) == 1500
    done = [bytes.fromhex(each) for part in told for each in part["committed"]]
    assert set(done) < {one.txn_id for one in commits}


@pytest.mark.long
def test_a_failure_aborts_its_transaction(
    cluster: Cluster, client: anabranch.Client, stream: str, tmp_path: Path
) -> None:
    file = tmp_path / "some.csv"
    file.write_text("carrier,flight\nUA,1\n")
    done = raw(cluster, stream, "--csv", str(file), "--key", "nocolumn", fails=True)
    assert "KeyError: 'nocolumn'" in done.stderr
    [info] = client.transactions(stream.partition("/")[0], finished=True)
    assert (info.state, info.reason) == ("ABORTED", "the raw client could not write")


def test_refusals_are_named(cluster: Cluster, client: anabranch.Client, stream: str) -> None:
    scope = stream.partition("/")[0]
    done = raw(cluster, f"{scope}/nowhere", fails=True)
    assert "UnknownStream" in done.stderr
    with client.begin(scope) as txn:
        tampered = bytearray(txn.token())
        tampered[-1] ^= 1
        txn.abort()
    done = raw(cluster, stream, "--token", tampered.hex(), fails=True)
    assert "UnknownTransaction" in done.stderr
