"""Gives a running engine on this host the weights of a version.

    python -m rekindle.compat.checkpoint_engine qwen3@41 --url http://127.0.0.1:30000
"""
from __future__ import annotations

import argparse
import sys

from ...errors import Error
from .buffers import DEFAULT_BYTES
from .channel import ReceiverError
from .engines import ENGINES, REQUEST_TIMEOUT
from .sender import ANSWER_TIMEOUT
from .serve import serve_to


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rekindle.compat.checkpoint_engine", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL[@VERSION]", help="without a version: the newest")
    parser.add_argument("--url", required=True, help="the engine's URL")
    parser.add_argument("--engine", choices=ENGINES, default="sglang")
    parser.add_argument("--devices", help="the engine's GPUs: cuda:0,cuda:1 [all]")
    parser.add_argument("--before", metavar="VERSION", help="the engine's version; one with other "
                        "tensors is refused")
    parser.add_argument("--store", help="the agent's store [/dev/shm/rekindle]")
    parser.add_argument("--uds", help="connect to this Unix socket instead of the URL's host")
    parser.add_argument("--header", action="append", default=[], metavar="NAME:VALUE",
                        help="a header of the request, for example Authorization")
    parser.add_argument("--socket-directory", help="directory for sockets; the engine sees it, too")
    parser.add_argument("--buffer-mib", type=int, default=DEFAULT_BYTES >> 20, metavar="MIB",
                        help="of the buffer on each device [%(default)s]")
    parser.add_argument("--timeout", type=float, default=ANSWER_TIMEOUT, metavar="S",
                        help="seconds for a worker to connect, and for each answer [%(default)g]")
    parser.add_argument("--request-timeout", type=float, default=REQUEST_TIMEOUT, metavar="S",
                        help="seconds for the whole update [%(default)g]")
    parsed = parser.parse_args(arguments)
    for header in parsed.header:
        if ":" not in header:
            parser.error(f"--header {header}: not NAME:VALUE")
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """Returns 0, or 1 after a failure, with one line on stderr."""
    options = _arguments(arguments)
    model, _, version = options.model.partition("@")
    headers = dict(header.split(":", 1) for header in options.header)
    try:
        served = serve_to(
            options.url, model, version or "latest", engine=options.engine, agent=options.store,
            devices=options.devices.split(",") if options.devices else None, uds=options.uds,
            before=options.before, headers={name.strip(): value.strip() for name, value in headers.items()},
            directory=options.socket_directory, buffer_bytes=options.buffer_mib << 20,
            timeout=options.timeout, request_timeout=options.request_timeout)
    except (Error, ReceiverError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{served.model}@{served.version}: {served.nbytes} bytes to {served.devices} devices in "
          f"{served.elapsed:.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
