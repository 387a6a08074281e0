"""The plugin: `--load-format rekindle` in an unchanged SGLang.

SGLang takes a class in place of a load format. Where it checks the format's name, the plugin
replaces the name by the class.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .recovery import LOAD_FORMAT, recovering

_TARGET = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
_ADAPTER = "sglang.srt.lora.lora.LoRAAdapter.initialize_weights"
_RECOVERY = "sglang.srt.eplb.eplb_manager.update_expert_location_with_recovery"


def register() -> None:
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    if LOAD_FORMAT in LOAD_FORMAT_CHOICES:
        return
    add_load_format_choices([LOAD_FORMAT])
    HookRegistry.register(_TARGET, verify_load_format, HookType.AROUND)
    HookRegistry.register(_ADAPTER, adapter_from_files, HookType.AROUND)
    HookRegistry.register(_RECOVERY, recovering, HookType.AROUND)


def verify_load_format(original: Callable[[Any], None], config: Any) -> None:
    """Around `LoadConfig._verify_load_format`."""
    if isinstance(config.load_format, str) and config.load_format.lower() == LOAD_FORMAT:
        from .loader import RekindleModelLoader
        config.load_format = RekindleModelLoader
    else:
        original(config)


def adapter_from_files(original: Callable[[Any], None], adapter: Any) -> None:
    """Around `LoRAAdapter.initialize_weights`: lets SGLang read adapters from files. It would read
    them by the load configuration of the model, of which they are no part."""
    from .loader import RekindleModelLoader, of_files
    if adapter.load_config.load_format is RekindleModelLoader:
        adapter.load_config = of_files(adapter.load_config)
    original(adapter)
