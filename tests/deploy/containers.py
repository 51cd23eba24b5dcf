"""The image and compose as they stand, in a Docker engine: ``scripts/test-infra`` runs this.

No image can be pulled there, so the image's base is made from Debian's packages, with the wheels that pip finds
instead of an index. Kafka's image is made by `tests.containers.image`, Prometheus' from Debian's program; Grafana
is left out.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from anabranch.infra.fetch import cache_root
from tests.deploy.files import INFRA, PROCESSOR, ROOT, STATE, STREAMS, WEB, compose, seconds
from tests.deploy.prometheus import program
from tests.deploy.writer import ORDERS
from tests.waiting import wait_until

BASE, KAFKA, PROMETHEUS, IMAGE = (
    "debian-python",
    "anabranch-kafka",
    "debian-prometheus",
    "anabranch",
)
SUITE = "bookworm"
CACHE = cache_root() / "deploy"
WHEELS, BASE_TAR = CACHE / "wheels", CACHE / f"{SUITE}.tar"
WRITER = Path(__file__).with_name("writer.py")
SOON_S = 900.0  # brokers, controllers and pages start at the same time, perhaps on two busy cores
MORE = 20
# Fails unless each replica is in sync: then any one broker may be lost.
IN_SYNC = """
from confluent_kafka.admin import AdminClient
brokers = "kafka-1:9092,kafka-2:9092,kafka-3:9092"
topics = AdminClient({"bootstrap.servers": brokers}).list_topics(timeout=20).topics.values()
parts = [part for topic in topics for part in topic.partitions.values()]
assert parts and all(len(part.isrs) == len(part.replicas) == 3 for part in parts)
"""
PIP = "[global]\nno-index = true\nfind-links = /wheels\n"
OF_PROMETHEUS = f"""
FROM {BASE}
COPY prometheus /usr/bin/prometheus
RUN install -d -o nobody /prometheus
USER nobody
ENTRYPOINT ["prometheus"]
"""
ENVIRONMENT = os.environ | {
    "ANABRANCH_IMAGE": IMAGE,
    "KAFKA_IMAGE": KAFKA,
    "PROMETHEUS_IMAGE": PROMETHEUS,
    "DOCKER_BUILDKIT": "0",  # BuildKit would ask a registry for the base
}


def run(*words: str | Path, given: bytes = b"") -> str:
    """Its output. ``given``: its input."""
    done = subprocess.run(
        [str(word) for word in words],
        env=ENVIRONMENT,
        input=given,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, f"{words}: {(done.stdout + done.stderr).decode()[-4000:]}"
    return done.stdout.decode()


def composed(*words: str) -> str:
    return run("docker-compose", "-p", "anabranch", "-f", INFRA / "compose.yaml", *words)


def say(text: str) -> None:
    sys.stdout.write(f"{time.strftime('%X')} {text}\n")
    sys.stdout.flush()


# -- what is fetched ------------------------------------------------------------------------------------


def fetch() -> None:
    """Bring all that is downloaded into the cache."""
    assert sys.version_info[:2] == (3, 11), f"the wheels must fit Python 3.11, of Debian {SUITE}"
    program("prometheus")
    run(
        sys.executable, "-m", "pip", "wheel", "-q", "-w", WHEELS,
        f"{ROOT}[controller,tables,web]", "hatchling",
    )  # fmt: skip
    for wheel in WHEELS.glob("anabranch-*.whl"):
        wheel.unlink()  # the image's build makes it
    if not BASE_TAR.exists():
        mirror = run("apt-get", "indextargets", "--format", "$(SITE)").split()[0]
        made = BASE_TAR.with_suffix(".new")
        folder = CACHE / SUITE
        run("rm", "-rf", folder)
        packages = "--include=python3,python3-venv"
        run("debootstrap", "--variant=minbase", packages, SUITE, folder, mirror)
        run("tar", "-C", folder, "--exclude=./var/cache/*", "--exclude=./dev/*", "-cf", made, ".")
        run("rm", "-rf", folder)
        made.replace(BASE_TAR)


# -- images ---------------------------------------------------------------------------------------------


def make_images() -> None:
    run("docker", "import", BASE_TAR, f"{BASE}-bare")
    build(BASE, f"FROM {BASE}-bare\nCOPY wheels /wheels\nCOPY pip.conf /etc/pip.conf\n", {
        "pip.conf": PIP.encode(),
        **{f"wheels/{wheel.name}": wheel.read_bytes() for wheel in WHEELS.iterdir()},
    })  # fmt: skip
    build(PROMETHEUS, OF_PROMETHEUS, {"prometheus": program("prometheus").read_bytes()})
    run(sys.executable, "-m", "tests.containers.image", f"{KAFKA}:latest")
    say("building the image")
    composed("build", "--build-arg", f"BASE={BASE}", "controller-1")
    say(run("docker", "images", IMAGE))


def build(name: str, dockerfile: str, files: dict[str, bytes]) -> None:
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        for path, content in (files | {"Dockerfile": dockerfile.encode()}).items():
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(content), 0o755
            tar.addfile(info, io.BytesIO(content))
    run("docker", "build", "-t", name, "-", given=context.getvalue())


# -- containers -----------------------------------------------------------------------------------------


def container(service: str) -> str:
    return composed("ps", "-q", service).strip()


def wait_healthy(services: Iterable[str]) -> None:
    for service in services:
        wait_until(partial(is_healthy, service), SOON_S, pause=0.5, what=partial(logs, service))


def is_healthy(service: str) -> bool:
    """Its check succeeds; if it has none, it runs."""
    (found,) = json.loads(run("docker", "inspect", container(service)))
    state = found["State"]
    return (state["Health"]["Status"] if "Health" in state else state["Status"]) in (
        "healthy",
        "running",
    )


def logs(service: str) -> str:
    return composed("logs", "--no-color", "--tail", "30", service, "kafka-1")


class Writing:
    """`writer` in a container of the image, on compose's network."""

    def __enter__(self) -> Writing:
        (network,) = run("docker", "network", "ls", "-q", "-f", "name=anabranch_default").split()
        self._id = run(
            "docker", "run", "-d", "--read-only", "--network", network,
            "--env-file", INFRA / "settings/anabranch.env",
            "-v", f"{INFRA}/settings/kafka.properties:/etc/anabranch/kafka.properties:ro",
            "-v", f"{WRITER}:/writer.py:ro", "--entrypoint", "python", IMAGE, "/writer.py",
        ).strip()  # fmt: skip
        return self

    def commits(self) -> int:
        said = run("docker", "logs", "--tail", "1", self._id).strip()
        return int(said) if said.isdecimal() else 0

    def more(self) -> None:
        wanted = self.commits() + MORE
        wait_until(lambda: self.commits() >= wanted, SOON_S, pause=0.5, what=self._log)

    def in_sync(self) -> bool:
        """Whether all brokers have all that is written."""
        words = ["docker", "exec", self._id, "python", "-c", IN_SYNC]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0

    def _log(self) -> str:
        return run("sh", "-c", f"docker logs --tail 30 {self._id} 2>&1")

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            run("docker", "stop", "-t", "600", self._id)  # it reads all back
            (state,) = json.loads(run("docker", "inspect", self._id))
            assert state["State"]["ExitCode"] == 0, self._log()


def check_confined(service: str) -> None:
    """No root, and only its folders can be written to."""
    code = "import os; print(os.getuid()); open('{}/x', 'w')"
    has_temporary = bool(compose()["services"][service].get("tmpfs"))
    for folder, allowed in (
        (STATE, service != WEB),
        ("/opt/anabranch", False),
        ("/tmp", has_temporary),
    ):
        words = ["docker", "exec", container(service), "python", "-c", code.format(folder)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.stdout == "10001\n", done.stderr
        assert (done.returncode == 0) == allowed, (folder, done.stderr)


def strike(service: str, writing: Writing) -> None:
    """Kill it and start it again; then stop it as its grace period allows, and start it again."""
    grace_s = seconds(compose()["services"][service].get("stop_grace_period", "10s"))
    for how in ("kill", "stop"):
        began = time.monotonic()
        composed(how, service)
        took = time.monotonic() - began
        writing.more()
        composed("start", service)
        wait_healthy([service])
        wait_until(writing.in_sync, SOON_S, pause=1.0, what=partial(logs, service))
        writing.more()
        say(f"{service}: {how} took {took:.1f} s")
        assert how == "kill" or took < grace_s + 5


def monitored() -> bool:
    """Prometheus has scraped both controllers and the processor, and knows the rules."""

    def ask(what: str) -> Any:
        with urlopen(f"http://127.0.0.1:9090/api/v1/{what}", timeout=5) as answer:
            return json.load(answer)["data"]

    try:
        targets = [each["health"] for each in ask("targets")["activeTargets"]]
        return targets == ["up"] * 3 and len(ask("rules")["groups"]) == 3
    except (URLError, ConnectionError, TimeoutError):
        return False


def main() -> None:
    if sys.argv[1:] == ["--fetch"]:
        fetch()
        return
    make_images()
    services = [name for name in compose()["services"] if name not in ("grafana", STREAMS)]
    try:
        composed("up", "-d", "--no-build", *services)
        wait_healthy(services)
        say("all run")
        for service in ("controller-1", WEB, PROCESSOR):
            check_confined(service)
        with Writing() as writing:
            writing.more()
            wait_until(monitored, SOON_S, pause=0.5, what=lambda: composed("logs", "prometheus"))
            for service in services:
                strike(service, writing)
            wait_until(monitored, SOON_S, pause=0.5)
            say(f"{writing.commits()} commits")
        with urlopen("http://127.0.0.1:8090/streams", timeout=10) as page:
            assert ORDERS in page.read().decode()
    finally:
        composed("down", "-v", "-t", "5")
    say("no commit was lost")


if __name__ == "__main__":
    main()
