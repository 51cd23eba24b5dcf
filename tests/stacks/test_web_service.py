"""The programs of docs/how-to/web-service.md, started by the page's own commands on a broker and a controller."""

from __future__ import annotations

import base64
import re
import runpy
import shlex
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]
import pytest

import anabranch
from anabranch.cli.cluster import child_environment
from anabranch.infra.broker import EmbeddedBroker
from anabranch.infra.sockets import free_port
from tests.cluster import Cluster, start_cluster
from tests.conftest import QUIET
from tests.owned import send_signal, start_module
from tests.pages import DOCS, blocks
from tests.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.long, pytest.mark.unsecured]

PAGE = DOCS / "how-to" / "web-service.md"
BOTH = "shop/orders", "shop/payments"
START_S, STOP_S = 60.0, 40.0
LOAD_THREADS = 8
TASKS = 400


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of this file's own: the page names its streams, and a test stops the controller."""
    with EmbeddedBroker(quick_start=True, properties=QUIET) as broker:
        running = start_cluster(
            broker.bootstrap, tmp_path_factory.mktemp("shop"), arguments=("--session-timeout", "6")
        )
        with anabranch.connect(broker.bootstrap) as client:
            for stream in (*BOTH, "shop/stock"):
                client.create_stream(stream)
        yield running
        running.controller.kill()
        broker.kill()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the page's reader works, with the page's files."""
    for block in blocks(PAGE):
        if block.title is not None:
            (tmp_path / block.title).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*words: str) -> str:
    """The page's command with these words."""
    lines = [
        line for block in blocks(PAGE) if block.kind == "console" for line, _ in block.commands
    ]
    [found] = [line for line in lines if all(word in line for word in words)]
    return found.removesuffix(" &")


@dataclass
class Program:
    """A program of the page in a process of its own."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def stop(self) -> int:
        """SIGTERM, and wait for the end. Returns the exit code, and 0 for uvicorn's, which ends by the signal."""
        send_signal(self.process.pid, signal.SIGTERM)
        try:
            code = self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            # Python's fault handler writes the stacks of all threads to the log.
            for member in (
                *psutil.Process(self.process.pid).children(recursive=True),
                self.process,
            ):
                send_signal(member.pid, signal.SIGABRT)
            self.process.wait(STOP_S)
            raise AssertionError(f"it did not end: {self.log.read_text()}") from None
        return 0 if code == -signal.SIGTERM else code

    def answers(self, path: str) -> bool:
        """Whether it answers 200. Raises: AssertionError (it has ended)."""
        assert self.process.poll() is None, self.log.read_text()
        try:
            return httpx.get(f"{self.url}{path}").status_code == 200
        except httpx.TransportError:
            return False

    def order(self, key: str, path: str = "/orders") -> httpx.Response:
        order = {"customer": "ann", "item": key}
        headers = {"Idempotency-Key": key}
        return httpx.post(f"{self.url}{path}", json=order, headers=headers, timeout=30)


@contextmanager
def started(line: str, cluster: Cluster, ready: str = "", **more: str) -> Iterator[Program]:
    """Run a command line on a free port, until it answers at the path ``ready``; all its processes end."""
    port = str(free_port())
    module, *arguments = shlex.split(re.sub(r"\b800\d\b", port, line))
    environment = child_environment({"ANABRANCH_BOOTSTRAP": cluster.bootstrap, **more})
    environment["PYTHONPATH"] = f"{Path.cwd()}:{environment['PYTHONPATH']}"
    environment["PYTHONFAULTHANDLER"] = "1"
    log = Path(f"{uuid.uuid4().hex}.log").absolute()
    with log.open("wb") as out:
        process = start_module(module, arguments, output=out, environment=environment)
    program = Program(process, f"http://127.0.0.1:{port}", log)
    try:
        if ready:
            wait_until(lambda: program.answers(ready), START_S, what=log.read_text)
        yield program
    finally:
        if process.poll() is None:
            family = [*psutil.Process(process.pid).children(recursive=True), process]
            for member in family:
                member.kill()
            process.wait(STOP_S)


def committed(cluster: Cluster, *streams: str) -> dict[str, list[anabranch.Event]]:
    """All events of each stream, as of one moment."""
    with anabranch.connect(cluster.bootstrap) as client:
        snapshot = client.snapshot(streams)
        return {stream: list(snapshot.read(stream)) for stream in streams}


def transactions(cluster: Cluster) -> dict[str, Counter[str]]:
    """Transaction -> how many events each stream has of it."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for stream, events in committed(cluster, *BOTH, "shop/stock").items():
        for event in events:
            assert event.txn_id is not None
            found[event.txn_id.hex()][stream] += 1
    return found


def items(cluster: Cluster, stream: str) -> Counter[bytes | None]:
    """How often each value was committed to a stream."""
    return Counter(event.value for event in committed(cluster, stream)[stream])


# -- uvicorn --------------------------------------------------------------------------------------------


def test_a_repeated_request_is_one_commit(shop: Cluster, unique: str) -> None:
    with started(command("uvicorn", "shop:app"), shop, "/ready") as program:
        keys = [f"{unique}-{number}" for number in range(20)]
        with ThreadPoolExecutor(20) as pool:
            first = list(pool.map(program.order, keys))
            again = list(pool.map(program.order, keys))
        assert {answer.status_code for answer in first + again} == {200}
        made = [answer.json()["transaction"] for answer in first]
        assert [answer.json()["transaction"] for answer in again] == made
        assert len(set(made)) == len(keys)
        found = transactions(shop)
        assert all(found[txn] == Counter(BOTH) for txn in made)
        assert program.stop() == 0
    orders = items(shop, BOTH[0])
    assert [orders[key.encode()] for key in keys] == [1] * len(keys)


def test_an_unknown_outcome_is_one_commit_after_all(shop: Cluster, unique: str) -> None:
    with started(command("uvicorn", "shop:app"), shop, "/ready") as program:
        assert program.order(f"{unique}-0").status_code == 200
        shop.controller.kill()
        lost = program.order(f"{unique}-1")
        assert (lost.status_code, lost.headers["retry-after"]) == (503, "1")
        assert "OutcomeUnknown" in lost.json()["detail"]
        assert httpx.get(f"{program.url}/ready", timeout=30).status_code == 503
        shop.controller.start().wait_leading()
        wait_until(lambda: program.answers("/ready"))
        made = {program.order(f"{unique}-1").json()["transaction"] for _ in range(2)}
        assert len(made) == 1
    assert items(shop, BOTH[0])[f"{unique}-1".encode()] == 1
    assert transactions(shop)[made.pop()] == Counter(BOTH)


def test_a_repeated_request_keeps_what_it_got(shop: Cluster, unique: str) -> None:
    with started(command("uvicorn", "seats:app"), shop, "/docs") as program:

        def book(number: int) -> httpx.Response:
            headers = {"Idempotency-Key": f"{unique}-{number}"}
            return httpx.post(f"{program.url}/bookings/{unique}", headers=headers, timeout=30)

        first = [book(number) for number in range(3)]
        assert [answer.status_code for answer in first] == [200, 200, 409]
        assert [book(number).json() for number in range(2)] == [{"seat": 2}, {"seat": 1}]
    booked = committed(shop, "shop/bookings")["shop/bookings"]
    assert [event.value for event in booked if event.key == unique.encode()] == [b"2", b"1"]


def test_the_test_of_the_page_passes(shop: Cluster) -> None:
    words = shlex.split(command("python -m pytest"))[1:]
    done = subprocess.run(
        [sys.executable, *words, "--anabranch-bootstrap", shop.bootstrap],
        env=child_environment({"PYTEST_PLUGINS": "anabranch.testing.pytest_plugin"}),
        capture_output=True, text=True, timeout=START_S,
    )  # fmt: skip
    assert "1 passed" in done.stdout, done.stdout


def test_two_services_write_one_transaction(shop: Cluster, unique: str) -> None:
    with started(command("uvicorn", "stock:app"), shop, "/docs") as stock:
        checkout = command("uvicorn", "checkout:app")
        with started(checkout, shop, "/ready", STOCK_URL=stock.url) as program:
            made = {program.order(unique, "/checkout").json()["transaction"] for _ in range(2)}
            assert len(made) == 1
            assert transactions(shop)[made.pop()] == Counter((BOTH[0], "shop/stock"))
            token = base64.b64encode(b"no token").decode()
            refused = httpx.post(f"{stock.url}/parts", json={"token": token, "item": "x"})
            assert (refused.status_code, "token" in refused.json()["detail"]) == (400, True)
            stock.stop()
            failed = program.order(f"{unique}-late", "/checkout")
            assert (failed.status_code, failed.headers["retry-after"]) == (503, "1")
    assert items(shop, BOTH[0])[f"{unique}-late".encode()] == 0


def test_settings_come_from_the_environment(
    shop: Cluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANABRANCH_BOOTSTRAP", shop.bootstrap)
    monkeypatch.setenv("SHOP_TIMEOUT_S", "20")
    with runpy.run_path(str(folder / "settings.py"))["connect"]() as client:
        assert client.describe(BOTH[0]).stream == BOTH[0]
    monkeypatch.setenv("SHOP_KAFKA_USER", "shop")
    monkeypatch.setenv("SHOP_KAFKA_PASSWORD", "secret")
    monkeypatch.setenv("SHOP_TIMEOUT_S", "1")
    with (
        runpy.run_path(str(folder / "settings.py"))["connect"]() as client,
        pytest.raises(anabranch.errors.RetryError),  # the broker has no TLS
    ):
        client.describe(BOTH[0])


# -- shutdown -------------------------------------------------------------------------------------------


def stopped_under_load(
    program: Program, send: Callable[[str], httpx.Response], unique: str
) -> dict[str, str]:
    """SIGTERM while requests come. Returns key -> transaction of those with an answer."""
    answered: dict[str, str] = {}
    wrong: list[str] = []
    counted = iter(range(1_000_000))
    closing = threading.Event()

    def load() -> None:
        while not closing.is_set():
            key = f"{unique}-{next(counted)}"
            try:
                answer = send(key)
            except httpx.TransportError:  # the server takes no more
                closing.wait(0.01)
                continue
            found = re.search("[0-9a-f]{32}", answer.text)
            if answer.status_code == 200 and found:
                answered[key] = found[0]
            else:
                wrong.append(f"{answer.status_code} {answer.text}")

    with ThreadPoolExecutor(LOAD_THREADS) as pool:
        for _ in range(LOAD_THREADS):
            pool.submit(load)
        try:
            wait_until(lambda: len(answered) > 100 or wrong)
            code = program.stop()
        finally:
            closing.set()
    assert (code, wrong) == (0, []), program.log.read_text()
    assert "Traceback" not in program.log.read_text()
    return answered


@pytest.mark.parametrize(
    "words",
    [
        ("uvicorn", "shop:app"),
        ("gunicorn", "shop:app", ""),
        ("gunicorn", "shop:app", "--preload"),
    ],
    ids=["uvicorn", "gunicorn", "gunicorn --preload"],
)
def test_sigterm_loses_no_answered_order(
    shop: Cluster, unique: str, words: tuple[str, ...]
) -> None:
    line = command(*words)
    if words[-1] == "":
        line = line.replace("--preload", "")
    with started(line, shop, "/ready") as program:
        answered = stopped_under_load(program, program.order, unique)
    found = transactions(shop)
    assert [txn for txn in answered.values() if found[txn] != Counter(BOTH)] == []
    # Also those whose answer was lost are whole, and no order is there twice.
    orders = items(shop, BOTH[0])
    assert {count for value, count in orders.items() if unique.encode() in (value or b"")} == {1}
    with_orders = [of for of in found.values() if of[BOTH[1]]]
    assert [of for of in with_orders if of != Counter(BOTH)] == []


def test_a_program_without_lifespan_connects_after_the_fork(shop: Cluster, unique: str) -> None:
    line = command("gunicorn", "plain")
    with started(line, shop, "/first") as program:
        answered = stopped_under_load(
            program, lambda key: httpx.get(f"{program.url}/{key}", timeout=30), unique
        )
    found = transactions(shop)
    assert [txn for txn in answered.values() if found[txn] != Counter([BOTH[0]])] == []
    orders = items(shop, BOTH[0])
    assert {orders[f"/{key}".encode()] for key in answered} == {1}


@pytest.mark.parametrize("preload", [False, True])
def test_a_client_from_before_the_fork_says_so(shop: Cluster, folder: Path, preload: bool) -> None:
    text = (folder / "plain.py").read_text()
    early = text.replace("client = None", "import anabranch\n\nclient = anabranch.connect()")
    (folder / "early.py").write_text(early)
    line = "gunicorn early:application --bind 127.0.0.1:8000" + " --preload" * preload
    with started(line, shop) as program:
        wait_until(lambda: _status(program) is not None)
        assert _status(program) == (500 if preload else 200)
        named = "NotForkSafe: this client was made before a fork" in program.log.read_text()
        assert named == preload


def _status(program: Program) -> int | None:
    try:
        return httpx.get(program.url, timeout=30).status_code
    except httpx.TransportError:
        return None


# -- Celery ---------------------------------------------------------------------------------------------


# A process of the pool dies once, between a commit and the end of its task. Killed from outside it may wait for a
# task, and then it holds a lock of the pool: no other process gets a task any more. So it is with those of Celery's
# transports that have no event loop, as the one here.
DIES_ONCE = """
import contextlib, os, signal


def transact(*given, commit=anabranch.Client.transact, **named):
    commit(*given, **named)
    with contextlib.suppress(FileExistsError):
        open("died", "x").close()
        os.kill(os.getpid(), signal.SIGKILL)


anabranch.Client.transact = transact
"""


def test_each_celery_task_commits_once(shop: Cluster, folder: Path, unique: str) -> None:
    (folder / "data_out").mkdir()
    (folder / "data_in").symlink_to("data_out")  # what this process sends, the worker receives
    broker = {"CELERY_BROKER_URL": "filesystem://"}
    send = f"import jobs\nfor n in range({TASKS}): jobs.deliver.delay('{unique}-%d' % n)\n"
    (folder / "send.py").write_text(send)
    with started("send", shop, **broker) as sender:
        assert sender.process.wait(START_S) == 0, sender.log.read_text()

    def done() -> Counter[bytes | None]:
        events = committed(shop, BOTH[1])[BOTH[1]]
        return Counter(e.key for e in events if (e.key or b"").startswith(unique.encode()))

    line = command("celery")
    with started(line, shop, **broker) as worker:
        wait_until(lambda: len(done()) > 5, what=worker.log.read_text)
        assert worker.stop() == 0, worker.log.read_text()
        part = done()
    with (folder / "jobs.py").open("a") as jobs:
        jobs.write(DIES_ONCE)
    with started(line, shop, **broker) as worker:
        wait_until(lambda: len(done()) == TASKS, what=worker.log.read_text)
        assert (folder / "died").exists()
        assert worker.stop() == 0, worker.log.read_text()
        assert "NotForkSafe" not in worker.log.read_text()
    assert 5 < len(part) < TASKS
    assert set(done().values()) == {1}
    found = transactions(shop)
    assert [of for of in found.values() if of[BOTH[1]] and of != Counter(BOTH)] == []
