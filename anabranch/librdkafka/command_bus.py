"""The command bus on confluent-kafka: a producer of commands, and a consumer of one partition of replies."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty
from typing import NamedTuple, TypeAlias

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AclOperation

from anabranch.backoff import Backoff
from anabranch.errors import (
    AnabranchError,
    ClockSkew,
    EventTooLarge,
    NotAuthorized,
    NotReady,
    RetryError,
    UnknownLane,
)
from anabranch.librdkafka.admin import KafkaAdmin
from anabranch.librdkafka.handles import LAST_WORDS_S, HandleHealth, drop, leak, make
from anabranch.librdkafka.options import Options
from anabranch.librdkafka.reconnecting_consumer import LastingConsumer, make_consumer
from anabranch.ports import Clock, Entropy, RecordHeaders
from anabranch.protocol.ids import CORRELATION_HEADER, REPLY_HEADER
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.topics.names import commands_topic, prefixes_of, replies_topic
from anabranch.waits import Queue, here

log = logging.getLogger("anabranch.client")

_POLL_S = 0.1
_STALL_S = 0.02  # how long a caller may take to wake the next one
_DENIED_S = 1.0  # how long a call waits while replies are not readable
_REPLIES_AT_ONCE = 1000
_FIRST_PAUSE_S = 0.1  # before asking again for the cluster's topics
_LONGEST_PAUSE_S = 1.0
_TOPICS_S = 10.0  # how long the cluster's topics may be missing
# How late a broker may learn of new partitions; an id beyond them is wrong after that.
_GROWTH_S = 2.0
# How long the number of control partitions is cached for lists of all.
_COUNT_S = 10.0
_JOIN_S = 10.0
_MEET_S = 0.5
# the search for other prefixes, and how many of them an error names
_LOOK_S = 5.0
_OTHERS = 10
# How long gathered commands wait for another one.
GAP_S = 0.002
MOST_GATHERED = 16
_FRAMING = 512  # upper bound of what a record adds to the payload of a command

# Errors by which a broker refuses a command, and each copy of it.
_REFUSALS: dict[int, type[AnabranchError]] = {
    KafkaError.MSG_SIZE_TOO_LARGE: EventTooLarge,
    KafkaError.INVALID_TIMESTAMP: ClockSkew,
}
_DENIED = KafkaError.TOPIC_AUTHORIZATION_FAILED

_Answer: TypeAlias = "bytes | AnabranchError | None"


class Queued(NamedTuple):
    """A command to send to a control partition."""

    partition: int
    correlation_id: bytes
    payload: bytes
    headers: RecordHeaders


@dataclass(slots=True)
class Gathering:
    """Commands that wait until more have come, so that they are sent in one request.

    The answers of a round arrive together, and most of the callers that they wake have a next command soon. So
    commands gather until as many have come as were answered, or until none has come for `GAP_S`. A command that
    follows no such answers is sent at once.

    ``beside``: commands whose caller waits for the answer to its next command only. Such a group counts as one.
    ``expected``: how many more commands may come. ``until``: when the commands that came are sent anyway, monotonic
    seconds.
    """

    commands: list[Queued] = field(default_factory=list)
    beside: list[Queued] = field(default_factory=list)
    expected: int = 0
    until: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def answered(self, count: int, now: float) -> None:
        """Expect as many commands as were answered together."""
        with self._lock:
            left = self.expected if now < self.until else 0
            self.expected, self.until = left + count, now + GAP_S

    def add(self, command: Queued, now: float) -> list[Queued]:
        """Add a command. Returns the commands to send now, perhaps none."""
        with self._lock:
            self.commands.append(command)
            self.expected = self.expected - 1 if now < self.until else 0
            if self.expected > 0 and len(self.commands) < MOST_GATHERED:
                self.until = now + GAP_S
                return []
            return self._take()

    def add_beside(self, command: Queued) -> None:
        """Add a command that nothing waits for. The next command of its caller takes it along."""
        with self._lock:
            self.beside.append(command)

    def due(self, correlation_id: bytes) -> float | None:
        """When the caller of this command has to send what has gathered; None: another caller does that."""
        commands = self.commands
        return self.until if commands and commands[0].correlation_id == correlation_id else None

    def take(self) -> list[Queued]:
        """Remove all commands, to send them."""
        with self._lock:
            self.expected = 0
            return self._take()

    def _take(self) -> list[Queued]:
        taken = self.beside + self.commands
        self.beside, self.commands = [], []
        return taken


class KafkaBus:
    """Commands through one producer; replies through one consumer of one partition."""

    def __init__(
        self,
        options: Options,
        admin: KafkaAdmin,
        prefix: str,
        lane: str,
        clock: Clock,
        entropy: Entropy,
    ) -> None:
        self._options = options
        self._admin = admin
        self._lane = lane
        self._commands = commands_topic(prefix, lane)
        self._replies = replies_topic(prefix, lane)
        self._clock = clock
        self._entropy = entropy
        self._lock = here().lock()
        self._slots: dict[bytes, Queue] = {}
        self._gathering = Gathering()
        self._arrived: deque[tuple[bytes, bytes]] = deque()  # replies whose callers are not awake
        self._ready = False
        self._closed = False
        self._partitions = 0
        self._counted = 0.0
        self._max_bytes = 0
        self._cluster_id = ""
        self._reply_header = (REPLY_HEADER, b"")
        self._trouble = ""
        self._deaf: NotAuthorized | None = None  # why replies can't be read
        self._producer: Producer | None = None
        self._health: HandleHealth | None = None  # the producer's
        self._consumer: LastingConsumer | None = None
        self._thread: threading.Thread | None = None

    # -- starting -------------------------------------------------------------------------------------

    def ready(self, deadline: float) -> None:
        """Find the topics, and go to the end of a replies partition before anything is sent."""
        if self._ready:
            return
        left = max(0.0, deadline - self._clock.monotonic())
        if not self._lock.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
            why = self._trouble or "another call of this client waits for them, too"
            raise NotReady(f"the brokers have not answered: {why}")
        try:
            self._start_once(deadline)
        finally:
            self._lock.release()

    def _start_once(self, deadline: float) -> None:
        if self._ready or self._closed:
            return
        self._start(deadline)
        self._ready = True

    def _start(self, deadline: float) -> None:
        counts = self._find_topics(deadline)
        self._partitions, self._counted = counts[self._commands], self._clock.monotonic()
        limits = self._admin.max_message_bytes([self._commands], deadline)
        self._max_bytes = min(limits[self._commands], self._options.message_max_bytes)
        partition = int.from_bytes(self._entropy(4), "big") % counts[self._replies]
        # After an error the next call continues with the handles that were made.
        if self._consumer is None:
            self._consumer = make_consumer(self._options, self._options.replies(), self._on_error)
        if self._producer is None:
            self._producer, self._health = self._new_producer()
        end = self._admin.end_offsets({(self._replies, partition): 0}, deadline)
        place = TopicPartition(self._replies, partition, end[self._replies, partition])
        self._consumer.assign([place])
        here().run(partial(_meet, self._producer, self._commands))
        self._reply_header = (REPLY_HEADER, partition.to_bytes(4, "big"))
        receive = partial(self._receive, self._consumer)
        thread = threading.Thread(target=receive, name="anabranch-replies", daemon=True)
        thread.start()
        self._thread = thread

    def _find_topics(self, deadline: float, least: int = 0) -> dict[str, int]:
        began = self._clock.monotonic()
        rights = {self._commands: AclOperation.WRITE, self._replies: AclOperation.READ}
        names = list(rights)
        pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, self._clock)
        while True:
            counts = self._admin.partition_counts(names, deadline, rights)
            missing = ", ".join(name for name in names if name not in counts)
            if not missing and counts[self._commands] >= least:
                return counts
            give_up = min(deadline, began + (_TOPICS_S if missing else _GROWTH_S))
            late = not pauses.sleep(give_up)
            if not late:
                # The pause may have taken longer than planned.
                late = bool(missing) and self._clock.monotonic() >= give_up
            if late and missing:
                raise missing_topics(self._lane, missing, self._other_prefixes())
            if late:
                return counts

    def _other_prefixes(self) -> list[str]:
        """Other prefixes under which the lane's topics exist: the caller may have meant such a prefix."""
        try:
            return prefixes_of(self._admin.topics(self._clock.monotonic() + _LOOK_S), self._lane)
        except AnabranchError:
            return []

    def _new_producer(self) -> tuple[Producer, HandleHealth]:
        config = self._options.commands(self._max_bytes)
        producer: Producer = make(Producer, config, self._producer_error)
        return producer, HandleHealth(producer, self._options.admin(), self._commands)

    def _renew_producer(self, producer: Producer) -> bool:
        """Replace the producer. Nothing is lost, as commands have their own ids and are sent again.

        False if another thread has replaced it, or the bus is closed.
        """
        with self._lock:
            if self._producer is not producer or self._closed:
                return False
            try:
                self._producer, self._health = self._new_producer()
            except NotReady as error:  # no token at present: the old producer stays
                self._trouble = str(error)
                return False
            return True

    def control_partitions(self, deadline: float, least: int = 0, *, afresh: bool = False) -> int:
        """As `CommandBus.control_partitions`. A single broker may still report a lower number."""
        now = self._clock.monotonic()
        if self._partitions < least:
            self._count(deadline, least)
        elif afresh or (not least and now - self._counted >= _COUNT_S):
            try:
                self._count(min(deadline, now + _GROWTH_S))
            except (RetryError, UnknownLane) as error:
                self._counted = now  # the controllers may answer anyway
                log.warning("there may be new control partitions, and brokers don't say: %s", error)
        return self._partitions

    def _count(self, deadline: float, least: int = 0) -> None:
        found = self._find_topics(deadline, least)[self._commands]
        self._partitions, self._counted = max(self._partitions, found), self._clock.monotonic()

    def max_command_bytes(self) -> int:
        """The commands topic's limit for a payload."""
        return self._max_bytes - _FRAMING

    def cluster_id(self, deadline: float) -> str:
        if not self._cluster_id:
            self._cluster_id = self._admin.cluster_id(self._commands, deadline)
        return self._cluster_id

    # -- commands and replies -------------------------------------------------------------------------

    def send(
        self,
        control_partition: int,
        correlation_id: bytes,
        payload: bytes,
        more: RecordHeaders = (),
        *,
        waits: bool = True,
    ) -> None:
        if self._producer is None or self._closed:
            return
        command = Queued(control_partition, correlation_id, payload, more)
        if not waits:
            self._gathering.add_beside(command)
            return
        self._slots.setdefault(correlation_id, here().queue())
        self._produce_all(self._gathering.add(command, self._clock.monotonic()))

    def _produce_all(self, commands: Sequence[Queued]) -> None:
        for command in commands:
            self._produce(command)

    def _produce(self, command: Queued) -> None:
        producer, correlation_id = self._producer, command.correlation_id
        if producer is None:
            return
        headers = [(CORRELATION_HEADER, correlation_id), self._reply_header, *command.headers]
        try:
            producer.produce(
                self._commands,
                command.payload,
                None,
                command.partition,
                headers=headers,  # type: ignore[arg-type]
                on_delivery=partial(self._delivered, correlation_id),
            )
        except BufferError:
            self._trouble = "the queue of commands is full"
        except RuntimeError:  # the producer was replaced meanwhile; the command is sent again
            self._trouble = "the producer of commands is being replaced"
        except KafkaException as error:
            self._refused(error.args[0], correlation_id, producer)

    def _refused(self, error: KafkaError, correlation_id: bytes, producer: Producer) -> None:
        self._trouble = str(error)
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            self._answer(correlation_id, EventTooLarge(f"a command is too large: {error}"))
        elif error.code() == _DENIED:
            self._answer(correlation_id, self._may_not_send())
        elif error.code() == KafkaError._UNKNOWN_PARTITION:  # noqa: SLF001
            # The partition is new, and librdkafka would ask only every 5 minutes. The command is sent again.
            _meet(producer, self._commands)
        elif error.fatal() or error.code() == KafkaError._FATAL:  # noqa: SLF001
            self._renew_producer(producer)

    def _may_not_send(self) -> NotAuthorized:
        return NotAuthorized(f"the right Write on the topic {self._commands} is missing")

    def wait(self, correlation_id: bytes, deadline: float) -> bytes | None:
        """The next reply; None: no reply came before the deadline, or the id was forgotten.

        `NotAuthorized` is about the last copy of the command: an earlier copy may be carried out.
        """
        slot = self._slots.get(correlation_id)
        if slot is None or self._closed:  # forgotten, perhaps by another thread just now
            return None
        self._send_gathered(correlation_id, deadline)
        left = deadline - self._clock.monotonic()
        deaf = self._deaf if left > _DENIED_S else None
        left = left if deaf is None else _DENIED_S
        try:
            answer: _Answer = (
                slot.get(timeout=min(left, threading.TIMEOUT_MAX))
                if left > 0
                else slot.get_nowait()
            )
        except Empty:
            if deaf is not None and self._deaf is deaf:
                raise NotAuthorized(str(deaf)) from None
            return None
        finally:
            self._wake_next()
        if isinstance(answer, AnabranchError):
            raise answer
        return answer

    def _send_gathered(self, correlation_id: bytes, deadline: float) -> None:
        """If this is the first of the gathered commands, wait until they are due, and send all of them.

        If the call of the first command ends before that, `forget` sends them.
        """
        while (due := self._gathering.due(correlation_id)) is not None:
            left = min(due, deadline) - self._clock.monotonic()
            if left > 0:
                self._clock.sleep(left)
                continue
            self._produce_all(self._gathering.take())

    def forget(self, correlation_id: bytes) -> None:
        """Drop the slot and wake its waiter. If this call had to send the gathered commands, send them."""
        if self._gathering.due(correlation_id) is not None:
            self._produce_all(self._gathering.take())
        slot = self._slots.pop(correlation_id, None)
        if slot is not None:
            slot.put(None)

    def trouble(self) -> str:
        return self._trouble

    def _answer(self, correlation_id: bytes, answer: _Answer) -> None:
        slot = self._slots.get(correlation_id)
        if slot is not None:
            slot.put(answer)

    def _wake_next(self) -> None:
        """Give the next reply that arrived to its caller.

        Callers that wake together would all wait again, for the interpreter lock. So each caller that wakes, wakes
        the next one.
        """
        while self._arrived:
            try:
                correlation_id, reply = self._arrived.popleft()
            except IndexError:  # another thread took it
                return
            slot = self._slots.get(correlation_id)
            if slot is not None:
                slot.put(reply)
                return

    def _receive(self, consumer: LastingConsumer) -> None:
        """The loop of the replies thread."""
        try:
            while not self._closed:
                try:
                    self._receive_some(consumer)
                except Exception:  # perhaps from a callback of the user; without this thread no call gets an answer
                    log.exception("replies: a defect, or an error of a callback")
                    self._clock.sleep(_POLL_S)
        finally:
            consumer.close()

    def _receive_some(self, consumer: LastingConsumer) -> None:
        message = consumer.poll(_STALL_S if self._arrived else _POLL_S)
        if message is None:
            while self._arrived:  # a caller that was to wake the next one is busy or gone
                self._wake_next()
        else:
            # The replies of one round arrive together, so take the rest in one call.
            messages = [message, *consumer.consume(_REPLIES_AT_ONCE, 0)]
            if len(messages) > 1:
                count = sum(message.key() in self._slots for message in messages)
                self._gathering.answered(count, self._clock.monotonic())
            for message in messages:
                self._take_reply(message)
            self._wake_next()
        self._serve_producer()  # after the replies, because it lets other threads run

    def _serve_producer(self) -> None:
        """Serve delivery reports; replace the producer if it has lost the brokers."""
        producer, health = self._producer, self._health
        if producer is None or health is None:
            return
        producer.poll(0)
        if not len(producer):
            health.answered()
        elif health.lost() and self._renew_producer(producer):
            drop(producer)

    def _take_reply(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            self._on_error(error)
            if error.code() == _DENIED:  # librdkafka reports it once, until a reply arrives
                text = (
                    f"the right Read on the topic {self._replies} is missing: no answer can be read, and what was "
                    "sent may be carried out"
                )
                self._deaf = NotAuthorized(text)
                for correlation_id in list(self._slots):
                    self._answer(correlation_id, NotAuthorized(text))
            return
        self._deaf = None
        key = message.key()
        value = message.value()
        if isinstance(key, bytes) and isinstance(value, bytes):
            self._arrived.append((key, value))

    def _delivered(self, correlation_id: bytes, error: KafkaError | None, _: Message) -> None:
        """Handle a delivery report. The id is an argument, because failed records lack their headers."""
        if error is None:
            return
        self._trouble = str(error)
        refusal = _REFUSALS.get(error.code())
        if refusal is not None:
            self._answer(correlation_id, refusal(f"the broker refused a command: {error}"))
        elif error.code() == _DENIED:
            self._answer(correlation_id, self._may_not_send())

    def _producer_error(self, error: KafkaError) -> None:
        if self._health is not None:
            self._health.complaint(error)
        self._on_error(error)

    def _on_error(self, error: KafkaError) -> None:
        if error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:  # no group is ever joined
            self._trouble = str(error)
        log.debug("commands and replies: %s", error)

    # -- its end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the thread; waiting calls return None."""
        closed, self._closed = self._closed, True
        self._admin.close()
        if closed:
            return
        with self._lock:  # waits for a call that starts the bus
            pass
        for correlation_id in list(self._slots):
            self.forget(correlation_id)
        if self._thread is None:
            if self._consumer is not None:
                here().run(self._consumer.close)
        elif self._thread is not threading.current_thread():
            here().run(partial(self._thread.join, _JOIN_S))
        if self._producer is not None:
            producer, self._producer = self._producer, None
            here().run(partial(producer.flush, LAST_WORDS_S))
            here().run(partial(drop, producer))

    def after_fork(self) -> None:
        leak(self._producer)
        leak(self._admin.native)
        if self._consumer is not None:
            leak(self._consumer.native)


def missing_topics(lane: str, missing: str, others: Sequence[str] = ()) -> AnabranchError:
    """The error for missing topics of a lane. ``others``: prefixes under which they exist."""
    known = f"; there are topics with prefix {', '.join(others[:_OTHERS])}" if others else ""
    if lane in (OPEN_LANE, ADMIN_LANE):
        return NotReady(
            f"there is no topic {missing}: start `anabranch controller`, or give the prefix of its topics "
            f"(--cluster-prefix, ANABRANCH_PREFIX){known}"
        )
    return UnknownLane(
        f"there is no topic {missing}: an operator makes lane {lane!r} with `anabranch lane add {lane}`{known}"
    )


def _meet(producer: Producer, topic: str) -> None:
    """Make two requests, so that a new producer gets its producer id early.

    A producer asks for the id after an answer of a broker. At first it often finds no broker (measured: 2 in 5),
    because it just leaves the bootstrap address. Then it tries again after half a second, and the first command
    waits for that.
    """
    with contextlib.suppress(KafkaException, RuntimeError):  # the producer may be closed meanwhile
        for _ in range(2):
            producer.list_topics(topic, timeout=_MEET_S)
