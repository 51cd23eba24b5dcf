"""The one mapping between options of `anabranch controller` and `ControllerOptions`."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from unittest.mock import MagicMock, Mock

import pytest

from anabranch.cli import cluster
from anabranch.cli.controller import Given, arguments_of
from anabranch.controller import service
from anabranch.controller.config import ControllerOptions, parse_place
from anabranch.errors import InvalidArgument
from anabranch.infra import __main__ as infra
from anabranch.infra import broker
from anabranch.infra.process import SupervisedProcess
from tests.cli.conftest import Run


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[ControllerOptions]:
    found: list[ControllerOptions] = []

    def run_controller(options: ControllerOptions) -> int:
        found.append(options)
        return 6

    monkeypatch.setattr(service, "run_controller", run_controller)
    return found


def test_every_field_has_an_option() -> None:
    options = {field.name for field in fields(Given)} - {
        "verbose",
        "kafka_file",
        "config",
        "log_json",
    }
    assert options == {field.name for field in fields(ControllerOptions)}


def test_the_defaults_are_those_of_the_options(run: Run, started: list[ControllerOptions]) -> None:
    assert run("controller").exit_code == 6, "the controller's exit code is the command's"
    assert started == [ControllerOptions(bootstrap="fake:9092", data_dir=Path("anabranch-data"))]


def test_options_come_back_from_their_arguments(
    run: Run, started: list[ControllerOptions], tmp_path: Path
) -> None:
    options = ControllerOptions(
        bootstrap="a:1,b:2",
        data_dir=tmp_path / "data",
        prefix="p",
        control_partitions=3,
        replication_factor=2,
        session_timeout_s=2.5,
        retention_s=60.0,
        max_open=7,
        max_streams=5,
        max_partitions=6,
        skip_commands=("0:17", "etl/1:2"),
        lanes_only=True,
        trusts_open=True,
        max_uncommitted_bytes=8,
        chunk_bytes=9,
        max_message_bytes=8 << 20,
        collate_s=0.5,
        move_bytes=11,
        lost_after_s=12.0,
        native_timeout_s=9.0,
        max_clock_skew_s=13.0,
        clock_error_ms=14,
        status_file=tmp_path / "status",
        http="127.0.0.1:9464",
        log_format="json",
        kafka={"security.protocol": "SSL", "sasl.password": "a=b c"},
    )
    defaults = ControllerOptions(bootstrap="x", data_dir=Path("y"))
    for field in fields(options):
        assert getattr(options, field.name) != getattr(defaults, field.name)
    run(*arguments_of(options))
    assert started == [options]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("0:17", ("open", 0, 17)),
        ("open/0:17", ("open", 0, 17)),
        ("etl/3:2", ("etl", 3, 2)),
        *(
            (text, None)
            for text in ("0", "0:", ":1", "0:-1", "/0:1", "Etl/0:1", "a/b/0:1", "etl/", "0:1/etl")
        ),
    ],
)
def test_the_place_of_a_command(text: str, place: tuple[str, int, int] | None) -> None:
    with nullcontext() if place else pytest.raises(InvalidArgument):
        assert parse_place(text) == place


def test_without_a_broker_nothing_starts(run: Run, started: list[ControllerOptions]) -> None:
    assert run("controller", bootstrap=None).exit_code == 2
    assert started == []


def test_dev_starts_a_killed_controller_again_and_ends_with_one_that_failed(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started, slept = [Mock(**{"poll.return_value": code}) for code in (None, -9, 143, 1)], Mock()
    start = Mock(side_effect=started)
    monkeypatch.setattr(SupervisedProcess, "start", start)
    monkeypatch.setattr(cluster, "_KERNELS", tmp_path)  # which has no compiled code
    monkeypatch.setattr(broker, "EmbeddedBroker", MagicMock())
    monkeypatch.setattr(infra, "prepare", lambda _: False)
    monkeypatch.setattr(cluster, "await_leader", Mock())
    monkeypatch.setattr(cluster, "raise_feature_level", Mock())
    monkeypatch.setattr(time, "sleep", slept)
    done = run("dev", "--folder", str(tmp_path))
    assert done.output.count("controller-1 was killed; it is started again in 6 s") == 2
    assert "ChildFailed: controller-1 ended with exit code 1 " in done.output
    assert [call.args for call in slept.mock_calls].count((6.0,)) == 2
    assert start.call_args_list[0].args[0][-1] == "import anabranch.batches.kernels.scan"
    started[0].close.assert_called_once()


def test_a_controller_that_crashed_was_not_killed() -> None:
    killed = []
    for code in (None, 0, 1, -11, -6, -9, -15, 143):
        process = cluster.ControllerProcess.__new__(cluster.ControllerProcess)
        process._process = Mock(**{"poll.return_value": code})
        killed += [code] if process.was_killed else []
    assert killed == [-9, -15, 143]
