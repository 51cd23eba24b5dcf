"""A controller process that starts while brokers are away, or may not use what it finds."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from anabranch.clock import SystemClock
from anabranch.controller import service
from anabranch.controller.config import ControllerOptions
from anabranch.controller.leader import Leader
from anabranch.controller.metrics import Metrics
from anabranch.errors import (
    ClockSkew,
    NotAuthorized,
    NotReady,
    TopicMisconfigured,
    UnsupportedSetting,
)
from anabranch.ports import Log, LogRefused, LogUnavailable, TopicSpec
from anabranch.topics.creation import ControlTopics
from anabranch.topics.new_topics import NewTopics
from tests.controller.world import World

ENDS = """
import sys
from pathlib import Path
from anabranch.errors import TopicMisconfigured
from anabranch.controller import service
from anabranch.controller.config import ControllerOptions

def create_control_topics(*_, **__):
    raise TopicMisconfigured("cleanup.policy is delete: set it to compact")

service.before_leading = lambda *_: ()
service.create_control_topics = create_control_topics
service.LATE_S = 0.0
folder = Path(sys.argv[1])
sys.exit(service.run_controller(
    ControllerOptions("127.0.0.1:1", data_dir=folder)))
"""


@pytest.fixture
def controller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> service.ControllerService:
    """It prepares quickly; tests say what its topics are."""
    monkeypatch.setattr(service, "before_leading", lambda *_: ())
    monkeypatch.setattr(service, "last_term", lambda *_: None)
    monkeypatch.setattr(service, "Membership", Mock())
    monkeypatch.setattr(service, "PREPARE_AGAIN_S", 0.01)
    options = ControllerOptions("127.0.0.1:1", data_dir=tmp_path)
    return service.ControllerService(options)


def test_it_reads_from_leaders_only(tmp_path: Path) -> None:
    rack = {"client.rack": "a"}
    with pytest.raises(UnsupportedSetting, match="leaders only"):
        service.ControllerService(ControllerOptions("h:1", data_dir=tmp_path, kafka=rack))


def test_it_waits_for_brokers_that_are_away_with_a_line_a_minute_for_each_kind(
    controller: service.ControllerService,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers: list[Exception | ControlTopics] = [
        LogUnavailable("nobody there"),
        LogUnavailable("no leader"),
        NotReady("not found (yet, or any more)"),
        TopicMisconfigured("add some until it has 3"),
        *[ControlTopics(3, 2, 1 << 20)] * 2,
    ]

    topics, members = Mock(side_effect=answers), Mock(side_effect=[NotReady("no token"), Mock()])
    monkeypatch.setattr(service, "create_control_topics", topics)
    monkeypatch.setattr(service, "Membership", members)
    assert asyncio.run(controller._prepared())
    assert (controller.failure, topics.call_count) == (None, len(answers))
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for the brokers: nobody there",
        "waiting for the brokers: not found (yet, or any more)",
        "waiting for the brokers: add some until it has 3",
    ]


@pytest.mark.parametrize(
    ("problem", "kind", "to_do"),
    [
        (TopicMisconfigured("cleanup.policy is delete"), TopicMisconfigured, ""),
        (LogRefused("the right Create on the topic is missing", 29), NotAuthorized, ""),
        (LogRefused("no such call", 35), LogRefused, ""),
        (
            LogRefused("no such setting", 40),
            LogRefused,
            "; all that a cluster must give: docs/how-to/brokers.md",
        ),
        (
            LogRefused("create topic s: You may not create more than 9 partitions", 44),
            LogRefused,
            (
                "; let the cluster have 6 topics and 13 partitions for controllers, and 3 topics and 3 partitions "
                "or more for each stream: docs/how-to/brokers.md"
            ),
        ),
    ],
)
def test_what_waiting_does_not_mend_is_a_failure(
    controller: service.ControllerService,
    monkeypatch: pytest.MonkeyPatch,
    problem: Exception,
    kind: type[Exception],
    to_do: str,
) -> None:
    monkeypatch.setattr(service, "create_control_topics", Mock(side_effect=problem))
    monkeypatch.setattr(service, "LATE_S", 0.1)
    assert not asyncio.run(controller._prepared())
    assert type(controller.failure) is kind
    assert str(controller.failure) == f"{problem}{to_do}"


def test_brokers_that_are_restarted_get_some_time(
    controller: service.ControllerService,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Too few of them are up for the replicas, until the last one is back; or for ever."""
    refused = "create topic s: INVALID_REPLICATION_FACTOR (38), 2 brokers are registered"
    topics = Mock(side_effect=[*[LogRefused(refused, 38)] * 4, ControlTopics(3, 2, 1 << 20)])
    monkeypatch.setattr(service, "create_control_topics", topics)
    assert asyncio.run(controller._prepared())
    assert [r.getMessage() for r in caplog.records] == [f"waiting for the brokers: {refused}"]
    topics.side_effect = LogRefused(refused, 38)
    monkeypatch.setattr(service, "LATE_S", 0.2)
    begun = time.monotonic()
    assert not asyncio.run(controller._prepared())
    assert time.monotonic() - begun > 0.2
    way = "start more brokers, or give --replication-factor 0"  # none is asked here
    assert str(controller.failure) == f"{refused}; {way}"


def test_code_is_compiled_after_all_that_may_be_refused_and_before_the_group_is_joined(
    controller: service.ControllerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiling takes longer than a cluster that can't be used may take to end a controller."""
    done: list[str] = []

    def note(what: str, answer: object = None) -> Any:
        def noted(*_: object, **__: object) -> object:
            done.append(what)
            return answer

        return noted

    monkeypatch.setattr(service, "before_leading", note("ask brokers", ()))
    topics = note("make topics", ControlTopics(1, 2, 1 << 20))
    monkeypatch.setattr(service, "create_control_topics", topics)
    monkeypatch.setattr(controller, "_compile", note("compile"))
    monkeypatch.setattr(service, "last_term", note("read"))
    monkeypatch.setattr(service, "Membership", note("be a member"))
    assert asyncio.run(controller._prepared())
    assert done == ["ask brokers", "make topics", "compile", "read", "be a member"]


def test_topics_that_are_refused_at_last_are_deleted_again(
    controller: service.ControllerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()

    def create_control_topics(log: Log, _: str, new: NewTopics, **__: object) -> None:
        new.note(log.create_topics([TopicSpec("new.status", 2)]))
        raise TopicMisconfigured("cleanup.policy is delete")

    monkeypatch.setattr(service, "KafkaLog", lambda *_, **__: world.cluster.log("prepares"))
    monkeypatch.setattr(service, "create_control_topics", create_control_topics)
    monkeypatch.setattr(service, "LATE_S", 0.1)
    assert not asyncio.run(controller._prepared())
    assert str(controller.failure) == (
        "cleanup.policy is delete; these new topics are deleted again: new.status"
    )
    assert "new.status" not in world.cluster.topics


def test_a_failure_of_a_leader_is_logged_once(
    controller: service.ControllerService,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    def refuse() -> Log:
        raise ClockSkew("set the clock")

    leader = Leader(
        refuse,
        SystemClock(),
        controller._settings(3),
        folder=tmp_path / "control-3",
        leader="me",
        native_timeout=60.0,
        on_change=controller._write_status,
        on_failure=controller._failed,
    )
    leader.start()
    assert leader.stop(60)
    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    asyncio.run(asyncio.wait_for(service.ControllerService._watch.fun(controller), 60))
    assert (raised, controller.exit_code) == ([signal.SIGTERM], service.EXIT_FIX_CALL)
    assert [record.getMessage() for record in caplog.records] == [
        "control partition 3: set the clock"
    ]


def test_what_brokers_lack_is_a_metric_as_long_as_it_lasts(
    controller: service.ControllerService, caplog: pytest.LogCaptureFixture
) -> None:
    leader = SimpleNamespace(metrics=Metrics())
    controller._leaders[0] = leader  # type: ignore[assignment]
    for _ in range(2):
        controller._lack(("DeleteRecords", "DescribeProducers"))
    assert leader.metrics.values["broker_lacks"] == {
        ("DeleteRecords",): 1,
        ("DescribeProducers",): 1,
    }
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "no DeleteRecords",
        "no DescribeProducers",
    ]
    controller._lack(())
    assert leader.metrics.values["broker_lacks"] == {}


@pytest.mark.slow(2)
def test_it_ends_with_a_line_that_says_what_to_do(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == service.EXIT_FIX_CALL, output
    assert "ERROR   TopicMisconfigured: cleanup.policy is delete: set it to compact" in output
    assert "Traceback" not in output


def test_a_service_is_ready_without_partitions_and_while_its_passes_end(
    controller: service.ControllerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert controller._trouble() == "starting, or leaving"
    member = SimpleNamespace(alive=True, error=None, trouble="a right is missing")
    monkeypatch.setattr(controller, "_membership", member)
    assert controller._trouble() == "a right is missing"
    member.trouble = ""
    assert controller._trouble() is None, "it stands by"
    leader = SimpleNamespace(leading=False, metrics=Metrics())
    controller._leaders[2] = leader  # type: ignore[assignment]
    assert controller._trouble() == "control partition 2: becoming leader"
    leader.leading = True
    leader.metrics.passed()
    assert controller._trouble() is None
    leader.metrics.passed_at -= 11
    assert controller._trouble() == "control partition 2: no round or pass ended for 11 s"
    controller.failure = ClockSkew("set the clock")
    assert controller._trouble() == "set the clock"


def test_a_leader_that_is_stuck_makes_it_stand_aside(
    controller: service.ControllerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, Any] = {}
    aside: list[float] = []

    def leader(*_: object, **how: Any) -> SimpleNamespace:
        made.update(how)
        return SimpleNamespace(start=lambda: None, metrics=Metrics())

    monkeypatch.setattr(service, "Leader", leader)
    monkeypatch.setattr(controller, "_membership", SimpleNamespace(stand_aside=aside.append))
    controller._gained({0})
    made["on_stuck"](15.0)
    assert aside == [15.0]


def test_a_partition_that_comes_back_waits_for_the_leader_that_did_not_stop(
    controller: service.ControllerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, leads, away = World(), threading.Semaphore(0), threading.Event()

    class Stuck:
        """In a call to a broker that is away."""

        lease = None
        rounds = 0

        def __init__(self, *_: object, **__: object) -> None:
            self.hand_over = self.resign = self.look = lambda: None

        def lead(self) -> None:
            leads.release()
            away.wait(60)

        def step(self, seconds: float) -> None:
            time.sleep(0.01)

    monkeypatch.setattr(Leader, "controller", Stuck)
    monkeypatch.setattr(service, "KafkaLog", lambda *_, **__: world.cluster.log("c"))
    monkeypatch.setattr(service, "STOP_LEADER_S", 0.5)
    began = []
    for _ in range(2):
        controller._gained({0})
        began.append(leads.acquire(timeout=0.5))
        controller._lost({0})
    controller._gained({0})
    assert began == [True, False], "not while the first one has the table"
    away.set()
    assert leads.acquire(timeout=60)
    controller._lost({0})
    assert controller.failure is None


def test_code_that_can_t_be_compiled_ends_it(
    controller: service.ControllerService, monkeypatch: pytest.MonkeyPatch
) -> None:
    topics = ControlTopics(1, 2, 1 << 20)
    monkeypatch.setattr(service, "create_control_topics", lambda *_, **__: topics)

    def warm(folder: Path) -> None:
        raise OSError(f"no room in {folder}")

    monkeypatch.setattr(service, "warm", warm)
    assert not asyncio.run(controller._prepared())
    assert isinstance(controller.failure, service.CompilationFailed)
    assert service._exit_code(controller.failure) == service.EXIT_ENVIRONMENT


def test_the_watch_writes_the_status_file_and_no_leader(
    controller: service.ControllerService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: dict[str, Any] = {}
    file = tmp_path / "status"

    def leader(*_: object, **how: Any) -> SimpleNamespace:
        made.update(how)
        return SimpleNamespace(start=lambda: None, metrics=Metrics(), leading=False)

    monkeypatch.setattr(service, "Leader", leader)
    monkeypatch.setattr(signal, "raise_signal", lambda _: None)
    monkeypatch.setattr(controller, "options", replace(controller.options, status_file=file))
    controller._gained({0})
    controller._said_at = time.monotonic() + 60  # it is not due by itself
    made["on_change"]()
    assert not file.exists()
    controller.failure = ClockSkew("set the clock")  # ends the watch
    asyncio.run(asyncio.wait_for(service.ControllerService._watch.fun(controller), 60))
    assert file.exists()
