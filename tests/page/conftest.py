import pathlib
import shutil
import sys
import tempfile

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from browser import Browser  # noqa: E402
from fleet import Fleet  # noqa: E402


@pytest.fixture
def directory():
    """On tmpfs, gone at the end."""
    path = pathlib.Path(tempfile.mkdtemp(prefix="rekindle-page.", dir="/dev/shm"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def fleet(directory):
    running = Fleet(directory)
    yield running
    running.close()


@pytest.fixture(scope="module")
def browser():
    running = Browser()
    yield running
    running.close()
