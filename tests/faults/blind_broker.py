"""A broker that answers as one does that has just started.

It has not read the cluster's metadata yet: it names no brokers, and knows no topics (KRaft; seen on restarts of
4.3.1, and of others in librdkafka #5301).
"""

from __future__ import annotations

import importlib
import io
import threading
from dataclasses import replace

from kio.serial import entity_reader, entity_writer

from tests.faults.proxy import Action, Change
from tests.faults.proxy_frames import METADATA, Request

_UNKNOWN_TOPIC = 3
_FLEXIBLE = 9  # the first version of Metadata with tags in its answer's header


class Blindness:
    """A `Policy`: while ``blind`` is set, answers to Metadata name no broker. ``told``: one was given."""

    def __init__(self) -> None:
        self.blind = threading.Event()
        self.told = threading.Event()

    def __call__(self, request: Request) -> Action | None:
        if request.api == METADATA and self.blind.is_set():
            return Change(self._nobody)
        return None

    def _nobody(self, request: Request, answer: bytes) -> bytes:
        """The answer (a frame) without brokers, and with topics that are not known."""
        module = importlib.import_module(f"kio.schema.metadata.v{request.version}.response")
        body = (
            9 if request.version >= _FLEXIBLE else 8
        )  # after the length, the correlation id, the tags
        found = entity_reader(module.MetadataResponse)(answer[body:], 0)[0]
        topics = tuple(
            replace(topic, error_code=type(topic.error_code)(_UNKNOWN_TOPIC), partitions=())
            for topic in found.topics
        )
        out = io.BytesIO()
        entity_writer(module.MetadataResponse)(out, replace(found, brokers=(), topics=topics))
        frame = answer[4:body] + out.getvalue()
        self.told.set()
        return len(frame).to_bytes(4, "big") + frame
