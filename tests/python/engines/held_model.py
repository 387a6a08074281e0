"""What a rank of an engine holds of Rekindle, for the test that started it."""
from rekindle._engines.loading import held


def describe(role="target"):
    now = held(role)
    if now is None:
        return {}
    return {"bytes": now.session.bytes_total, "instance": now.place.instance,
            "generation": now.place.generation, "version": now.session.version,
            "recorded": now.boxes is not None, "names": sorted(now.names), "torn": now.torn,
            "whole": sorted(i.name for i in now.session.tensors() if i.shape == i.full_shape)}
