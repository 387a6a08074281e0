"""Finds librekindle and the ``rekindle`` command: in the wheel, or as the environment says.

Also tells the version of the package.
"""
from __future__ import annotations

import os
import pathlib
import re
import shutil

from .errors import UnavailableError

LIBRARY = "librekindle.so.1"
COMMAND = "rekindle"
_NATIVE = pathlib.Path(__file__).resolve().parent / "_native"


def shared_object() -> str:
    """Returns the name for dlopen(): ``$REKINDLE_LIBRARY``, the wheel's library or the system's."""
    named = os.environ.get("REKINDLE_LIBRARY")
    if named:
        return named
    bundled = _NATIVE / "lib" / LIBRARY
    return str(bundled) if bundled.is_file() else LIBRARY


def command_path() -> str:
    """Returns the ``rekindle`` program: ``$REKINDLE_BINARY``, the wheel's, or the first in
    ``PATH``.

    Raises UnavailableError when there is none."""
    named = os.environ.get("REKINDLE_BINARY")
    if named:
        return named
    bundled = _NATIVE / "bin" / COMMAND
    if bundled.is_file():
        return str(bundled)
    for directory in os.get_exec_path():
        found = shutil.which(COMMAND, path=directory)
        if found and not _is_script(found):
            return found
    raise UnavailableError(
        "the `rekindle` command is neither in this package nor in PATH: install the wheel, or name "
        "it in REKINDLE_BINARY")


def version() -> str:
    """Returns CMake's project version: from the wheel's build, or from the source tree."""
    written = _NATIVE / "version"
    if written.is_file():
        return written.read_text(encoding="utf-8").strip()
    project = _NATIVE.parents[2] / "CMakeLists.txt"
    found = project.is_file() and re.search(
        r"^project\(rekindle VERSION ([0-9.]+)", project.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else "0+unknown"


def _is_script(path: str) -> bool:
    """Whether a file is a script: this package's console script, for example, would call itself."""
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return True
