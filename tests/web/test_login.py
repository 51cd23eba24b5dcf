"""Who may look: by a proxy's header, or by a password file; and that each look at values is in the log."""

from __future__ import annotations

import asyncio
import base64
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from anabranch.errors import InvalidArgument, NotReady
from anabranch.testing.memory.cluster import MemoryCluster
from anabranch.web import app as web_app
from anabranch.web import hub, login
from anabranch.web.app import Site, application
from anabranch.web.guard import LOCAL
from anabranch.web.login import HeaderLogin, Login, PasswordLogin, password_line
from anabranch.web.pages import Pages, Showing

STREAM = "shop/orders"


def answer(
    app: Any,
    path: str,
    headers: dict[str, str] | None = None,
    peer: str = "127.0.0.1",
    *,
    method: str = "GET",
    version: str = "1.1",
) -> tuple[int, dict[str, str], str]:
    """The answer to a request: status, headers, text."""
    path, _, query = path.partition("?")
    given = {"host": "localhost", "origin": "http://localhost"} | (headers or {})
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in given.items()],
        "client": (peer, 1234),
        "server": ("localhost", 80),
        "scheme": "http",
        "root_path": "",
        "http_version": version,
        "state": {},
    }
    sent: list[dict[str, Any]] = []

    asked: list[dict[str, Any]] = [{"type": "http.request", "body": b"", "more_body": False}]

    async def receive() -> dict[str, Any]:
        while not asked:
            await asyncio.sleep(60)  # the browser waits for the answer
        return asked.pop()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(asyncio.wait_for(app(scope, receive, send), 30))
    names = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    text = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], names, text.decode()


@pytest.fixture(autouse=True)
def cheap_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash takes a sixteenth of the usual time."""
    monkeypatch.setattr(login, "_LOG_N", 10)


@pytest.fixture
def site() -> Callable[..., Any]:
    """Makes an application on a cluster in memory with an event."""
    client = MemoryCluster().connect(timeout=5)
    client.create_stream(STREAM)
    with client.begin("shop") as txn:
        txn.write(STREAM, b"apples", b"ann")
        txn.commit()

    def make(found: Login | None, *, acts: bool = False) -> Any:
        showing = Showing(acts, values=True)
        return application(Site(client, "memory", frozenset(LOCAL), 5.0, showing, found))

    return make


def basic(user: str, password: str) -> dict[str, str]:
    text = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"authorization": f"Basic {text}"}


def test_a_header_counts_from_the_proxy_alone(site: Callable[..., Any]) -> None:
    app = site(HeaderLogin("X-User", ["127.0.0.0/8", "::1"]))
    assert answer(app, "/streams", {"x-user": "anna"})[0] == 200
    assert "anna" in answer(app, "/streams", {"x-user": "anna"})[2]
    for headers, peer in (
        ({}, "127.0.0.1"),
        ({"x-user": ""}, "127.0.0.1"),
        ({"x-user": "a" * 101}, "127.0.0.1"),
        ({"x-user": "a\x01b"}, "127.0.0.1"),
        ({"x-user": "anna"}, "10.0.0.9"),
        ({"x-user": "anna"}, "odd"),
        ({"x-other": "anna"}, "127.0.0.1"),
    ):
        status, _, text = answer(app, f"/streams/{STREAM}/events", headers, peer)
        assert (status, "apples" in text) == (401, False), (headers, peer)
    assert answer(app, "/streams", {"x-user": "anna"}, "::ffff:127.0.0.1")[0] == 200
    assert answer(app, "/streams", {"x-user": "anna"}, "::ffff:10.0.0.9")[0] == 401
    assert answer(app, "/health")[0] == 200
    assert answer(app, "/static/web.css")[0] == 200
    for wrong in ("X User", "", "X-User: "):
        with pytest.raises(InvalidArgument):
            HeaderLogin(wrong, [])
    with pytest.raises(InvalidArgument, match="--proxy"):
        HeaderLogin("X-User", ["10.0.0.0/33"])


def test_a_proxy_needs_a_login_for_values(site: Callable[..., Any]) -> None:
    """Also if it names this machine as the host, and nothing says that others can reach the page."""
    app = site(None)
    path = f"/streams/{STREAM}/events"
    assert "apples" in answer(app, path)[2]
    for header in ("x-forwarded-for", "x-forwarded-proto", "x-forwarded-server", "via", "forwarded", "x-real-ip",
                   "cf-connecting-ip", "x-client-ip"):  # fmt: skip
        status, _, text = answer(app, path, {header: "10.0.0.1"})
        assert (status, "apples" in text, "--user-header" in text) == (403, False, True), header
    status, _, text = answer(app, path, version="1.0")  # as nginx sends it
    assert (status, "apples" in text) == (403, False)
    assert answer(app, "/streams", {"via": "10.0.0.1"})[0] == 200
    named = site(HeaderLogin("X-User", ["127.0.0.1"]))
    assert "apples" in answer(named, path, {"x-forwarded-for": "10.0.0.1", "x-user": "anna"})[2]


def test_passwords(site: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "users"
    file.write_text(f"# ours\n{password_line('anna', 'clé: 1')}\n")
    app = site(PasswordLogin(file))
    status, headers, text = answer(app, f"/streams/{STREAM}/events")
    assert (status, headers["www-authenticate"].partition(" ")[0]) == (401, "Basic")
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "apples" not in text
    assert answer(app, "/streams", basic("anna", "clé: 1"))[0] == 200
    for user, password in (
        ("anna", "clé: 2"),
        ("anna", ""),
        ("bob", "clé: 1"),
        ("", ""),
        ("nobody", ""),
    ):
        assert answer(app, "/streams", basic(user, password))[0] == 401, user
    for header in ("Basic", "Basic !", "Bearer x", "Basic " + "x" * 2000, "Basic /w=="):
        assert answer(app, "/streams", {"authorization": header})[0] == 401
    file.write_text(f"{password_line('bob', 'other')}\n")
    assert answer(app, "/streams", basic("anna", "clé: 1"))[0] == 401
    assert answer(app, "/streams", basic("bob", "other"))[0] == 200
    for half in ("nonsense\n", "bob:scrypt$²$8$1$AA==$AA==\n", "bob:scrypt$14$8$1$é$AA==\n"):
        file.write_text(half)
        assert answer(app, "/streams", basic("bob", "other"))[0] == 200


def test_without_users_in_the_password_file_none_gets_in(
    site: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, kept = tmp_path / "users", tmp_path / "kept"
    file.write_text(password_line("anna", "right"))
    app = site(PasswordLogin(file))

    def status() -> int:
        return answer(app, "/streams", basic("anna", "right"))[0]

    assert status() == 200
    file.rename(kept)
    assert (status(), status()) == (401, 401)
    kept.rename(file)
    assert status() == 200
    text = file.read_text()
    for none in ("", "# none\n"):
        file.write_text(none)
        assert status() == 401
    file.write_text(text)
    assert status() == 200
    said = [each.getMessage() for each in caplog.records if "lets no user in" in each.getMessage()]
    assert len(said) == 2
    assert "No such file" in said[0]
    assert "it has no user" in said[1]


def test_a_wrong_password_is_in_the_log_at_most_once_a_second(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "users"
    file.write_text(password_line("anna", "right"))
    found = PasswordLogin(file)
    assert found.user_of("10.0.0.9", Headers({})) == ""  # a browser that has not asked yet
    assert found.user_of("10.0.0.9", Headers(basic("anna", "right"))) == "anna"
    assert caplog.records == []
    for _ in range(2):
        proxied = basic("anna", "guess") | {"x-forwarded-for": "1.2.3.4\n"}
        assert found.user_of("10.0.0.9", Headers(proxied)) == ""
    monkeypatch.setattr(login, "_WARNED_S", 0.0)
    found.user_of("10.0.0.9", Headers(basic(f"x\n{'y' * 200}", "guess")))
    assert [record.getMessage() for record in caplog.records] == [
        "a wrong login: 'anna' at 10.0.0.9 for '1.2.3.4\\n'",
        f"a wrong login: 'x\\n{'y' * 98}' at 10.0.0.9",
    ]


def test_a_right_password_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "users"
    file.write_text(password_line("anna", "right"))
    found = PasswordLogin(file)
    hashed: list[object] = []
    real = login._hashed

    def counted(*given: Any) -> bytes:
        hashed.append(given)
        return real(*given)

    monkeypatch.setattr(login, "_hashed", counted)
    for _ in range(3):
        assert found.user_of("", Headers(basic("anna", "right"))) == "anna"
    assert len(hashed) == 1
    for user in ("anna", "unknown"):  # both take the time of a hash
        for _ in range(2):
            assert found.user_of("", Headers(basic(user, "wrong"))) == ""
    assert len(hashed) == 5


def test_wrong_passwords_of_one_address_lock_no_user_out(
    site: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one who is logged in, at the same address; nor one who logs in from another."""
    file = tmp_path / "users"
    file.write_text("\n".join(password_line(user, user) for user in ("anna", "bob")))
    app = site(PasswordLogin(file))
    hashed: list[object] = []
    real = login._hashed

    def counted(*given: Any) -> bytes:
        hashed.append(given)
        return real(*given)

    monkeypatch.setattr(login, "_hashed", counted)
    assert answer(app, "/streams", basic("anna", "anna"))[0] == 200
    hashed.clear()
    said = [answer(app, "/streams", basic("anna", f"guess {n}"))[0] for n in range(40)]
    assert said[:5] == [401] * 5
    assert said[-5:] == [429] * 5
    assert len(hashed) < 20
    assert answer(app, "/streams", basic("anna", "anna"))[0] == 200
    assert answer(app, "/streams", basic("bob", "bob"))[0] == 429
    assert answer(app, "/streams", basic("bob", "bob"), "10.0.0.9")[0] == 200
    proxied = basic("bob", "bob") | {"x-forwarded-for": "127.0.0.1, 10.0.0.7"}
    assert answer(app, "/streams", proxied)[0] == 200
    # What one who is no proxy names does not count.
    said = [
        answer(
            app,
            "/streams",
            basic("bob", f"guess {n}") | {"x-forwarded-for": f"10.0.1.{n}"},
            "10.0.0.8",
        )[0]
        for n in range(20)
    ]
    assert (said[0], said[-1]) == (401, 429)


def test_users_that_log_in_are_no_guessers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "users"
    file.write_text("\n".join(password_line(f"user {n}", "right") for n in range(15)))
    found = PasswordLogin(file)
    for n in range(15):
        headers = Headers(basic(f"user {n}", "right"))
        assert found.known("10.0.0.9", headers) is None
        assert found.user_of("10.0.0.9", headers) == f"user {n}"
        assert found.known("10.0.0.9", headers) == f"user {n}"


def test_one_who_is_logged_in_waits_for_no_other_s_password(
    site: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "users"
    file.write_text(password_line("anna", "right"))
    app = site(PasswordLogin(file))
    assert answer(app, "/streams", basic("anna", "right"))[0] == 200
    ends = threading.Event()
    monkeypatch.setattr(login, "_is_right", lambda *_: not ends.wait(60))
    guesses = [
        threading.Thread(target=answer, args=(app, "/streams", basic("x", "guess"), f"10.0.0.{n}"))
        for n in range(5)
    ]
    for guess in guesses:
        guess.start()
    began = time.monotonic()
    assert answer(app, "/streams", basic("anna", "right"))[0] == 200
    assert time.monotonic() - began < 30
    ends.set()
    for guess in guesses:
        guess.join()


@pytest.mark.parametrize(
    "line",
    ["anna", "anna:", "anna:secret", "anna:scrypt$14$8$1$AA==$AA==", "anna:scrypt$99$8$1$AA==$AA==",
     "anna:scrypt$14$8$1$!$!", "anna:scrypt$²$8$1$AA==$AA==", "anna:scrypt$14$8$1$é$AA==", ""],
)  # fmt: skip
def test_password_files_that_are_refused(tmp_path: Path, line: str) -> None:
    file = tmp_path / "users"
    file.write_text(line)
    with pytest.raises(InvalidArgument, match="web-password"):
        PasswordLogin(file)
    with pytest.raises(InvalidArgument):
        PasswordLogin(tmp_path / "none")


def test_each_look_at_values_is_in_the_log_with_the_user(
    site: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    app = site(HeaderLogin("X-User", ["127.0.0.1"]))
    with caplog.at_level(logging.INFO, "anabranch.web"):
        answer(app, f"/streams/{STREAM}/events?key=ann%0Aforged", {"x-user": "anna"})
        answer(app, "/streams", {"x-user": "anna"})
        answer(app, f"/streams/{STREAM}/events")
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"'anna' at 127.0.0.1 looks at events {STREAM} 'ann\\nforged' '50'"]


@pytest.mark.parametrize("action", ["events", "rows", "versions?key=k"])
def test_no_address_forges_a_line_of_the_log(
    site: Callable[..., Any], caplog: pytest.LogCaptureFixture, action: str
) -> None:
    app = site(None)
    with caplog.at_level(logging.INFO, "anabranch.web"):
        for name in ("x\n2026-11-29 'anna' looks at events", "x\u202e", "x" * 5000):
            assert answer(app, f"/streams/shop/{name}/{action}")[0] == 400
    assert caplog.records == []


def test_a_failed_action_is_one_line_of_the_log(
    site: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    app = site(None, acts=True)
    txn = "0f" * 16
    with caplog.at_level(logging.INFO, "anabranch.web"):
        for about in ("ff\nforged", f"{txn}: done: forged"):
            assert answer(app, f"/transactions/{about}/abort", method="POST")[0] == 400
        assert answer(app, f"/transactions/{txn}\n/abort", method="POST")[0] == 409
    (said,) = (record.getMessage() for record in caplog.records)
    assert said.startswith(f"127.0.0.1: abort {txn}: InvalidArgument: this confirmation")
    assert "\n" not in said


def test_an_open_page_is_checked_and_logged_again(
    site: Callable[..., Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web_app, "LIVE_S", 1.0)
    file, path = tmp_path / "users", f"/streams/{STREAM}/events"
    file.write_text(password_line("anna", "right"))
    app = site(PasswordLogin(file))
    live = {"accept": "text/event-stream"} | basic("anna", "right")
    with caplog.at_level(logging.INFO, "anabranch.web"):
        for _ in range(2):  # the answer ends by itself
            status, headers, text = answer(app, path, live)
            assert (status, headers["content-type"].partition(";")[0]) == (200, "text/event-stream")
            assert "apples" in text
    assert [record.getMessage().split()[3] for record in caplog.records] == ["follows"] * 2
    file.write_text(password_line("bob", "right"))
    status, _, text = answer(app, path, live)
    assert (status, "apples" in text) == (401, False)


def test_without_a_user_nothing_of_the_cluster_is_shown(
    site: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    app = site(HeaderLogin("X-User", ["127.0.0.1"]))
    assert answer(app, "/health")[::2] == (200, "ok\n")
    for path in ("/healthXYZ", "/health/", "/static", "/staticXYZ"):
        assert answer(app, path)[0] == 401, path
    assert answer(app, "/static/none")[::2] == (404, "404\n")

    def fails(*_: object) -> str:
        raise NotReady("the secret broker")

    monkeypatch.setattr(Pages, "body", fails)
    app, bare = site(HeaderLogin("X-User", ["127.0.0.1"])), site(None)
    assert answer(app, "/health")[::2] == (503, "not ready\n")
    status, _, text = answer(bare, "/health")
    assert (status, "the secret broker" in text) == (503, True)
    monkeypatch.setattr(hub, "MOST_PAGES", 0)
    assert answer(site(HeaderLogin("X-User", [])), "/health")[::2] == (503, "not ready\n")
