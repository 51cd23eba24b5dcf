"""A network in front of one broker that can make it answer as a broker does that has just started.

Such a broker has not read the cluster's metadata yet: it names no brokers, and knows no topics (KRaft; seen on
restarts of 4.3.1, and of others in librdkafka #5301).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import socket
import struct
import threading
from dataclasses import replace
from types import TracebackType
from typing import Any

from kio.serial import entity_reader, entity_writer

from tests.faults.proxy_frames import FIND_COORDINATOR, METADATA, read_frame

_HOST = "127.0.0.1"
_UNKNOWN_TOPIC = 3
# api -> (kio's module, kio's name, the first version with tags in the answer's header)
_READ = {
    METADATA: ("metadata", "MetadataResponse", 9),
    FIND_COORDINATOR: ("find_coordinator", "FindCoordinatorResponse", 3),
}


class BlindBroker:
    """Answers name this proxy, so that clients stay with it; while it is ``blind``, they name nobody."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.blind = threading.Event()
        self.told = threading.Event()  # somebody was answered while it was blind
        self._target = target
        self._listener = socket.create_server((_HOST, 0))
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def bootstrap(self) -> str:
        return f"{_HOST}:{self._port}"

    @property
    def _port(self) -> int:
        return int(self._listener.getsockname()[1])

    def __enter__(self) -> BlindBroker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # closing alone does not wake who reads
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                broker = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += (client, broker)
            asked: dict[int, tuple[int, int]] = {}
            for work in (self._requests, self._answers):
                threading.Thread(target=work, args=(client, broker, asked), daemon=True).start()

    def _requests(
        self, client: socket.socket, broker: socket.socket, asked: dict[int, tuple[int, int]]
    ) -> None:
        with contextlib.suppress(OSError):
            while True:
                frame = read_frame(client)
                api, version, correlation = struct.unpack_from(">hhi", frame, 4)
                if api in _READ:
                    asked[correlation] = (api, version)
                broker.sendall(frame)
        broker.close()

    def _answers(
        self, client: socket.socket, broker: socket.socket, asked: dict[int, tuple[int, int]]
    ) -> None:
        with contextlib.suppress(OSError):
            while True:
                body = read_frame(broker)[4:]
                known = asked.pop(int.from_bytes(body[:4], "big"), None)
                if known is not None:
                    body = self._changed(*known, body)
                client.sendall(len(body).to_bytes(4, "big") + body)
        client.close()

    def _changed(self, api: int, version: int, body: bytes) -> bytes:
        module, name, flexible = _READ[api]
        kind = getattr(importlib.import_module(f"kio.schema.{module}.v{version}.response"), name)
        begin = 5 if version >= flexible else 4
        answer = entity_reader(kind)(body[begin:], 0)[0]
        out = io.BytesIO()
        changed = self._metadata(answer) if api == METADATA else self._coordinators(answer)
        entity_writer(kind)(out, changed)
        return body[:begin] + out.getvalue()

    def _metadata(self, answer: Any) -> Any:
        if not self.blind.is_set():
            return replace(answer, brokers=tuple(map(self._here, answer.brokers)))
        self.told.set()
        topics = tuple(
            replace(topic, error_code=type(topic.error_code)(_UNKNOWN_TOPIC), partitions=())
            for topic in answer.topics
        )
        return replace(answer, brokers=(), topics=topics)

    def _coordinators(self, answer: Any) -> Any:
        if hasattr(answer, "coordinators"):
            return replace(answer, coordinators=tuple(map(self._here, answer.coordinators)))
        return self._here(answer)

    def _here(self, broker: Any) -> Any:
        return replace(broker, host=_HOST, port=type(broker.port)(self._port))
