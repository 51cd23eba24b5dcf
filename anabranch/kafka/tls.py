"""TLS for new connections, from files that are read again when they change."""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Mapping

log = logging.getLogger("anabranch.kafka")

_CA, _CERTIFICATE, _KEY = "ssl.ca.location", "ssl.certificate.location", "ssl.key.location"


class Tls:
    """TLS contexts; safe for threads. Open connections keep the files that they were opened with."""

    def __init__(self, options: Mapping[str, str], *, check_names: bool) -> None:
        """``options`` by librdkafka's names. Raises `OSError` for a missing or wrong file."""
        self._options = dict(options)
        self._check_names = check_names
        self._lock = threading.Lock()
        self._seen = self._look()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """The context for the next connection; unchanged while changed files can't be read (yet)."""
        with self._lock:
            try:
                # Looked at before they are loaded: a change in between is seen next time.
                seen = self._look()
                if seen != self._seen:
                    self._context = self._load()
                    self._seen = seen
                    log.info("TLS files have changed: new connections use the new ones")
            except OSError as error:
                log.warning("changed TLS files can't be used, the old ones are: %s", error)
            return self._context

    def _look(self) -> list[tuple[int, int, int]]:
        found = [os.stat(self._options[n]) for n in (_CA, _CERTIFICATE, _KEY) if n in self._options]
        return [(one.st_mtime_ns, one.st_size, one.st_ino) for one in found]

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._options.get(_CA))
        context.check_hostname = self._check_names
        if _CERTIFICATE in self._options:
            # Without a password OpenSSL would ask at the terminal.
            password = self._options.get("ssl.key.password", "")
            context.load_cert_chain(
                self._options[_CERTIFICATE], self._options.get(_KEY), lambda: password
            )
        return context
