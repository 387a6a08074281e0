"""Compile caches that hosts share: the fingerprint, and a real cache of torch.compile."""
import json
import os
import subprocess
import sys

import pytest
from conftest import PATIENCE_S, run_python

import rekindle
from rekindle import artifacts

COMPILE_S = 300
# Compiles a function and prints what the caches did.
COMPILE = """
import json, sys, torch
from torch._dynamo.utils import counters

@torch.compile
def f(x, y):
    return torch.nn.functional.gelu(x @ y).softmax(-1) * 3 + y.sum()

x = torch.arange(4096, dtype=torch.float32).reshape(64, 64) / 4096
total = f(x, x).sum().item()
print(json.dumps({"total": total, "hits": counters["inductor"]["fxgraph_cache_hit"],
                  "misses": counters["inductor"]["fxgraph_cache_miss"],
                  "whole_hits": counters["aot_autograd"]["autograd_cache_hit"]}))
"""


def compiled_with(cache):
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, timeout=COMPILE_S,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(cache), "TORCHINDUCTOR_FX_GRAPH_CACHE": "1"})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def libraries(cache):
    return sorted(str(path.relative_to(cache)) for path in cache.rglob("*.so"))


def test_a_compiler_on_another_host_finds_the_cache_of_the_first(fleet, tmp_path):
    pytest.importorskip("torch")
    first, second = tmp_path / "first", tmp_path / "second"
    cold = compiled_with(first)
    assert cold["misses"] > 0 and cold["hits"] == 0 and libraries(first)
    mark = artifacts.fingerprint()
    sent = artifacts.publish("m", mark, {"inductor": first}, agent=fleet.store("a"),
                             coordinator=fleet.coordinator)
    assert sent["published"] and sent["files"] > 0
    got = artifacts.fetch("m", mark, {"inductor": second}, agent=fleet.store("b"),
                          coordinator=fleet.coordinator)
    assert got["written"] == sent["files"] and got["kept"] == 0
    fetched = libraries(second)
    assert fetched == libraries(first)
    warm = compiled_with(second)
    assert warm["misses"] == 0 and warm["hits"] + warm["whole_hits"] > 0
    assert warm["total"] == cold["total"]
    assert libraries(second) == fetched


def test_another_fingerprint_gets_nothing(fleet, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "kernel").write_bytes(b"code")
    with_extra = artifacts.fingerprint(extra="other kernels")
    assert with_extra != artifacts.fingerprint()
    artifacts.publish("m", artifacts.fingerprint(), {"t": cache}, agent=fleet.store("a"),
                      coordinator=fleet.coordinator)
    with pytest.raises(rekindle.NotFoundError):
        artifacts.fetch("m", with_extra, {"t": tmp_path / "new"}, agent=fleet.store("b"),
                        coordinator=fleet.coordinator)
    assert not (tmp_path / "new").exists()


def test_a_second_publication_says_that_there_is_one(fleet, tmp_path):
    (tmp_path / "kernel").write_bytes(b"code")
    publish = {"caches": {"t": tmp_path}, "agent": fleet.store("a"), "coordinator": fleet.coordinator}
    assert artifacts.publish("m", "F", **publish)["published"]
    assert not artifacts.publish("m", "F", **publish)["published"]
    assert artifacts.publish("m", "F", replace=True, **publish)["version"] == 2


def test_the_fingerprint_is_one_line_that_names_what_compiles():
    named = json.loads(artifacts.fingerprint(dtype="bfloat16", parallel="tp=8"))
    assert named["dtype"] == "bfloat16" and named["parallel"] == "tp=8"
    assert named["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "\n" not in artifacts.fingerprint(extra="two\nlines")
    for changed in ({"dtype": "float16"}, {"parallel": "tp=4"}, {"extra": "x"}):
        assert artifacts.fingerprint(**changed) != artifacts.fingerprint()


def test_the_gpus_and_their_driver_are_part_of_it(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    marks = set()
    for gpus in ("NVIDIA H100, 9.0, 550.1", "NVIDIA H100, 9.0, 560.2", "NVIDIA H200, 9.0, 550.1"):
        program.write_text(f"#!/bin/sh\necho '{gpus}'\necho '{gpus}'\n")
        program.chmod(0o755)
        assert json.loads(artifacts.fingerprint())["gpus"] == [gpus]
        marks.add(artifacts.fingerprint())
    assert len(marks) == 3
    program.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(rekindle.UnavailableError, match="GPUs"):
        artifacts.fingerprint()


NVCC = """nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2024 NVIDIA Corporation
Cuda compilation tools, release {}
"""


def test_the_compilers_that_an_engine_runs_are_part_of_it(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    for variable, program in {"CC": "mycc", "CXX": "myc++"}.items():
        monkeypatch.setenv(variable, str(tmp_path / "bin" / program))

    def programs_of(**versions):
        for program, text in {"mycc": "mycc 1", "myc++": "myc++ 1", "nvcc": NVCC.format("12.4, V12.4.99"),
                              **versions}.items():
            (tmp_path / "bin" / program).write_text(f"#!/bin/sh\ncat <<'end'\n{text}\nend\n")
            (tmp_path / "bin" / program).chmod(0o755)
        return json.loads(artifacts.fingerprint())["programs"]

    assert programs_of() == {"cc": "mycc 1", "c++": "myc++ 1",
                             "nvcc": "Cuda compilation tools, release 12.4, V12.4.99"}
    marks = [programs_of(), programs_of(mycc="mycc 2"), programs_of(**{"myc++": "myc++ 2"}),
             programs_of(nvcc=NVCC.format("12.9, V12.9.1"))]
    assert len(set(map(str, marks))) == 4
    (tmp_path / "bin/mycc").write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(rekindle.UnavailableError, match="the version of .*mycc is unknown"):
        artifacts.fingerprint()


def test_an_engine_that_is_not_installed_is_an_error():
    with pytest.raises(rekindle.NotFoundError, match="no-such-engine"):
        artifacts.fingerprint(engine="no-such-engine")
    done = subprocess.run([sys.executable, "-m", "rekindle.artifacts", "--engine", "no-such-engine"],
                          capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1 and done.stderr.count("\n") == 1


def test_the_module_prints_it():
    printed = run_python("import runpy, sys; sys.argv[1:] = ['--dtype', 'int8'];"
                         " runpy.run_module('rekindle.artifacts', run_name='__main__')")
    assert printed == artifacts.fingerprint(dtype="int8") + "\n"


def test_fetch_needs_a_directory():
    with pytest.raises(rekindle.InvalidError, match="caches"):
        artifacts.fetch("m", "F", {})
