"""Compile caches of engines that hosts share: the fingerprint, `fetch` and `publish`.

    python -m rekindle.artifacts --engine vllm --dtype bfloat16 --parallel tp=8

prints the fingerprint of this host and environment. Two hosts with equal fingerprints may use each
other's caches. Engines run what a cache contains, so trust whoever may publish in the fleet."""
from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from . import _optional, command, errors

PathLike = command.PathLike

_ENGINES = ("vllm", "sglang")
# Compilers, and packages that come with kernels which they compile.
_COMPILERS = ("torch", "triton", "flashinfer-python", "deep-gemm", "sgl-kernel", "sglang-kernel")
_NVIDIA_SMI_TIMEOUT_S = 60.0
_COMPILER_TIMEOUT_S = 30.0


def _engine(name: str | None) -> dict[str, str]:
    found = {each: version for each in ([name] if name else _ENGINES)
             if (version := _optional.version(each)) is not None}
    if name and not found:
        raise errors.NotFoundError(f"engine {name} is not installed in {sys.prefix}")
    return found


def _gpus() -> list[str]:
    """Name, compute capability and driver of each kind of GPU of this host."""
    program = shutil.which("nvidia-smi")
    if program is None:
        if os.path.exists("/proc/driver/nvidia/version"):
            raise errors.UnavailableError(
                "the GPUs of this host are unknown: nvidia-smi is not in PATH; put it there")
        return []
    line = [program, "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(line, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=_NVIDIA_SMI_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as why:
        raise errors.UnavailableError(f"the GPUs of this host are unknown: {why}") from None
    return sorted({row.strip() for row in done.stdout.splitlines() if row.strip()})


def _first_line(program: str) -> str:
    """What a compiler says of its version, without what only its path changes."""
    try:
        done = subprocess.run([program, "--version"], stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=_COMPILER_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as why:
        raise errors.UnavailableError(f"the version of {program} is unknown: {why}") from None
    lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
    # The first line of nvcc is the same in every release.
    released = [line for line in lines if "release" in line and "nvcc" not in line]
    return (released or lines or [""])[0]


def _programs() -> dict[str, str]:
    """The versions of nvcc and of the host's compilers, which engines run as they start."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    wanted = {"nvcc": [f"{home}/bin/nvcc", "nvcc"],
              "cc": [os.environ.get("CC", ""), "gcc", "clang", "cc"],
              "c++": [os.environ.get("CXX", ""), "g++", "clang++", "c++"]}
    found = {}
    for name, programs in wanted.items():
        there = [path for program in programs if program and (path := shutil.which(program))]
        if there:
            found[name] = _first_line(there[0])
    return found


def _cpu() -> str:
    """Compilers also make code for the CPU that they run on."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = sorted({line.split(":", 1)[1].strip() for line in lines
                    if line.split(":", 1)[0].strip() in ("model name", "CPU part")})
    return "; ".join([platform.machine(), *names])


def fingerprint(*, engine: str | None = None, dtype: str | None = None,
                parallel: str | None = None, extra: str = "") -> str:
    """Returns one line of text. Caches fit only where it is the same.

    It has the versions of Python, the C library, the engine, torch, its CUDA, the compilers, nvcc
    and the host's C and C++ compilers (`$CC`, `$CXX`, gcc, clang), the CPU, the kinds of GPUs and the driver. `engine`: a package; without it, vLLM and SGLang where
    they are installed. `parallel`: such as "tp=8". `extra`: whatever else makes a difference to
    you. The model is not in it, because `fetch` and `publish` take it by name."""
    torch = _optional.module("torch")
    parts: dict[str, Any] = {
        "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        "cpu": _cpu(),
        "engine": _engine(engine),
        "compilers": {name: version for name in _COMPILERS if (version := _optional.version(name))},
        "programs": _programs(),
        "cuda": str(torch.version.cuda) if torch is not None else None,
        "gpus": _gpus(),
        "dtype": dtype,
        "parallel": parallel,
        "extra": extra,
    }
    return json.dumps({name: value for name, value in parts.items() if value}, sort_keys=True)


def _caches(caches: Mapping[str, PathLike]) -> list[str]:
    if not caches:
        raise errors.InvalidError("caches: name at least one directory, such as {'triton': DIR}")
    return [f"{name}={os.fspath(path)}" for name, path in caches.items()]


def fetch(model: str, fingerprint: str, caches: Mapping[str, PathLike], *,
          agent: PathLike | None = None, coordinator: str | None = None,
          timeout: float | None = 120.0) -> dict[str, Any]:
    """Adds the files that the fleet has for this fingerprint to the directories. Files that are
    there stay.

    `caches`: directories by the names of the set. NotFoundError: the fleet has no such set. Returns
    the command's JSON: "files", "bytes", "written", "kept", …"""
    return command.run("artifacts", "fetch", model, *_caches(caches),
                       *command._options(fingerprint=fingerprint, store=agent,
                                         coordinator=coordinator), timeout=timeout)


def publish(model: str, fingerprint: str, caches: Mapping[str, PathLike], *,
            replace: bool = False, agent: PathLike | None = None, coordinator: str | None = None,
            timeout: float | None = 600.0) -> dict[str, Any]:
    """Publishes the files of the directories, unless the fleet has a set with this fingerprint.

    Call it when nothing writes to them. Returns the command's JSON; "published" is false where the
    fleet has such a set, or another host was first. `replace`: publish anyhow, and retire that
    set."""
    return command.run("artifacts", "publish", model, *_caches(caches),
                       *command._options(fingerprint=fingerprint, replace=replace, store=agent,
                                         coordinator=coordinator), timeout=timeout)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rekindle.artifacts",
        description="Prints the fingerprint for `rekindle artifacts` and `rekindle run`.")
    parser.add_argument("--engine", help="its package [vllm and sglang, where installed]")
    parser.add_argument("--dtype", help="of the model, such as bfloat16")
    parser.add_argument("--parallel", help="sizes of the parallel groups, such as tp=8")
    parser.add_argument("--extra", default="", help="whatever else makes a difference")
    given = parser.parse_args()
    try:
        print(fingerprint(**vars(given)))
    except errors.Error as why:
        sys.exit(f"rekindle.artifacts: {why}")


if __name__ == "__main__":
    main()
