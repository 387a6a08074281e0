"""Runs the bundled `rekindle` command with `--json`."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any, Union

from . import _attaching, _library, errors

PathLike = Union[str, "os.PathLike[str]"]


def run(*arguments: PathLike, timeout: float | None = None) -> dict[str, Any]:
    """Runs `rekindle ARGUMENTS --json` and returns the JSON document that it prints.

    An error of the command is raised as the exception of its code. TimeoutError: the command was
    killed after `timeout` seconds. What a pull has verified is kept."""
    given = [os.fspath(argument) for argument in arguments]
    line = [_library.command_path(), *given, "--json", "--quiet"]
    try:
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout,
                              check=False)
    except subprocess.TimeoutExpired:
        raise errors.TimeoutError(f"rekindle {arguments[0]} has not ended in {timeout} s") from None
    except OSError as why:
        raise errors.UnavailableError(f"start {line[0]}: {why.strerror}") from None
    return _answer(str(arguments[0]), done)


def _answer(what: str, done: "subprocess.CompletedProcess[bytes]") -> dict[str, Any]:
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        said = done.stderr.decode("utf-8", "replace").strip().replace("\n", " ")
        raise errors.InternalError(
            f"rekindle {what} has ended with {done.returncode}: {said or 'no word'}") from None
    if done.returncode and "error" in answer:
        raise errors.of_name(answer["error"]["code"], answer["error"]["message"])
    return dict(answer)


def _options(**given: Any) -> list[PathLike]:
    """Returns --name value for each option that is given. The environment of the command decides
    the rest."""
    line: list[PathLike] = []
    for name, value in given.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            line.append(option)
        elif value is not None and value is not False:
            line += [option, os.fspath(value) if hasattr(value, "__fspath__") else str(value)]
    return line


def pull(model: str, version: str | int | None = "latest", *, to: PathLike | None = None,
         shard: str | None = None, spec: PathLike | None = None, tensors: str | None = None,
         sources: Iterable[str] = (), fallback_dir: PathLike | None = None, dry_run: bool = False,
         agent: PathLike | None = None, coordinator: str | None = None,
         timeout: float | None = None) -> dict[str, Any]:
    """Fetches a version, or a part of it, from the hosts that hold it: into the agent's store, or
    into the checkpoint directory `to`.

    `shard`: "tp=3/8"; `spec`: a path to its rules; `tensors`: a regular expression of names;
    `sources`: agents such as "10.0.0.3:7400", instead of a coordinator. Returns the command's JSON:
    "model", "version", "root", "path", "tensors", "bytes", …"""
    if spec is not None and not (isinstance(spec, str | os.PathLike) and os.path.isfile(spec)):
        raise errors.InvalidError("spec: the path of a file with the rules")
    from_sources = ",".join(sources) or None
    return run("pull", _attaching.model_version(model, version),
               *_options(to=to, shard=shard, spec=spec, tensors=tensors, fallback=fallback_dir,
                         dry_run=dry_run, store=agent, coordinator=coordinator),
               *_options(**{"from": from_sources}), timeout=timeout)


def status(*, agent: PathLike | None = None, coordinator: str | None = None,
           timeout: float | None = 60.0) -> dict[str, Any]:
    """Returns the status of the fleet by the coordinator, or without one, that of this host's
    agent.

    `agent`: its store directory. The result is the JSON of `rekindle status --json`."""
    return run("status", *_options(store=agent, coordinator=coordinator), timeout=timeout)


def main() -> None:
    """The console script `rekindle`: replaces this process by the bundled program."""
    try:
        program = _library.command_path()
        os.execv(program, [program, *sys.argv[1:]])
    except (errors.UnavailableError, OSError) as why:
        sys.exit(f"rekindle: {why}")
