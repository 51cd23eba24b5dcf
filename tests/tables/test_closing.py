"""What a replica that could not be made leaves: nothing."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.errors import InvalidArgument
from anabranch.tables import replica as replica_module
from anabranch.tables.replica import ReadReplica, ReplicaSettings
from tests.client.world import World
from tests.tables.worlds import reader_ports


@pytest.mark.parametrize("fails", ["index", "store", "thread"])
def test_no_folder_and_no_open_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def refused(*_: object) -> Any:
        raise RuntimeError("refused")

    if fails != "index":
        where: tuple[Any, str] = (
            (replica_module, "Store") if fails == "store" else (threading.Thread, "start")
        )
        monkeypatch.setattr(*where, refused)
    index = {"i": cast("Any", "no function")} if fails == "index" else None
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    settings = ReplicaSettings(tables=("bank/one",), cluster_id="test", index=index)
    controller = cast("Any", SimpleNamespace(base=None))
    with pytest.raises((RuntimeError, InvalidArgument)):
        ReadReplica(reader_ports(World()), controller, settings)
    assert list(tmp_path.iterdir()) == []
