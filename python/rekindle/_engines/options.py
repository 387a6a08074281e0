"""The user's options for an engine's loader, as one JSON object: `--model-loader-extra-config`."""
from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from .._staging import MODES, RESERVE, Staging
from ..errors import InvalidError

_SECONDS = ("attach_timeout", "load_timeout", "commit_timeout")


@dataclass(frozen=True)
class Options:
    """How to reach the weights. Times are seconds. None stands for `rekindle.attach`'s default."""

    model: str | None = None  # name in Rekindle; None: REKINDLE_MODEL
    version: str | int = "latest"
    # The model of a speculative decoder whose weights are published separately.
    draft_model: str | None = None
    draft_version: str | int = "latest"
    agent: str | None = None  # the agent's store
    instance: str | None = None
    # None: REKINDLE_GENERATION, or else the ranks agree on one.
    generation: int | None = None
    group: str | None = None
    device: str | None = None  # None: where the parameters are
    bucket_bytes: int = 0
    fallback_dir: str | None = None
    attach_timeout: float = 60.0
    # The longest time in which nothing arrives.
    load_timeout: float = 600.0
    # Seconds to wait for the other ranks of the instance.
    commit_timeout: float = 600.0
    # True: fetch only the tensors that this rank's loader reads.
    record: bool = True
    # "default": the engine's own loader takes over when the weights are not available.
    fallback: str | None = None
    # Whether an update is taken into memory beside what serves: "auto", "require" or "off", and the
    # bytes of the device that stay free.
    staging: str = "auto"
    staging_reserve_bytes: int = RESERVE
    # Regular expressions of parameters that may stay without weights.
    allow_unwritten: tuple[str, ...] = ()
    # Regular expressions of tensors that an update may bring although no parameter reads them.
    allow_unread: tuple[str, ...] = ()
    # True: the model lies in memory that outlives the worker, and its successor takes it over.
    resident: bool = False

    @classmethod
    def parse(cls, config: Any) -> "Options":
        """Reads the engine's extra configuration.

        InvalidError names an unknown key, or a value of the wrong kind."""
        if config is None:
            config = {}
        if not isinstance(config, Mapping):
            raise InvalidError(
                f"extra configuration of load format rekindle must be an object, not {config!r}")
        known = {field.name: field for field in fields(cls)}
        unknown = sorted(set(config) - set(known))
        if unknown:
            raise InvalidError(f"unknown key '{unknown[0]}' in the extra configuration of load "
                               f"format rekindle; it takes {', '.join(sorted(known))}")
        options = cls(**{key: _checked(key, value) for key, value in config.items()})
        if options.fallback not in (None, "default"):
            raise InvalidError(f"fallback is 'default' or absent, not {options.fallback!r}")
        return options

    @property
    def name(self) -> str:
        """The model's name in Rekindle, without a version."""
        name = self.model or os.environ.get("REKINDLE_MODEL")
        if not name:
            raise InvalidError("no model: say {\"model\": \"NAME\"} in the extra configuration, or "
                               "set REKINDLE_MODEL")
        return name

    @property
    def staged(self) -> Staging:
        return Staging(self.staging, self.staging_reserve_bytes)

    def of_draft(self, same_checkpoint: bool) -> "Options":
        """Returns the options for the draft model of a speculative decoder, which attaches by
        itself.

        `same_checkpoint`: the target's checkpoint has its weights, as for MTP."""
        if self.draft_model is None and not same_checkpoint:
            raise InvalidError("the draft model is another checkpoint than the target: say its "
                               "name as {\"draft_model\": \"NAME\"} in the extra configuration")
        if self.draft_model is None:
            return replace(self, group=None)
        return replace(self, model=self.draft_model, version=self.draft_version, group=None)


def _checked(key: str, value: Any) -> Any:
    if key in ("allow_unwritten", "allow_unread"):
        if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
            raise InvalidError(f"{key} is a list of regular expressions, not {value!r}")
        return tuple(value)
    if key in _SECONDS:
        valid = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
        kind = "a positive number of seconds"
    elif key in ("record", "resident"):
        valid, kind = isinstance(value, bool), "true or false"
    elif key == "staging":
        valid, kind = value in MODES, f"one of {', '.join(MODES)}"
    elif key in ("bucket_bytes", "generation", "staging_reserve_bytes"):
        valid = isinstance(value, int) and not isinstance(value, bool) and value >= 0
        kind = "a whole number"
    elif key in ("version", "draft_version"):
        valid = isinstance(value, (str, int)) and not isinstance(value, bool)
        kind = "a version"
    else:
        valid, kind = isinstance(value, str) or value is None, "a string"
    if not valid:
        raise InvalidError(f"{key} is {kind}, not {value!r}")
    return value
