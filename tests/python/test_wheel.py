"""The wheel: built from an installation, put into an empty place, used there without the tree."""
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
from conftest import BINARY, PATIENCE_S, ROOT

BUILD_S = 300


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """As tools/package makes it; the native half is the one that is tested."""
    prefix, out = tmp_path_factory.mktemp("prefix"), tmp_path_factory.mktemp("dist")
    (prefix / "bin").mkdir()
    (prefix / "lib").mkdir()
    shutil.copy(BINARY, prefix / "bin/rekindle")
    (prefix / "libexec/rekindle").mkdir(parents=True)
    shutil.copy(pathlib.Path(BINARY).with_name("example_worker"), prefix / "libexec/rekindle")
    shutil.copy(os.environ["REKINDLE_LIBRARY"], prefix / "lib/librekindle.so.1.9")
    (prefix / "lib/librekindle.so.1").symlink_to("librekindle.so.1.9")  # as where it was built
    done = subprocess.run([ROOT / "tools/package", "--only", "wheel", "--prefix", prefix, "--out", out],
                          capture_output=True, text=True, timeout=BUILD_S,
                          env={**os.environ, "PYTHON": sys.executable})
    assert done.returncode == 0, done.stderr
    (found,) = out.glob("*.whl")
    assert done.stdout.split("\n")[-2] == str(found)
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    place = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
                    "--disable-pip-version-check", "--target", place, wheel],
                   check=True, timeout=BUILD_S)
    return place


def environment(place):
    """Nothing of the tree, and nothing that names a library."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("REKINDLE_")}
    return {**kept, "PYTHONPATH": str(place), "PATH": "/usr/bin:/bin"}


def test_one_wheel_for_all_of_python_3(wheel):
    project = (ROOT / "CMakeLists.txt").read_text()
    version = re.escape(re.search(r"project\(rekindle VERSION ([0-9.]+)", project)[1])
    assert re.fullmatch(rf"rekindle-{version}-py3-none-manylinux_\d+_\d+_\w+\.whl", wheel.name)


def test_it_has_all_modules_and_no_drivers_library(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT / "python"))
               for path in (ROOT / "python/rekindle").rglob("*.py")}
    assert modules <= names and "rekindle/_native/version" in names
    assert not [name for name in names if re.search(r"lib(cuda|nccl|ibverbs)", name)]
    assert [name for name in names if "libprotobuf" in name]


def test_it_works_by_itself(installed, fleet, store):
    fleet.publish("minimal@1", _safetensors(fleet.directory), node="a")
    code = """
import sys, rekindle
from rekindle import _library
print(_library.shared_object(), _library.command_path(), rekindle.__version__)
with rekindle.attach("minimal", agent=sys.argv[1]) as session:
    print(session.tensor_count, rekindle.status(agent=sys.argv[1])["node"])
"""
    done = subprocess.run([sys.executable, "-c", code, store], capture_output=True, text=True,
                          timeout=PATIENCE_S, env=environment(installed), cwd="/")
    assert done.returncode == 0, done.stderr
    library, command, version, count, node = done.stdout.split()
    assert pathlib.Path(library).is_relative_to(installed)
    assert pathlib.Path(command).is_relative_to(installed)
    found = importlib.metadata.Distribution.at(next(installed.glob("rekindle-*.dist-info")))
    assert (version, count, node) == (found.version, "1", "a")
    assert {one.group for one in found.entry_points} == {
        "console_scripts", "vllm.general_plugins", "sglang.srt.plugins"}


def test_without_a_python_to_make_it_what_to_do_is_said():
    done = subprocess.run([ROOT / "tools/package"], capture_output=True, text=True,
                          timeout=PATIENCE_S, env={**os.environ, "PYTHON": "/nowhere/python"})
    assert done.returncode == 1 and not done.stdout
    assert "no /nowhere/python: run tools/install-deps --package" in done.stderr


def test_the_demo_runs_from_the_wheel(installed):
    done = subprocess.run([installed / "bin/rekindle", "demo", "--gib", "0.02"], capture_output=True,
                          text=True, timeout=PATIENCE_S, env=environment(installed), cwd="/")
    assert done.returncode == 0, done.stderr
    assert "crash: SIGKILL to the agent of b" in done.stdout
    assert done.stdout.rstrip().split("\n")[-1].startswith("All of it worked.")


def test_its_script_is_the_bundled_command(installed):
    done = subprocess.run([installed / "bin/rekindle", "version", "--json"], capture_output=True,
                          text=True, timeout=PATIENCE_S, env=environment(installed), cwd="/")
    assert done.returncode == 0, done.stderr
    ours = subprocess.run([BINARY, "version", "--json"], capture_output=True, text=True, check=True)
    assert done.stdout == ours.stdout
    wrong = subprocess.run([installed / "bin/rekindle", "nonsense"], capture_output=True,
                           timeout=PATIENCE_S, env=environment(installed), cwd="/")
    assert wrong.returncode == 2


def _safetensors(directory):
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    path = directory / "minimal.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    return path
