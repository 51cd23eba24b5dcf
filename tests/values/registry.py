"""A schema registry: the REST calls that confluent-kafka's serializers make, over a dictionary.

It is no judge of schemas: it stores them, gives each an id, and finds them by id, subject and text.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

NOT_FOUND = (404, {"error_code": 40403, "message": "Schema not found"})


class Registry:
    """A server on a port of its own, from the ``with`` block's begin to its end. ``subjects``: their schemas."""

    def __init__(self) -> None:
        self.subjects: dict[str, list[int]] = {}
        self.schemas: list[dict[str, Any]] = []
        self.away = False  # it answers 503
        registry, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self._answer(None)

            def do_POST(self) -> None:
                self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def _answer(self, body: Any) -> None:
                path = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]
                with lock:
                    status, found = registry.answer(path, body)
                data = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/vnd.schemaregistry.v1+json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Registry:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def answer(self, path: list[str], body: Any) -> tuple[int, Any]:
        """Status and document of a call."""
        if self.away:
            return 503, {"error_code": 50301, "message": "away"}
        match path:
            case ["schemas", "ids", number]:
                at = int(number) - 1
                return (200, self.schemas[at]) if 0 <= at < len(self.schemas) else NOT_FOUND
            case ["subjects", subject, "versions"] if body is not None:
                ids = self.subjects.setdefault(subject, [])
                schema = {"schemaType": "AVRO", **body}
                if schema not in self.schemas:
                    self.schemas.append(schema)
                made = self.schemas.index(schema) + 1
                if made not in ids:
                    ids.append(made)
                return 200, self._row(subject, made)
            case ["subjects", subject] if body is not None:
                schema = {"schemaType": "AVRO", **body}
                for known in self.subjects.get(subject, []):
                    if self.schemas[known - 1] == schema:
                        return 200, self._row(subject, known)
                return NOT_FOUND
            case ["subjects", subject, "versions", version]:
                ids = self.subjects.get(subject, [])
                at = len(ids) if version == "latest" else int(version)
                return (200, self._row(subject, ids[at - 1])) if 0 < at <= len(ids) else NOT_FOUND
        return NOT_FOUND

    def _row(self, subject: str, number: int) -> dict[str, Any]:
        version = self.subjects[subject].index(number) + 1
        row = {"subject": subject, "version": version, "id": number}
        return row | {"guid": f"{number:032x}", **self.schemas[number - 1]}
