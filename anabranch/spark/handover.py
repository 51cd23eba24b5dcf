"""Hands over the transaction that a query's micro-batch writes to, from its planner to who aborts it.

Spark aborts a micro-batch on a fresh object, in another process of the driver's machine, with the messages of the
tasks that succeeded. Where none did, only this tells which transaction is to be aborted; without it the
transaction stays open until its keepalive has passed.
"""

from __future__ import annotations

import logging
import os
from hashlib import sha256
from pathlib import Path

from anabranch.client.reservation import Reservation
from anabranch.errors import AnabranchError
from anabranch.spark.options import Options

# Folders that Spark's driver makes for itself, and removes when it ends; it names them to its Python workers.
LOCAL_DIRS = "SPARK_LOCAL_DIRS"
# Of these a query has at least one, unless its checkpoint has a name by chance. In one driver no two that run have
# the same; without them another query could have all the same options.
_OWN = ("checkpointlocation", "queryname")

log = logging.getLogger("anabranch.spark")


class Handover:
    """A file in the driver's own folder, for each query one. All of it is best effort: nothing raises."""

    def __init__(self, options: Options) -> None:
        folder = os.environ.get(LOCAL_DIRS, "").split(",")[0]
        own = any(options.text(name) for name in _OWN)
        name = sha256(repr(options.all()).encode()).hexdigest()[:32]
        self._path = Path(folder, f"anabranch-{name}") if folder and own else None

    def leave(self, reservation: Reservation) -> None:
        """This is what the tasks will write to; what was left before is over."""
        if self._path is None:
            return
        try:
            new = self._path.with_suffix(f".{os.getpid()}")
            new.unlink(missing_ok=True)
            # A reader of it may write and commit.
            with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(reservation.to_bytes())
            new.replace(self._path)
        except OSError as error:
            log.info("an abort without messages will not find its transaction: %s", error)

    def find(self) -> Reservation | None:
        """What was left last."""
        if self._path is None:
            return None
        try:
            return Reservation.from_bytes(self._path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, AnabranchError) as error:
            log.info("what was written to is not known: %s", error)
            return None
