"""librdkafka's failures are told seldom; everything else it says is told."""

from __future__ import annotations

import logging

import pytest
from confluent_kafka import Consumer, Producer

from anabranch.librdkafka import options as kafka_logging
from anabranch.librdkafka.options import Options

LINE = "%s [%s] %s"
AWAY = "[thrd:b:1/1]: b:1/1: Connect to ipv4#b:1 failed: Connection refused (after %dms in state CONNECT)"


def test_failures_of_one_kind_are_told_now_and_then() -> None:
    now = 100.0
    seldom = kafka_logging.Seldom(lambda: now)

    def said(facility: str, client: str, text: str) -> str | None:
        record = logging.LogRecord("x", 40, "", 0, LINE, (facility, client, text), None)
        return record.getMessage() if seldom.filter(record) else None

    first = said("FAIL", "a#1", AWAY % 0)
    assert first == f"FAIL [a#1] {AWAY % 0}"
    assert [said("FAIL", "a#1", AWAY % n) for n in range(1, 5)] == [None] * 4
    for other in (("FAIL", "a#2", AWAY % 0), ("FAIL", "a#1", "[thrd:b:2/2]: gone"), ("X", "a", "")):
        assert said(*other) == LINE % other
    assert said("X", "a", "") is not None, "no failure: always"
    now += kafka_logging.EVERY_S
    assert said("FAIL", "a#1", AWAY % 9) == f"FAIL [a#1] {AWAY % 9} (and 4 more)"
    assert said("FAIL", "a#1", AWAY % 9) is None


@pytest.mark.parametrize("kind", [Producer, Consumer])
def test_librdkafka_that_nobody_answers(
    kind: type[Producer] | type[Consumer], caplog: pytest.LogCaptureFixture
) -> None:
    """confluent-kafka's log lines have the form that the filter knows."""
    options = Options("127.0.0.1:1", {"reconnect.backoff.max.ms": 20, "reconnect.backoff.ms": 10})
    config = options.commands(1_000_000) if kind is Producer else options.reader("g", "earliest")
    made = kind(config)
    for _ in range(10):
        made.poll(0.1)
    made.close()
    told = [r.getMessage() for r in caplog.records if r.name == kafka_logging.logger.name]
    refused = [line for line in told if line.startswith("FAIL") and "Connection refused" in line]
    assert len(refused) == 1, told
