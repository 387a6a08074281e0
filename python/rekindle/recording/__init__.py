"""Records which elements of which tensors an engine's own loader reads, and where it puts them.

    session = recording.attach(model.load_weights, model, key, "qwen3", device="cuda")

In steps: `record(load, catalog, targets)` runs the loader on tensors without storage and returns a
`Plan`. `boxes(plan)` has the boxes to attach with. `execute(plan, load, targets, session)` fills
the targets. `cached` keeps plans on disk, each under a `fingerprint`. Imports torch.
"""
from .attaching import attach
from .cache import cache_directory, cached, fingerprint
from .execute import boxes, catalog_of, execute
from .plan import Constant, Entry, Move, Plan
from .recorder import record
from .tracer import NeedsData, TensorMeta

__all__ = ["Constant", "Entry", "Move", "NeedsData", "Plan", "TensorMeta", "attach", "boxes",
           "cache_directory", "cached", "catalog_of", "execute", "fingerprint", "record"]
