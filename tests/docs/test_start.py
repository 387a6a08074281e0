"""Runs the command blocks of docs/start as a new user would, page by page.

Each page runs in one shell, in namespaces of its own: its processes, ports, /tmp and /dev/shm are private. The blocks
build with the preset `dev` instead of `release`. A block below `<!-- not run: REASON -->` is left out."""
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs/start").glob("*.md"))
NAMESPACES = ["unshare", "--user", "--map-root-user", "--mount", "--net", "--pid", "--fork", "--kill-child",
              "--mount-proc"]
# The clone itself may lie in /tmp, so it is mounted there again. (Without the cd, bash stays in the hidden directory.)
CLONE = shlex.quote(str(ROOT))
PRIVATE = (f"mount --bind {CLONE} /mnt && mount -t tmpfs none /tmp && mkdir -p {CLONE} && mount --bind /mnt {CLONE} && "
           f"cd {CLONE} && mount -t tmpfs none /dev/shm && ip link set lo up")
PATIENCE_S = 600
BLOCK = re.compile(r"(?P<left_out><!-- not run: [^>]+ -->\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$",
                   re.MULTILINE | re.DOTALL)


def script_of(page):
    """One shell script of all blocks of a page that run; None when there are none."""
    parts = []
    for number, block in enumerate(BLOCK.finditer(page.read_text()), 1):
        if block["left_out"] or block["language"] not in ("sh", "python"):
            continue
        text = block["text"].replace("--preset release", "--preset dev").replace("build/release", "build/dev")
        if block["language"] == "python":
            text = f'"$PYTHON" - <<\'END_OF_BLOCK\'\n{text}END_OF_BLOCK\n'
        parts.append(f"echo '--- {page.name}, block {number}' >&2\n{text}")
    return "\n".join(parts) if parts else None


def can_isolate():
    return subprocess.run([*NAMESPACES, "sh", "-c", PRIVATE], capture_output=True).returncode == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_block_of_start_works(page):
    script = script_of(page)
    if script is None:
        assert "<!-- not run: " in page.read_text()
        return
    if not can_isolate():
        pytest.skip("no namespaces here")
    library = ROOT / "build/dev/src/client/librekindle.so.1"
    environment = {
        "PATH": f"{ROOT / 'build/dev/bin'}:{os.environ['PATH']}", "HOME": os.environ.get("HOME", "/root"),
        "PYTHON": sys.executable, "PYTHONPATH": str(ROOT / "python"), "REKINDLE_LIBRARY": str(library),
        "REKINDLE_BINARY": str(ROOT / "build/dev/bin/rekindle"), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(
        [*NAMESPACES, "bash", "-euo", "pipefail", "-c", f"{PRIVATE}\n{script}"], cwd=ROOT, env=environment,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_S)
    print(ended.stdout)
    assert ended.returncode == 0, ended.stdout[-4000:]


def test_no_block_escapes_by_its_language():
    for page in PAGES:
        for block in BLOCK.finditer(page.read_text()):
            assert block["language"] in ("sh", "python", "text", "ini", "toml", "json"), (page, block["text"])
