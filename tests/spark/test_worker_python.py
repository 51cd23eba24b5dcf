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


@pytest.mark.long
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


def nothing(files: Path, monkeypatch: pytest.MonkeyPatch) -> None: ...


def pyspark_of_the_driver_alone(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyspark, "__file__", str(files / "pyspark" / "__init__.py"))


def no_folder(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files.rmdir()


def a_folder_in_its_place(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (files / "anabranch-python").mkdir()


@pytest.mark.parametrize(
    ("context", "spoil", "gets_launcher"),
    [
        *((Context(master), nothing, True) for master in ("local", "local[*]", "local[2,4]")),
        *(
            (Context(master), nothing, False)
            for master in (None, "yarn", "spark://h:7077", "local-cluster[2,1,1024]")
        ),
        (Context(pythonExec="/opt/python"), nothing, False),
        (Context(), pyspark_of_the_driver_alone, False),
        (Context(), no_folder, False),
        (Context(), a_folder_in_its_place, False),
    ],
)
def test_a_local_master_gets_a_launcher_unless_it_can_not(
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    context: Context,
    spoil: Callable[[Path, pytest.MonkeyPatch], None],
    gets_launcher: bool,
) -> None:
    spoil(files, monkeypatch)
    launcher = str(files / "anabranch-python")
    expected = launcher if gets_launcher else context.pythonExec
    use_installed_pyspark(context)  # type: ignore[arg-type]
    assert context.pythonExec == expected
    assert gets_launcher == Path(launcher).is_file()


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
