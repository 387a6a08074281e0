"""Like transformers' from_pretrained, but with weights from Rekindle instead of files."""
from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from .. import session as sessions
from ..cataloging import catalog as rekindle_catalog
from .._engines.fitting import Fit
from .._engines.loading import contents_of
from ..errors import InvalidError, NotFoundError
from . import conversion, memory

_sessions: WeakKeyDictionary[Any, sessions.Session] = WeakKeyDictionary()


def from_pretrained(name: str | None = None, version: str | int | None = "latest", *,
                    model_class: Any = None, config: Any = None, torch_dtype: Any = "auto",
                    device: Any = None, device_map: Any = None, strict: bool = True,
                    load_timeout: float | None = 60.0,
                    model_arguments: Mapping[str, Any] | None = None, **options: Any) -> Any:
    """Returns a transformers model with a version's weights, in eval mode.

    `model_class`: a class of transformers, also AutoModel…; None: the architecture in config.json.
    `config`: instead of the published config.json. `torch_dtype`: as in transformers; "auto" is the
    checkpoint's. `device`: for the whole model, as in `rekindle.attach`; or `device_map`: as in
    transformers, for several devices, through host memory. `strict`: NotFoundError when a parameter
    gets nothing, instead of random values. `model_arguments`: more for transformers'
    from_pretrained. `options`: of `rekindle.attach`, except shard and spec. `session_of(model)` is
    the session, which the caller commits.

    Code that was published beside the weights (*.py) is never run. Raises ImportError without
    transformers, and what `rekindle.attach` and transformers raise.
    """
    import transformers
    if device is not None and device_map is not None:
        raise InvalidError("give a device or a device_map, not both")
    if options.get("shard") is not None or options.get("spec") is not None:
        raise InvalidError("a whole model is loaded: give no shard and no spec")
    where = {key: options[key] for key in ("agent", "fallback_dir", "timeout") if key in options}
    whole = rekindle_catalog(name, version, **where)
    contents, name, number = contents_of(whole), whole.model, whole.version
    catalog = contents.tensors
    with _directory(whole.files()) as directory:
        config = config or _config(transformers, directory)
        generation = _generation(transformers, directory)
    kind = _class(transformers, model_class, config)
    arguments = conversion.spelled({
        **(model_arguments or {}), "dtype": torch_dtype,
        "device_map": device_map if device_map is not None else str(memory.torch_device(device))})
    recorded = conversion.record(kind, config, catalog, **arguments)
    if recorded is None:
        model, session, missing = _from_real(kind, config, name, number, arguments, options,
                                             load_timeout)
    else:
        model, missing = recorded.model, recorded.missing
        targets = recorded.targets
        Fit(model, contents).check_conversions(recorded.plan, targets)
        options["device"] = (device if device_map is None
                             else memory.common_device(targets.values()))
        session = conversion.attach(recorded, name, number, catalog, options, targets, load_timeout)
    if strict and missing:
        session.close()
        raise NotFoundError(f"{name}@{number} has nothing for {memory.some(missing)} of the model; "
                            "strict=False initialises them")
    if generation is not None and model.can_generate():
        model.generation_config = generation
    _sessions[model] = session
    return model.eval()


def session_of(model: Any) -> sessions.Session:
    """Returns the session from which `from_pretrained` has filled the model. NotFoundError for
    another model.
    """
    try:
        return _sessions[model]
    except (KeyError, TypeError) as reason:
        raise NotFoundError("this model is not from rekindle.torch.from_pretrained") from reason


def _from_real(kind: Any, config: Any, name: str, version: int, arguments: dict[str, Any],
               options: dict[str, Any], timeout: float | None
               ) -> tuple[Any, sessions.Session, list[str]]:
    """Runs transformers' loader with real tensors in host memory, because it computes with them."""
    session = sessions.attach(name, version, **{**options, "device": None})
    try:
        state = {info.name: tensor.clone() for info, tensor in session.entries(timeout)}
        model, info = kind.from_pretrained(None, config=config, state_dict=state,
                                           output_loading_info=True, **arguments)
    except BaseException:
        session.close()
        raise
    return model, session, sorted(info["missing_keys"])


@contextlib.contextmanager
def _directory(files: Mapping[str, bytes]) -> Iterator[str]:
    """A temporary directory with the small files that transformers reads."""
    with tempfile.TemporaryDirectory(prefix="rekindle-") as directory:
        for name in ("config.json", "generation_config.json"):
            if name in files:
                (Path(directory) / name).write_bytes(files[name])
        yield directory


def _config(transformers: Any, directory: str) -> Any:
    if not (Path(directory) / "config.json").is_file():
        raise NotFoundError("no config.json was published with the version: give a config")
    return transformers.AutoConfig.from_pretrained(directory, local_files_only=True)


def _generation(transformers: Any, directory: str) -> Any:
    if not (Path(directory) / "generation_config.json").is_file():
        return None
    return transformers.GenerationConfig.from_pretrained(directory, local_files_only=True)


def _class(transformers: Any, model_class: Any, config: Any) -> Any:
    """Returns the class whose loader runs; for an AutoModel…, the class that it maps the config to.
    """
    if model_class is None:
        names = getattr(config, "architectures", None) or []
        there = (getattr(transformers, name, None) for name in names)
        model_class = next((kind for kind in there if kind is not None), None)
        if model_class is None:
            raise InvalidError(f"transformers {transformers.__version__} has none of {names}: give "
                               "a model_class")
    mapping = getattr(model_class, "_model_mapping", None)
    return mapping[type(config)] if mapping is not None else model_class
