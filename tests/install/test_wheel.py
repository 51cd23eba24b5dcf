"""Wheel and sdist: built, checked, installed into a bare environment and used there."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from tests.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
MOST_BYTES = 60_000_000
REPOSITORY = "https://example.org/anabranch"


def run(*words: str | Path, **environment: str) -> str:
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True, text=True, cwd="/", env=os.environ | environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.soak
@pytest.mark.network
@pytest.mark.broker
@pytest.mark.timeout(300)
def test_a_bare_environment_runs_the_readmes_example(
    tmp_path: Path, cluster: Cluster, unique: str
) -> None:
    built, venv = tmp_path / "built", tmp_path / "venv"
    run(sys.executable, "-m", "build", ROOT, "-o", built, ANABRANCH_REPOSITORY=REPOSITORY)
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    with zipfile.ZipFile(wheel) as packed:
        (named,) = (name for name in packed.namelist() if name.endswith("/METADATA"))
        said = message_from_bytes(packed.read(named))
        assert {name.split("/")[0] for name in packed.namelist()} == {
            "anabranch",
            named.split("/")[0],
        }
    assert f"![one transaction of many processes]({REPOSITORY}/raw/v" in said.get_payload()
    assert said.get_all("Project-URL") == [f"Repository, {REPOSITORY}"]
    with tarfile.open(sdist) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
    assert {"README.md", "hatch_build.py", "tests/README.md", "docs/client.md"} <= names

    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    pip = (
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--only-binary",
        ":all:",
    )
    run(*pip, wheel)
    (site,) = venv.glob("lib/python*/site-packages")
    size = sum(file.lstat().st_blocks * 512 for file in site.rglob("*") if file.is_file())
    assert size < MOST_BYTES
    example = re.search(
        r"```python\n(import anabranch\n\nwith.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    assert example is not None
    code = example[1].replace("localhost:9092", cluster.bootstrap).replace('"nyc', f'"nyc{unique}')
    assert run(python, "-I", "-c", code).splitlines() == [
        "b'N14228' b'...'",
        "b'N24211' b'...'",
    ]


def test_links_of_the_readme_are_absolute_or_gone() -> None:
    pytest.importorskip("hatchling")
    readme = runpy.run_path(str(ROOT / "hatch_build.py"))["readme"]
    text = "![a](docs/a.svg) [b](docs/b.md#c) [d](https://example.org) [e](#f)"
    assert readme(text, "https://x.org/r/", "1.2") == (
        "![a](https://x.org/r/raw/v1.2/docs/a.svg) [b](https://x.org/r/blob/v1.2/docs/b.md#c) "
        "[d](https://example.org) [e](#f)"
    )
    assert readme(text, None, "1.2") == " b [d](https://example.org) [e](#f)"
    shown = readme((ROOT / "README.md").read_text(), REPOSITORY, "1.2")
    assert re.findall(r"\]\((?!https?:|#)", shown) == []
