"""A question to a broker for which confluent-kafka has no call."""

from __future__ import annotations

import io
import socket
import struct

from kio.schema.api_versions.v3.request import ApiVersionsRequest
from kio.schema.api_versions.v3.response import ApiVersionsResponse
from kio.schema.request_header.v2.header import RequestHeader
from kio.serial import entity_reader, entity_writer
from kio.static.primitive import i16, i32


def finalized_features(bootstrap: str) -> dict[str, int]:
    """The levels of the cluster's finalized features, by name."""
    message = io.BytesIO()
    entity_writer(RequestHeader)(
        message,
        RequestHeader(
            request_api_key=i16(18),
            request_api_version=i16(3),
            correlation_id=i32(1),
            client_id="test",
        ),
    )
    entity_writer(ApiVersionsRequest)(
        message,
        ApiVersionsRequest(client_software_name="test", client_software_version="1"),
    )
    host, _, port = bootstrap.split(",")[0].rpartition(":")
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.sendall(struct.pack(">i", message.tell()) + message.getvalue())
        with connection.makefile("rb") as stream:
            (size,) = struct.unpack(">i", stream.read(4))
            answer = stream.read(size)
    # ApiVersions answers with header version 0: the correlation id alone.
    response, _ = entity_reader(ApiVersionsResponse)(answer, 4)
    return {str(f.name): int(f.max_version_level) for f in response.finalized_features}
