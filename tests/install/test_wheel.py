"""Wheel and sdist: built, checked, installed into a bare environment and used there, as the README says."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
# Of the client alone, and with the extra `local`.
MOST_BYTES = 62_000_000
MOST_LOCAL_BYTES = 700_000_000
REPOSITORY = "https://example.org/anabranch"
# Built with the environment's own hatchling; what comes from an index is what an installation needs.
BUILD = (sys.executable, "-m", "build", "--no-isolation")
TWO_EVENTS = ["b'N14228' b'...'", "b'N24211' b'...'"]


def environment() -> dict[str, str]:
    """What a new user's shell has: nothing of the environment that runs the tests."""
    ours = ("PYTHON", "VIRTUAL_ENV", "ANABRANCH_BOOTSTRAP", "ANABRANCH_LANE", "ANABRANCH_PREFIX")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def run(*words: str | Path, folder: Path = Path("/"), **more: str) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True, text=True, cwd=folder, env=environment() | more, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Built:
    """What a release uploads."""

    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Both, the wheel made from the sdist."""
    folder = tmp_path_factory.mktemp("built")
    run(*BUILD, ROOT, "-o", folder, ANABRANCH_REPOSITORY=REPOSITORY)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, sdist)


def bytes_of(venv: Path) -> int:
    """How much an environment's packages take on disk."""
    (site,) = venv.glob("lib/python*/site-packages")
    return sum(file.lstat().st_blocks * 512 for file in site.rglob("*") if file.is_file())


def install(venv: Path, requirement: str) -> Path:
    """The Python of a new environment that has this, and nothing else."""
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", requirement)
    return python


def readme_commands() -> list[str]:
    """What the README says to type before its example: the last command is `anabranch dev`."""
    block = re.search(r"```console\n(\$ python3 -m venv.*?)```", README, re.DOTALL)
    assert block is not None
    commands = [line.removeprefix("$ ").split("  #")[0].strip() for line in block[1].splitlines()]
    assert commands[-1] == "anabranch dev"
    return commands[:-1]


def from_the_readme(folder: Path) -> Path:
    """The Python of the environment that the README's commands make in a clone."""
    clone = folder / "clone"
    run("git", "clone", "-q", "--depth", "1", f"file://{ROOT}", clone)
    path = (
        f"{sys.base_prefix}/bin:{os.environ['PATH']}"  # its python3 is one that anabranch runs on
    )
    run("bash", "-ec", "\n".join(readme_commands()), folder=clone, PATH=path)
    return clone / ".venv" / "bin" / "python"


@contextmanager
def started(python: Path, *words: str) -> Iterator[Any]:
    """A command of the environment's `anabranch` that runs until SIGTERM, and the JSON document that it prints."""
    command = [str(python.with_name("anabranch")), *words, "--port", "0", "--json"]
    with subprocess.Popen(command, cwd="/", env=environment(), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            text = b""
            while line := process.stdout.readline():
                text += line
                if line.rstrip().endswith(b"}") and not line.startswith(b" "):
                    break
            yield json.loads(text)
        finally:
            process.terminate()
            process.wait(60)
    assert process.returncode in (0, 143, -15)


def run_example(python: Path, bootstrap: str) -> None:
    """The README's example, in this environment."""
    example = re.search(r"```python\n(import anabranch\n\nwith.*?)```", README, re.DOTALL)
    assert example is not None
    code = example[1].replace("localhost:9092", bootstrap)
    assert run(python, "-I", "-c", code).splitlines() == TWO_EVENTS


def use_the_first_day(python: Path, bootstrap: str, folder: Path) -> None:
    """The commands that need pyarrow, RocksDB and a web server."""

    def anabranch(*words: str | Path) -> str:
        return run(python.with_name("anabranch"), *words, ANABRANCH_BOOTSTRAP=bootstrap)

    rows = folder / "rows.csv"
    rows.write_text("tail,miles\nN14228,12\nN24211,7\n")
    anabranch("load", rows, "--stream", "nyc/rows", "--key", "tail", "--segments", "1")
    assert anabranch("read", "nyc/rows", "--at", "now").count("miles") == 2
    anabranch("table", "create", "nyc/planes", "--setting", "table.history.ms=0")
    anabranch("table", "put", "nyc/planes", "N14228", "Boeing", "--insert")
    time.sleep(1.1)  # a base is as of a whole second
    said = anabranch("table", "compact", "nyc/planes", "--plain-readers-lose-history")
    assert said.endswith(": 1 row\n")
    with (
        started(python, "web", "--bootstrap", bootstrap) as web,
        urlopen(f"{web['url']}streams") as page,
    ):
        assert b"<h1>Streams</h1>" in page.read()


@pytest.mark.long
@pytest.mark.network
def test_wheel_and_sdist_have_what_a_release_needs(built: Built) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", built.wheel, built.sdist)
    with zipfile.ZipFile(built.wheel) as packed:
        (named,) = (name for name in packed.namelist() if name.endswith("/METADATA"))
        said = message_from_bytes(packed.read(named))
        assert {name.split("/")[0] for name in packed.namelist()} == {
            "anabranch",
            named.split("/")[0],
        }
    assert f"![one transaction of many processes]({REPOSITORY}/raw/v" in said.get_payload()
    assert said.get_all("Project-URL") == [f"Repository, {REPOSITORY}"]
    with tarfile.open(built.sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"README.md", "hatch_build.py", "tests/README.md", "docs/client.md"} <= names


@pytest.mark.long
@pytest.mark.network
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["wheel", "sdist", "clone"])
def test_a_bare_environment_runs_the_readmes_example(
    kind: str, built: Built, tmp_path: Path, measured: Callable[[str], None]
) -> None:
    begun = time.monotonic()
    if kind == "clone":
        python = from_the_readme(tmp_path)
    else:
        python = install(tmp_path / "venv", f"{getattr(built, kind)}[local]")
    installed = time.monotonic()
    if kind == "wheel":  # the clone's environment has pip as well
        assert bytes_of(tmp_path / "venv") <= MOST_LOCAL_BYTES
    with started(python, "dev") as dev:
        ready = time.monotonic()
        run_example(python, dev["bootstrap"])
        measured(
            f"{kind}: {installed - begun:.0f} s to install, {ready - installed:.0f} s until `dev` was ready, "
            f"{time.monotonic() - ready:.1f} s for the example"
        )
        if kind == "wheel":
            use_the_first_day(python, dev["bootstrap"], tmp_path)
            alone = install(tmp_path / "alone", str(built.wheel))
            assert bytes_of(tmp_path / "alone") <= MOST_BYTES
            run(
                alone,
                "-I",
                "-c",
                "import anabranch, importlib.util as u; assert not u.find_spec('numpy')",
            )
    # A gigabyte each, which pytest would keep for three runs.
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()


def test_links_of_the_readme_are_absolute_or_gone() -> None:
    pytest.importorskip("hatchling")
    readme = runpy.run_path(str(ROOT / "hatch_build.py"))["readme"]
    text = "![a](docs/a.svg) [b](docs/b.md#c) [d](https://example.org) [e](#f)"
    assert readme(text, "https://x.org/r/", "1.2") == (
        "![a](https://x.org/r/raw/v1.2/docs/a.svg) [b](https://x.org/r/blob/v1.2/docs/b.md#c) "
        "[d](https://example.org) [e](#f)"
    )
    assert readme(text, None, "1.2") == " b [d](https://example.org) [e](#f)"
    shown = readme(README, REPOSITORY, "1.2")
    assert re.findall(r"\]\((?!https?:|#)", shown) == []
