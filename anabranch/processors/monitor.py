"""`anabranch controller --http`: the counts of this process's leaders, and whether it lives and is ready."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING
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
from anabranch.processors.metrics import BOUNDS_S, TABLE, Metrics

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIEnvironment

log = logging.getLogger("anabranch.controller")

_ANSWER_S = 10.0
_PARTITION = "control_partition"
Leaders = Callable[[], Mapping[int, Metrics]]


class _Counts(Collector):
    def __init__(self, leaders: Leaders) -> None:
        self._leaders = leaders

    def collect(self) -> Iterator[Metric]:
        leaders = self._leaders()
        for name, number in TABLE.items():
            kind = GaugeMetricFamily if number.kind == "gauge" else CounterMetricFamily
            labels = [_PARTITION, *number.labels]
            family = kind(f"anabranch_{name}", number.help, labels=labels)
            for partition, metrics in leaders.items():
                for values, value in metrics.values[name].copy().items():
                    family.add_metric([str(partition), *values], value)
            yield family
        rounds = HistogramMetricFamily(
            "anabranch_round_seconds", "Time to make a round durable", labels=[_PARTITION]
        )
        for partition, metrics in leaders.items():
            bounds = [*map(str, BOUNDS_S), "+Inf"]
            buckets = list(zip(bounds, accumulate(metrics.seconds), strict=True))
            rounds.add_metric([str(partition)], buckets, metrics.seconds_sum)
        yield rounds


class _Handler(WSGIRequestHandler):
    timeout = _ANSWER_S

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        log.debug(format, *args)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class Monitor:
    """Serves `/metrics`, `/live` and `/ready` on a thread of its own."""

    def __init__(self, address: str, leaders: Leaders, trouble: Callable[[], str | None]) -> None:
        """``trouble``: the reason why the process is not ready, or None.

        Raises: InvalidArgument, PortTaken.
        """
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or int(port) > 65_535:
            raise InvalidArgument(f"--http {address!r} is not HOST:PORT, such as 127.0.0.1:9464")
        self._trouble = trouble
        registry = CollectorRegistry()
        registry.register(_Counts(leaders))
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
        """Serve no more."""
        self._server.shutdown()
        self._server.server_close()
