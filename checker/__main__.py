"""``python -m checker FOLDER`` judges a history: exit status 0 without anomalies, 1 with some, 2 if broken."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.console import Console

from checker import BrokenHistory, judge


def main(arguments: list[str] | None = None) -> int:
    """Judge a folder, and print the report. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="checker", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    parser.add_argument("--examples", type=int, default=5, help="of each kind; default 5")
    parsed = parser.parse_args(arguments)
    try:
        report = judge(parsed.folder)
    except (BrokenHistory, OSError) as error:
        print(f"broken history: {error}", file=sys.stderr)
        return 2
    if parsed.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        report.show(Console(), parsed.examples)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
