"""A model of 4 GiB and its workers, each a process with a GPU of its own.

    python -m pytest tests/python/gpu/test_models_gpu.py

Without a GPU these are skipped, and fail when REKINDLE_REQUIRE_GPU is set; those that need more
GPUs than there are say so. REKINDLE_TEST_DEVICES=double runs them on doubles, with a tiny model.
"""
import os

import pytest
import torch

pytest.importorskip("transformers")
pytest.register_assert_rewrite("models")

from models import (  # noqa: E402, F401
    Devices, ModelTests, model_fleet, ranks, start, starter, versions)

KIND = os.environ.get("REKINDLE_TEST_DEVICES", "cuda")
assert KIND in ("cuda", "double"), f"REKINDLE_TEST_DEVICES={KIND}"


@pytest.fixture(scope="module")
def devices():
    if KIND == "double":
        return Devices(KIND, 2, "tiny")
    if not torch.cuda.is_available():
        assert not os.environ.get("REKINDLE_REQUIRE_GPU"), "there is no GPU"
        pytest.skip("no GPU: a model and its workers have not run on CUDA")
    return Devices(KIND, torch.cuda.device_count(), "large")


class TestOnGpus(ModelTests):
    counts = (1, 2, 4)
