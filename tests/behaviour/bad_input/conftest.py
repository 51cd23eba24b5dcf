"""Bad input of every kind: a named error or a counted rejection, and nothing else is disturbed.

Beside each case a healthy transaction of two writers is open; it commits at the end, whole and soon.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import anabranch
from anabranch.ports import Log
from tests.behaviour.bad_input.place import SEGMENTS, Place, beside
from tests.cluster import Cluster
from tests.crash.raw import Raw


@pytest.fixture
def raw(cluster: Cluster, log: Log) -> Raw:
    return Raw(cluster.bootstrap, cluster.prefix, log).start()


@pytest.fixture
def place(
    cluster: Cluster, client: anabranch.Client, raw: Raw, log: Log, unique: str
) -> Iterator[Place]:
    """Something bad happens here; the transaction beside it commits whole, and soon."""
    made = Place(cluster, client, raw, log, f"bad{unique}")
    client.create_stream(made.stream, segments=SEGMENTS)
    with beside(client, made.stream) as healthy:
        yield made
    seen = [value for value in made.visible() if value.startswith(b"healthy")]
    assert seen == sorted(healthy)
