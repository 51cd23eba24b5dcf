"""The key file: made once, read by all, and refused by name when it can't be trusted."""

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.errors import InvalidArgument
from anabranch.processors import keyfile


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(keyfile.ENVIRONMENT, raising=False)
    return tmp_path


@pytest.fixture
def any_umask() -> Iterator[None]:
    old = os.umask(0)
    yield
    os.umask(old)


def test_the_path_is_the_argument_then_the_environment_then_the_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert keyfile.key_path() == home / ".config/anabranch/token.key"
    monkeypatch.setenv(keyfile.ENVIRONMENT, "~/elsewhere.key")
    assert keyfile.key_path() == home / "elsewhere.key"
    assert keyfile.key_path(home / "given.key") == home / "given.key"
    assert keyfile.key_path("~/given.key") == home / "given.key"
    monkeypatch.setenv(keyfile.ENVIRONMENT, "")
    assert keyfile.key_path() == home / ".config/anabranch/token.key"


@pytest.mark.usefixtures("any_umask")
def test_a_new_key_is_random_private_and_stays(home: Path) -> None:
    key = keyfile.load_or_create()
    file = home / ".config/anabranch/token.key"
    assert file.read_text() == key.hex() + "\n"
    assert len(key) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert keyfile.load_or_create() == key
    assert keyfile.load_or_create(home / "other.key") != key
    assert [entry.name for entry in file.parent.iterdir()] == ["token.key"]


def test_a_file_by_hand_is_read(home: Path) -> None:
    file = home / "k"
    file.write_text("AB" * 32)
    file.chmod(0o400)
    assert keyfile.load_or_create(file) == b"\xab" * 32


RACER = """
import sys, pathlib
from anabranch.processors import keyfile
print("ready", flush=True)
while not pathlib.Path(sys.argv[2]).exists():
    pass
print(keyfile.load_or_create(sys.argv[1]).hex())
"""


def test_processes_that_start_at_once_agree(home: Path) -> None:
    path, gate = home / "deep/er/token.key", home / "gate"
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(path), str(gate)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    for racer in racers:
        assert racer.stdout
        assert racer.stdout.readline() == "ready\n"
    gate.touch()
    keys = {racer.communicate(timeout=60)[0] for racer in racers}
    assert keys == {path.read_text()}
    assert os.listdir(path.parent) == ["token.key"]


def test_one_that_comes_second_takes_the_first_ones_key(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = home / "token.key"
    link = os.link

    def beaten(source: Path, target: Path) -> None:
        file.write_text("11" * 32)
        file.chmod(0o600)
        link(source, target)

    monkeypatch.setattr(os, "link", beaten)
    assert keyfile.load_or_create(file) == b"\x11" * 32
    assert os.listdir(home) == ["token.key"]


@pytest.mark.parametrize("mode", [0o601, 0o602, 0o604, 0o610, 0o620, 0o640, 0o666])
def test_a_file_that_others_may_touch_is_refused(home: Path, mode: int) -> None:
    file = home / "token.key"
    keyfile.load_or_create(file)
    file.chmod(mode)
    with pytest.raises(InvalidArgument, match=f"mode 0{mode:o}.*chmod 600 .*token.key"):
        keyfile.load_or_create(file)


@pytest.mark.parametrize(
    "text", ["", "\n", "ab" * 31, "ab" * 33, "a" * 63, "zz" * 32, "ab" * 16 + " " + "ab" * 16]
)
def test_a_file_without_a_key_is_refused_and_left_alone(home: Path, text: str) -> None:
    file = home / "token.key"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(InvalidArgument, match=r"token\.key does not hold a key: 64 hex") as refused:
        keyfile.load_or_create(file)
    assert file.read_text() == text
    assert not text.strip() or text.strip() not in str(refused.value)  # a secret stays one


def test_what_is_no_file_is_refused(home: Path) -> None:
    with pytest.raises(InvalidArgument, match="can't be used"):
        keyfile.load_or_create(home)
    (home / "plain").write_text("")
    with pytest.raises(InvalidArgument, match=r"plain/token\.key can't be used"):
        keyfile.load_or_create(home / "plain/token.key")
    (home / "gone").symlink_to(home / "nowhere" / "x")
    with pytest.raises(InvalidArgument, match="gone can't be used"):
        keyfile.load_or_create(home / "gone")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_is_not_writable_is_named(home: Path) -> None:
    locked = home / "locked"
    locked.mkdir(mode=0o500)
    with pytest.raises(InvalidArgument, match=r"locked/token\.key can't be used: Permission"):
        keyfile.load_or_create(locked / "token.key")
