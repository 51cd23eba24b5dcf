"""An embedded cluster before its start: what it refuses, and what it tells its nodes. It runs in `tests/faults`."""

from __future__ import annotations

from pathlib import Path

import pytest

from anabranch.infra import cluster
from anabranch.infra.broker import EmbeddedBroker
from anabranch.infra.cluster import EmbeddedCluster
from anabranch.infra.errors import BrokerNotRunning, FolderMismatch, StartDeadlinePassed
from anabranch.infra.settings import Membership, server_properties


def properties(node: int, nodes: int) -> dict[str, str]:
    voters = {n: 20_000 + n for n in range(1, nodes + 1)}
    membership = Membership(node, voters, cluster_id="id")
    return server_properties(data=Path("/data"), port=9092, extra={}, membership=membership)


def test_a_node_of_three_replicates() -> None:
    found = properties(2, 3)
    assert found["node.id"] == "2"
    assert found["controller.quorum.voters"].count("@") == 3
    for name, value in found.items():
        if name.endswith("replication.factor"):
            assert value == "3", name
        if name.endswith((".min.isr", "min.insync.replicas")):
            assert value == "2", name
    assert found["unclean.leader.election.enable"] == "false"


def test_no_more_replicas_than_nodes() -> None:
    assert properties(1, 2)["default.replication.factor"] == "2"
    assert properties(1, 5)["default.replication.factor"] == "3"


def test_arguments(tmp_path: Path) -> None:
    for wrong in ({"brokers": 0}, {"brokers": 10}, {"brokers": 2, "ports": [9092]}):
        with pytest.raises(ValueError, match="broker"):
            EmbeddedCluster(folder=tmp_path / "wrong", **wrong)
    assert not (tmp_path / "wrong").exists()


def test_a_folder_of_three_brokers_does_not_fit_two(tmp_path: Path) -> None:
    first = EmbeddedCluster(3, tmp_path, ports=[30_001, 30_002, 30_003])
    assert first.bootstrap.count(",") == 2
    assert first.running == []
    with pytest.raises(BrokerNotRunning, match="no node 4"):
        first.node(4)
    assert EmbeddedCluster(3, tmp_path).folder == tmp_path
    with pytest.raises(FolderMismatch, match="of 3 brokers, not 2"):
        EmbeddedCluster(2, tmp_path)


def test_it_has_started_when_each_node_shows_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = EmbeddedCluster(3, tmp_path, ports=[30_001, 30_002, 30_003], start_timeout_s=0.2)
    asked: list[int] = []
    shows = [False, False, True, False, True, True]

    def is_ready(host: str, port: int, cluster_id: str, *, others: list[int]) -> bool:
        assert others == [30_001, 30_002, 30_003]
        asked.append(port)
        return shows.pop(0)

    monkeypatch.setattr(cluster, "is_ready", is_ready)
    monkeypatch.setattr(EmbeddedBroker, "start", lambda _: None)
    started.start()
    assert shows == []
    assert set(asked) == {30_001, 30_002, 30_003}
    monkeypatch.setattr(cluster, "is_ready", lambda *_, **__: False)
    with pytest.raises(StartDeadlinePassed, match="did not show the others within"):
        started.start()
