"""Requests that no person made: refused, and nothing is done. Beside them the one that a person makes."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any

import pytest

import anabranch
from tests.web.conftest import WebProcess

pytestmark = pytest.mark.broker
EVIL = "http://evil.example"


@pytest.fixture
def txn(client: anabranch.Client, unique: str) -> Iterator[bytes]:
    """The id of an open transaction with an event."""
    client.create_stream(f"{unique}/s")
    with client.begin(unique, keepalive=600) as begun:
        begun.write(f"{unique}/s", b"v", key=b"k")
        begun.flush()
        assert begun.txn_id is not None
        yield begun.txn_id
        if client.state(begun.txn_id).state == "OPEN":
            begun.abort()


HOSTS = {
    "rebound": "evil.example:{port}",
    "rebound, no port": "evil.example",
    "begins alike": "localhost.evil.example:{port}",
    "none": None,
    "empty": "",
    "of IPv6": "[::2]:{port}",
}


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("path", ["/", "/static/live.js", "/health"])
def test_names_of_others(web: WebProcess, path: str, host: str | None) -> None:
    port = web.host.partition(":")[2]
    status, text = web.ask(path, host=None if host is None else host.format(port=port))
    assert status in (400, 403)
    assert "<" not in text
    assert web.ask(path, host=f"localhost:{port}")[0] == 200


FORMS: dict[str, dict[str, str | None]] = {
    "another origin": {"origin": EVIL},
    "no origin": {"origin": None},
    "origin null": {"origin": "null"},
    "origin begins alike": {"origin": "http://{host}.evil.example"},
    "another port": {"origin": "http://127.0.0.1:1"},
    "another scheme": {"origin": "https://{host}"},
    "not that of its proxy": {"x_forwarded_proto": "https"},
    "cross-site": {"sec_fetch_site": "cross-site"},
    "same-site": {"sec_fetch_site": "same-site"},
    "typed": {"sec_fetch_site": "none"},
    "a referer of others": {"origin": None, "referer": f"{EVIL}/x", "sec_fetch_site": None},
    "rebound": {"host": "evil.example", "origin": EVIL},
    "by PUT": {"method": "PUT"},
    "by DELETE": {"method": "DELETE"},
    "a GET": {"method": "GET"},
    "a HEAD": {"method": "HEAD"},
}


def test_forms_of_others(
    web: WebProcess, client: anabranch.Client, txn: bytes, subtests: pytest.Subtests
) -> None:
    """Even with a secret that is good."""
    path = f"/transactions/{txn.hex()}/abort"
    for what, headers in FORMS.items():
        with subtests.test(what):
            form = {"secret": web.secret(path)}
            filled = {
                name: value and value.format(host=web.host) for name, value in headers.items()
            }
            method = filled.pop("method", None) or "POST"
            status, _ = web.ask(path, form, method, **filled)
            assert status == (200 if method in ("GET", "HEAD") else 403)
            assert client.state(txn).state == "OPEN"


def test_secrets(web: WebProcess, client: anabranch.Client, txn: bytes) -> None:
    """Each is good once, for what it was given for."""
    scope = client.state(txn).scope
    about = f"/transactions/{txn.hex()}"
    scale = f"/streams/{scope}/s/scale"
    other = web.secret(f"{scale}?segments=2")
    for form in (
        {},
        {"secret": ""},
        {"secret": "x" * 43},
        {"secret": other},
        {"secret": "x" * 5000},
    ):
        assert web.ask(f"{about}/abort", form)[0] in (400, 409), form
    swapped = {"secret": web.secret(f"{scale}?segments=2"), "segments": "9"}
    assert web.ask(scale, swapped)[0] == 409
    assert len(client.describe(f"{scope}/s").segments) == 1
    assert client.state(txn).state == "OPEN"
    good = {"secret": web.secret(f"{about}/abort")}
    status, text = web.ask(f"{about}/abort", good)
    assert (status, "is aborted" in text) == (200, True)
    status, text = web.ask(f"{about}/abort", good)
    assert (status, "used already" in text) == (409, True)
    said = web.log.read_text()
    assert f"127.0.0.1: abort {txn.hex()}: done" in said
    assert f"127.0.0.1: abort {txn.hex()}: InvalidArgument: this confirmation" in said


def test_a_confirmation_is_for_the_state_that_was_shown(
    web: WebProcess, client: anabranch.Client, unique: str
) -> None:
    """The stream was scaled by another one while a person thought."""
    client.create_stream(f"{unique}/s")
    path = f"/streams/{unique}/s/scale?segments=3"
    form = {"secret": web.secret(path), "segments": "3"}
    client.scale(f"{unique}/s", 2)
    status, text = web.ask(path, form)
    assert (status, "is for another state" in text) == (409, True)
    assert len(client.describe(f"{unique}/s").segments) == 2


@pytest.mark.long
def test_many_confirmation_pages_void_no_other(
    web: WebProcess, client: anabranch.Client, txn: bytes
) -> None:
    path = f"/transactions/{txn.hex()}/abort"
    form = {"secret": web.secret(path)}
    for _ in range(1_001):
        web.secret(path)
    assert web.ask(path, form)[0] == 200
    assert client.state(txn).state == "ABORTED"


HALVES = {
    "no end of the headers": b"GET / HTTP/1.1\r\nHost: {host}\r\n",
    "nothing": b"",
    "no whole body": b"POST /streams/a/b/scale HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\n"
    b"Content-Length: 9\r\n\r\n1",
}


@pytest.mark.long
def test_half_requests_hold_nothing_up_and_end(web: WebProcess) -> None:
    address = web.host.partition(":")[0], int(web.host.partition(":")[2])
    with ExitStack() as stack:
        halves = []
        for number in range(450):
            half = stack.enter_context(socket.create_connection(address, timeout=30))
            text = [*HALVES.values()][number % len(HALVES)]
            half.sendall(text.replace(b"{host}", web.host.encode()))
            halves.append(half)
        assert [web.ask(path)[0] for path in ("/", "/health")] == [200, 200]
        for half in halves:
            with suppress(ConnectionResetError):
                while half.recv(1 << 16):
                    pass
    assert web.ask("/health")[0] == 200


REQUESTS = {
    "another site's picture": (
        "/",
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "no-cors"},
        403,
    ),
    "another site's link": (
        "/",
        {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"},
        200,
    ),
    "a page that is not there": ("/nope", {}, 404),
    "a stream that is not there": ("/streams/no/such", {}, 404),
    "no name": ("/streams/a/%3Cscript%3E", {}, 400),
    "no id": ("/transactions/xyz", {}, 400),
    "an id that is forgotten": (f"/transactions/{'0' * 32}", {}, 410),
    "a limit": ("/transactions?limit=10000000", {}, 400),
    "no number": ("/streams/a/b/scale?segments=-1", {}, 400),
    "a great number": ("/streams/a/b/scale?segments=99999999999999999999", {}, 400),
    "out of the folder": ("/static/../app.py", {}, 404),
    "out of it, encoded": ("/static/%2e%2e/app.py", {}, 404),
}


@pytest.mark.parametrize(("path", "headers", "wanted"), REQUESTS.values(), ids=REQUESTS)
def test_requests(web: WebProcess, path: str, headers: dict[str, Any], wanted: int) -> None:
    status, text = web.ask(path, **headers)
    assert status == wanted
    assert "<script>" not in text
