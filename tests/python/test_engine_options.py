"""What a user says to an engine's loader, and where a rank attaches by it; without an engine."""
import types

import pytest

import rekindle as rk
from rekindle._engines.loading import ALONE, Place, said_place
from rekindle._engines.options import Options
from rekindle.sglang.versions import supported as sglang_supported
from rekindle.vllm import WorkerExtension
from rekindle.vllm.placing import place_of
from rekindle.vllm.versions import supported as vllm_supported


def test_options_are_what_the_user_says_and_defaults():
    options = Options.parse({"model": "qwen3", "version": 41, "record": False,
                             "allow_unwritten": ["bias$"], "attach_timeout": 5})
    assert (options.name, options.version, options.record) == ("qwen3", 41, False)
    assert options.allow_unwritten == ("bias$",) and options.fallback is None


@pytest.mark.parametrize("config, named", [
    ({"modle": "x"}, "'modle'"), ({"model": 3}, "model"), ({"record": "yes"}, "record"),
    ({"attach_timeout": 0}, "attach_timeout"), ({"fallback": "dummy"}, "fallback"),
    ({"generation": -1}, "generation"), ({"version": True}, "version"), ([], "object"),
    ({"allow_unwritten": "bias"}, "allow_unwritten"), ({"resident": "yes"}, "resident")])
def test_a_wrong_option_is_refused_by_name(config, named):
    with pytest.raises(rk.InvalidError, match=named):
        Options.parse(config)


def test_a_draft_of_another_checkpoint_must_be_named(monkeypatch):
    options = Options.parse({"model": "target", "group": "g"})
    assert options.of_draft(same_checkpoint=True).name == "target"
    assert options.of_draft(same_checkpoint=True).group is None
    with pytest.raises(rk.InvalidError, match="draft_model"):
        options.of_draft(same_checkpoint=False)
    named = Options.parse({"model": "target", "draft_model": "eagle", "draft_version": 2})
    assert (named.of_draft(False).name, named.of_draft(False).version) == ("eagle", 2)
    monkeypatch.delenv("REKINDLE_MODEL", raising=False)
    with pytest.raises(rk.InvalidError, match="no model"):
        Options().name
    monkeypatch.setenv("REKINDLE_MODEL", "from-run")
    assert Options().name == "from-run"


@pytest.mark.parametrize("version, is_supported", [
    ("0.23.0", True), ("0.26.1", True), ("0.33.0+cu130", True), ("0.22.9", False),
    ("0.34.0", False), ("1.0.0", False), ("dev", False)])
def test_vllm_versions(version, is_supported):
    assert vllm_supported(version) is is_supported


@pytest.mark.parametrize("version, is_supported", [
    ("0.5.23", True), ("0.5.23.post1", True), ("0.5.22", False), ("0.5.230", False), ("", False)])
def test_sglang_versions(version, is_supported):
    assert sglang_supported(version) is is_supported


def test_a_worker_extension_has_prefixed_names_only_and_no_state():
    names = [name for name in dir(WorkerExtension) if not name.startswith("__")]
    assert names and all(name.startswith("rekindle_") for name in names)
    assert "__init__" not in vars(WorkerExtension)


@pytest.mark.parametrize("said, expected", [({}, None), ({"REKINDLE_GENERATION": "7"}, 7)])
def test_an_instance_is_what_the_options_say_or_else_the_environment(monkeypatch, said, expected):
    for name in ("REKINDLE_INSTANCE", "REKINDLE_GENERATION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    assert said_place(Options()) is ALONE
    assert said_place(Options(instance="a")) == Place("a", expected)
    assert said_place(Options(instance="a", generation=3)) == Place("a", 3)
    monkeypatch.setenv("REKINDLE_INSTANCE", "b")
    assert said_place(Options()) == Place("b", expected)
    monkeypatch.setenv("REKINDLE_GENERATION", "soon")
    with pytest.raises(rk.InvalidError, match="REKINDLE_GENERATION=soon"):
        said_place(Options())


@pytest.mark.parametrize("replica, rank, role, place", [
    (0, 2, "target", Place("i", 9, 2, 4)), (0, 2, "draft", Place("i.draft2", 9, 0, 1)),
    (1, 6, "target", Place("i.dp1", 9, 2, 4)), (1, 6, "draft", Place("i.dp1.draft2", 9, 0, 1))])
def test_where_a_rank_of_vllm_attaches(monkeypatch, replica, rank, role, place):
    """Four ranks in each replica; an external launcher counts through all."""
    monkeypatch.setattr("rekindle._engines.loading._held", {})
    parallel = types.SimpleNamespace(
        data_parallel_index=replica, rank=rank, tensor_parallel_size=2, pipeline_parallel_size=2,
        prefill_context_parallel_size=1)
    assert place_of(parallel, Options(instance="i", generation=9), role) == place
