"""Inputs of processors: each is the topic that it was."""

from __future__ import annotations

from collections.abc import Mapping

from anabranch.errors import IllegalState
from anabranch.schemas.records import ProcessorInput


def check_same_topic(topic: str, wanted: ProcessorInput, ids: Mapping[str, str]) -> None:
    """`IllegalState` if a topic has another id than the processor was made with, if both are known."""
    found = ids.get(topic, "")
    if wanted.topic_id and found and found != wanted.topic_id:
        raise IllegalState(
            f"{topic} is another topic than the one that the processor was made for: its stream was forgotten and "
            "created again. Make another processor"
        )
