"""Tells the process that aborts a query's micro-batch which transaction its planner reserved.

Spark aborts a micro-batch on a fresh object, in another process of the driver's machine, with the messages of the
successful tasks. If no task succeeded, only this file names the transaction; without it the transaction stays
open until its keepalive has passed.
"""

from __future__ import annotations

import logging
import os
from hashlib import sha256
from pathlib import Path

from anabranch.client.reservation import Reservation
from anabranch.errors import AnabranchError
from anabranch.spark.options import Options

# Folders that Spark's driver makes and removes, and names to its Python workers.
LOCAL_DIRS = "SPARK_LOCAL_DIRS"
# A query has at least one of these, unless its checkpoint is named at random. Queries that run in one driver differ
# in them; without them two queries could have all the same options.
_OWN = ("checkpointlocation", "queryname")

log = logging.getLogger("anabranch.spark")


class Handover:
    """A file in the driver's own folder, one for each query. Best effort: no method raises."""

    def __init__(self, options: Options) -> None:
        folder = os.environ.get(LOCAL_DIRS, "").split(",")[0]
        own = any(options.text(name) for name in _OWN)
        name = sha256(repr(options.all()).encode()).hexdigest()[:32]
        self._path = Path(folder, f"anabranch-{name}") if folder and own else None

    def leave(self, reservation: Reservation) -> None:
        """Keep the reservation of the coming tasks; the former one is over."""
        if self._path is None:
            return
        try:
            new = self._path.with_suffix(f".{os.getpid()}")
            new.unlink(missing_ok=True)
            # A reader of the file may write and commit.
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(reservation.to_bytes())
            new.replace(self._path)
        except OSError as error:
            log.info("an abort without messages will not find its transaction: %s", error)

    def find(self) -> Reservation | None:
        """The latest reservation."""
        if self._path is None:
            return None
        try:
            return Reservation.from_bytes(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, AnabranchError) as error:
            log.info("what was written to is not known: %s", error)
            return None
