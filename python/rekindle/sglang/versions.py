"""The version of SGLang that this works with."""
from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version as installed

from ..errors import InvalidError

# The versions whose sources were read. docs/guides/engines.md lists the versions that were run.
KNOWN = (0, 5, 23)

# Drafts whose `set_embed_and_head` keeps their own embeddings and head, as in derived classes.
KEEPING = ("Gemma4AssistantForCausalLM", "IQuestQ1MTP", "Step3p5MTP")


def check() -> str:
    """Returns the installed version of SGLang. InvalidError for another release than KNOWN."""
    try:
        found = installed("sglang")
    except PackageNotFoundError:
        raise InvalidError("SGLang is not installed") from None
    if not supported(found):
        raise InvalidError(f"SGLang {found} is not known to rekindle.sglang, which is for "
                           f"{'.'.join(map(str, KNOWN))}; its --custom-weight-loader and the "
                           "checkpoint-engine protocol work with others")
    return found


def supported(version: str) -> bool:
    """Whether this is the known version, or a post-release or local version of it."""
    numbers = version.split("+")[0].split(".")
    return [part for part in numbers[:3]] == [str(part) for part in KNOWN]
