"""How to run examples/raw_client.py, the writer that knows only the protocol's page."""

from __future__ import annotations

import sys
from pathlib import Path

import anabranch
from anabranch.cli.session import Target


def raw_program() -> Path | None:
    """The program, if this is a checkout: it is not part of the installed package."""
    path = Path(anabranch.__file__).resolve().parents[1] / "examples" / "raw_client.py"
    return path if path.is_file() else None


def raw_command(
    target: Target, stream: str, csv_file: Path, key: str, token: str
) -> list[str] | None:
    """The command that writes a CSV file as one more writer and prints its receipt.

    None where the program is missing, or can't reach the cluster (it takes no further settings).
    """
    program = raw_program()
    if program is None or target.kafka:
        return None
    return [
        *(sys.executable, str(program), stream),
        *("--bootstrap", target.bootstrap, "--prefix", target.prefix),
        *("--csv", str(csv_file), "--key", key, "--token", token),
    ]
