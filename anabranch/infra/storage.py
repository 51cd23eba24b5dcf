"""Formats a broker's folder once, and keeps the settings of that in ``broker.json``.

Kafka's tool writes two small files: the ids of folder, node and cluster, and the levels of features. The levels are
the same for all brokers with a transaction version, and are cached with the jars. So the slow tool runs once.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from anabranch.infra.errors import (
    BrokerDied,
    FolderInUse,
    FolderMismatch,
    FolderUnusable,
    StartDeadlinePassed,
)
from anabranch.infra.fetch import broker_lock
from anabranch.infra.process import log_tail, mark_log

DATA = "data"
_LOCK = "in-use"
_FACTS = "broker.json"
_IDS = "meta.properties"
_FEATURES = "bootstrap.checkpoint"


@contextmanager
def hold(folder: Path) -> Iterator[int]:
    """Lock the folder for this process. A missing folder is made (mode 0700).

    Yields a descriptor: a child that inherits it keeps the lock, too, until both have closed it.

    Raises: FolderInUse, FolderUnusable.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        why = error.strerror or error
        raise FolderUnusable(f"the folder {folder} can't be made, or written to: {why}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            who = os.pread(lock, 20, 0).decode(errors="replace")
            raise FolderInUse(
                f"{folder} is in use by pid {who}: end that one, or give another folder"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, b"%d" % os.getpid(), 0)
        yield lock
    finally:
        os.close(lock)


def ensure_formatted(
    folder: Path,
    *,
    java: Sequence[str],
    environment: Mapping[str, str],
    config: Path,
    log: Path,
    transaction_version: int,
    deadline: float,
    kept_in: Path,
    node_id: int,
    cluster_id: str | None = None,
    more: Sequence[str] = (),
) -> str:
    """Format the folder's data, unless that was done before; returns the cluster id.

    An interrupted formatting is repeated on an empty folder: ``broker.json`` says whether it ended.

    Args:
        java: the launcher and its options.
        environment: of the process, with the class path.
        config: the server properties, which name the data folder.
        log: the file to which the output is appended.
        transaction_version: the feature level.
        deadline: on the monotonic clock.
        kept_in: the folder of cached feature levels, for this Kafka version.
        cluster_id: of a cluster of several nodes; None: a new one.
        more: further arguments of the tool.

    Raises:
        FolderMismatch: formatted with another transaction_version or for another cluster, or not by
            `EmbeddedBroker`.
        BrokerDied: the formatting failed.
        StartDeadlinePassed: the formatting did not end in time.
    """
    facts_file, data = folder / _FACTS, folder / DATA
    facts = _read(facts_file)
    if facts is not None and facts["formatted"]:
        if facts["transaction_version"] != transaction_version:
            raise FolderMismatch(
                f"{folder} was formatted with transaction.version={facts['transaction_version']}, "
                f"not {transaction_version}: ask for that, or give another folder"
            )
        if cluster_id is not None and facts["cluster_id"] != cluster_id:
            raise FolderMismatch(f"{folder} is of another cluster: give another folder")
        return str(facts["cluster_id"])
    if facts is None and data.exists() and any(data.iterdir()):
        raise FolderMismatch(f"{data} holds files of somebody else: give another folder")
    facts = {
        "kafka_version": broker_lock().kafka_version,
        "transaction_version": transaction_version,
        "cluster_id": cluster_id or new_cluster_id(),
        "formatted": False,
    }
    _write(facts_file, facts)
    shutil.rmtree(data, ignore_errors=True)
    kept = kept_in / f"features-{transaction_version}.checkpoint"
    if more or not _copied(kept, data, node_id, str(facts["cluster_id"])):
        _format([*java, *_arguments(facts, config), *more], environment, log, deadline)
        if not more:
            _keep(data / _FEATURES, kept)
    _write(facts_file, facts | {"formatted": True})
    return str(facts["cluster_id"])


def new_cluster_id() -> str:
    """An id in Kafka's form, without a leading dash, because it becomes an argument of a command."""
    return "A" + urlsafe_b64encode(uuid.uuid4().bytes).decode()[1:22]


def _arguments(facts: Mapping[str, object], config: Path) -> list[str]:
    return [
        # The run is too short for the second compiler.
        "-XX:TieredStopAtLevel=1",
        *("kafka.tools.StorageTool", "format", "--config", str(config)),
        *("--cluster-id", str(facts["cluster_id"])),
        *("--feature", f"transaction.version={facts['transaction_version']}"),
    ]


def _copied(kept: Path, data: Path, node_id: int, cluster_id: str) -> bool:
    """Write the files that the tool would write; False if the tool has to run."""
    try:
        features = kept.read_bytes()
    except OSError:
        return False
    data.mkdir(parents=True)
    (data / _FEATURES).write_bytes(features)
    ids = {
        "version": 1,
        "node.id": node_id,
        "directory.id": new_cluster_id(),
        "cluster.id": cluster_id,
    }
    text = "".join(f"{name}={value}\n" for name, value in ids.items())
    (data / _IDS).write_text(text, encoding="utf-8")
    return True


def _keep(features: Path, kept: Path) -> None:
    with suppress(OSError):  # the folder of the jars may not be ours
        new = kept.with_name(f".{kept.name}.{os.getpid()}")
        shutil.copyfile(features, new)
        os.replace(new, kept)


def _format(
    command: Sequence[str], environment: Mapping[str, str], log: Path, deadline: float
) -> None:
    mark_log(log, f"formatting for Kafka {broker_lock().kafka_version}")
    try:
        with log.open("ab") as output:
            done = subprocess.run(
                command,
                env=environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=max(0.0, deadline - time.monotonic()),
                check=False,
            )
    except subprocess.TimeoutExpired:
        raise StartDeadlinePassed(
            "the formatting did not end in time", log=log, log_tail=log_tail(log)
        ) from None
    if done.returncode != 0:
        raise BrokerDied(
            f"the formatting failed with exit code {done.returncode}",
            log=log,
            log_tail=log_tail(log),
        )


def _read(facts: Path) -> dict[str, object] | None:
    try:
        loaded: dict[str, object] = json.loads(facts.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return loaded


def _write(path: Path, facts: Mapping[str, object]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    os.replace(new, path)
