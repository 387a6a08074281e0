"""Engines are too large for every machine. What runs here runs the engines themselves; those that
are not installed are not collected, and the end of every test run says which that are."""
import importlib.util

ENGINES = {"vllm": "test_real_vllm.py", "verl": "test_real_verl.py"}
missing = [name for name in ENGINES if importlib.util.find_spec(name) is None]
collect_ignore = [ENGINES[name] for name in missing]


def pytest_terminal_summary(terminalreporter):
    here = ", ".join(name for name in ENGINES if name not in missing) or "none"
    terminalreporter.write_line(f"engines whose own code was collected: {here}")
    for name in missing:
        terminalreporter.write_line(f"did not run: {ENGINES[name]}: {name} is not installed")
    terminalreporter.write_line("did not run: sglang: test_sglang_glue.py has a stand-in for it")
