"""A real TCP proxy between Kafka's clients and one broker: it delays, cuts, splits and holds single requests.

Every connection is two sockets and two threads. A ``policy`` is asked for each request and says what happens to
it; where it says nothing the bytes go on as they came. What is held keeps its place: the rest of that connection
waits behind it, as TCP has it; other connections go on.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from socket import create_connection  # as it is now: tests patch it for others
from types import TracebackType

from tests.faults.proxy_frames import (
    Request,
    correlation_of,
    end_error,
    parse_request,
    read_frame,
)

HOST = "127.0.0.1"
DEADLINE_S = 30.0
PIECE_PAUSE_S = 0.0005


class Held:
    """A request that waits in the network until it is let go. Made by `Hold`."""

    def __init__(self) -> None:
        self.request: Request | None = None
        self._caught = threading.Event()
        self._free = threading.Event()
        self._answered = threading.Event()
        self._answer: bytes | None = None

    def wait_caught(self, deadline_s: float = DEADLINE_S) -> Request:
        """Until a request is held."""
        assert self._caught.wait(deadline_s), "no request came to be held"
        assert self.request is not None
        return self.request

    @property
    def caught(self) -> bool:
        return self._caught.is_set()

    def let_go(self) -> None:
        """Deliver it to the broker; returns at once."""
        self._free.set()

    def deliver(self, deadline_s: float = DEADLINE_S) -> bytes:
        """Deliver it, and wait for the broker's answer: a frame with its length."""
        self.wait_caught(deadline_s)
        self.let_go()
        assert self._answered.wait(deadline_s), f"the broker does not answer {self.request}"
        assert self._answer is not None, "the connection ended before the broker answered"
        return self._answer

    def deliver_end(self, deadline_s: float = DEADLINE_S) -> int:
        """`deliver` of an EndTxn: the error code of its answer."""
        answer = self.deliver(deadline_s)
        assert self.request is not None
        return end_error(self.request, answer)

    def _catch(self, request: Request) -> None:
        self.request = request
        self._caught.set()

    def _wait(self, closed: threading.Event) -> bool:
        """Until it is let go; False if the proxy is closed before."""
        while not self._free.wait(0.05):
            if closed.is_set():
                return False
        return True

    def _answer_is(self, answer: bytes | None) -> None:
        self._answer = answer
        self._answered.set()


# -- what can happen to a request -----------------------------------------------------------------------


@dataclass(frozen=True)
class Delay:
    """The request (and what follows it) is late, or its answer (``answer``)."""

    seconds: float
    answer: bool = False


@dataclass(frozen=True)
class Cut:
    """The connection is cut: before the request got through, or after (its answer is lost).

    ``within``: after that many bytes of the request or, if ``after``, of the answer got through.
    """

    after: bool = False
    within: int = 0


@dataclass(frozen=True)
class Swallow:
    """The request never gets through, and the connection stays, without an answer."""


@dataclass(frozen=True)
class Split:
    """The request and its answer arrive in pieces of ``size`` bytes."""

    size: int


@dataclass(frozen=True)
class Hold:
    """The request waits until ``held`` is let go, whatever its client does meanwhile.

    ``cut``: the client's side of the connection is cut at once. ``copy``: the request itself gets through; a
    copy of it is held on a connection of its own.
    """

    held: Held
    cut: bool = False
    copy: bool = False


@dataclass(frozen=True)
class Before:
    """``then`` is called when the answer is there, before the client gets it."""

    then: Callable[[], object]


@dataclass(frozen=True)
class Change:
    """The client gets another answer: what ``to`` makes of the broker's, a frame with its length."""

    to: Callable[[Request, bytes], bytes]


Action = Delay | Cut | Swallow | Split | Hold | Before | Change
Policy = Callable[[Request], Action | None]


@dataclass
class Rules:
    """A policy made of single rules; the first one that fits is applied, ``times`` times."""

    _rules: list[tuple[Callable[[Request], bool], Action, list[int]]] = field(default_factory=list)

    def add(self, fits: Callable[[Request], bool], action: Action, times: int = 1) -> None:
        self._rules.append((fits, action, [times]))

    def __call__(self, request: Request) -> Action | None:
        for fits, action, left in self._rules:
            if left[0] > 0 and fits(request):
                left[0] -= 1
                return action
        return None


class Proxy:
    """Listens on a port of its own from the start on. ``target`` may be given later, when it is known.

    ``policy`` is called under a lock, by one connection at a time. ``seen``: what came through, in order.
    """

    def __init__(self, target: tuple[str, int] | None = None, policy: Policy | None = None) -> None:
        self.target = target
        self.policy = policy
        self.seen: list[Request] = []
        self._numbers = itertools.count(1)
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._listener = socket.create_server((HOST, 0), backlog=256)
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    @property
    def bootstrap(self) -> str:
        """``host:port``, for clients."""
        return f"{HOST}:{self.port}"

    def __enter__(self) -> Proxy:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every connection and the port; what is held is never delivered."""
        self._closed.set()
        # Closing alone does not wake a thread that accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut_all()

    def cut_all(self) -> None:
        """Close every connection, as a broker does with idle ones."""
        with self._lock:
            connections = list(self._connections)
        for one in connections:
            one.close()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        target = self.target
        try:
            if target is None:
                raise ConnectionRefusedError("no target yet")
            broker = create_connection(target, DEADLINE_S)
        except OSError:
            _close(client)
            return
        broker.settimeout(None)
        one = _Connection(self, next(self._numbers), client, broker)
        with self._lock:
            self._connections.add(one)
        if self._closed.is_set():
            one.close()
        one.run()
        with self._lock:
            self._connections.discard(one)

    def _ask(self, request: Request) -> Action | None:
        with self._lock:
            self.seen.append(request)
            return self.policy(request) if self.policy is not None else None

    def _deliver_copy(self, held: Held, request: Request, frame: bytes) -> None:
        """A copy of a request, on a connection of its own, when it is let go."""
        held._catch(request)
        answer = None
        try:
            if held._wait(self._closed) and self.target is not None:
                with create_connection(self.target, DEADLINE_S) as broker:
                    broker.sendall(frame)
                    answer = read_frame(broker)
        except OSError:
            pass
        finally:
            held._answer_is(answer)


class _Connection:
    """A client's connection and ours to the broker."""

    def __init__(
        self, proxy: Proxy, number: int, client: socket.socket, broker: socket.socket
    ) -> None:
        self._proxy = proxy
        self._number = number
        self._client = client
        self._broker = broker
        for one in (client, broker):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._lock = threading.Condition()
        self._awaited: dict[int, tuple[Request, Action | None]] = {}
        self._over = False

    def close(self) -> None:
        """Both sides."""
        with self._lock:
            self._over = True
            for _, action in self._awaited.values():
                if isinstance(action, Hold) and not action.copy:
                    action.held._answer_is(None)
            self._awaited.clear()
            self._lock.notify_all()
        _close(self._client)
        _close(self._broker)

    def run(self) -> None:
        """Until it ends. On the caller's thread and one more."""
        answers = threading.Thread(target=self._answers, daemon=True)
        answers.start()
        try:
            self._requests()
        except OSError:
            pass
        finally:
            # What was held and has got through by now is still to be answered, if only to us.
            self._wait_for_held()
            self.close()

    def _requests(self) -> None:
        for number in itertools.count():
            frame = read_frame(self._client)
            request = parse_request(frame, self._number, number)
            action = self._proxy._ask(request)
            match action:
                case Cut(after=False, within=within):
                    self._broker.sendall(frame[:within])
                    return
                case Swallow():
                    continue
                case Delay(seconds=seconds, answer=False):
                    self._proxy._closed.wait(seconds)
                case Hold(held=held, copy=True):
                    threading.Thread(
                        target=self._proxy._deliver_copy, args=(held, request, frame), daemon=True
                    ).start()
                case Hold(held=held, cut=cut):
                    if cut:
                        _shut(self._client)
                    held._catch(request)
                    if not held._wait(self._proxy._closed):
                        return
            with self._lock:
                self._awaited[request.correlation] = (request, action)
            if isinstance(action, Split):
                _send_pieces(self._broker, frame, action.size)
            else:
                self._broker.sendall(frame)

    def _answers(self) -> None:
        try:
            while True:
                answer = read_frame(self._broker)
                with self._lock:
                    # An answer without a request is the broker's affair; it is passed on as it is.
                    request, action = self._awaited.pop(correlation_of(answer), (None, None))
                    self._lock.notify_all()
                match action:
                    case Hold(held=held, copy=False):
                        held._answer_is(answer)
                    case Cut(within=within):
                        self._client.sendall(answer[:within])
                        break
                    case Delay(seconds=seconds, answer=True):
                        self._proxy._closed.wait(seconds)
                    case Before(then=then):
                        then()
                    case Change(to=to) if request is not None:
                        answer = to(request, answer)
                if isinstance(action, Split):
                    _send_pieces(self._client, answer, action.size)
                    continue
                with contextlib.suppress(OSError):  # its client may be gone
                    self._client.sendall(answer)
        except OSError:
            pass
        self.close()

    def _wait_for_held(self) -> None:
        until = time.monotonic() + DEADLINE_S
        with self._lock:
            while not self._over and any(
                isinstance(action, Hold) and not action.copy for _, action in self._awaited.values()
            ):
                if not self._lock.wait(until - time.monotonic()):
                    return


def _send_pieces(to: socket.socket, data: bytes, size: int) -> None:
    """In single small writes: the receiver has to put them together."""
    # Big ones would take too long; their middle goes at once.
    head, tail = (len(data), len(data)) if len(data) < 64 * size else (32 * size, len(data) - size)
    for at in range(0, head, size):
        to.sendall(data[at : min(at + size, head)])
        time.sleep(PIECE_PAUSE_S)
    if head < tail:
        to.sendall(data[head:tail])
        to.sendall(data[tail:])


def _shut(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def _close(one: socket.socket) -> None:
    _shut(one)
    one.close()
