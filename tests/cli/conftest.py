"""The fake client in every command's hands, and a way to run commands as a shell would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner, Result
from typer.main import get_command

from anabranch.cli import options
from anabranch.cli.main import app
from anabranch.cli.options import Target
from anabranch.reading import group_lag
from tests.cli.fakes import FakeClient

Run = Callable[..., Result]
COMMAND: Any = get_command(app)  # made once: that takes longer than most commands


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """The client that every command gets."""
    client = FakeClient()

    @contextmanager
    def connected(target: Target) -> Iterator[FakeClient]:
        client.target = target
        yield client

    monkeypatch.setattr(options, "connected", connected)
    monkeypatch.setattr(options, "losses_of", lambda _: client.losses)
    monkeypatch.setattr(options, "topic_sizes_of", lambda _, topics: {topics[0]: 123_456})
    monkeypatch.setattr(group_lag, "count_streams", lambda *_: client.counts)
    return client


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command line; the address of a broker is set unless ``bootstrap`` is None."""

    def invoke(
        *arguments: str, bootstrap: str | None = "fake:9092", lane: str | None = None
    ) -> Result:
        monkeypatch.delenv("ANABRANCH_BOOTSTRAP", raising=False)
        for name in ("LANE", "KAFKA_FILE", "PREFIX"):
            monkeypatch.delenv(f"ANABRANCH_{name}", raising=False)
        if bootstrap is not None:
            monkeypatch.setenv("ANABRANCH_BOOTSTRAP", bootstrap)
        if lane is not None:
            monkeypatch.setenv("ANABRANCH_LANE", lane)
        return CliRunner().invoke(COMMAND, list(arguments))

    return invoke
