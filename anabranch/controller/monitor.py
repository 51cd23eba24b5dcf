"""The numbers of a long-lived process, and the HTTP server that shows them (``--http``).

The process's own threads write the numbers; the server's thread reads them. The server also answers whether the
process is alive and ready.
"""

from __future__ import annotations

import errno
import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from anabranch.errors import InvalidArgument
from anabranch.infra.errors import PortTaken

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

BOUNDS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)

Labels = tuple[str, ...]
log = logging.getLogger("anabranch.http")

_ANSWER_S = 10.0


class Number(NamedTuple):
    """A number as `/metrics` shows it. ``labels``: its own labels, without the label that names the owner."""

    kind: Literal["gauge", "counter"]
    help: str
    labels: Labels = ()


class Table(NamedTuple):
    """The numbers of one kind of process. ``owner``: the label that names the owner of each number.

    ``timed``: name and help of the histogram of durations.
    """

    numbers: Mapping[str, Number]
    owner: str
    timed: tuple[str, str]


class Numbers:
    """The present values of one process's metrics: name -> labels -> value. ``table`` lists and describes them.

    Mappings grow or are replaced at any time, so a reader copies them first.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.values: dict[str, dict[Labels, float]] = {
            name: {} if number.labels else {(): 0} for name, number in table.numbers.items()
        }
        # How many durations are within each bound; the last one: beyond all bounds.
        self.seconds = [0] * (len(BOUNDS_S) + 1)
        self.seconds_sum = 0.0
        self._adding = threading.Lock()

    def add(self, name: str, *labels: str, by: float = 1) -> None:
        """Add ``by`` to a number under these labels."""
        values = self.values[name]
        with self._adding:
            values[labels] = values.get(labels, 0) + by

    def set(self, name: str, value: float) -> None:
        """Set the present value of a number without labels."""
        self.values[name] = {(): value}

    def total(self, name: str) -> float:
        """The sum of a number over all its labels."""
        return sum(self.values[name].copy().values())

    def took(self, seconds: float) -> None:
        self.seconds[bisect_left(BOUNDS_S, seconds)] += 1
        self.seconds_sum += seconds


Measured = Callable[[], Mapping[Any, Numbers]]


class _Counts(Collector):
    def __init__(self, table: Table, measured: Measured) -> None:
        self._table, self._measured = table, measured

    def collect(self) -> Iterator[Metric]:
        owners, (numbers, owner, (timed, timed_help)) = self._measured(), self._table
        for name, number in numbers.items():
            kind = GaugeMetricFamily if number.kind == "gauge" else CounterMetricFamily
            labels = [owner, *number.labels]
            family = kind(f"anabranch_{name}", number.help, labels=labels)
            for whose, metrics in owners.items():
                for values, value in metrics.values[name].copy().items():
                    family.add_metric([str(whose), *values], value)
            yield family
        times = HistogramMetricFamily(f"anabranch_{timed}", timed_help, labels=[owner])
        for whose, metrics in owners.items():
            bounds = [*map(str, BOUNDS_S), "+Inf"]
            buckets = list(zip(bounds, accumulate(metrics.seconds), strict=True))
            times.add_metric([str(whose)], buckets, metrics.seconds_sum)
        yield times


class _Handler(WSGIRequestHandler):
    timeout = _ANSWER_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        log.debug(format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class Monitor:
    """Serves `/metrics`, `/live` and `/ready` on a thread of its own."""

    def __init__(
        self, address: str, table: Table, measured: Measured, trouble: Callable[[], str | None]
    ) -> None:
        """``measured``: returns the numbers by owner. ``trouble``: returns why the process is not ready, or None.

        Raises: InvalidArgument, PortTaken.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65_535:
            raise InvalidArgument(f"--http {address!r} is not HOST:PORT, such as 127.0.0.1:9464")
        self._trouble = trouble
        registry = CollectorRegistry()
        registry.register(_Counts(table, measured))
        ProcessCollector(registry=registry)
        self._metrics = make_wsgi_app(registry)
        try:
            self._server = make_server(host, int(port), self._answer, _Server, _Handler)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise PortTaken(int(port)) from error
            raise InvalidArgument(f"--http {address}: {error.strerror or error}") from error
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="http", daemon=True).start()

    def _answer(self, request: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path = request["PATH_INFO"]
        if path == "/metrics":
            page: Iterable[bytes] = self._metrics(request, start)
            return page
        known = path in ("/live", "/ready")
        trouble = self._trouble() if path == "/ready" else None
        status = "404 Not Found" if not known else "503 Not Ready" if trouble else "200 OK"
        start(status, [("Content-Type", "text/plain; charset=utf-8")])
        said = trouble or ("ok" if known else "there are /metrics, /live and /ready")
        return [f"{said}\n".encode()]

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
