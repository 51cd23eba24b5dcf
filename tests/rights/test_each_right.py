"""Each right of the table is needed: without it somebody is told so by its name, and others go on."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

import anabranch
from anabranch import Client, errors
from anabranch.cli.main import app
from anabranch.infra.sockets import free_port
from anabranch.kafka.log import KafkaLog
from anabranch.ports import LogError
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.topics import rights
from anabranch.topics.creation import create_control_topics
from anabranch.topics.names import (
    commands_topic,
    control_topic,
    controllers_group,
    history_topic,
    journal_topic,
    of_scope,
    of_transactions,
    replies_topic,
    status_topic,
    stream_topic,
    transactional_ids,
)
from anabranch.topics.rights import Right
from tests.cluster import ControllerProcess, words
from tests.secured import SecuredBroker
from tests.secured_lanes import at_last

pytestmark = pytest.mark.broker
KEPT, TAKEN = "near/a", "shop/a"  # of control partitions 1 and 0
GROUP = "billing"
SOON_S = 30.0
CONTROLLER, OPERATOR, WRITER, READER = "controller", "operator", "writer", "reader"
RESETTER, WATCHER, DOCTOR = "resetter", "watcher", "doctor"
USERS = CONTROLLER, OPERATOR, WRITER, READER, RESETTER, WATCHER, DOCTOR
FIRST_START = "Create", "DescribeConfigs"


class Place:
    """A broker with everybody's rights as in the table, a controller and clients."""

    def __init__(
        self, secured: SecuredBroker, controller: ControllerProcess, http: str, open_: ExitStack
    ) -> None:
        self.http = http
        self.secured = secured
        self.controller = controller
        self.operator, self.writer, self.reader, self.resetter, self.watcher = (
            open_.enter_context(self.connected(user)) for user in USERS[1:-1]
        )
        self.log = KafkaLog(secured.broker.bootstrap)  # by the plain listener: may do everything
        self.own = KafkaLog(secured.bootstrap, secured.options(CONTROLLER))
        self.numbers = count(2)
        self.fenced = False

    def close(self) -> None:
        for log in (self.log, self.own):
            log.close()

    def connected(self, user: str) -> Client:
        lane = ADMIN_LANE if user == OPERATOR else OPEN_LANE
        options = self.secured.options(user)
        return anabranch.connect(self.secured.bootstrap, lane=lane, config=options, timeout=2)

    @contextmanager
    def without(self, user: str, right: Right) -> Iterator[None]:
        taken = [right]
        if right.operation == "DescribeConfigs":  # the other one brings it along
            found = rights.controller_rights("anabranch", "near", "shop")
            taken += [r for r in found if (r.name, r.operation) == (right.name, "AlterConfigs")]
        self.secured.revoke(user, taken)
        try:
            yield
        finally:
            self.secured.grant(user, taken)

    def new_lead(self) -> None:
        """Make the leaders of both control partitions begin anew."""
        if not self.fenced:
            for number in (0, 1):
                self.log.producer(transactional_ids(number)[0], timeout=60).close()
        self.fenced = True
        self.operator.describe(KEPT)
        self.operator.describe(TAKEN)
        self.fenced = False

    def forget_lost(self) -> None:
        there = {stream.stream: stream for stream in self.operator.streams()}
        lost = there.get("shop/lost")
        if lost is None:  # a call before this one was cut off behind its first half
            self.operator.create_stream("shop/lost")
            raise errors.NotReady("it is not lost yet")
        if lost.state == "ACTIVE":
            journal = self.log.describe_topics([journal_topic(lost.stream)])
            self.log.delete_topics(list(journal.values()))
            raise errors.NotReady("it is not lost yet")
        self.operator.forget_stream(lost.stream)
        self.operator.create_stream(lost.stream)


def commit(client: Client, stream: str) -> None:
    with client.begin(stream.partition("/")[0]) as txn:
        txn.write(stream, b"v")
        txn.flush()  # into the journal: a client may bring few events along with the commit, without its right
        txn.commit()


def read(client: Client, group: str | None) -> None:
    with client.read(TAKEN, group=group, timeout=5) as reader:
        next(reader)


def read_cut(client: Client) -> None:
    assert list(client.snapshot(TAKEN).read(TAKEN))


def write_big(place: Place) -> None:
    """An event above Kafka's own limit, by a client that has to ask for the topic's."""
    with place.connected(WRITER) as fresh, fresh.begin("shop") as txn:
        txn.write(TAKEN, b"v" * 1_500_000)
        txn.flush()
        txn.commit()


def ask_directory(place: Place) -> None:
    """A client that does not know yet where a scope is served has the directory tell that controller."""
    with place.connected(OPERATOR) as fresh:
        fresh.create_stream(KEPT)


def reset(place: Place) -> None:
    place.resetter.reset_group(GROUP, TAKEN, "begin")


def watch(place: Place) -> None:
    """The group stands in the stream; what keeps its lag from being told is told in its place."""
    listed = [group for group in place.watcher.groups(TAKEN) if group.name == GROUP]
    standing = place.watcher.group(GROUP).streams
    if any(one.trouble for one in standing):
        raise errors.NotAuthorized(standing[0].trouble)
    if not listed or not standing:
        raise errors.InvalidArgument("it is not listed")
    assert listed[0].most.events > 0


def see_disks(place: Place) -> None:
    options = words(place.secured.options(DOCTOR))
    done = CliRunner().invoke(app, ["doctor", "-b", place.secured.bootstrap, *options, "--json"])
    rows = [row for row in json.loads(done.stdout)["rows"] if row["what"].startswith("disk")]
    assert rows
    if not all(row["told"].endswith("GB free") for row in rows):  # this machine's may be full
        raise errors.NotAuthorized(str(rows))


def be_assigned(place: Place) -> None:
    """`NotAuthorized` with what /ready says: a group's right is missed by no call of a client."""
    if place.controller.leading() != [0, 1]:
        try:
            with urlopen(f"http://{place.http}/ready", timeout=10):
                raise errors.NotReady("it does not lead yet")
        except HTTPError as unready:
            kind = (
                errors.NotAuthorized
                if "right" in (said := unready.read().decode())
                else errors.NotReady
            )
            raise kind(said) from unready


class Seen(NamedTuple):
    """What needs a right, and who goes on without it.

    ``logged``: only the controller's log says what is missing. ``unnamed``: an error that does not say it.
    """

    call: Callable[[Place], object]
    goes_on: Callable[[Place], object] | None = None
    logged: bool = True
    unnamed: type[errors.AnabranchError] | None = None


def write_kept(place: Place) -> None:
    commit(place.writer, KEPT)


def new_stream(place: Place) -> None:
    place.operator.create_stream(f"shop/n{next(place.numbers)}")


def asked(place: Place) -> None:
    place.operator.describe(TAKEN)


CONTROLLER_SEEN = {
    (commands_topic(), "Read"): Seen(asked),
    (control_topic(), "Read"): Seen(asked),
    (control_topic(), "Write"): Seen(ask_directory, write_kept),
    (status_topic(), "Read"): Seen(Place.new_lead),
    (status_topic(), "Write"): Seen(asked),
    (replies_topic(), "Write"): Seen(asked),
    (controllers_group(), "Read"): Seen(be_assigned, logged=False),
    (of_transactions(), "Write"): Seen(asked),
    (of_scope("shop"), "Create"): Seen(new_stream, write_kept, logged=False),
    (of_scope("shop"), "DescribeConfigs"): Seen(new_stream, write_kept, logged=False),
    (of_scope("shop"), "Read"): Seen(lambda p: commit(p.writer, TAKEN), write_kept),
    (of_scope("shop"), "Write"): Seen(lambda p: commit(p.writer, TAKEN), write_kept),
    (of_scope("shop"), "Alter"): Seen(
        lambda p: p.operator.scale(TAKEN, next(p.numbers)), write_kept, logged=False
    ),
    (of_scope("shop"), "AlterConfigs"): Seen(
        lambda p: p.operator.alter_stream(TAKEN, {"segment.ms": 10**9 + next(p.numbers)}),
        write_kept,
        logged=False,
    ),
    (of_scope("shop"), "Delete"): Seen(Place.forget_lost, write_kept, logged=False),
}
CLIENT_SEEN = {
    (OPERATOR, commands_topic(lane=ADMIN_LANE), "Write"): Seen(asked, write_kept, logged=False),
    (OPERATOR, replies_topic(lane=ADMIN_LANE), "Read"): Seen(asked, write_kept, logged=False),
    (WRITER, journal_topic(TAKEN), "Write"): Seen(
        lambda p: commit(p.writer, TAKEN), write_kept, logged=False
    ),
    (WRITER, journal_topic(TAKEN), "DescribeConfigs"): Seen(
        write_big, write_kept, logged=False, unnamed=errors.EventTooLarge
    ),
    (READER, stream_topic(TAKEN), "Read"): Seen(
        lambda p: read_cut(p.reader), write_kept, logged=False
    ),
    (READER, history_topic(TAKEN), "Read"): Seen(
        lambda p: read_cut(p.reader), write_kept, logged=False
    ),
    (READER, GROUP, "Read"): Seen(
        lambda p: read(p.reader, GROUP), lambda p: read(p.reader, None), logged=False
    ),
    **{
        (RESETTER, right.name, right.operation): Seen(reset, write_kept, logged=False)
        for right in rights.reader_rights([GROUP], TAKEN)
    },
    (WATCHER, stream_topic(TAKEN), "Describe"): Seen(  # brokers leave its offsets out
        watch, write_kept, logged=False, unnamed=errors.InvalidArgument
    ),
    (WATCHER, history_topic(TAKEN), "Read"): Seen(watch, write_kept, logged=False),
    (WATCHER, GROUP, "Describe"): Seen(watch, write_kept, logged=False),
    (DOCTOR, rights.THE_CLUSTER, "Describe"): Seen(see_disks, write_kept, logged=False),
}


@pytest.fixture(scope="module")
def place(secured: SecuredBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("each-right")
    with ExitStack() as open_:
        secured.grant(CONTROLLER, rights.controller_rights("anabranch", "near", "shop"))
        secured.grant(OPERATOR, rights.client_rights(lane=ADMIN_LANE))
        secured.grant(WRITER, [*rights.client_rights(), *rights.writer_rights(KEPT, TAKEN)])
        secured.grant(READER, [*rights.client_rights(), *rights.reader_rights([GROUP], TAKEN)])
        secured.grant(RESETTER, rights.reader_rights([GROUP], TAKEN))
        secured.grant(WATCHER, rights.watcher_rights([GROUP], TAKEN))
        secured.grant(DOCTOR, [*rights.client_rights(), *rights.doctor_rights()])
        http = f"127.0.0.1:{free_port()}"
        controller = ControllerProcess(
            secured.bootstrap,
            folder / "controller",
            arguments=(
                *words(secured.options(CONTROLLER)),
                *("--control-partitions", "2", "--session-timeout", "2", "--lost-after", "0.1"),
                *("--http", http),
            ),
        )
        with controller:
            controller.wait_leading()
            made = Place(secured, controller, http, open_)
            for stream in ("shop/lost", KEPT):  # the first scope is the directory's
                at_last(partial(made.operator.create_stream, stream))
            big = {"max.message.bytes": 2_000_000}
            at_last(partial(made.operator.create_stream, TAKEN, settings=big))
            at_last(lambda: commit(made.writer, TAKEN))
            at_last(partial(reset, made))
            yield made
            made.close()


def names(right: Right) -> str:
    return f"{right.kind}-{right.name}-{right.operation}"


def is_named(right: Right, text: str) -> bool:
    """Whether a line says which right is missing."""
    enough = "Read" if right.operation == "Describe" else "Describe"  # the one comes with the other
    said = rf"right ({right.operation}|{enough}) on the {right.kind.replace('-', ' ')} "
    return any(re.search(said, line) and right.name in line for line in text.splitlines())


def refusal(place: Place, seen: Seen) -> str | None:
    """What a call without the right is told, if anything; None: as expected, an error that does not name it."""
    try:
        seen.call(place)
    except errors.NotAuthorized as error:
        return str(error)
    except (errors.RetryError, errors.AskOutcomeError):
        pass  # not yet known, or nobody leads
    except errors.FixCallError as error:
        if type(error) is not seen.unnamed:
            raise
        return None
    return ""


def see(place: Place, user: str, right: Right, seen: Seen) -> None:
    """Without the right it is named, others go on; with it again all is well.

    A call that waits for a controller ends when the right is given back: its log has named it by then.
    """
    log = place.controller.log_file
    before, until, told = len(log.read_text()), time.monotonic() + SOON_S, ""
    with ThreadPoolExecutor(1) as beside:
        with place.without(user, right):
            while True:
                trying = beside.submit(refusal, place, seen)
                while seen.logged and not trying.done() and not is_named(right, told):
                    time.sleep(0.02)
                    told = log.read_text()[before:]
                found = told if seen.logged else trying.result()
                if found is None or is_named(right, found):
                    break
                assert time.monotonic() < until, f"nothing says {names(right)} is missing: {found}"
            if seen.goes_on is not None:
                at_last(partial(seen.goes_on, place))
        trying.result()
    at_last(lambda: seen.call(place))
    at_last(lambda: write_kept(place))


def in_part(*cases: object, first: bool) -> pytest.ParameterSet:
    """Those that are not among the first are left to scripts/soak."""
    return pytest.param(*cases, marks=[] if first else pytest.mark.soak)


@pytest.mark.parametrize(
    "right",
    [
        in_part(right, first=right.name == of_scope("shop"))
        for right in rights.controller_rights("anabranch", "shop")
        if right.name == of_scope("shop") or right.operation not in FIRST_START
    ],
    ids=names,
)
def test_a_controller_without(place: Place, right: Right) -> None:
    see(place, CONTROLLER, right, CONTROLLER_SEEN[right.name, right.operation])


@pytest.mark.parametrize(
    ("user", "right"),
    [
        in_part(user, right, first=user == WRITER)
        for user, rights_of_it in (
            (OPERATOR, rights.client_rights(lane=ADMIN_LANE)),
            (WRITER, rights.writer_rights(TAKEN)),
            (READER, rights.reader_rights([GROUP], TAKEN)),
            (RESETTER, rights.reader_rights([GROUP], TAKEN)),
            (WATCHER, rights.watcher_rights([GROUP], TAKEN)),
            (DOCTOR, rights.doctor_rights()),
        )
        for right in rights_of_it
    ],
    ids=lambda part: names(part) if isinstance(part, Right) else part,
)
def test_a_client_without(place: Place, user: str, right: Right) -> None:
    see(place, user, right, CLIENT_SEEN[user, right.name, right.operation])


@pytest.mark.parametrize(
    "number",
    [
        in_part(n, first=n % 2 == 0)
        for n, right in enumerate(rights.controller_rights())
        if right.operation in FIRST_START
    ],
    ids=lambda n: names([*rights.controller_rights()][n]),
)
def test_a_first_start_without(place: Place, number: int) -> None:
    """In an installation of its own, as topics are made once. Others lack nothing."""
    prefix = f"young{number}"
    granted = [*rights.controller_rights(prefix)]
    right = granted.pop(number)

    def start() -> None:
        create_control_topics(place.own, prefix, control_partitions=1)

    place.secured.grant(CONTROLLER, granted)
    until = time.monotonic() + SOON_S
    while True:
        with pytest.raises((errors.NotAuthorized, LogError)) as missing:
            start()
        if is_named(right, str(missing.value)):
            break
        assert time.monotonic() < until, missing.value  # what is granted is known a moment later
    place.secured.grant(CONTROLLER, [right])
    at_last(start)
