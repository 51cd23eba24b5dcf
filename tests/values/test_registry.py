"""The serializers with a real registry: what one client encodes, another decodes, under the stream's subject."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest

from anabranch.values import stream_of
from tests.values.apicurio import Apicurio
from tests.values.kinds import KINDS, REGISTRY


@pytest.fixture(scope="module")
def apicurio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apicurio]:
    with Apicurio(tmp_path_factory.mktemp("apicurio")) as running:
        yield running


@pytest.mark.network
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["avro", "protobuf"])
def test_what_one_client_encodes_another_decodes(
    kind: str, apicurio: Apicurio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REGISTRY, apicurio.url)
    stream = f"shop/{kind}"
    key, value = stream_of(stream, str, KINDS[kind].spec, "raise").encode("ann", KINDS[kind].value)
    assert (key, value and value[0]) == (b"ann", 0)
    reader = stream_of(stream, str, KINDS[kind].spec, "raise")
    assert reader.decode_row(b"ann", value or b"") == ("ann", KINDS[kind].value)
    with urllib.request.urlopen(f"{apicurio.url}/subjects") as answer:
        assert f"shop.{kind}-value" in json.load(answer)
