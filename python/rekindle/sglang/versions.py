"""Which SGLang this works with."""
from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version as installed

from ..errors import InvalidError

# The versions whose sources were read. docs/guides/engines.md lists the versions that were run.
KNOWN = (0, 5, 23)

# Drafts whose `set_embed_and_head` leaves them the embeddings and head that they have; so do classes
# derived from them.
KEEPING = ("Gemma4AssistantForCausalLM", "IQuestQ1MTP", "Step3p5MTP")


def check() -> str:
    """The version of the SGLang that is installed; InvalidError for another release than KNOWN."""
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
    """Also post-releases and local versions of the one that is known."""
    numbers = version.split("+")[0].split(".")
    return [part for part in numbers[:3]] == [str(part) for part in KNOWN]
