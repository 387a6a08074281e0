"""A worker that serves one of several models at a time, and obeys `rekindle switch`.

    rekindle agent --gpu double:1 &                       # or a real GPU
    python switching_worker.py --publish                  # publishes red@1 and blue@1, then serves red
    curl 127.0.0.1:8000                                   # {"model": "red", "token": …}
    rekindle switch demo blue
    curl 127.0.0.1:8000                                   # {"model": "blue", "token": …}

Requests are answered between two steps, so none runs while a model is loaded. Needs torch.
"""
from __future__ import annotations

import argparse
import http.server
import json
from typing import Any

import torch
from torch import nn

import rekindle
import rekindle.torch

NAMES = ("red", "blue")


class Model(nn.Module):
    """Says a token, always the same: enough to tell models apart."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(64, 256)
        self.head = nn.Linear(256, 1000)

    def forward(self) -> int:
        one = torch.ones(64, device=self.hidden.weight.device)
        return int(self.head(torch.tanh(self.hidden(one))).argmax())


def build() -> Model:
    with torch.device("meta"):
        return Model()


def publish(agent: str | None) -> None:
    for seed, name in enumerate(NAMES):
        torch.manual_seed(seed)
        rekindle.publish(Model(), f"{name}@1", agent=agent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent", help="the store of the agent")
    parser.add_argument("--device", default="double:0")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--publish", action="store_true")
    options = parser.parse_args()
    if options.publish:
        publish(options.agent)
    models = rekindle.torch.Models({name: build for name in NAMES}, device=options.device, instance="demo",
                                   agent=options.agent)
    models.switch(NAMES[0])

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with torch.no_grad():
                answer = {"model": models.name, "token": models.model()}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode() + b"\n")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", options.port), Handler)
    server.timeout = 0.05
    print(f"serving {models.name} on port {server.server_port}", flush=True)
    while True:
        server.handle_request()
        if models.follow():
            print(f"serving {models.name} after {sum(models.phases.values()):.3f} s", flush=True)


if __name__ == "__main__":
    main()
