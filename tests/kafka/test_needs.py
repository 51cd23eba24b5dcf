"""Questions to brokers of which some don't answer: each is named, and the others' answers count."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from types import SimpleNamespace as Answer
from typing import Any

import pytest

from anabranch.kafka import calls
from anabranch.kafka import probe as probes
from anabranch.kafka.calls import Api, ConnectionBroken
from anabranch.kafka.cluster import Cluster
from anabranch.kafka.needs import look_at
from anabranch.kafka.probe import FAILS, WORKS, Probe
from anabranch.kafka.settings import parse_settings
from anabranch.protocol.limits import LEAST_RECORD

AWAY_S = 1.0


class Broker:
    """One of three brokers, which metadata all name. ``loads``: answers of a group's coordinator that loads."""

    def __init__(self, loads: dict[str, list[int]]) -> None:
        self._loads = loads
        self.features: dict[str, int] = {}

    def greet(self, _: float) -> None:
        pass

    def close(self) -> None:
        pass

    def version(self, api: Api) -> int:
        return api.highest

    def ask(self, api: Api, _: float, **asked: Any) -> Any:
        codes = self._loads.get(api.folder, [])
        code = codes.pop(0) if len(codes) > 1 else codes[0] if codes else 0
        if api is calls.METADATA:
            brokers = [Answer(node_id=n, host=f"b{n}", port=9092) for n in (1, 2, 3)]
            return Answer(brokers=brokers, topics=[])
        return Answer(error_code=code, host="b1", port=9092)


def answering(cluster: Cluster, up: set[str], **loads: list[int]) -> Cluster:
    """Let these brokers answer; the others take their time, and then don't."""

    def take(address: tuple[str, int], _: float) -> Any:
        if address[0] not in up:
            time.sleep(AWAY_S)
            raise ConnectionBroken(f"no answer of {address[0]}", sent=False)
        return Broker(loads)

    cluster.pool.take = cluster.pool.open = take  # type: ignore[method-assign,assignment]
    cluster.pool.give = lambda *_: None  # type: ignore[method-assign]
    return cluster


def test_a_broker_that_is_away_is_named_and_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    cluster = answering(Cluster(parse_settings("b1:9092", {})), {"b1"})
    begun = time.monotonic()
    found = look_at(cluster, 5.0, disks=False)
    assert time.monotonic() - begun < 2 * AWAY_S, "both are asked at once"
    assert [(one.address, one.trouble) for one in found] == [
        ("b1:9092", ""),
        ("b2:9092", "no answer of b2"),
        ("b3:9092", "no answer of b3"),
    ]
    monkeypatch.setattr(probes, "check_native_timeout", lambda *_: None)
    assert probes.before_leading(cluster, "anabranch", 60.0) == ()
    assert [record.getMessage() for record in caplog.records] == [
        "the broker b2:9092 does not answer; others do: no answer of b2",
        "the broker b3:9092 does not answer; others do: no answer of b3",
    ]


@pytest.mark.parametrize("call", ["find_coordinator", "join_group"])
@pytest.mark.parametrize(
    ("codes", "state", "said"),
    [
        ([14, 15, 0], WORKS, ""),
        ([14], FAILS, "COORDINATOR_LOAD_IN_PROGRESS (14)"),
        ([15], FAILS, "COORDINATOR_NOT_AVAILABLE (15)"),
    ],
)
def test_a_group_s_coordinator_that_loads_gets_time_and_is_named(
    call: str, codes: list[int], state: str, said: str
) -> None:
    probe = Probe(
        parse_settings("b1:9092", {}), "anabranch", control_partitions=1, replication_factor=1,
        session_timeout=6.0, max_message_bytes=LEAST_RECORD.value, native_timeout=60.0,
    )  # fmt: skip
    cluster = answering(probe._cluster, {"b1"}, **{call: [*codes]})
    cluster.settings = replace(cluster.settings, request_timeout=1.0, retry_backoff=0.05)
    found = probe._try(probes._Step("groups", probe._groups))
    assert found.state == state
    assert said in found.found
