"""A scenario of a stream's life: altered, truncated, deleted under transactions by a client that never gives up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from anabranch.core import rows as k
from anabranch.ports import Log
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode
from anabranch.topics.names import journal_topic, stream_topic, topics_of
from tests.crash.oracle import read_status, read_stream
from tests.crash.raw import Raw
from tests.crash.scenario import LONG_MS, WIDE, Scenario

MORTAL = "mortal"
RETENTION = {"retention.ms": "86400000"}
SOON_S = 5.0


@dataclass
class Living(Scenario):
    """Two streams: one that lives on, and must not notice; one that dies, and is there again.

    ``lived``: what was written to the latter, by transaction.
    """

    ends: ClassVar[dict[str, str]] = dict.fromkeys(("old", "journal", "open", "new"), "COMMITTED")
    partitions: ClassVar[dict[str, int]] = {WIDE: 2}
    lived: dict[str, list[bytes]] = field(default_factory=dict)

    @property
    def mortal(self) -> str:
        return f"{self.scope}/{MORTAL}"

    @property
    def steps(self) -> list[tuple[str, Callable[[], None]]]:
        return [
            ("create both streams", self.create),
            ("a one-shot to both", lambda: self.shot("old")),
            ("a commit to both", self.journal),
            ("alter", self.alter),
            ("write and keep open", lambda: self.begin_and_write("open")),
            ("truncate", self.truncate),
            ("delete too early", self.delete_early),
            ("commit what was open", lambda: self.commit("open")),
            ("delete", self.delete),
            ("delete again", self.delete),
            ("create again", self.create_again),
            ("a one-shot to both again", lambda: self.shot("new")),
        ]

    # -- steps ----------------------------------------------------------------------------------------

    def create(self) -> None:
        former = self.client
        self.operator = Raw(
            "", former.prefix, former.log, former.producer, lane=ADMIN_LANE, idle=former.idle
        ).start()
        super().create()
        self.create_again()

    def create_again(self) -> None:
        found = self.client.ask(r.CreateStream(self.mortal, 2, {})).streams[0]
        assert (found.stream, len(found.segments), found.settings) == (self.mortal, 2, {})
        # The client's producer has to know the new topic.
        self.client.producer.list_topics(journal_topic(self.mortal), timeout=10)
        self.shows()

    def shot(self, which: str) -> None:
        one_shot = self._one_shot_command(which, 4)
        mine = [r.Event(self.mortal, -1, key, value, (), -1) for key, value in self.live(which, 4)]
        self._acknowledge(
            which, self.client.ask(one_shot._replace(events=(*one_shot.events, *mine)))
        )
        self.shows(which)

    def live(self, which: str, count: int) -> list[tuple[bytes, bytes]]:
        """Payloads for the mortal stream."""
        events = self._events(which, self.mortal, count)
        self.lived[which] = self.written[which].pop(self.mortal)
        return events

    def journal(self) -> None:
        self.begin_and_write("journal")
        self.commit("journal")
        self.shows("old", "journal")

    def begin_and_write(self, which: str) -> None:
        token = self._begin(which, None, LONG_MS)
        wide, mortal = self._touch(token, WIDE), self._touch(token, MORTAL)
        pen = self._pen(which)
        self._write(pen, which, wide, 4)
        pen.write(mortal.stream, mortal.segments, self.live(which, 6))
        self.client.ask(r.Register(token, pen.receipt()))

    def alter(self) -> None:
        found = self.operator.ask(r.AlterStream(self.mortal, RETENTION, ())).streams[0]
        assert found.settings == RETENTION
        topic, until = stream_topic(self.mortal), time.monotonic() + SOON_S
        while True:
            config = self.client.log.describe_topics([topic])[topic].config
            if config["retention.ms"] == RETENTION["retention.ms"]:
                return
            assert time.monotonic() < until, config
            time.sleep(0.02)

    def truncate(self) -> None:
        until = self.acknowledged["old"].commit_timestamp
        self.operator.ask(r.TruncateStream(self.mortal, until))
        self.shows("journal")

    def delete_early(self) -> None:
        """A transaction has written to it."""
        self._refused("IllegalState", r.DeleteStream(self.mortal), by=self.operator)
        self.shows("journal")

    def delete(self) -> None:
        self.operator.ask(r.DeleteStream(self.mortal))
        assert not self.client.log.describe_topics(topics_of(self.mortal))

    # -- the checks -----------------------------------------------------------------------------------

    def shows(self, *whichs: str) -> None:
        """The mortal stream has exactly what these wrote."""
        log = read_stream(self.client.log, self.mortal, self.client.idle)
        for which, values in self.lived.items():
            wanted = sorted(values) if which in whichs else []
            assert log.values(self.ids[which]) == wanted, f"{which} in {self.mortal}"

    def check_end(self, log: Log, auditor: Raw) -> None:
        super().check_end(log, auditor)
        self.shows("new")
        row: Any = decode(read_status(log, auditor.prefix).rows[k.stream_key(self.mortal)])
        assert (row.state, row.change, row.settings) == ("ACTIVE", None, {}), row
