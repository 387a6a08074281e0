"""Fills modules of torch, and models of transformers.

    model = rekindle.torch.from_pretrained("qwen3", device="cuda")  # built on meta, then filled
    session = rekindle.torch.load(model, "qwen3", version=42)       # any nn.Module, in place
    session.commit()

Only `from_pretrained`, and `load` of transformers' models, need transformers.
"""
from .modules import load
from .pretrained import from_pretrained, session_of

__all__ = ["from_pretrained", "load", "session_of"]
