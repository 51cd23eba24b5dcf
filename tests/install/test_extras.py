"""The client without any extra, and how each part says which extra it lacks."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from anabranch.cli.errors import ExitCode
from anabranch.extras import EXTRA_OF, _words, command_of
from tests.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
# Packages that a process can't import, as if they were not installed.
_HIDE = """
import sys
class Hider:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hider())
"""
CLIENT = """
import itertools, json, time, anabranch, anabranch.reading.decoded as fetched
fetched._loading.worth_it(10_000)  # as if it had read that many: compiled code is wanted
scope = {scope!r}
one, other = f"{{scope}}/one", f"{{scope}}/other"
with anabranch.connect({bootstrap!r}, lane={lane!r}) as client:
    client.create_stream(one, segments=2)
    client.create_stream(other)
    with client.begin(scope) as txn:
        with client.join(txn.token()) as writer:
            for n in range(1000):
                writer.write(one, b"v%d" % n, key=b"k%d" % (n % 7), headers=[("h", b"x")])
            receipt = writer.finish()
        txn.write(other, b"with it")
        big = txn.commit(receipts=[receipt])
    with client.begin(scope) as txn:
        txn.write(one, None, key=b"k1")
        small = txn.commit()
    with client.read(one) as reader:
        events = [*itertools.islice(reader, 1001)]
    with client.read_transactions(one) as reader:
        whole = [[*t.events] for t in itertools.islice(reader, 2)]
    snapshot = client.snapshot([one, other], at=big.commit_timestamp)
    then = [*snapshot.read(one)]
    print(json.dumps([
        [[e.key.decode(), e.value and e.value.decode(), len(e.headers), e.txn_id == big.txn_id] for e in events],
        [len(events) for events in whole],
        len(then), [e.value.decode() for e in snapshot.read(other)],
    ]))
assert not {packages!r} & {{name for name, module in sys.modules.items() if module}}
"""


def run_without(packages: Iterable[str], code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that lacks these packages."""
    text = _HIDE.format(packages=set(packages)) + code
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.soak
@pytest.mark.broker
def test_a_client_without_extras_does_all_that_one_with_them_does(
    cluster: Cluster, unique: str
) -> None:
    found = []
    for number, packages in enumerate((set[str](), set(EXTRA_OF))):
        scope = f"small{number}{unique}"
        code = CLIENT.format(
            scope=scope, bootstrap=cluster.bootstrap, lane="open", packages=packages
        )
        ended = run_without(packages, code)
        assert ended.returncode == 0, ended.stderr
        events, *rest = json.loads(ended.stdout)
        found.append((sorted(map(str, events)), rest))
    assert found[0] == found[1]
    assert found[0][1] == [[1000, 1], 1000, ["with it"]]


@pytest.mark.parametrize(
    ("code", "extra"),
    [
        ("import anabranch; anabranch.Processor", "controller"),
        ("import anabranch.controller.service", "controller"),
        ("import anabranch.faust", "faust"),
        ("import anabranch.aio", "aio"),
        ("import anabranch.spark", "spark"),
        # What `write_batch` of a transaction and of a writer begin with.
        ("from anabranch.client.shared import Shared; Shared.columns(None, 'a/b', None)", "fast"),
        ("import anabranch.batches.kernels.scan", "fast"),
    ],
)
def test_a_part_names_the_extra_that_brings_it(code: str, extra: str) -> None:
    ended = run_without(EXTRA_OF, code)
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("anabranch.errors.NotInstalled: ")
    assert last.endswith(f" this gets it: {command_of(extra)}")


@pytest.mark.parametrize(
    ("words", "extra"),
    [
        ("stream list", "cli"),
        ("controller", "controller"),
        ("warm", "fast"),
        ("dev", "local"),
        ("spark audit --stream a/b", "spark"),
        ("load README.md --stream a/b --key k", "fast"),
    ],
)
def test_a_command_names_it_too(words: str, extra: str) -> None:
    shell = {name for name, brought in EXTRA_OF.items() if brought == "cli"}
    arguments = ["anabranch", *words.split()]
    if extra not in ("cli", "dev", "local", "fast"):
        arguments += ["--bootstrap", "127.0.0.1:1"]
    ended = run_without(
        EXTRA_OF if extra == "cli" else EXTRA_OF.keys() - shell,
        f"sys.argv = {arguments!r}\nfrom anabranch.cli import app\napp()",
    )
    assert ended.returncode == ExitCode.ENVIRONMENT, ended.stderr
    assert ended.stderr.startswith("NotInstalled: ")
    assert f" this gets it: {command_of(extra)} -> " in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("origin", "words"),
    [
        ({}, ["anabranch[web]"]),
        ({"url": "file:///tmp/a%20clone", "dir_info": {}}, ["/tmp/a clone[web]"]),
        (
            {"url": "file:///tmp/clone", "dir_info": {"editable": True}},
            ["-e", "/tmp/clone[web]"],
        ),
        ({"url": "file:///tmp/a.whl", "archive_info": {}}, ["/tmp/a.whl[web]"]),
        (
            {"url": "ssh://git@example.org/a", "vcs_info": {"vcs": "git"}},
            ["anabranch[web] @ git+ssh://git@example.org/a"],
        ),
        ({"url": "https://example.org/a.whl", "archive_info": {}}, ["anabranch[web]"]),
    ],
)
def test_an_extra_comes_from_where_the_package_came_from(
    origin: dict[str, Any], words: list[str]
) -> None:
    assert _words("web", origin) == words


def test_each_package_of_the_table_is_in_its_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    called = {"mode": "mode-streaming", "faust": "faust-streaming"}
    within = {
        "click": "typer",
        "llvmlite": "numba",
        "py4j": "pyspark",
    }  # what a package brings itself
    for package, extra in EXTRA_OF.items():
        wanted = called.get(package) or within.get(package, package).replace("_", "-")
        assert any(entry.startswith(wanted) for entry in extras[extra]), package
    named = {word.strip() for word in extras["all"][0].partition("[")[2].strip("]").split(",")}
    assert named == extras.keys() - {
        "all",
        "dev",
        "docs",
        "spark-connect",
    }  # a client without a JVM


def test_windows_is_refused_by_name() -> None:
    ended = run_without((), "sys.platform = 'win32'\nimport anabranch.infra")
    assert "NotSupported: the embedded broker and controllers need Linux or macOS" in ended.stderr
