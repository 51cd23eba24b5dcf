"""`anabranch processor run` and `bridge`: workers of a processor, as long-lived processes."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
import os
import sys
import time
import traceback
from contextlib import ExitStack, closing
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from anabranch.backoff import Backoff
from anabranch.cli.errors import ChildFailed
from anabranch.cli.options import ClusterOptions, argument, option
from anabranch.cli.output import log_to_stderr, print_line, show_failure
from anabranch.cli.session import parse_kafka
from anabranch.clock import SystemClock
from anabranch.errors import AnabranchError, InvalidArgument

if TYPE_CHECKING:
    from anabranch.cli.session import Target
    from anabranch.processing.app import Processor

_STOP_S = 10.0
_POLL_S = 0.2
# Before a worker that was killed is started again.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


def run(
    options: ClusterOptions,
    target: Annotated[str, argument("MODULE:APP", "The module, and the processor in it.")],
    workers: Annotated[int, option("", "How many processes.", min=1, max=256)] = 1,
    folder: Annotated[
        Path | None,
        option(
            "DIR",
            "Keep stores here, so that a restart reads only what it missed (default: a temporary one).",
        ),
    ] = None,
    standby: Annotated[
        bool, option("--standby", "Keep warm copies of other workers' tasks.")
    ] = False,
    http: Annotated[
        str | None,
        option(
            "--http HOST:PORT",
            "Serve /metrics (Prometheus), /live and /ready here; each further worker at the next port (:0: any).",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run workers of a processor, until Ctrl-C or SIGTERM.

    Run more of them on other machines: they share the tasks, and take over from each other. A worker that is killed
    is started again; one that ends with an error, as of a handler, ends all of this command.
    """
    cluster = options.target()
    _load(target)  # its errors before anything is started
    if workers == 1:
        _work(target, cluster, folder, standby, http)
        return
    host, _, port = (http or "").rpartition(":")
    further = port.isdecimal() and int(port) > 0  # :0 is any port, for each
    with ExitStack() as stack:
        running = [
            _Worker(
                target,
                cluster,
                None if folder is None else folder / f"worker-{n}",
                standby,
                f"{host}:{int(port) + n}" if further else http,
            )
            for n in range(workers)
        ]
        for one in running:
            stack.callback(one.join)
        for one in running:
            stack.callback(one.terminate)
            one.start()
        if not options.json:
            print_line(f"{workers} workers of {target}; Ctrl-C ends them")
        while True:
            for one in running:
                one.look()
            time.sleep(_POLL_S)


class _Worker:
    """A worker's process, started again when it is killed."""

    def __init__(self, *arguments: Any) -> None:
        """``arguments``: of `_work`."""
        self._arguments = arguments
        self._process: BaseProcess | None = None
        self._pauses = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, SystemClock())

    def start(self) -> None:
        spawn = multiprocessing.get_context("spawn")  # a client can't be forked
        self._process = spawn.Process(target=_work, args=self._arguments)
        self._process.start()

    def look(self) -> None:
        """Start it again if it was killed. `ChildFailed`: it ended with an error."""
        process = self._process
        if process is None:
            if self._pauses.is_over:
                self.start()
            return
        if process.exitcode is None:
            return
        if process.exitcode >= 0:
            raise ChildFailed(f"a worker ended with exit code {process.exitcode}: see above why")
        pause = self._pauses.begin()
        print_line(f"a worker ended by signal {-process.exitcode}; again in {pause:g} s")
        self._process = None

    def terminate(self) -> None:
        if self._process is not None:
            self._process.terminate()

    def join(self) -> None:
        if self._process is not None:
            self._process.join(_STOP_S)
            if self._process.exitcode is None:
                self._process.kill()
            self._process.join()


def _work(
    target: str, cluster: Target, folder: Path | None, standby: bool, http: str | None
) -> None:
    from anabranch.cli.errors import failure_of
    from anabranch.cli.session import connected
    from anabranch.processing.worker import run_worker

    try:
        with connected(cluster) as client:
            # A service tells what happens to it; `connected` keeps commands silent.
            log_to_stderr(form="%(asctime)s %(levelname)s %(message)s")
            logging.getLogger("anabranch").setLevel(logging.WARNING)
            logging.getLogger("anabranch.processor").setLevel(logging.INFO)
            run_worker(_load(target), client, folder=folder, standby=standby, http=http)
    except Exception as error:
        if multiprocessing.parent_process() is None:
            raise
        failure = failure_of(error)
        show_failure(failure, as_json=False)
        sys.exit(failure.code)


def _load(target: str) -> Processor:
    """The processor of ``module:name``; modules of this folder are found. `InvalidArgument`."""
    from anabranch.processing.app import Processor

    module, _, name = target.partition(":")
    if not module or not name:
        raise InvalidArgument(f"{target!r}: name a module and the processor in it, as delays:app")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name, None)
    except AnabranchError:
        raise
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name in (
            module,
            module.partition(".")[0],
        ):
            raise InvalidArgument(f"there is no module {module} here, nor installed") from error
        trace = traceback.extract_tb(error.__traceback__)
        *_, last = (frame for frame in trace if not frame.filename.startswith("<frozen"))
        at = "" if isinstance(error, SyntaxError) else f" ({last.filename}, line {last.lineno})"
        raise InvalidArgument(
            f"the module {module} itself fails: {type(error).__name__}: {error}{at}"
        ) from error
    if isinstance(getattr(found, "program", None), Processor):
        raise InvalidArgument(
            f"{target} is a Faust app: `faust -A {target} worker` runs it; start one for each worker, with a "
            "--datadir and a --web-port of its own"
        )
    if not isinstance(found, Processor):
        raise InvalidArgument(f"{target} is no anabranch.Processor, but {found!r:.100}")
    found.check()
    return found


def bridge(
    options: ClusterOptions,
    topic: Annotated[str, argument("TOPIC", "The topic to read.")],
    stream: Annotated[str, option("SCOPE/STREAM", "The stream to write; create it before.")],
    source: Annotated[
        str | None, option("--from HOST:PORT", "The topic's cluster (default: the stream's).")
    ] = None,
    from_file: Annotated[
        Path | None, option("FILE", "librdkafka options of that cluster, as of --kafka-file.")
    ] = None,
    group: Annotated[
        str | None,
        option("GROUP", "Begin where this consumer group of Kafka's stands (once, at first)."),
    ] = None,
    tasks: Annotated[
        int, option("", "Most partitions of the topic, ever: a power of two.", min=1, max=1024)
    ] = 64,
    dead_letter: Annotated[
        str | None,
        option(
            "--dead-letter SCOPE/STREAM",
            "Where to copy records that the stream does not accept, such as too large ones; else it ends at one.",
        ),
    ] = None,
    once: Annotated[
        bool, option("--once", "End when all is copied that the topic has, by then.")
    ] = False,
    strict: Annotated[
        bool,
        option(
            "--strict/--lossy",
            "If retention removed records before they were copied: end, or go on without them.",
        ),
    ] = True,
) -> None:
    """Copy a plain topic into a stream, each record once, until Ctrl-C or SIGTERM.

    A processor named STREAM-bridge keeps the positions, in the commits of what it copies. Run it on several
    machines: they share the partitions. Keys, values, headers and timestamps stay; records of Kafka's own
    transactions come once they are committed. A header name that begins with "ab." gets a "_" before it, and bytes
    of a name that are not UTF-8 become U+FFFD; a timestamp before 1970 or after 9999 becomes the time of the copy.
    """
    import pyarrow as pa

    from anabranch.processing.app import Processor
    from anabranch.processing.plain import Cluster, import_group, outputs_of, plain_ports
    from anabranch.processing.worker import make_processor, run_worker
    from anabranch.reading.group_lag import input_lags
    from anabranch.schemas.records import ProcessorInfo

    app = Processor(
        f"{stream}-bridge",
        tasks=tasks,
        dead_letter=dead_letter,
        on_lost="stop" if strict else "skip",
    )
    config = parse_kafka(None, file=from_file)
    records, output = app.topic(topic, bootstrap=source, config=config), app.output(stream)

    @app.on(records, batch=True)
    def copy(batch: pa.RecordBatch) -> None:
        output.write_batch(outputs_of(batch))

    def copied(info: ProcessorInfo) -> bool:
        with closing(ports.committed_log(options.timeout)) as log:
            lags = input_lags(log, info, options.timeout)
        return not any(lag.trouble or lag.most.events for lag in lags)

    with options.client() as client:
        client.describe(stream)
        made = make_processor(client, app)
        ports = plain_ports(client, Cluster(source, config))
        if group is not None and not any(
            task.sequence for task in client.processor(app.name).tasks
        ):
            count = import_group(client, ports, app.name, group, options.timeout)
            print_line(f"{count} partitions go on where group {group} stands")
        if not options.json:
            print_line(f"{topic} to {stream}, by processor {made.processor}; Ctrl-C ends it")
        run_worker(app, client, until=copied if once else None)
