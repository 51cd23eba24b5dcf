"""Records of plain topics that no stream accepts unchanged: the bridge copies them, or says what to do."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from anabranch.batches.records import Record, encode_batch
from anabranch.errors import InvalidArgument
from anabranch.ports import TopicPartition, TopicSpec
from anabranch.processing.app import Processor
from anabranch.processing.plain import outputs_of
from anabranch.protocol.limits import LATEST
from tests.processing.test_worker import Place, steps

Headers = tuple[tuple[str, bytes | None], ...]
# A record's headers and time -> those of its copy; None: now.
ODD: dict[str, tuple[Headers, int, Headers, int | None]] = {
    "nothing odd": ((("h", b"1"), ("é", None)), 5, (("h", b"1"), ("é", None)), 5),
    "a tag": ((("ab.variant", b"B"), ("h", b"")), 5, (("_ab.variant", b"B"), ("h", b"")), 5),
    "of another stream": ((("ab.txn", bytes(28)), ("h", b"")), 5, (("h", b""),), 5),
    "a name that is no UTF-8": ((("\udcff", b"1"),), 5, (("?", b"1"),), 5),
    "microseconds": ((), 1_735_689_600_000_000, (), None),
    "2^62": ((), 1 << 62, (), None),
    "-2^62": ((), -(1 << 62), (), None),
    "the end of 9999": ((), LATEST, (), LATEST),
}


@pytest.mark.parametrize("what", ODD)
@pytest.mark.parametrize("many", [1, 400])
def test_odd_records_are_copied(tmp_path: Path, what: str, many: int) -> None:
    place = Place(tmp_path)
    headers, timestamp, copied, time = ODD[what]
    log, orders = place.cluster.log("kafka"), TopicPartition("orders", 0)
    any_time = dict.fromkeys(
        ("message.timestamp.after.max.ms", "message.timestamp.before.max.ms"), str((1 << 63) - 1)
    )
    log.create_topics([TopicSpec("orders", 1, any_time, 1)])
    log.produce(orders, [Record(0, timestamp, b"k", b"v", headers)] * many)
    app = Processor("nyc/p", tasks=1, commit_interval=0, retries=0)
    out = app.output("nyc/out")
    app.on(app.topic("orders"), batch=True)(lambda batch: out.write_batch(outputs_of(batch)))
    with closing(place.worker(app)) as worker:
        steps(worker)
    events = place.events("nyc/out")
    assert len(events) == many
    its = [pair for pair in events[-1].headers if pair[0] != "ab.txn"]
    found = [(n.replace("\ufffd", "?"), v) for n, v in its]
    assert tuple(found) == copied
    assert events[-1].timestamp_ms == time if time is not None else events[-1].timestamp_ms > 10**11


@pytest.mark.parametrize("what", ["value", "headers", "key"])
@pytest.mark.parametrize("batch", [False, True])
def test_a_record_that_no_stream_takes_is_a_dead_letter_without_its_content(
    tmp_path: Path, what: str, batch: bool
) -> None:
    """Brokers took it, as it came packed; the dead letters have no room for it either."""
    place = Place(tmp_path)
    place.client.create_stream("nyc/dead")
    log, orders = place.cluster.log("kafka"), TopicPartition("orders", 0)
    log.create_topics([TopicSpec("orders", 1, {}, 1)])
    good, big = Record(0, 5, b"k", b"v"), bytes(3_000_000)
    bad = {
        "value": good._replace(value=big),
        "headers": good._replace(headers=(("h", big),)),
        "key": good._replace(key=big),
    }[what]
    place.cluster.produce_batch(orders, encode_batch([good, bad, good], "zstd"))
    app = Processor("nyc/p", tasks=1, commit_interval=0, retries=0, dead_letter="nyc/dead")
    out = app.output("nyc/out")
    if batch:
        app.on(app.topic("orders"), batch=True)(lambda rows: out.write_batch(outputs_of(rows)))
    else:
        app.on(app.topic("orders"))(
            lambda event: out.write(event.value, event.key, headers=event.headers)
        )
    with closing(place.worker(app)) as worker:
        steps(worker)
    assert len(place.events("nyc/out")) == 2
    (letter,) = place.events("nyc/dead")
    assert (letter.key, letter.value) == (None if what == "key" else b"k", None)
    headers = dict(letter.headers)
    assert headers["from"] == b"topic:orders[0]@1"
    assert (headers["error"] or b"").startswith(b"EventTooLarge")


@pytest.mark.parametrize("timestamp", [0, -1, LATEST + 1, True])
def test_an_output_s_own_time_is_judged_as_any_write_s(tmp_path: Path, timestamp: Any) -> None:
    place = Place(tmp_path)
    app = Processor("nyc/p", tasks=1, commit_interval=0, retries=0)
    out = app.output("nyc/out")
    seen: list[Exception] = []

    @app.on(app.input("nyc/in"))
    def handle(event: Any) -> None:
        try:
            out.write(b"", timestamp=timestamp)
        except InvalidArgument as error:
            seen.append(error)
        out.write(event.value)

    place.write(b"k")
    with closing(place.worker(app)) as worker:
        steps(worker)
    assert [f"timestamp {timestamp!r}: " in str(error) for error in seen] == [True]
    assert len(place.events("nyc/out")) == 1
