"""``python -m anabranch.infra`` fetches the broker and starts it once, so that later starts are quick."""

from __future__ import annotations

import sys
from collections.abc import Callable

from anabranch.infra.broker import EmbeddedBroker
from anabranch.infra.errors import InfraError
from anabranch.infra.fetch import ensure_broker, report
from anabranch.infra.java import archive_path, ensure_archive, find_java


def prepare(say: Callable[[str], object] | None = None) -> bool:
    """Fetch the broker and start it once, unless that was done, with progress on standard error.

    ``say``: takes what is done, as lines of text, instead of standard error.

    Returns whether the broker was started. Raises: as `ensure_broker` and `EmbeddedBroker.start`; NoJava.
    """

    def run_broker(java_options: list[str]) -> None:
        broker = EmbeddedBroker(java_options=java_options)
        broker.start()
        broker.stop(timeout_s=60)  # the JVM writes the archive when it ends

    class_path = ensure_broker(report if say is None else None)
    java = find_java()
    if archive_path(java, class_path).exists():
        return False
    line = f"Starting the broker once, on Java {java.major} ({java.source}), to make later starts quick"
    if say is None:
        sys.stderr.write(line + "\n")
    else:
        say(line)
    ensure_archive(java, class_path, run_broker)
    return True


def main() -> int:
    """As `prepare`; returns the exit code."""
    try:
        prepare()
    except InfraError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
