"""A model and its workers on doubles of devices: what gpu/test_models_gpu.py does on GPUs."""
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.register_assert_rewrite("models")

from models import (  # noqa: E402, F401
    Devices, ModelTests, model_fleet, ranks, start, starter, versions)


@pytest.fixture(scope="module")
def devices():
    return Devices("double", 2, "tiny")


class TestOnDoubles(ModelTests):
    counts = (1, 2)
