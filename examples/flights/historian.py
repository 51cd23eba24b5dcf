"""The roles that scale a stream, and that report and draw its history."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from anabranch.cli.options import connected
from examples.flights.child import Say
from examples.flights.writers import target_from

_MOST_EPOCHS = 200


class Epoch(NamedTuple):
    """A stream epoch, from the history. ``big``: the big transaction was committed in it."""

    epoch: int
    reference: int
    segments: int
    commits: int
    big: bool

    def __str__(self) -> str:
        """The epoch as a line of the report."""
        words = f"{self.epoch}: {self.segments} segments"
        if self.reference != self.epoch:
            words += f", duplicates {self.reference}"
        return words + (", takes the transaction" if self.big else "")


def scale(parameters: Mapping[str, Any], say: Say, finish: Event) -> None:
    with connected(target_from(parameters)) as client:
        found = client.scale(parameters["stream"], segments=parameters["segments"])
    say("scaled", segments=len(found.segments), epoch=found.stream_epoch, done=time.monotonic())


def tell(parameters: Mapping[str, Any], say: Say, finish: Event) -> None:
    """Report the stream's epochs, and in which of them a transaction was committed; draw them."""
    from anabranch.presentation.history import draw, read_history

    stream = parameters["stream"]
    with connected(target_from(parameters)) as client:
        past = read_history(client.reader_ports(), stream, last=_MOST_EPOCHS)
    Path(parameters["picture"]).write_text(
        draw(past.epochs, past.commits, f"Stream {stream}"), encoding="utf-8"
    )
    say(
        "history",
        epochs=[
            Epoch(
                epoch.stream_epoch,
                epoch.reference_epoch,
                len(epoch.segments),
                len(commits := past.of_epoch(epoch.stream_epoch)),
                any(commit.txn_id.hex() == parameters["txn_id"] for commit in commits),
            )._asdict()
            for epoch in past.epochs
        ],
    )
