"""Hooks of MkDocs: what the site adds to the pages of docs/.

A page asks for generated text by a line `<!-- generated: NAME -->`:

  commands    the help of every command of the binary that $REKINDLE_BINARY names
  c-api       the declarations and comments of src/client/rekindle.h

A link to a file outside docs/ becomes the name of that file, because the site does not have it.
"""
from __future__ import annotations

import os
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
HEADER = "src/client/rekindle.h"


def on_page_markdown(markdown: str, page, **_) -> str:
    markdown = re.sub(r"<!-- generated: ([a-z-]+) -->", lambda match: GENERATED[match[1]](), markdown)
    folder = (ROOT / "docs" / page.file.src_uri).parent
    return re.sub(r"\[([^\]\n]+)\]\(([^)#\s]+)(#[^)\s]*)?\)",
                  lambda match: _local_name(folder, match), markdown)


def _local_name(folder: pathlib.Path, match: re.Match) -> str:
    if "://" in match[2]:
        return match[0]
    target = (folder / match[2]).resolve()
    # MkDocs itself reports a link that leads nowhere.
    if target.is_relative_to(ROOT / "docs") or not target.exists():
        return match[0]
    return match[1] if match[1].startswith("`") else f"{match[1]} (`{target.relative_to(ROOT)}`)"


def _help_of(*command: str) -> str:
    binary = os.environ["REKINDLE_BINARY"]
    return subprocess.run([binary, *command, "--help"], check=True, capture_output=True, text=True,
                          timeout=20, env={"PATH": os.environ["PATH"]}).stdout


def _section(text: str, title: str) -> list[str]:
    """The lines below `TITLE:`, up to the next line that is not indented."""
    found = re.search(rf"^{title}[^\n]*:\n((?: .*\n|\n)*)", text, re.MULTILINE)
    return found[1].splitlines() if found else []


def _subcommands(text: str) -> list[str]:
    return [line.split()[0] for line in _section(text, "Subcommands") if re.match(r"  \S", line)]


def _own_help(text: str) -> str:
    """A command's help without the sections that all commands share. RDMA options are shown once, for `agent`."""
    own = re.split(r"^(?:Options of every command|Exit codes|Environment)\b.*:$", text, flags=re.MULTILINE)[0]
    if "Usage: rekindle agent" not in own:
        own = re.sub(r"\n+RDMA:\n(?:  --(?:hca|gid-index|traffic-class|service-level|topology) .*\n(?: {10}.*\n)*)+",
                     "\n\nRDMA: --hca, --gid-index, --traffic-class, --service-level, --topology, as of `rekindle agent`\n", own)
    return own.strip()


def _commands() -> str:
    top = _help_of()
    parts = []
    for name in _subcommands(top):
        own = _help_of(name)
        parts.append(f"### {name}\n\n```text\n{_own_help(own)}\n```\n")
        parts += [f"#### {name} {inner}\n\n```text\n{_own_help(_help_of(name, inner))}\n```\n"
                  for inner in _subcommands(own)]
    shared = re.search(r"^Options of every command:\n.*?(?=^Subcommands:)", top,
                       re.MULTILINE | re.DOTALL)
    rest = top[top.index("Exit codes:"):].strip()
    parts.append(f"### All commands\n\n```text\n{shared[0].strip()}\n\n{rest}\n```\n")
    return "\n".join(parts)


def _prose(comment: str) -> str:
    """A C comment as Markdown: no stars, names of the API as code, indented lines as a block."""
    lines = [re.sub(r"^ ?\*? ?", "", line) for line in comment.strip()[2:-2].splitlines()]
    lines[0] = lines[0].lstrip()
    text = "\n".join(("  " + line if line.startswith("  ") else line) for line in lines).strip()
    return re.sub(r"(?m)^(?! {4}).*$", lambda line: re.sub(
        r"\b((?:rk|RK)_\w+(?:\.\w+|\(\))?)", r"`\1`", line[0]), text)


def _name(declaration: str) -> str:
    found = re.search(r"^typedef (?:struct|enum) (\w+)|\(\*(\w+)\)|\b(rk_\w+)\(", declaration, re.MULTILINE)
    return next(name for name in found.groups() if name)


def _c_api() -> str:
    """The header, section by section: each declaration under its name, below its comment."""
    text = (ROOT / HEADER).read_text()
    about = re.match(r"/\*.*?\*/", text, re.DOTALL)[0]
    body = text[text.index("#define RK_API_VERSION"):text.rindex("#ifdef __cplusplus")]
    body = body.split("\n", 1)[1]
    parts = [_prose(about), "## Codes and handles"]
    piece = re.compile(
        r"\s*(?P<title>/\* --- .*?\*/)|\s*(?P<comment>/\*.*?\*/(?=\s*\n))?\s*"
        r"(?P<code>(?:typedef (?:struct|enum) \w+ \{.*?\n\} \w+;|typedef .*?;|RK_API .*?;)(?: *//?\*?.*?(?=\n))?)",
        re.DOTALL)
    at = 0
    while found := piece.match(body, at):
        at = found.end()
        if found["title"]:
            title = found["title"][len("/* --- "):-2].strip()
            parts.append(f"## {title[0].upper()}{title[1:]}")
            continue
        code = found["code"]
        if re.fullmatch(r"typedef struct (\w+) \1;.*", code, re.DOTALL):
            heading = ""
        else:
            heading = f"### `{_name(code)}`\n\n"
        prose = _prose(found["comment"]) + "\n\n" if found["comment"] else ""
        if not heading and not prose and parts[-1].startswith("```c"):
            parts[-1] = parts[-1].removesuffix("```") + f"{code}\n```"
            continue
        parts.append(f"{heading}{prose}```c\n{code}\n```")
    if body[at:].strip():
        raise ValueError(f"{HEADER}: cannot read from here on: {body[at:at + 200]!r}")
    return "\n\n".join(parts) + "\n"


GENERATED = {"commands": _commands, "c-api": _c_api}
