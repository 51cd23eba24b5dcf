"""Apicurio Registry from Maven Central, whose Confluent-compatible calls confluent-kafka's serializers make."""

from __future__ import annotations

import os
import subprocess
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

from anabranch.infra.fetch import REPOSITORY_VARIABLE
from anabranch.infra.java import find_java
from anabranch.infra.sockets import free_port
from tests.waiting import wait_until

VERSION = "3.3.3"
JAVA = 21  # the least major version that it runs on
START_S = 180.0


def fetched() -> Path:
    """The archive, from jgo's cache or the Maven repository."""
    from jgo.maven import MavenContext

    repository = os.environ.get(REPOSITORY_VARIABLE)
    maven = MavenContext(remote_repos={"given": repository.rstrip("/")} if repository else None)
    component = maven.project("io.apicurio", "apicurio-registry-app").at_version(VERSION)
    return Path(component.artifact("all", "tar.gz").resolve())


class Apicurio:
    """A registry with a storage in memory, from the ``with`` block's begin to its end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/apis/ccompat/v7"

    def __enter__(self) -> Apicurio:
        with tarfile.open(fetched()) as archive:
            # Python before 3.11.4 has no such filter; the archive's digest was checked.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(self._folder)
        log = self._folder / "log"
        with log.open("wb") as output:
            settings = [f"-Dquarkus.http.port={self.port}", "-Dquarkus.http.host=127.0.0.1"]
            command = [str(find_java(JAVA).path), "-Xmx512m", *settings, "-jar", "quarkus-run.jar"]
            self._process = subprocess.Popen(
                command, cwd=self._folder, stdout=output, stderr=subprocess.STDOUT
            )
        wait_until(self._answers, START_S, pause=0.5, what=lambda: log.read_text()[-4000:])
        return self

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/subjects", timeout=5.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
