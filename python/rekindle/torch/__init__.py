"""Modules of torch, and transformers' models.

    model = rekindle.torch.from_pretrained("qwen3", device="cuda")  # built on meta, then filled
    session = rekindle.torch.load(model, "qwen3", version=42)       # any nn.Module, in place
    session.commit()

transformers is needed for `from_pretrained` only, and for `load` of its models.
"""
from .modules import load
from .pretrained import from_pretrained, session_of

__all__ = ["from_pretrained", "load", "session_of"]
