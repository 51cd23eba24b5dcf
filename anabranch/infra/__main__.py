"""``python -m anabranch.infra``: fetches the broker and starts it once, so that all later starts are quick."""

from __future__ import annotations

import sys

from anabranch.infra.archive import archive_path, ensure_archive
from anabranch.infra.broker import EmbeddedBroker
from anabranch.infra.errors import InfraError
from anabranch.infra.fetch import Progress, ensure_broker
from anabranch.infra.java import find_java
from anabranch.infra.lock import broker_lock


def _report(progress: Progress) -> None:
    end = "\n" if progress.done_files == progress.total_files else ""
    start = "\r" if sys.stderr.isatty() else ""
    if start or end:
        sys.stderr.write(
            f"{start}Kafka {broker_lock().kafka_version}: {progress.done_files}/"
            f"{progress.total_files} files, {progress.done_bytes / 1e6:.1f}/"
            f"{progress.total_bytes / 1e6:.1f} MB{end}"
        )
        sys.stderr.flush()


def main() -> int:
    """Fetch the broker with progress on standard error; returns the exit code."""

    def run_broker(java_options: list[str]) -> None:
        broker = EmbeddedBroker(java_options=java_options)
        broker.start()
        broker.stop(timeout_s=60)  # the broker writes the archive as it ends

    try:
        class_path = ensure_broker(_report)
        java = find_java()
        if not archive_path(java, class_path).exists():
            sys.stderr.write(
                f"Starting the broker once, on Java {java.major} ({java.source}), to make later "
                "starts quick\n"
            )
            ensure_archive(java, class_path, run_broker)
    except InfraError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
