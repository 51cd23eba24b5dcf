"""What a program says of itself, and what is drawn of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from anabranch.presentation.topology import Topology, picture, read_topology, tree
from anabranch.processing.app import Processor
from anabranch.processing.derived import DerivedTable
from anabranch.processing.operations.topology import topology_of
from anabranch.processing.worker import make_processor
from anabranch.protocol.limits import TOPOLOGY
from anabranch.testing.memory.cluster import MemoryCluster
from tests.processing.words import app as words_app

BEHIND = {"events_behind": 12, "seconds_behind": 1.5, "exact": True, "trouble": ""}


def helper(out: Any, event: Any) -> None:
    out.write(1, key=event.key)


def program() -> Processor:
    app = Processor("nyc/delays", dead_letter="nyc/errors")
    flights, weather = app.input("nyc/flights", value=json), app.input("nyc/weather", value=json)
    hours, late = app.output("nyc/hours", value=json), app.output("nyc/late")
    totals = app.store("totals", value=json)
    windows = app.windows("hourly", 3600, value=json, late=late)
    fees = app.table("nyc/fees", value=json)
    unused = app.store("unused")
    by_place = {"unused": unused}

    @app.timer("quiet")
    def quiet(key: bytes, due: int) -> None:
        hours.write(due, key=key)

    def put(event: Any) -> None:
        for window in windows.of(event):
            window.value = fees.get(event.key)

    @app.on(flights, weather)
    def count(event: Any) -> None:
        totals[event.key] = 1
        put(event)
        quiet.set(event.key, at=1)
        by_place.clear()

    @windows.on_close
    def closed(window: Any) -> None:
        helper(hours, window)

    return app


def test_a_program_says_what_its_handlers_use() -> None:
    found = read_topology(topology_of(program()))
    assert found is not None
    calls = {one.name: (set(one.of), set(one.uses), set(one.writes)) for one in found.calls}
    assert calls == {
        "count": ({"nyc/flights", "nyc/weather"}, {"totals", "hourly", "quiet", "nyc/fees"}, set()),
        "quiet": ({"quiet"}, set(), {"nyc/hours"}),
        "closed": ({"hourly"}, set(), {"nyc/hours"}),
    }
    assert found.late == {"hourly": "nyc/late"}
    assert found.outputs == ("nyc/hours", "nyc/late")
    assert found.dead_letter == "nyc/errors"
    assert found.stores["quiet"] == "a timer by event time"


def test_words_are_handlers_that_use_a_store() -> None:
    found = read_topology(topology_of(words_app))
    assert found is not None
    for call in found.calls:
        assert call.of, call
    named = {name for call in found.calls for name in (*call.uses, *call.of)}
    assert named >= set(found.stores)
    written = {name for call in found.calls for name in call.writes} | set(found.late.values())
    unused = {f"{words_app.scope}/late-{word}" for word in ("expiring", "periodic")}
    assert written == set(found.outputs) - unused


def test_a_method_of_the_program_names_its_attributes() -> None:
    found = read_topology(topology_of(DerivedTable("nyc/flights", "by-place", lambda _, row: row)))
    assert found is not None
    (call,) = found.calls
    assert (call.uses, call.writes) == (("entries",), ("nyc/flights-by-place-v1",))


def test_the_tree_names_everything() -> None:
    found = read_topology(topology_of(program()))
    assert found is not None
    lines = list(
        tree(found, [{"stream": f"nyc/{name}", **BEHIND} for name in ("flights", "weather")])
    )
    uses = found.calls[0].uses
    assert uses == ("quiet", "totals", "nyc/fees", "hourly")
    assert lines[:8] == [
        "nyc/flights  (12 behind, 1.5 s)",
        "└─ count",
        *(f"   {line}─ [{name}]" for line, name in zip("├├├└", uses, strict=True)),
        "nyc/weather  (12 behind, 1.5 s)",
        "└─ count …",
    ]
    assert "stores of no handler that is known: unused" in lines
    assert "dead letters: nyc/errors" in lines
    assert "└─ late events > nyc/late" in lines
    text = "\n".join(lines)
    for name in (*found.stores, *found.outputs, *found.tables):
        assert name in text
    assert max(map(len, lines)) <= 60


def test_a_topology_that_is_too_long_loses_its_parts() -> None:
    app = Processor("nyc/p")
    for number in range(100):
        source = app.input(f"nyc/in-{number}")
        store = app.store(f"store-{number:03d}-{'x' * 20}")

        def use(event: Any, store: Any = store) -> None:
            store[event.key] = b""

        app.on(source)(use)
    text = topology_of(app)
    assert 0 < len(text) <= TOPOLOGY.value
    found = read_topology(text)
    assert found is not None
    assert (found.calls, len(found.stores)) == ((), 100)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "[" * 100_000, '{"calls": 7, "stores": [], "late": "x", "outputs": {}}',
        '{"calls": [7, {"name": 7, "of": [7, "nyc/in"], "uses": null}], "stores": {"a": 7}}',
    ],
)  # fmt: skip
def test_what_is_no_topology_is_drawn_as_far_as_it_is_one(text: str) -> None:
    found = read_topology(text) or Topology()
    assert list(tree(found, [{"stream": "nyc/in", **BEHIND}]))
    assert picture(found, [{"stream": "nyc/in", **BEHIND}], "t").startswith("<svg")


def test_hostile_names_are_text() -> None:
    evil = "<script>alert(1)</script>\x1b[2J'\""
    text = json.dumps(
        {
            "calls": [{"name": evil, "of": ["nyc/in"], "uses": [evil], "writes": [evil]}],
            "stores": {evil: evil},
            "outputs": [evil],
        }
    )
    found = read_topology(text)
    assert found is not None
    drawn = picture(found, [{"stream": "nyc/in", **BEHIND}], evil)
    assert "<script" not in drawn
    assert "\x1b" not in drawn
    assert "&lt;script&gt;" in drawn


def test_a_worker_declares_it_and_a_describer_reads_it() -> None:
    with MemoryCluster().connect() as client:
        for name in ("flights", "weather", "hours", "late", "errors"):
            client.create_stream(f"nyc/{name}")
        client.create_table("nyc/fees")
        make_processor(client, program())
        declared = read_topology(client.processor("nyc/delays", topology=True).topology)
        assert declared == read_topology(topology_of(program()))
        assert client.processor("nyc/delays").topology == "", (
            "a worker of an older release reads that"
        )


def test_a_cluster_of_a_lower_level_has_none() -> None:
    with MemoryCluster(feature_level=1).connect() as client:
        for name in ("flights", "weather", "hours", "late", "errors"):
            client.create_stream(f"nyc/{name}")
        client.create_table("nyc/fees")
        make_processor(client, program())
        assert client.processor("nyc/delays", topology=True).topology == ""
