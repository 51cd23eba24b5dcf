"""A worker as a whole process: until a signal, with its HTTP server and the mirror of its positions."""

from __future__ import annotations

import gc
import logging
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

from anabranch.client.client import Client
from anabranch.controller.monitor import Monitor
from anabranch.errors import AnabranchError
from anabranch.logs import about
from anabranch.processing.metrics import TABLE
from anabranch.processing.program import Program
from anabranch.processing.threads import ThreadedWorker
from anabranch.processing.worker import IDLE_S, MIRROR_S, Worker
from anabranch.protocol.schemas.records import ProcessorInfo
from anabranch.reading.positions import Mirror

log = logging.getLogger("anabranch.processor")


def run_worker(
    app: Program, client: Client, *, folder: str | Path | None = None, standby: bool = False,
    http: str | None = None, until: Callable[[ProcessorInfo], bool] | None = None,
) -> None:  # fmt: skip
    """Run a worker in this process until SIGTERM, SIGINT, or ``until`` returns true; see `Processor.run`."""
    with ExitStack() as stack:
        stack.enter_context(about(processor=app.name))
        if folder is None:
            made = tempfile.TemporaryDirectory(prefix="anabranch-processor-")
            folder = stack.enter_context(made)
        made_by = ThreadedWorker if app.threads > 1 else Worker
        worker = made_by(app, client, Path(folder), standby=standby)
        with ExitStack() as until_closed:
            until_closed.callback(worker.close)
            if http is not None:
                measured = {app.name: worker.metrics}
                monitor = Monitor(http, TABLE, lambda: measured, lambda: worker.trouble)
                stack.enter_context(closing(monitor))
                log.info("%s: /metrics, /live and /ready at port %d", app.name, monitor.port)
            if app.cluster is None:
                # At the end the worker releases its tasks first, even if the mirror has to wait.
                mirror = stack.enter_context(
                    closing(client.mirror(app.name, partial(worker.described, MIRROR_S)))
                )
                lags = None if http is None else partial(_show_lags, worker, client)
                showing = threading.Thread(target=_show, args=(worker, mirror, lags), name="mirror")
                stack.callback(showing.join)
                stack.callback(worker.stop.set)
                showing.start()
            if until is not None:
                watching = threading.Thread(target=_stop_when, args=(worker, until), name="until")
                stack.callback(watching.join)
                stack.callback(worker.stop.set)
                watching.start()
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGTERM, signal.SIGINT):
                    before = signal.signal(number, lambda *_: worker.stop.set())
                    stack.callback(signal.signal, number, before)
            spare_collections()
            worker.run()


def spare_collections() -> None:
    """Let the garbage collector visit only what is new, and less often: loaded code stays.

    A batch has tens of thousands of objects, without circles. With Python's defaults the collector takes a tenth of
    a worker's time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _stop_when(worker: Worker | ThreadedWorker, until: Callable[[ProcessorInfo], bool]) -> None:
    while not worker.stop.wait(IDLE_S):
        with suppress(AnabranchError):
            if until(worker.described(IDLE_S)):
                worker.stop.set()


def _show(worker: Worker | ThreadedWorker, mirror: Mirror, lags: Callable[[], None] | None) -> None:
    """Copy the positions to the mirror while this worker has task 0, and update the lag in `/metrics`."""
    while not worker.stop.wait(MIRROR_S):
        if 0 in worker.tasks:
            mirror.step()
        if lags is not None:
            lags()


def _show_lags(worker: Worker | ThreadedWorker, client: Client) -> None:
    values = worker.metrics.values
    events, seconds = dict[tuple[str, ...], float](), dict[tuple[str, ...], float]()
    with suppress(AnabranchError):
        if 0 in worker.tasks:
            for lag in client.lag(worker.described(MIRROR_S)):
                if not lag.trouble:
                    events[lag.stream,] = lag.most.events
                    seconds[lag.stream,] = lag.most.age_s(time.time())
    values["processor_lag_events"], values["processor_lag_seconds"] = events, seconds
