"""Finds librekindle and the ``rekindle`` command: in the wheel, or as the environment says.

Also tells the version of the package.
"""
from __future__ import annotations

import os

from .errors import UnavailableError

LIBRARY = "librekindle.so.1"
COMMAND = "rekindle"
_NATIVE = os.path.join(os.path.dirname(os.path.realpath(__file__)), "_native")


def shared_object() -> str:
    """Returns the name for dlopen(): ``$REKINDLE_LIBRARY``, the wheel's library or the system's."""
    named = os.environ.get("REKINDLE_LIBRARY")
    if named:
        return named
    bundled = os.path.join(_NATIVE, "lib", LIBRARY)
    return bundled if os.path.isfile(bundled) else LIBRARY


def command_path() -> str:
    """Returns the ``rekindle`` program: ``$REKINDLE_BINARY``, the wheel's, or the first in
    ``PATH``.

    Raises UnavailableError when there is none."""
    named = os.environ.get("REKINDLE_BINARY")
    if named:
        return named
    bundled = os.path.join(_NATIVE, "bin", COMMAND)
    if os.path.isfile(bundled):
        return bundled
    import shutil
    for directory in os.get_exec_path():
        found = shutil.which(COMMAND, path=directory)
        if found and not _is_script(found):
            return found
    raise UnavailableError(
        "the `rekindle` command is neither in this package nor in PATH: install the wheel, or name "
        "it in REKINDLE_BINARY")


def version() -> str:
    """Returns CMake's project version: from the wheel's build, or from the source tree."""
    import re
    written = _read(os.path.join(_NATIVE, "version"))
    if written is not None:
        return written.strip()
    # _NATIVE is ROOT/python/rekindle/_native in the source tree.
    root = os.path.dirname(os.path.dirname(os.path.dirname(_NATIVE)))
    project = _read(os.path.join(root, "CMakeLists.txt")) or ""
    found = re.search(r"^project\(rekindle VERSION ([0-9.]+)", project, re.MULTILINE)
    return found[1] if found else "0+unknown"


def _read(path: str) -> str | None:
    """Returns the text of a file; None: there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_script(path: str) -> bool:
    """Whether a file is a script: this package's console script, for example, would call itself."""
    try:
        with open(path, "rb") as file:
            return file.read(2) == b"#!"
    except OSError:
        return True
