"""Asks engines over HTTP to receive weights. An engine answers when it has them."""
from __future__ import annotations

import http.client
import json
import socket
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...errors import InvalidError, UnavailableError

# The device key and the socket address of each rank, in the order of ranks.
Handles = Sequence[tuple[str, str]]
Request = Callable[[Handles], None]

# Seconds, for a whole update.
REQUEST_TIMEOUT = 1800.0
ENGINES = ("sglang", "lmdeploy", "vllm")


def engine_request(engine: str, url: str, version: str, *, timeout: float = REQUEST_TIMEOUT,
                   headers: Mapping[str, str] | None = None, uds: str | None = None) -> Request:
    """Returns a function that asks the engine at `url` to receive, and returns when it has.

    engine: "sglang" (POST /update_weights_from_ipc), "lmdeploy" (the same, after a check that it is
        ready), "vllm" (POST /collective_rpc of a server in dev mode, whose workers have
        checkpoint-engine's extension).
    version: for engines that keep a name of their weights.
    timeout: seconds. uds: a Unix socket to connect to instead of the URL's host.

    The function raises UnavailableError with the engine's message when the engine refuses or fails.
    """
    if engine not in ENGINES:
        raise InvalidError(f"no engine '{engine}': one of {', '.join(ENGINES)}")
    server = _Server(url, timeout, headers or {}, uds)

    def request(handles: Handles) -> None:
        if engine == "vllm":
            server.post("/collective_rpc", {"method": "update_weights_from_ipc",
                                            "args": [dict(handles)], "timeout": timeout})
            return
        body: dict[str, Any] = {"zmq_handles": dict(handles)}
        if engine == "sglang":
            body |= {"flush_cache": True, "weight_version": version}
        else:
            _check_lmdeploy(server, handles)
        answer = server.post("/update_weights_from_ipc", body)
        if not (isinstance(answer, dict) and answer.get("success")):
            raise UnavailableError(f"{engine} at {url} failed: {answer}")

    return request


def request_inference_to_update(url: str, socket_paths: Mapping[str, str], timeout: float = 300.0,
                                uds: str | None = None) -> None:
    """checkpoint-engine's function of this name: POSTs a collective RPC to `url` as it is.

    socket_paths: device key → address. timeout: seconds. uds: a Unix socket to connect to.
    UnavailableError: the server does not answer, or answers with an error.
    """
    _Server(url, timeout, {}, uds).post(
        "", {"method": "update_weights_from_ipc", "args": [dict(socket_paths)], "timeout": timeout})


def _check_lmdeploy(server: _Server, handles: Handles) -> None:
    """Checks, before any change, that lmdeploy can receive and runs only on devices that we feed.
    """
    status = server.get("/update_weights_from_ipc")
    if not status.get("ready"):
        raise UnavailableError(f"lmdeploy is not ready to receive: {status.get('message')}")
    missing = set(status.get("device_uuids", ())) - {key for key, _ in handles}
    if missing:
        raise InvalidError(f"lmdeploy also runs on {', '.join(sorted(missing))}: name all of its "
                           f"devices")


class _Server:
    def __init__(self, url: str, timeout: float, headers: Mapping[str, str],
                 uds: str | None) -> None:
        self._parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        if self._parts.scheme not in ("http", "https") or not (self._parts.hostname or uds):
            raise InvalidError(f"'{url}' is no http:// or https:// address")
        self._url, self._timeout, self._headers, self._uds = url, timeout, dict(headers), uds

    def get(self, path: str) -> Any:
        return self._call("GET", path, None)

    def post(self, path: str, body: Any) -> Any:
        return self._call("POST", path, json.dumps(body))

    def _call(self, method: str, path: str, body: str | None) -> Any:
        connection = self._connect()
        headers = {"Content-Type": "application/json", **self._headers}
        target = (self._parts.path.rstrip("/") + path) or "/"
        if self._parts.query:
            target += f"?{self._parts.query}"
        try:
            connection.request(method, target, body, headers)
            response = connection.getresponse()
            text = response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise UnavailableError(f"{self._url}: {error or type(error).__name__}") from error
        finally:
            connection.close()
        if not 200 <= response.status < 300:
            raise UnavailableError(f"{self._url} answers {response.status} to {method} {target}: "
                                   f"{_reason(text)}")
        return _json(text)

    def _connect(self) -> http.client.HTTPConnection:
        if self._uds is not None:
            return _UnixConnection(self._uds, self._timeout)
        kind = (http.client.HTTPSConnection if self._parts.scheme == "https"
                else http.client.HTTPConnection)
        return kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _json(text: str) -> Any:
    try:
        return json.loads(text) if text.strip() else None
    except ValueError:
        return None


def _reason(text: str) -> str:
    answer = _json(text)
    if isinstance(answer, dict):
        return str(answer.get("message") or answer.get("detail") or answer.get("error") or answer)
    return text.strip()[:500] or "no reason given"
