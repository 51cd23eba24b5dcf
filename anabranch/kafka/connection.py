"""Connections to brokers, with requests in flight, and the pool of idle connections."""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakSet

from anabranch.batches.format import Buffer
from anabranch.kafka import calls
from anabranch.kafka.calls import (
    API_VERSIONS,
    SASL_AUTHENTICATE,
    SASL_HANDSHAKE,
    Api,
    AuthenticationFailed,
    ConnectionBroken,
)
from anabranch.kafka.codes import NONE, UNSUPPORTED_VERSION
from anabranch.kafka.sasl import Mechanism, SaslError
from anabranch.kafka.settings import Settings
from anabranch.ports import LogRefused, LogUnavailable
from anabranch.waits import here

T = TypeVar("T")
_SIZE = struct.Struct(">i")
_REQUEST_HEADER = struct.Struct(">ihhih")
# The most that a first call receives: enough for most answers.
_RECEIVED_BYTES = 64 << 10
# The system's limit of buffers in one call (IOV_MAX) is 1024 almost everywhere.
_MAX_BUFFERS = 512
# Below this, joining buffers is cheaper than passing them one by one.
_JOIN_BYTES = 16_384
_MAX_ANSWER_BYTES = 1 << 30
_MAX_STRANGER_BYTES = 1 << 20  # … before authentication, as another program may answer
# Allocate this, or as much as arrived already: an announced size alone costs nothing.
_PIECE_BYTES = 1 << 20
_DRAIN_S = 5.0
_AUTHENTICATE_S = 10.0
_SAID = 500  # characters of a broker's message
_CLOSED = "the broker closed the connection"
# A session is renewed after this part of its life, so that requests under way arrive before its end; and not within
# a second, which brokers refuse.
_RENEW_AFTER = 0.7
_LEAST_SESSION_S = 1.1


def readable(connections: Sequence[socket.socket | Connection], wait_s: float = 0.0) -> set[int]:
    """The descriptors of connections that have bytes to read, or were closed. Waits ``wait_s`` seconds for one."""
    poll = select.poll()  # `select` supports no descriptor above 1,023
    files = [connection.fileno() for connection in connections]
    for file in files:
        poll.register(file, select.POLLIN)
    wait_s = here().ready(files, select.POLLIN, wait_s)
    return {descriptor for descriptor, _ in poll.poll(wait_s * 1000)}


class Connection:
    """A socket to one broker, used by one thread at a time. Deadlines: `time.monotonic`.

    The socket does not block: a call waits only if the system has no bytes, or no room for them. Each system call
    counts here, because the leader makes them for each round.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        client_id: str,
        deadline: float,
        tls: ssl.SSLContext | None = None,
        sasl: Mechanism | None = None,
    ) -> None:
        self.address = f"{host}:{port}"
        self._sasl = sasl
        self._renew_at = math.inf
        self._client_id = client_id.encode()
        self._correlation = 0
        # Answers come in the order of the requests: the broker processes one at a time of a connection.
        self._awaited: deque[tuple[int, bool]] = deque()
        self._read: dict[int, memoryview] = {}
        self._ahead = b""  # received, but of no answer that was read
        self._most = _MAX_STRANGER_BYTES
        self.broken = False
        # Filled by `greet`: api key -> (lowest, highest version), feature -> its final level.
        self.versions: dict[int, tuple[int, int]] = {}
        self.features: dict[str, int] = {}
        try:
            connect = partial(socket.create_connection, (host, port), _remaining(deadline))
            self._socket = here().run(connect, drop=socket.socket.close)
            try:
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if tls is not None:
                    # Without the handshake, so that an interrupt of that finds the socket to close.
                    wrapped = self._socket = tls.wrap_socket(
                        self._socket, server_hostname=host, do_handshake_on_connect=False
                    )
                    wrapped.setblocking(False)
                    self._at_once(wrapped.do_handshake, select.POLLIN, deadline)
            except BaseException:
                self._socket.close()
                raise
        except (OSError, ValueError) as error:
            # `ValueError`: the host in the metadata is malformed.
            raise ConnectionBroken(
                f"no connection to {self.address}: {error}", sent=False
            ) from error
        self._gather = tls is None
        self._socket.setblocking(False)
        self._arrival = select.poll()
        self._arrival.register(self._socket, select.POLLIN)

    def fileno(self) -> int:
        return self._socket.fileno()

    def buffered(self) -> bool:
        """Whether there are bytes that `readable` can't see: inside TLS, or read together with earlier ones."""
        return bool(self._read or self._ahead) or (not self._gather and self._pending())

    def _pending(self) -> bool:
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def has_arrived(self, wait_s: float = 0.0) -> bool:
        """Whether bytes of an answer have arrived, or the connection has ended. Waits ``wait_s`` seconds."""
        if self.broken or self.buffered():
            return True
        wait_s = here().ready((self._socket.fileno(),), select.POLLIN, wait_s) if wait_s else 0.0
        return bool(self._arrival.poll(wait_s * 1000))

    @property
    def idle(self) -> bool:
        """Whether no answer is awaited, so that another caller may use the connection."""
        return not (self.broken or self._awaited or self._read)

    def send(
        self,
        api_key: int,
        version: int,
        parts: Sequence[Buffer],
        *,
        flexible: bool,
        deadline: float,
        answer_flexible: bool | None = None,
    ) -> int:
        """Send a request made of ``parts``; returns its correlation id.

        ``answer_flexible``: False if the answer's header has no tags though the request's has (ApiVersions).
        """
        if time.monotonic() >= self._renew_at:
            self.authenticate(min(deadline, time.monotonic() + _AUTHENTICATE_S))
        self._correlation = (self._correlation + 1) & 0x7FFFFFFF
        tags = b"\x00" if flexible else b""
        size = 10 + len(self._client_id) + len(tags) + sum(map(len, parts))
        header = _REQUEST_HEADER.pack(
            size, api_key, version, self._correlation, len(self._client_id)
        )
        buffers: list[Buffer] = [header + self._client_id + tags, *parts]
        self._write(buffers, size, deadline)
        self._awaited.append(
            (self._correlation, flexible if answer_flexible is None else answer_flexible)
        )
        return self._correlation

    def receive(self, correlation: int, deadline: float) -> memoryview:
        """The answer's body. Earlier answers that are read meanwhile are kept for their callers."""
        while correlation not in self._read:
            if not self._awaited:
                raise ConnectionBroken(f"{self.address}: answer {correlation} was never asked for")
            expected, flexible = self._awaited[0]
            body = self._read_frame(deadline)
            if _SIZE.unpack_from(body)[0] != expected:
                self.close()
                raise ConnectionBroken(f"{self.address} answered out of order")
            self._awaited.popleft()
            # A flexible header ends with tagged fields, which no broker sends there.
            self._read[expected] = body[5 if flexible else 4 :]
        return self._read.pop(correlation)

    def call(self, api: Api, version: int, body: Buffer, deadline: float) -> memoryview:
        """Send a request and wait for its answer."""
        flexible = version >= api.flexible_from
        return self.receive(
            self.send(api.key, version, (body,), flexible=flexible, deadline=deadline), deadline
        )

    def ask(
        self, api: Api, deadline: float, /, *, version: int | None = None, **fields: Any
    ) -> Any:
        """`call` with kio's messages, in the highest version by default. Raises: MalformedAnswer, LogRefused."""
        version = self.version(api) if version is None else version
        body = calls.request(api, version, **fields)
        return calls.answer(api, version, self.call(api, version, body, deadline))

    def version(self, api: Api, highest: int | None = None) -> int:
        """The version to use with this broker. `LogRefused` (35) without a common one."""
        if api.key not in self.versions:
            raise LogRefused(f"{self.address} does not offer {api.name}", UNSUPPORTED_VERSION)
        low, high = self.versions[api.key]
        version = min(high, api.highest if highest is None else highest)
        if version < max(low, api.lowest):
            raise LogRefused(
                f"{self.address} speaks {api.name} {low} to {high}; "
                f"{api.lowest} to {api.highest} are supported here",
                UNSUPPORTED_VERSION,
            )
        return version

    def greet(self, deadline: float) -> None:
        """Ask for the broker's versions and features (ApiVersions, KIP-584)."""
        for version in (API_VERSIONS.highest, 0):
            body = calls.request(
                API_VERSIONS,
                version,
                client_software_name="anabranch",
                client_software_version="0.1",
            )
            # The header of this answer never has tags: the client can't know the version yet (KIP-511).
            correlation = self.send(
                API_VERSIONS.key,
                version,
                (body,),
                flexible=version >= API_VERSIONS.flexible_from,
                deadline=deadline,
                answer_flexible=False,
            )
            found = self.receive(correlation, deadline)
            # A broker that doesn't know the version answers in the format of version 0.
            if int.from_bytes(found[:2], "big", signed=True) == UNSUPPORTED_VERSION:
                continue
            answer = calls.answer(API_VERSIONS, version, found)
            self.versions = {
                int(api.api_key): (int(api.min_version), int(api.max_version))
                for api in answer.api_keys
            }
            self.features = {
                feature.name: int(feature.max_version_level)
                for feature in getattr(answer, "finalized_features", ())
            }
            return
        raise ConnectionBroken(f"{self.address} does not tell its versions", sent=False)

    def authenticate(self, deadline: float) -> None:
        """Authenticate, if SASL is set: on a new connection, and again before the session ends (KIP-368).

        Answers under way come first, and are kept for their callers (`buffered`).

        Raises:
            AuthenticationFailed: names mechanism and principal.
        """
        sasl = self._sasl
        if sasl is None:
            self._most = _MAX_ANSWER_BYTES
            return
        self._renew_at = math.inf  # so that the requests sent here don't renew it
        began = time.monotonic()
        try:
            life = self._exchange(sasl, deadline)
        except SaslError as error:
            self.close()
            said = str(error).replace(sasl.secret, "…") if sasl.secret else str(error)
            raise AuthenticationFailed(
                f"{self.address}: not let in by {sasl.name} as {sasl.principal}: {said[:_SAID]}"
            ) from None
        except (OSError, ConnectionBroken) as error:  # transient; also a missing token
            self.close()
            raise ConnectionBroken(f"{self.address}: {error}", sent=False) from error
        except BaseException:
            self.close()
            raise
        self._most = _MAX_ANSWER_BYTES
        if life > 0:
            self._renew_at = began + max(life * _RENEW_AFTER, _LEAST_SESSION_S)

    def _exchange(self, sasl: Mechanism, deadline: float) -> float:
        """Authenticate. Returns the seconds that the session lasts; 0: without an end."""
        exchange = sasl.exchange(deadline)
        message = here().run(
            partial(next, exchange)
        )  # this fetches a token, before anything is sent
        found = self.ask(SASL_HANDSHAKE, deadline, mechanism=sasl.name)
        if code := int(found.error_code):
            known = ", ".join(found.mechanisms) or "none"
            raise SaslError(f"the broker refuses the mechanism ({code}); it has {known}")
        while True:
            found = self.ask(SASL_AUTHENTICATE, deadline, auth_bytes=message)
            if (code := int(found.error_code)) != NONE:
                raise SaslError(f"{found.error_message or 'the broker refuses'} ({code})")
            try:
                message = exchange.send(found.auth_bytes)
            except StopIteration:
                break
        life = getattr(found, "session_lifetime", None)
        return life.total_seconds() if life is not None else 0.0

    def usable(self) -> bool:
        """Whether the connection looks alive. Nothing may be in flight, so bytes or an end mean that it is dead."""
        if self.has_arrived():
            self.close()
        return not self.broken

    def drain(self) -> None:
        """Read and drop the answers that have arrived."""
        self._read.clear()
        while self._awaited and not self.broken:
            if not self.has_arrived():
                break
            try:
                self.receive(self._awaited[0][0], time.monotonic() + _DRAIN_S)
            except ConnectionBroken:
                break

    def close(self) -> None:
        """Close the socket; the fate of requests in flight stays unknown."""
        self.broken = True
        self._socket.close()

    def interrupt(self) -> None:
        """Break the connection from another thread: a thread that waits for the broker stops waiting."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _write(self, buffers: list[Buffer], size: int, deadline: float) -> None:
        sent = False
        try:
            _remaining(deadline)
            if size < _JOIN_BYTES or not self._gather:
                buffers = [b"".join(buffers)]
            at = 0
            sent = True
            while at < len(buffers):
                some = buffers[at : at + _MAX_BUFFERS]
                done = self._at_once(partial(self._sent, some), select.POLLOUT, deadline)
                while at < len(buffers) and done >= len(buffers[at]):
                    done -= len(buffers[at])
                    at += 1
                if done:
                    buffers[at] = memoryview(buffers[at])[done:]
        except OSError as error:
            self.close()
            raise ConnectionBroken(f"{self.address}: {error}", sent=sent) from error
        except BaseException:
            # Interrupted, perhaps in mid-frame.
            self.close()
            raise

    def _at_once(self, call: Callable[[], T], events: int, deadline: float) -> T:
        """Call the socket, and again when these events have come, until it does not have to wait."""
        while True:
            try:
                return call()
            except ssl.SSLWantReadError:
                events = select.POLLIN
            except ssl.SSLWantWriteError:
                events = select.POLLOUT
            except BlockingIOError:
                pass
            poll = select.poll()
            poll.register(self._socket, events)
            wait_s = here().ready((self._socket.fileno(),), events, _remaining(deadline))
            if not poll.poll(wait_s * 1000):
                raise TimeoutError("timed out")

    def _read_frame(self, deadline: float) -> memoryview:
        try:
            return self._frame(deadline)
        except OSError as error:
            self.close()
            raise ConnectionBroken(f"{self.address}: {error}") from error
        except BaseException:
            # Interrupted, perhaps in mid-frame.
            self.close()
            raise

    def _frame(self, deadline: float) -> memoryview:
        """The next answer without its size."""
        data, self._ahead = self._ahead, b""
        while len(data) < _SIZE.size:
            data += self._at_once(self._received, select.POLLIN, deadline)
        size = _SIZE.unpack_from(data)[0]
        if not 4 <= size <= self._most:
            raise ConnectionBroken(f"{self.address} sent a frame of {size} bytes")
        done, end = len(data), _SIZE.size + size
        if done >= end:
            self._ahead = data[end:]
            return memoryview(data)[_SIZE.size : end]
        room = bytearray(data)
        while done < end:
            if done == len(room):
                room.extend(bytes(min(end - done, max(done, _PIECE_BYTES))))
            with memoryview(room) as view, view[done:] as rest:
                receive = partial(self._received_into, rest)
                done += self._at_once(receive, select.POLLIN, deadline)
        return memoryview(room)[_SIZE.size :]

    def _sent(self, buffers: list[Buffer]) -> int:
        """Send as much as there is room for. Returns the number of bytes."""
        # TLS has no `sendmsg`.
        return self._socket.send(buffers[0]) if len(buffers) == 1 else self._socket.sendmsg(buffers)

    def _received(self) -> bytes:
        if not (data := self._socket.recv(_RECEIVED_BYTES)):
            raise ConnectionResetError(_CLOSED)
        return data

    def _received_into(self, room: memoryview) -> int:
        if not (count := self._socket.recv_into(room)):
            raise ConnectionResetError(_CLOSED)
        return count


class Pool:
    """Idle connections by address. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._idle: dict[tuple[str, int], list[Connection]] = {}
        # Connections with answers under way.
        self._parked: dict[tuple[str, int], list[Connection]] = {}
        # Connections that wait for an answer that may never come.
        self._waiting: WeakSet[Connection] = WeakSet()
        self._closed = False

    def open(self, address: tuple[str, int], deadline: float) -> Connection:
        """A new connection that knows the broker's versions and has authenticated."""
        settings = self._settings
        limit = min(deadline, time.monotonic() + settings.connect_timeout)
        connection = Connection(
            *address,
            client_id=settings.client_id,
            deadline=limit,
            tls=settings.tls.context() if settings.tls is not None else None,
            sasl=settings.sasl,
        )
        try:
            connection.greet(limit)
            connection.authenticate(limit)
        except BaseException as error:
            connection.close()
            if isinstance(error, ConnectionBroken) and not isinstance(error, AuthenticationFailed):
                raise ConnectionBroken(str(error), sent=False) from error
            raise
        return connection

    def wait_on(self, address: tuple[str, int], deadline: float) -> Connection:
        """Do the same as `take`, for a request that changes nothing, so that `close` may interrupt it."""
        connection = self.take(address, deadline)
        with self._lock:
            self._waiting.add(connection)
            if self._closed:
                connection.interrupt()
        return connection

    def take(self, address: tuple[str, int], deadline: float) -> Connection:
        """An idle or a new connection. Give it back with `give`."""
        with self._lock:
            parked = self._parked.pop(address, [])
        try:
            for connection in parked:
                connection.drain()
        finally:
            for connection in parked:
                self.give(connection, address)
        while True:
            with self._lock:
                if self._closed:
                    raise LogUnavailable("the log is closed")
                idle = self._idle.get(address)
                found = idle.pop() if idle else None
            if found is None:
                return self.open(address, deadline)
            if found.usable():
                return found

    def give(self, connection: Connection, address: tuple[str, int]) -> None:
        """Give a connection back. If answers are under way, it is reused once they have arrived."""
        with self._lock:
            self._waiting.discard(connection)
            if connection.broken:
                return
            if self._closed:
                connection.close()
            elif connection.idle:
                self._idle.setdefault(address, []).append(connection)
            else:
                self._parked.setdefault(address, []).append(connection)

    def close(self) -> None:
        """Close idle connections, and interrupt those of `wait_on`. All others are closed when they come back."""
        with self._lock:
            self._closed = True
            for connection in self._waiting:
                connection.interrupt()
            for pool in (self._idle, self._parked):
                for connections in pool.values():
                    for connection in connections:
                        connection.close()
                pool.clear()

    def after_fork(self) -> None:
        """In a forked child: close its copies of the connections; the parent's connections stay open."""
        self._lock = threading.Lock()
        self._waiting.clear()
        self.close()


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
