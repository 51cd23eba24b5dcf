"""What the faulty network does to single requests, before a server that answers everything with its body."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from tests.faults.proxy import (
    HOST,
    Action,
    Before,
    Change,
    Cut,
    Delay,
    Held,
    Hold,
    Proxy,
    Split,
    Swallow,
)
from tests.faults.proxy_frames import (
    END_TXN,
    PRODUCE,
    End,
    Request,
    correlation_of,
    end_error,
    parse_request,
    read_frame,
)
from tests.waiting import wait_until

NO_ANSWER_S = 0.2


class Server:
    """Answers each request with its correlation id and body; keeps what it got."""

    def __init__(self) -> None:
        self.got: list[bytes] = []
        self.parts: list[bytes] = []
        self.listener = socket.create_server((HOST, 0))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            data = b""
            while more := connection.recv(1 << 16):
                data += more
                while len(data) >= 4 and len(data) >= 4 + int.from_bytes(data[:4], "big"):
                    size = 4 + int.from_bytes(data[:4], "big")
                    frame, data = data[:size], data[size:]
                    self.got.append(frame)
                    body = frame[8:12] + b"answer"
                    connection.sendall(struct.pack(">i", len(body)) + body)
            if data:
                self.parts.append(data)


def request(correlation: int, api: int = 3) -> bytes:
    """A request of some api, version 0."""
    body = struct.pack(">hhih", api, 0, correlation, 2) + b"me" + bytes(40)
    return struct.pack(">i", len(body)) + body


def end(correlation: int, version: int, name: str, *, commit: bool) -> bytes:
    """An EndTxn request."""
    raw = name.encode()
    text = bytes((0, len(raw) + 1)) + raw if version >= 3 else struct.pack(">h", len(raw)) + raw
    tail = struct.pack(">qh?", 77, 5, commit) + (b"\x00" if version >= 3 else b"")
    body = struct.pack(">hhih", END_TXN, version, correlation, 2) + b"me" + text + tail
    return struct.pack(">i", len(body)) + body


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.listener.shutdown(socket.SHUT_RDWR)
    made.listener.close()


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.listener.getsockname()) as made:
        yield made


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, proxy.port), 10) as connection:
        yield connection


def on(proxy: Proxy, correlation: int, action: Action) -> None:
    """What happens to one request."""
    proxy.policy = lambda request: action if request.correlation == correlation else None


def ask(client: socket.socket, correlation: int) -> int:
    """Send and wait for the answer: its correlation id."""
    client.sendall(request(correlation))
    return correlation_of(read_frame(client))


def is_silent(client: socket.socket) -> bool:
    """Nothing comes, and the connection stays."""
    client.settimeout(NO_ANSWER_S)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(10)
    return False


@pytest.mark.parametrize(
    "action",
    [None, Delay(0.05), Delay(0.05, answer=True), Split(1), Split(3), Before(lambda: None)],
    ids=["as it is", "request delayed", "answer delayed", "bytes", "threes", "after a call"],
)
def test_it_gets_through_once(
    proxy: Proxy, server: Server, client: socket.socket, action: Action | None
) -> None:
    if action is not None:
        on(proxy, 2, action)
    assert [ask(client, n) for n in (1, 2, 3)] == [1, 2, 3]
    assert server.got == [request(n) for n in (1, 2, 3)]
    assert [one.correlation for one in proxy.seen] == [1, 2, 3]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("within", [0, 9])
def test_a_cut_connection_ends_after_these_bytes(
    proxy: Proxy, server: Server, client: socket.socket, after: bool, within: int
) -> None:
    on(proxy, 2, Cut(after=after, within=within))
    assert ask(client, 1) == 1
    client.sendall(request(2))
    got = b""
    while more := client.recv(100):
        got += more
    if after:
        assert server.got == [request(1), request(2)]
        assert len(got) == within
    else:
        wait_until(lambda: server.parts or not within)
        assert server.got == [request(1)]
        assert server.parts == ([request(2)[:within]] if within else [])
        assert got == b""


def test_a_swallowed_request_is_never_answered(
    proxy: Proxy, server: Server, client: socket.socket
) -> None:
    on(proxy, 1, Swallow())
    client.sendall(request(1))
    assert is_silent(client)
    assert ask(client, 2) == 2
    assert server.got == [request(2)]


def test_an_answer_is_changed_once(proxy: Proxy, client: socket.socket) -> None:
    def to(asked: Request, answer: bytes) -> bytes:
        return answer[:4] + struct.pack(">i", 70 + asked.correlation) + answer[8:]

    on(proxy, 1, Change(to))
    assert [ask(client, 1), ask(client, 2)] == [71, 2]


def test_hold_keeps_the_order_of_a_connection(
    proxy: Proxy, server: Server, client: socket.socket
) -> None:
    held = Held()
    on(proxy, 1, Hold(held))
    client.sendall(request(1) + request(2))
    assert held.wait_caught().correlation == 1
    with socket.create_connection((HOST, proxy.port), 10) as other:
        assert ask(other, 3) == 3
    assert is_silent(client)
    assert correlation_of(held.deliver()) == 1
    assert [correlation_of(read_frame(client)) for _ in range(2)] == [1, 2]
    assert server.got == [request(3), request(1), request(2)]


@pytest.mark.parametrize("cut", [False, True])
def test_what_is_held_outlives_its_client(
    proxy: Proxy, server: Server, client: socket.socket, cut: bool
) -> None:
    held = Held()
    on(proxy, 1, Hold(held, cut=cut))
    client.sendall(request(1))
    held.wait_caught()
    if cut:
        assert client.recv(1) == b""
    client.close()
    assert server.got == []
    assert correlation_of(held.deliver()) == 1
    assert server.got == [request(1)]


def test_a_copy_comes_on_another_connection(
    proxy: Proxy, server: Server, client: socket.socket
) -> None:
    held = Held()
    on(proxy, 1, Hold(held, copy=True))
    assert [ask(client, n) for n in (1, 2)] == [1, 2]
    held.deliver()
    assert server.got == [request(1), request(2), request(1)]


def test_what_is_held_at_the_end_is_never_delivered(
    proxy: Proxy, server: Server, client: socket.socket
) -> None:
    held = Held()
    on(proxy, 1, Hold(held))
    client.sendall(request(1))
    held.wait_caught()
    proxy.close()
    held.let_go()
    assert client.recv(1) == b""
    assert server.got == []


def test_an_end_in_every_format() -> None:
    for version in (0, 3, 5):
        frame = end(9, version, "a.b", commit=version != 0)
        assert parse_request(frame, 4, 2) == Request(
            4, 2, END_TXN, version, 9, "me", "a.b", End(77, 5, version != 0), len(frame)
        )
    produce = struct.pack(">hhih", PRODUCE, 9, 1, -1) + bytes((0, 0))
    parsed = parse_request(struct.pack(">i", len(produce)) + produce, 1, 0)
    assert (parsed.client_id, parsed.transactional_id) == ("", None)
    for version, tags in ((1, b""), (3, b"\x00")):
        answer = struct.pack(">ii", 99, 9) + tags + struct.pack(">ih", 0, 90)
        asked = parse_request(end(9, version, "a", commit=True), 1, 0)
        assert end_error(asked, answer) == 90
