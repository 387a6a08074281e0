"""Waiting in tests."""
import time

PATIENCE_S = 60


def eventually(fact, patience_s=PATIENCE_S):
    """What `fact()` returns, as soon as it is true."""
    deadline = time.monotonic() + patience_s
    while True:
        found = fact()
        if found:
            return found
        assert time.monotonic() < deadline, "it has not become true"
        time.sleep(0.01)
