"""Lanes on a broker with an authorizer: a principal for each, which comes in by that lane alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import anabranch
from anabranch.errors import AnabranchError
from anabranch.kafka.log import KafkaLog
from anabranch.ports import LogError
from anabranch.topics import rights
from tests.cluster import ControllerProcess, words
from tests.crash.raw import Raw, quick_producer
from tests.secured import SecuredBroker, secured_broker

CONTROLLER, OPERATOR = "controller", "operator"
SOON_S = 30.0
Grants = Mapping[str, Sequence[str]]  # pattern -> rights


@dataclass
class LanesPlace:
    """A secured broker, a controller, an operator, and how lanes' principals come in."""

    secured: SecuredBroker
    controller: ControllerProcess
    operator: anabranch.Client
    log: KafkaLog  # by the plain listener: may do everything
    prefix: str
    open_: ExitStack

    def client(self, user: str, lane: str | None = None, timeout: float = 5) -> anabranch.Client:
        """A client of a lane's principal, by default in its own lane."""
        connected = anabranch.connect(
            self.secured.bootstrap,
            prefix=self.prefix,
            lane=lane or user,
            config=self.secured.options(user),
            timeout=timeout,
        )
        return self.open_.enter_context(connected)

    def raw(self, user: str) -> Raw:
        """Commands and answers by hand, with the principal's rights."""
        options = self.secured.options(user)
        log = KafkaLog(self.secured.bootstrap, options)
        self.open_.callback(log.close)
        producer = quick_producer(self.secured.bootstrap, **options)
        return Raw(self.secured.bootstrap, self.prefix, log, producer, lane=user).start()

    def add(self, lane: str, granted: Grants) -> None:
        """A lane of the principal of the same name, with these grants and the journals' rights."""
        principal = [f"User:{lane}"]
        at_last(lambda: self.operator.add_lane(lane, principal, apply=True, adopt_topics=True))
        for pattern, granted_rights in granted.items():
            self.operator.grant(lane, pattern, list(granted_rights))


@contextmanager
def lanes_place(
    folder: Path,
    lanes: Mapping[str, Grants],
    streams: Sequence[str],
    *arguments: str,
    prefix: str = "anabranch",
) -> Iterator[LanesPlace]:
    """``lanes``: lane -> its grants; it may write to the journals of the streams that patterns name."""
    with secured_broker(folder, CONTROLLER, OPERATOR, *lanes) as secured, ExitStack() as stack:
        scopes = sorted({stream.partition("/")[0] for stream in streams})
        secured.grant(CONTROLLER, rights.controller_rights(prefix, *scopes))
        secured.grant(OPERATOR, rights.client_rights(prefix, "admin"))
        secured.grant(OPERATOR, rights.lane_maker_rights(prefix))
        controller = ControllerProcess(
            secured.bootstrap,
            folder / "controller",
            prefix,
            (*words(secured.options(CONTROLLER)), *arguments),
        )
        stack.enter_context(controller)
        log = KafkaLog(secured.broker.bootstrap)
        stack.callback(log.close)
        operator = anabranch.connect(
            secured.bootstrap,
            prefix=prefix,
            lane="admin",
            config=secured.options(OPERATOR),
            timeout=10,
        )
        stack.enter_context(operator)
        place = LanesPlace(secured, controller, operator, log, prefix, stack)
        controller.wait_leading()
        for stream in streams:
            at_last(lambda stream=stream: operator.create_stream(stream, segments=1))  # type: ignore[misc]
        for lane, granted in lanes.items():
            place.add(lane, granted)
            mine = [stream for stream in streams if stream in granted]
            if mine:
                secured.grant(lane, rights.writer_rights(*mine))
        yield place


def at_last(call: Callable[[], object], seconds: float = SOON_S) -> None:
    """Until it works: rights are believed, streams and leaders go on."""
    until = time.monotonic() + seconds
    while True:
        try:
            call()
            return
        except (AnabranchError, LogError):
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
