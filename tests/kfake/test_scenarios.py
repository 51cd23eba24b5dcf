"""A table of scenarios: kinds of brokers by steps of a user. Each step works, or is refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import anabranch
from tests.cluster import start_cluster
from tests.conftest import need_go
from tests.kfake.kinds import KINDS
from tests.kfake.server import Kfake
from tests.kfake.steps import BIG, STEPS, Place, Refused

pytestmark = [pytest.mark.broker, pytest.mark.slow(2)]

QUICK = ("Kafka 3.6",)
# What a kind can't do at all -> what the refusal names.
REFUSED = {("WarpStream", "altering"): "IncrementalAlterConfigs"}
KINDS_HERE = (
    "nothing missing",
    "nothing missing, 3 brokers",
    "Redpanda before 25.3, 1 broker",
    "WarpStream",
    "Kafka 3.6",
    "dry runs are bare",
)
FEW = 400


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in QUICK else pytest.mark.soak) for name in KINDS_HERE
    ],
)
def kind(request: pytest.FixtureRequest) -> str:
    """A column of the table."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def kfake(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kfake]:
    """A broker of the kind, until its steps are done."""
    need_go()
    with Kfake(KINDS[kind], tmp_path_factory.mktemp("kfake")) as broker:
        yield broker


@pytest.fixture(scope="module")
def place(kfake: Kfake, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """The broker with a controller that leads."""
    with place_on(kfake, tmp_path_factory.mktemp("place"), FEW) as made:
        yield made


@contextmanager
def place_on(
    broker: Kfake, folder: Path, events: int, timeout: float = 60, patience: float = 120
) -> Iterator[Place]:
    """A controller and clients on a broker; they end with the `with`."""
    quick = "--session-timeout", "2"
    cluster = start_cluster(broker.bootstrap, folder, arguments=quick)
    with (
        closing(anabranch.connect(broker.bootstrap, timeout=timeout)) as client,
        closing(anabranch.connect(broker.bootstrap, timeout=timeout, lane="admin")) as operator,
    ):
        try:
            yield Place(cluster, client, operator, folder, events, patience)
        finally:
            cluster.controller.kill()


@pytest.mark.parametrize("step", STEPS)
def test_steps(kind: str, place: Place, step: str) -> None:
    named = REFUSED.get((kind, step))
    if named is None:
        STEPS[step](place)
        return
    with pytest.raises(Refused) as refused:
        STEPS[step](place)
    assert named in str(refused.value)


@pytest.mark.soak
@pytest.mark.parametrize("name", KINDS_HERE)
def test_a_merge_of_many_events(name: str, tmp_path: Path) -> None:
    need_go()
    with Kfake(KINDS[name], tmp_path) as broker, place_on(broker, tmp_path, BIG // 2) as place:
        STEPS["merge"](place)


@pytest.mark.soak
def test_a_broker_is_killed_within_a_transaction(tmp_path: Path) -> None:
    """It comes back on its data: what was acknowledged is there."""
    need_go()
    broker = Kfake(KINDS["nothing missing"], tmp_path, keeps=True)
    with broker, place_on(broker, tmp_path, FEW) as place:
        scope = place.scope()
        stream = place.stream(f"{scope}/kept")
        with place.client.begin(scope, keepalive=120) as txn:
            for i in range(200):
                if i == 100:
                    txn.flush()
                    broker.kill()
                    broker.start()
                txn.write(stream, b"%d" % i, key=b"k%d" % (i % 7))
            txn.commit(timeout=120)
        assert place.committed(stream) == Counter(b"%d" % i for i in range(200))
