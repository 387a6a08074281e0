"""Engines are too large for every machine. What runs here runs the engines themselves; those that
are not installed are not collected, and the end of every test run says which that are."""
import importlib.util

ENGINES = ("vllm", "verl", "sglang")
missing = [name for name in ENGINES if importlib.util.find_spec(name) is None]
collect_ignore_glob = [f"test_real_{name}*.py" for name in missing]


def pytest_terminal_summary(terminalreporter):
    here = ", ".join(name for name in ENGINES if name not in missing) or "none"
    terminalreporter.write_line(f"engines whose own code was collected: {here}")
    for name in missing:
        terminalreporter.write_line(f"did not run: test_real_{name}*.py: {name} is not installed")
