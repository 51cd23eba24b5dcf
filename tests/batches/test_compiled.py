"""The folder of compiled code: one that can't be written, or that others may write, is passed over."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import numba
import pytest

from anabranch.batches.kernels import parts as kernel_parts

SOURCE = """
from anabranch.batches.kernels.parts import compiled

@compiled("int64(int64)")
def double(x):
    return x * 2
"""


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to be named by the test; nothing else can be written."""
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__pycache__").touch()  # a file: it can't become a folder
    for name in ("ANABRANCH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "package" / "__pycache__"))
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(kernel_parts, "own_folders", [])
    monkeypatch.setattr(kernel_parts, "_warned", set())
    return tmp_path / "kept"


def load(tmp_path: Path) -> ModuleType:
    file = tmp_path / "package" / "doubling.py"
    file.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("doubling", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.double(21) == 42
    return module


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.nbc"))


def test_compiled_code_is_kept_in_the_named_folder_and_found_there(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked, cache, own = kept / "asked", kept / "cache", kept / "own"
    monkeypatch.setattr(kernel_parts, "own_folders", [own])
    load(tmp_path)
    assert len(files(own)) == 1
    monkeypatch.setenv("ANABRANCH_CACHE", str(cache))
    load(tmp_path)
    assert not files(cache), "what is there already is used"
    shutil.rmtree(own)
    load(tmp_path)
    assert (len(files(cache / "compiled")), files(own)) == (1, [])
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(asked))
    (file,) = files(cache)
    file.write_bytes(b"torn")
    load(tmp_path)
    assert len(files(asked)) == 1
    assert file.read_bytes() == b"torn", "the first that can be written is written to"
    said = [record.getMessage()[:15] for record in caplog.records]
    assert said == ["compiling code,", "compiled code i"], (
        "each is said once; the second: it can't be read"
    )


def test_a_folder_that_others_may_write_is_not_used(
    kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_parts, "own_folders", [kept])
    load(tmp_path)
    (file,) = files(kept)
    file.write_bytes(b"planted")
    kept.chmod(0o777)
    load(tmp_path)
    assert file.read_bytes() == b"planted"
    said = [record.getMessage() for record in caplog.records]
    wanted = ("compiling code", f"others may write to {kept}", "can't be kept")
    assert [text in line for text, line in zip(wanted, said, strict=True)] == [True] * 3
    load(tmp_path)
    assert len(caplog.records) == 3, "each is said once"
