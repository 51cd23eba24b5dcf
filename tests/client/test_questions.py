"""Questions to the brokers alone: how long they may take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from anabranch.client.client import Client
from anabranch.errors import InvalidArgument
from anabranch.reading.iteration import Readers
from tests.client.world import World
from tests.tables.worlds import reader_ports


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.count_events("s/x", timeout=-1),
        lambda client: client.groups(timeout=-1),
        lambda client: client.group("g", timeout=-1),
        lambda client: client.reset_group("g", "s/x", "end", timeout=-1),
        lambda client: client.stored("s/p", "store", b"k", timeout=-1),
        lambda client: client.mirror("s/p", timeout=-1),
        lambda client: client.lag(cast("Any", None), timeout=-1),
    ],
)
def test_each_takes_a_time_out(ask: Callable[[Client], object]) -> None:
    world = World()
    readers = Readers(replace(reader_ports(world), groups=cast("Any", object())), 30.0)
    world.client._shared.ports = replace(world.client._shared.ports, readers=readers)
    with pytest.raises(InvalidArgument, match="timeout -1: seconds, 0 or more"):
        ask(world.client)
