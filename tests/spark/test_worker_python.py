"""Workers on this machine import the installed pyspark, not its zip; elsewhere nothing is changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyspark
import pytest
from pyspark import SparkFiles
from pyspark.sql import SparkSession

from anabranch.spark.session import launcher_of, use_installed_pyspark

PACKAGE = Path(pyspark.__file__).parent
ZIP = PACKAGE / "python" / "lib" / "pyspark.zip"


@dataclass
class Context:
    """The calls of a SparkContext."""

    master: str | None = "local[2]"
    pythonExec: str = sys.executable


@pytest.mark.slow(3)
def test_workers_import_what_is_installed(spark: SparkSession) -> None:
    def look(_: int) -> tuple[str, str]:
        import pyspark

        return sys.executable, pyspark.__file__

    found = spark.sparkContext.parallelize([0], 1).map(look).collect()
    assert found == [(sys.executable, pyspark.__file__)]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of Spark's files."""
    monkeypatch.setattr(SparkFiles, "getRootDirectory", lambda: str(tmp_path))
    return tmp_path


def chosen(context: Context) -> str:
    use_installed_pyspark(context)  # type: ignore[arg-type]
    return context.pythonExec


@pytest.mark.parametrize("master", ["local", "local[*]", "local[2,4]"])
def test_a_local_master_has_a_launcher(files: Path, master: str) -> None:
    assert chosen(Context(master)) == str(files / "anabranch-python")


@pytest.mark.parametrize("master", [None, "yarn", "spark://h:7077", "local-cluster[2,1,1024]"])
def test_a_cluster_keeps_its_own(files: Path, master: str | None) -> None:
    assert chosen(Context(master)) == sys.executable
    assert not list(files.iterdir())


def test_a_chosen_python_stays(files: Path) -> None:
    assert chosen(Context(pythonExec="/opt/python")) == "/opt/python"


def test_one_that_only_the_driver_finds_stays(
    files: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pyspark, "__file__", str(tmp_path / "pyspark" / "__init__.py"))
    assert chosen(Context()) == sys.executable


def _nowhere(files: Path) -> None:
    files.rmdir()


def _never_executed(files: Path) -> None:
    (files / "anabranch-python").mkdir()


@pytest.mark.parametrize("spoil", [_nowhere, _never_executed])
def test_without_a_place_for_it_all_is_as_it_was(
    files: Path, spoil: Callable[[Path], None]
) -> None:
    spoil(files)
    assert chosen(Context()) == sys.executable


@pytest.mark.parametrize(
    ("given", "left"),
    [
        (f"{ZIP}:/a:/b c", "/a:/b c"),
        (f"{ZIP.parent}/../lib/pyspark.zip:/a", "/a"),
        (str(ZIP), ""),
        (f"/a:{ZIP}", f"/a:{ZIP}"),
        ("/other/pyspark.zip:/a", "/other/pyspark.zip:/a"),  # another Spark's
    ],
)
def test_only_the_zip_of_the_installed_one_is_left_out(
    tmp_path: Path, given: str, left: str
) -> None:
    launcher = tmp_path / "python"
    launcher.write_text(launcher_of(PACKAGE))
    program = "import os, sys; print(os.environ['PYTHONPATH'], *sys.argv[1:])"
    said = subprocess.run(
        ["/bin/sh", str(launcher), "-S", "-c", program, "x  y"],
        env=os.environ | {"PYTHONPATH": given},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert (said.stdout, said.stderr) == (f"{left} x  y\n", "")
