"""Charts of the last hour: samples by a clock of the test's own, and their pictures."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from anabranch.errors import AnabranchError, NotAuthorized, NotReady
from anabranch.protocol.schemas.records import TaskPosition
from anabranch.reading.group_lag import ConsumerGroup, GroupPosition, InputLag, Lag
from anabranch.testing.memory.cluster import MemoryCluster
from anabranch.types import LeaderInfo, Listed
from anabranch.web.charts import HOUR_S, Recorder, bars, line
from anabranch.web.hub import View
from anabranch.web.pages import Pages, Showing, environment
from tests.cli.fakes import processor, stream


class Leaders:
    """A client whose leaders have a term, commits and bytes, and may fail."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.parts = [[7, 100, 5], [3, 0, 0]]
        self.missing: dict[int, AnabranchError] = {}
        self.error: AnabranchError | None = None
        self.groups_error: AnabranchError | None = None
        self.asked_groups = 0
        self.lags: list[InputLag] = []  # of a processor; without any, there is none

    def leaders(self, *, timeout: float) -> Listed[LeaderInfo]:
        if self.error is not None:
            raise self.error
        return Listed(
            [
                LeaderInfo(n, term, "host", 0, committed, held)
                for n, (term, committed, held) in enumerate(self.parts)
                if n not in self.missing
            ],
            self.missing,
        )

    def groups(self, *, timeout: float) -> list[Any]:
        self.asked_groups += 1
        if self.groups_error is not None:
            raise self.groups_error
        return [
            ConsumerGroup("a", "Stable", (), (GroupPosition("shop/seen", {}, Lag(7, 0)),)),
            ConsumerGroup("b", "Stable", (), (GroupPosition("hr/hidden", {}, Lag(900, 0)),)),
            ConsumerGroup(
                "c", "Stable", (), (GroupPosition("shop/seen", {}, Lag(800, 0), "lost"),)
            ),
        ]

    def streams(self, *, timeout: float) -> list[Any]:
        return [stream("shop/seen")]

    def processors(self, scope: str, *, timeout: float) -> list[Any]:
        return [processor(f"{scope}/bills")] if self.lags else []

    def processor(self, name: str, *, timeout: float) -> Any:
        return processor(name)

    def lag(self, info: Any, *, timeout: float) -> list[InputLag]:
        return self.lags


@pytest.fixture
def leaders() -> Leaders:
    return Leaders()


@pytest.fixture
def recorder(leaders: Leaders) -> Recorder:
    client: Any = leaders
    return Recorder(client, 1.0, lambda: leaders.now)


def step(leaders: Leaders, recorder: Recorder, seconds: float = 10.0) -> None:
    leaders.now += seconds
    recorder.sample()


def test_commits_a_second_over_all_control_partitions_and_takeovers(
    leaders: Leaders, recorder: Recorder
) -> None:
    step(leaders, recorder)
    leaders.parts = [[7, 150, 6], [3, 10, 1]]
    step(leaders, recorder)
    leaders.parts = [[9, 4, 6], [3, 20, 1]]  # another leader, which counts anew
    step(leaders, recorder)
    leaders.parts = [[9, 14, 6], [3, 20, 1]]
    step(leaders, recorder, 5.0)
    found = [(s.commits, s.takeovers, s.journal_bytes) for s in recorder.samples]
    assert found == [(None, None, 5), (6.0, 0, 7), (1.0, 2, 7), (2.0, 0, 7)]
    assert [(load.control_partition, load.commits) for load in recorder.loads] == [
        (0, 2.0),
        (1, 0.0),
    ]
    shown = {chart.title: chart.now for chart in recorder.charts()}
    assert shown["commits a second"] == "2.0"
    assert shown["takeovers by other controllers"] == "2"
    # Of streams that the lane may see; asked in the first step.
    assert shown["events behind, of the slowest group or processor, 25s ago"] == "7"
    leaders.missing = {1: NotReady("no leader")}
    step(leaders, recorder)
    leaders.missing = {}
    step(leaders, recorder)
    assert [load.commits for load in recorder.loads] == [0.0, None], "no answer in the last sample"


def test_the_chart_and_the_page_of_lags_show_the_same(leaders: Leaders, recorder: Recorder) -> None:
    place = TaskPosition(0, 1, 1)
    leaders.lags = [InputLag("shop/seen", {0: (place, Lag(90, 0))})]
    step(leaders, recorder)
    assert recorder.samples[-1].behind == 90
    leaders.lags = [InputLag("shop/seen", {0: (place, Lag(95, 0))})]
    client: Any = leaders
    page = Pages(client, environment(), 1.0, Showing(), recorder).body(View("groups"))
    assert ">90</td>" in page  # not asked again within some seconds
    leaders.now += 4.0
    page = Pages(client, environment(), 1.0, Showing(), recorder).body(View("groups"))
    assert ">95</td>" in page
    asked = leaders.asked_groups
    step(leaders, recorder)
    assert recorder.samples[-1].behind == 95
    assert leaders.asked_groups == asked


def test_what_is_not_known_is_no_zero(leaders: Leaders, recorder: Recorder) -> None:
    step(leaders, recorder)
    leaders.error = NotAuthorized("operate on *")
    step(leaders, recorder)
    assert (recorder.samples[-1].commits, recorder.samples[-1].takeovers) == (None, None)
    assert recorder.missing == "NotAuthorized: operate on *"
    assert {chart.title: chart.now for chart in recorder.charts()}["commits a second"] == "?"
    leaders.error, leaders.missing = None, {1: NotReady("away")}
    leaders.parts[0][1] = 400
    step(leaders, recorder)
    assert recorder.samples[-1].commits == 15.0  # over the 20 s since the last answer
    assert recorder.samples[-1].journal_bytes is None
    assert "away" in recorder.missing
    leaders.missing = {}
    step(leaders, recorder)
    assert recorder.missing == ""


def test_what_the_lane_may_not_see_any_more_is_forgotten(
    leaders: Leaders, recorder: Recorder
) -> None:
    for _ in range(3):
        step(leaders, recorder)
    leaders.error = NotReady("away")
    step(leaders, recorder)
    assert recorder.samples[1].commits == 0.0
    leaders.error = NotAuthorized("operate on *")
    step(leaders, recorder)
    assert {s[1:] for s in recorder.samples} == {(None, 7, None, None)}
    leaders.groups_error = NotAuthorized("describe")
    step(leaders, recorder, 60.0)
    assert {s[1:] for s in recorder.samples} == {(None, None, None, None)}
    assert "line" not in "".join(chart.svg for chart in recorder.charts())


def test_it_keeps_an_hour(leaders: Leaders, recorder: Recorder) -> None:
    for _ in range(500):
        step(leaders, recorder)
    assert len(recorder.samples) == 1 + HOUR_S / 10
    assert leaders.asked_groups <= 5000 / 60 + 1


def test_pictures(leaders: Leaders) -> None:
    points = [(-3600.0, 1.0), (-2990.0, None), (-20.0, 4.0), (-10.0, 2.0), (0.0, 0.0)]
    drawn = line("a <b>", points, str)
    root = ET.fromstring(drawn)
    assert root.find("title").text == "a <b>, in the last hour: at most 4.0"  # type: ignore[union-attr]
    path = next(each.get("d") for each in root.iter("path") if each.get("class") == "line")
    assert path == "M298.3,6.0 L299.2,39.0 L300.0,72.0"
    assert "60m ago" in drawn
    assert "2m ago" not in line(
        "x", [(-130.0, 1.0), (0.0, 1.0)], str
    )  # a new process: the last five
    assert "not known" in line("x", [(0.0, None)], str)
    ET.fromstring(line("x", [(-1.0, 0.0), (0.0, 0.0)], str))
    drawn = bars("takeovers", [(-7200.0, 1.0), (-90.0, 2.0), (0.0, 0.0)])
    assert [each.text for each in ET.fromstring(drawn).iter("title")][1:] == [
        "1 2h ago",
        "2 90s ago",
    ]
    assert "style=" not in drawn  # the policy of the pages allows none


def test_a_cluster_s_commits_are_counted() -> None:
    cluster = MemoryCluster()
    with cluster.connect(lane="admin", timeout=5) as client:
        client.create_stream("shop/orders")
        recorder = Recorder(client, 5.0, cluster.clock.monotonic)
        recorder.sample()
        before = client.leaders()[0]
        for number in range(7):
            with client.begin("shop") as txn:
                txn.write("shop/orders", b"%d" % number)
                if number % 3:
                    txn.commit()
                else:
                    txn.token()
                    txn.abort()
        now = client.leaders()[0]
        assert (now.term, now.committed - before.committed) == (before.term, 4)
        cluster.advance(10)
        recorder.sample()
        assert recorder.samples[-1].commits == pytest.approx(0.4, rel=0.5)
        assert recorder.samples[-1].takeovers == 0
        cluster.stop_controller()
        cluster.start_controller()
        cluster.advance(10)
        recorder.sample()
        assert recorder.samples[-1].takeovers == 1
        assert re.search("1 .* ago", recorder.charts()[-1].svg)
