"""Fills modules of torch and models of transformers, and publishes sharded ones.

    model = rekindle.torch.from_pretrained("qwen3", device="cuda")  # built on meta, then filled
    session = rekindle.torch.load(model, "qwen3", version=42)       # any nn.Module, in place
    session.commit()
    with rekindle.torch.stage(model, "qwen3", version=43) as staged:  # while the model serves
        session = staged.switch()                                   # in a pause
    models = rekindle.torch.Models({"a": build_a, "b": build_b}, device="cuda")  # in turns
    rekindle.torch.publish(model, "qwen3@43")                       # on every rank of a trainer

Only `from_pretrained`, and `load` of transformers' models, need transformers.
"""
from .casting import cast
from .flat import flat_boxes, flat_parts
from .fp8 import fp8_blocks
from .modules import StagedVersion, load, stage
from .names import Block, Fuse, Rename, Rows, Split, Unstack
from .pretrained import from_pretrained, session_of
from .publishing import parts_of, publish
from .turns import Models

__all__ = ["Block", "Fuse", "Models", "Rename", "Rows", "Split", "StagedVersion", "Unstack", "cast", "flat_boxes",
           "flat_parts", "fp8_blocks", "from_pretrained", "load", "parts_of", "publish",
           "session_of", "stage"]
