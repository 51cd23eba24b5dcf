"""Questions to a broker for which confluent-kafka has no call."""

from __future__ import annotations

import io
import socket
import struct
from datetime import timedelta
from typing import Any

from kio.schema.api_versions.v3.request import ApiVersionsRequest
from kio.schema.api_versions.v3.response import ApiVersionsResponse
from kio.schema.request_header.v2.header import RequestHeader
from kio.schema.update_features.v1.request import FeatureUpdateKey, UpdateFeaturesRequest
from kio.schema.update_features.v1.response import UpdateFeaturesResponse
from kio.serial import entity_reader, entity_writer
from kio.static.primitive import i8, i16, i32, i32Timedelta

_TIMEOUT_S = 30
_UNSAFE_DOWNGRADE = 3


def finalized_features(bootstrap: str) -> dict[str, int]:
    """The levels of the cluster's finalized features, by name."""
    answer = _ask(
        bootstrap, ApiVersionsRequest(client_software_name="test", client_software_version="1")
    )
    # ApiVersions answers with header version 0: the correlation id alone.
    response, _ = entity_reader(ApiVersionsResponse)(answer, 4)
    return {str(f.name): int(f.max_version_level) for f in response.finalized_features}


def update_feature(bootstrap: str, name: str, level: int) -> None:
    """Bring a feature down to that level; what it loses by that does not matter to a test."""
    update = FeatureUpdateKey(
        feature=name, max_version_level=i16(level), upgrade_type=i8(_UNSAFE_DOWNGRADE)
    )
    answer = _ask(
        bootstrap,
        UpdateFeaturesRequest(
            timeout=i32Timedelta.parse(timedelta(seconds=_TIMEOUT_S)), feature_updates=(update,)
        ),
    )
    # The correlation id, and no tags.
    response, _ = entity_reader(UpdateFeaturesResponse)(answer, 5)
    assert response.error_code == 0, response.error_message


def _ask(bootstrap: str, request: Any) -> bytes:
    """The broker's answer, header and all."""
    message = io.BytesIO()
    entity_writer(RequestHeader)(
        message,
        RequestHeader(
            request_api_key=request.__api_key__,
            request_api_version=request.__version__,
            correlation_id=i32(1),
            client_id="test",
        ),
    )
    entity_writer(type(request))(message, request)
    host, _, port = bootstrap.split(",")[0].rpartition(":")
    with socket.create_connection((host, int(port)), _TIMEOUT_S) as connection:
        connection.sendall(struct.pack(">i", message.tell()) + message.getvalue())
        with connection.makefile("rb") as stream:
            (size,) = struct.unpack(">i", stream.read(4))
            return stream.read(size)
