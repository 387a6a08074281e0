"""What holds without an agent: errors, dtypes, names, and a package without torch and numpy."""
import builtins
import json
import re
import signal
import threading
import time

import numpy
import pytest
from conftest import ROOT, run_python

import rekindle
from rekindle import _abi, _attaching, _library, _native, dtypes, errors


@pytest.mark.parametrize("name, builtin", [
    ("InvalidError", ValueError), ("NotFoundError", LookupError),
    ("TimeoutError", builtins.TimeoutError), ("PeerLostError", ConnectionError),
    ("StaleError", Exception), ("CorruptError", Exception), ("ExhaustedError", Exception),
    ("DeniedError", PermissionError), ("UnavailableError", Exception),
    ("InternalError", Exception)])
def test_each_code_of_the_library_has_its_exception(name, builtin):
    kind = getattr(rekindle, name)
    assert issubclass(kind, rekindle.Error) and issubclass(kind, builtin)
    assert _abi.load().rk_code_name(kind.code).decode() == kind.name
    raised = errors.of_code(kind.code, "what and why")
    assert type(raised) is kind and str(raised) == "what and why"
    assert type(errors.of_name(kind.name, "x")) is kind


def test_there_is_no_code_without_an_exception():
    names = [_abi.load().rk_code_name(code) for code in range(1, 12)]
    assert names.index(b"UNKNOWN") == 10
    assert {kind.code for kind in errors._CLASSES} == set(range(1, 11))


LIBRARY_DTYPES = ["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "I16", "U16", "F16", "BF16",
                  "I32", "U32", "F32", "I64", "U64", "F64"]


@pytest.mark.parametrize("name", LIBRARY_DTYPES)
def test_names_of_dtypes_lead_to_torch_and_numpy_and_back(name):
    known = dtypes.numpy_dtype(name)
    assert known.itemsize == dtypes.itemsize(name)
    if known.kind != "V":
        assert dtypes.numpy_dtype_name(known) == name
    pytest.importorskip("torch")
    dtype = dtypes.torch_dtype(name)
    assert dtypes.dtype_name(dtype) == name and dtype.itemsize == known.itemsize


def test_dtypes_of_less_than_a_byte_are_refused_or_named():
    with pytest.raises(rekindle.InvalidError, match="packed as U8"):
        dtypes.itemsize("F4")
    with pytest.raises(rekindle.InvalidError, match="datetime64"):
        dtypes.numpy_dtype_name(numpy.dtype("datetime64[s]"))
    torch = pytest.importorskip("torch")
    if hasattr(torch, "float4_e2m1fn_x2"):
        assert dtypes.dtype_name(torch.float4_e2m1fn_x2) == "F4"
    with pytest.raises(rekindle.InvalidError, match="F6_E2M3"):
        dtypes.torch_dtype("F6_E2M3")
    with pytest.raises(rekindle.InvalidError, match="'F7'"):
        dtypes.torch_dtype("F7")
    with pytest.raises(rekindle.InvalidError, match="complex128"):
        dtypes.dtype_name(torch.complex128)


def test_the_version_is_the_projects(monkeypatch, tmp_path):
    project = re.search(r"project\(rekindle VERSION ([0-9.]+)",
                        (ROOT / "CMakeLists.txt").read_text())[1]
    assert rekindle.__version__ == project
    (tmp_path / "version").write_text("7.8.9\n")  # as a wheel has it
    monkeypatch.setattr(_library, "_NATIVE", tmp_path)
    assert _library.version() == "7.8.9"
    monkeypatch.setattr(_library, "_NATIVE", tmp_path / "a/b/c")  # the package alone
    assert _library.version() == "0+unknown"


NO_PACKAGES = """
import sys
for name in ("torch", "numpy"): sys.modules[name] = None
"""


def test_importing_takes_neither_torch_nor_numpy():
    run_python(NO_PACKAGES + "import rekindle; rekindle.errors.of_code(3, 'x')")
    loaded = run_python("import sys, rekindle; print({'torch', 'numpy'} & set(sys.modules))")
    assert loaded.strip() == "set()"


def modules_after(code):
    """The modules that `code` loads beyond those of a bare interpreter."""
    return set(json.loads(run_python(
        "import sys\nbefore = set(sys.modules)\n" + code +
        "\nadded = sorted(set(sys.modules) - before)\nimport json\nprint(json.dumps(added))")))


def test_importing_loads_no_other_module():
    loaded = modules_after("import rekindle")
    assert loaded <= {"rekindle", "__future__", "importlib", "importlib._bootstrap",
                      "importlib._bootstrap_external", "warnings"}


# Each of these takes a millisecond or more to import, and no attach needs it.
HEAVY = {"asyncio", "dataclasses", "importlib.metadata", "inspect", "json", "logging", "numpy",
         "pathlib", "shutil", "socket", "subprocess", "tempfile", "torch", "urllib.parse"}


def test_what_attach_needs_is_light():
    loaded = modules_after("import rekindle; rekindle.attach")
    assert "rekindle.session" in loaded
    assert not loaded & HEAVY


def test_each_name_is_found_at_its_first_use():
    code = "import rekindle as r; print(r.{0} is getattr(r, '{0}'), '{0}' in dir(r))"
    assert rekindle.__all__ == sorted(rekindle._MODULE_OF)
    for name in [*rekindle.__all__, *rekindle._NAMES, "__version__"]:
        assert run_python(code.format(name)).split() == ["True", "True"], name
    # Importing the module of a function does not replace the function.
    assert run_python("import rekindle.cataloging, rekindle.session\n"
                      "print(callable(rekindle.catalog), callable(rekindle.attach))").split() == [
        "True", "True"]
    assert run_python("from rekindle import *; print(attach.__name__)").strip() == "attach"
    with pytest.raises(AttributeError, match="'rekindle' has no attribute 'attac'"):
        rekindle.attac


def test_a_library_that_is_not_there_is_named():
    done = run_python("import rekindle; rekindle.attach('m')", check=False,
                      REKINDLE_LIBRARY="/nowhere/librekindle.so.1")
    assert done.returncode == 1
    assert "UnavailableError" in done.stderr and "/nowhere/librekindle.so.1" in done.stderr


def test_no_command_is_an_error_and_a_script_of_that_name_is_none(monkeypatch, tmp_path):
    script = tmp_path / "rekindle"
    script.write_text("#!/bin/sh\nexit 1\n")
    script.chmod(0o755)
    monkeypatch.delenv("REKINDLE_BINARY")
    monkeypatch.setattr(_library, "_NATIVE", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(rekindle.UnavailableError, match="REKINDLE_BINARY"):
        _library.command_path()
    monkeypatch.setenv("REKINDLE_BINARY", str(tmp_path / "absent"))
    with pytest.raises(rekindle.UnavailableError, match="absent"):
        rekindle.status()


def test_models_and_versions():
    assert _attaching.model_version("m", "latest") == _attaching.model_version("m", None) == "m"
    assert _attaching.model_version("m@3") == "m@3"
    assert _attaching.model_version("m", 41) == "m@41"
    with pytest.raises(rekindle.InvalidError, match="has a version already"):
        _attaching.model_version("m@3", 4)


def test_specs_are_dicts_texts_or_files(tmp_path):
    path = tmp_path / "spec.json"
    path.write_text('{"a": 1}')
    assert json.loads(_attaching.spec_json({"a": 1})) == {"a": 1}
    assert _attaching.spec_json(' {"a": 1}') == ' {"a": 1}'
    assert _attaching.spec_json(path) == _attaching.spec_json(str(path)) == '{"a": 1}'
    with pytest.raises(rekindle.InvalidError, match="absent"):
        _attaching.spec_json(tmp_path / "absent")


def test_waiting_goes_on_in_slices_until_the_deadline():
    slices = []

    def late(ms):
        slices.append(ms)
        if len(slices) < 3:
            raise rekindle.TimeoutError("not yet")
        return "here"

    assert _native.wait_until(None, late) == "here"
    assert slices == [1000, 1000, 1000]

    def never(ms):
        raise rekindle.TimeoutError("not yet")

    with pytest.raises(rekindle.TimeoutError):
        _native.wait_until(0, never)
    for wrong in (-1, float("nan"), float("inf")):
        with pytest.raises(rekindle.InvalidError, match="time-out"):
            _native.wait_until(wrong, never)


class LongCall:
    """A call of the library that runs until it is stopped."""

    def __init__(self, then=lambda: None):
        self.stopped, self.ended = threading.Event(), threading.Event()
        self._then = then

    def __call__(self):
        # The main thread may be waiting for this one already, or about to.
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        assert self.stopped.wait(60)
        self._then()
        self.ended.set()


def test_an_interrupt_stops_a_long_call_and_waits_for_its_end():
    call = LongCall()
    with pytest.raises(KeyboardInterrupt):
        _native.run_interruptibly(call, call.stopped.set)
    assert call.ended.is_set()


def test_a_second_interrupt_waits_for_the_end_too():
    def interrupt_again():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.2)

    call = LongCall(interrupt_again)
    with pytest.raises(KeyboardInterrupt):
        _native.run_interruptibly(call, call.stopped.set)
    assert call.ended.is_set()


def test_an_interrupt_while_the_thread_starts_stops_the_call(monkeypatch):
    begun, stopped, ended = threading.Event(), threading.Event(), threading.Event()
    start = threading.Thread.start

    def call():
        begun.set()
        assert stopped.wait(60)
        ended.set()

    def interrupted(thread):
        start(thread)
        assert begun.wait(60)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _native.run_interruptibly(call, stopped.set)
    assert ended.is_set()


def test_an_interrupt_before_the_thread_starts_makes_no_call(monkeypatch):
    started, start = [], threading.Thread.start

    def interrupted(thread):
        started.append(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    called = []
    with pytest.raises(KeyboardInterrupt):
        _native.run_interruptibly(lambda: called.append(1), lambda: called.append(2))
    # As if the thread had been about to start.
    start(started[0])
    started[0].join(60)
    assert not called


def test_a_call_that_cannot_be_stopped_does_not_hang_its_caller(monkeypatch):
    monkeypatch.setattr(_native, "STOP_S", 0.1)
    call = LongCall()
    with pytest.raises(KeyboardInterrupt):
        _native.run_interruptibly(call, lambda: None)
    assert not call.ended.is_set()
    call.stopped.set()


class FakeLibrary:
    """Records the calls of one Native, whose calls block until they are interrupted."""

    def __init__(self):
        self.calls, self.began, self.interrupted = [], threading.Event(), threading.Event()

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name == "rk_connect":
                arguments[1]._obj.value = 1
            if name == "rk_interrupt":
                self.interrupted.set()
            if name == "rk_update":
                self.began.set()
                assert self.interrupted.wait(60)
                self.calls.append("rk_update returns")
                return 8
            return 0
        return call


@pytest.fixture
def fake_native(monkeypatch):
    library = FakeLibrary()
    monkeypatch.setattr(_native._abi, "load", lambda: library)
    return library, _native.Native(None, 1.0)


def test_a_cut_connection_is_freed_after_its_call(fake_native):
    library, native = fake_native

    def cut():
        assert library.began.wait(60)
        native.cut()
        native.end()

    cutter = threading.Thread(target=cut)
    cutter.start()
    with pytest.raises(rekindle.Error):
        native.call_agent("rk_update")
    cutter.join()
    assert library.calls == ["rk_connect", "rk_update", "rk_interrupt", "rk_update returns",
                             "rk_disconnect"]
    native.cut()
    assert library.calls[-1] == "rk_disconnect", "nothing is left to interrupt"


def test_a_last_call_that_is_never_made_leaks_nothing(fake_native):
    library, native = fake_native
    native.open("rk_publish_begin", "rk_publish_abandon")
    native._handles.object.value = 2
    with native.using():
        native.end()
        with pytest.raises(rekindle.StaleError):
            native.call_last("rk_publish_commit")
    assert library.calls[2:] == ["rk_publish_abandon", "rk_disconnect"]
