"""Draft models of SGLang's that are several, or share parameters with their target, with a small
stand-in for SGLang: what they are given at the start and by updates."""

import types

import pytest
import torch
from torch import nn

import rekindle as rk
from sglang_stand_in import (  # noqa: F401  (fixtures)
    DefaultModelLoader, from_disk, load, publish, sglang)

LAYERS = 3


class Layer(nn.Module):
    """One layer for multi-token prediction: all are of the class, and know the first one's name."""

    def __init__(self):
        super().__init__()
        self.part = nn.Parameter(torch.full((2,), float("nan")), requires_grad=False)

    def load_weights(self, weights):
        for name, weight in weights:
            if name == "model.mtp.layers.0.w":
                self.part.data.copy_(weight)


def weights_of(version, layer):
    return torch.tensor([float(version), float(layer)])


def publish_layers(rekindle, name, version, layers=LAYERS):
    rk.publish({f"model.mtp.layers.{layer}.w": weights_of(version, layer)
                for layer in range(layers)}, f"{name}@{version}", agent=rekindle.store("a"))


class Server:
    """A target, and the layers of a draft of another checkpoint."""

    def __init__(self, rekindle, sglang, name, between=lambda layer: None, **options):
        sglang.speculation.enable_multi_layer_eagle = True
        self.options = {"model": f"{name}-target", "draft_model": name,
                        "agent": str(rekindle.store("a")), **options}
        sglang.server.model_loader_extra_config = self.options
        publish(rekindle, f"{name}-target@1", 1)
        _, self.target = load(rekindle, **self.options)
        DefaultModelLoader.makes = Layer
        self.layers = []
        for layer in range(LAYERS):
            between(layer)
            self.layers.append(load(rekindle, "d", True, layer, **self.options)[1])

    def has(self, *versions):
        """Of each layer, its own weights, and a session of that version."""
        from rekindle._engines.loading import held
        roles = ["draft", "draft.1", "draft.2"]
        for layer, (model, role, version) in enumerate(zip(self.layers, roles, versions)):
            assert torch.equal(model.part, weights_of(version, layer)), (layer, model.part)
            assert held(role).session.version == version and not held(role).session.closed
            assert {info.name for info in held(role).session.tensors()} == {
                f"model.mtp.layers.{layer}.w"}


@pytest.mark.parametrize("record", [True, False])
def test_layers_of_a_draft_load_the_version_of_the_first_one(rekindle, sglang, record):
    name = f"layers-{record}"
    publish_layers(rekindle, name, 1)
    server = Server(rekindle, sglang, name, record=record, between=lambda layer: (
        publish_layers(rekindle, name, 1 + layer) if layer else None))
    for layer, model in enumerate(server.layers):
        assert torch.equal(model.part, weights_of(1, layer))
    if record:
        server.has(1, 1, 1)


def test_layers_of_a_draft_are_updated_from_disks_place_to_one_version(rekindle, sglang):
    publish_layers(rekindle, "disk-layers", 1)
    server = Server(rekindle, sglang, "disk-layers")
    server.has(1, 1, 1)
    for layer, model in enumerate(server.layers):
        publish_layers(rekindle, "disk-layers", 2 + layer)  # while the update goes on
        from_disk(model, is_draft_model=True)()
    server.has(2, 2, 2)


def test_a_layer_that_an_update_fails_for_goes_back_to_its_own_version(rekindle, sglang):
    publish_layers(rekindle, "short-layers", 1)
    server = Server(rekindle, sglang, "short-layers")
    publish_layers(rekindle, "short-layers", 2, layers=1)
    from_disk(server.layers[0], is_draft_model=True)()
    attempt = from_disk(server.layers[1], is_draft_model=True)
    with pytest.raises(rk.InvalidError, match="short-layers@2"):
        attempt()
    attempt()
    server.has(2, 1, 1)


def test_layers_of_a_draft_are_updated_by_the_targets_name_to_one_version(rekindle, sglang):
    from rekindle import sglang as ours
    publish_layers(rekindle, "named-layers", 1)
    server = Server(rekindle, sglang, "named-layers")
    later = publish(rekindle, "named-layers-target@2", 2)
    ours.load(server.target, ours.version("named-layers-target", 2))
    for layer, model in enumerate(server.layers):
        publish_layers(rekindle, "named-layers", 2 + layer)
        ours.load(model, ours.version("named-layers-target", 2))
    assert torch.equal(server.target.part, later)
    server.has(2, 2, 2)


def test_layers_in_the_targets_checkpoint_take_the_targets_version(rekindle, sglang, monkeypatch):
    from rekindle._engines.loading import held
    both = {"w": torch.arange(8.0).view(4, 2)}
    both.update({f"model.mtp.layers.{layer}.w": weights_of(1, layer) for layer in range(LAYERS)})
    rk.publish(both, "both@1", agent=rekindle.store("a"))
    load(rekindle, model="both")
    rk.publish({name: tensor + 1 for name, tensor in both.items()}, "both@2",
               agent=rekindle.store("a"))
    monkeypatch.setattr(DefaultModelLoader, "makes", Layer)
    for layer in range(LAYERS):
        _, model = load(rekindle, "m", True, layer, model="both")
        assert torch.equal(model.part, weights_of(1, layer))
    assert held("draft.2").session.version == 1


def test_layers_that_nothing_tells_apart_are_not_updated(rekindle, sglang):
    """SGLang gives an update to each, and does not say to which."""
    from rekindle import sglang as ours
    publish_layers(rekindle, "unknown-layers", 1)
    server = Server(rekindle, sglang, "unknown-layers")
    other = Layer()
    with pytest.raises(rk.InvalidError, match="which of several draft layers"):
        ours.load(other, ours.version("unknown-layers-target", 1))
    assert other.part.isnan().all()
    server.has(1, 1, 1)


def test_an_update_of_layers_that_nothing_tells_apart_fails_before_it_touches_them(
        rekindle, sglang):
    sglang.speculation.enable_multi_layer_eagle = True
    publish_layers(rekindle, "dummy-layers", 1)
    publish(rekindle, "dummy-target@1", 1)
    options = {"model": "dummy-target", "draft_model": "dummy-layers"}
    _, target = load(rekindle, **options)
    sglang.server.model_loader_extra_config = {**options, "agent": str(rekindle.store("a"))}
    other, steps = Layer(), len(DefaultModelLoader.steps)
    with pytest.raises(rk.InvalidError, match="which of several draft layers"):
        from_disk(other, is_draft_model=True)()
    assert len(DefaultModelLoader.steps) == steps and other.part.isnan().all()
    from_disk(target)()  # the target can be


class Embedding(nn.Module):
    """Has embeddings and a head, which SGLang lets a draft share with its target."""

    def __init__(self):
        super().__init__()
        self.embed_tokens, self.lm_head = nn.Module(), nn.Module()
        self.embed_tokens.weight = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.lm_head.weight = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.own = nn.Parameter(torch.zeros(2), requires_grad=False)

    def load_weights(self, weights):
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for name, weight in weights:
            parameters[name].data.copy_(weight)


def publish_embedding(rekindle, name, value):
    names = ("embed_tokens.weight", "lm_head.weight", "own")
    rk.publish({of: torch.full((2,), float(value)) for of in names}, name,
               agent=rekindle.store("a"))


class Step3p5MTP(Embedding):
    """SGLang's of this name keeps its own."""


class OfItsKind(Step3p5MTP):
    """As SGLang's Gemma 4 has another one."""


@pytest.mark.parametrize("makes, algorithm, config", [
    (Step3p5MTP, "EAGLE", {}), (OfItsKind, "NEXTN", {}),
    (Embedding, "EAGLE3", {"target_hidden_size": 4, "hidden_size": 2})])
def test_a_draft_that_keeps_its_own_embeddings_must_have_them(
        rekindle, sglang, monkeypatch, makes, algorithm, config):
    monkeypatch.setattr(DefaultModelLoader, "makes", makes)
    monkeypatch.setattr(makes, "config", types.SimpleNamespace(**config), raising=False)
    sglang.speculation.speculative_algorithm = algorithm
    name = f"keeps-{algorithm}"
    rk.publish({"own": torch.ones(2), "lm_head.weight": torch.ones(2)}, f"{name}@1",
               agent=rekindle.store("a"))
    with pytest.raises(rk.InvalidError, match="embed_tokens.weight"):
        load(rekindle, "d", True, draft_model=name)
    if config:  # the same, of the target's size
        config["target_hidden_size"] = 2
        monkeypatch.setattr(makes, "config", types.SimpleNamespace(**config))
        load(rekindle, "d", True, draft_model=name)


def embeddings(draft, target):
    draft.embed_tokens.weight = target.embed_tokens.weight


def embeddings_and_tied_head(draft, target):
    target.lm_head.weight = target.embed_tokens.weight
    embeddings(draft, target)
    draft.lm_head.weight = target.lm_head.weight


def embeddings_by_another_name(draft, target):
    """As Gemma 4's drafts, beside their own."""
    draft.target_embed_weight = target.embed_tokens.weight


@pytest.mark.parametrize("share", [embeddings, embeddings_and_tied_head,
                                   embeddings_by_another_name])
@pytest.mark.parametrize("record", [True, False])
def test_an_update_of_a_draft_leaves_what_it_shares_with_the_target(
        rekindle, sglang, monkeypatch, record, share):
    """A draft's own checkpoint has embeddings of the target that it was made for."""
    monkeypatch.setattr(DefaultModelLoader, "makes", Embedding)
    name = f"shares-{record}-{share.__name__}"
    publish_embedding(rekindle, f"{name}@1", 1)
    publish_embedding(rekindle, f"{name}-draft@1", 10)
    options = {"model": name, "draft_model": f"{name}-draft", "record": record,
               "agent": str(rekindle.store("a"))}
    sglang.server.model_loader_extra_config = options
    _, target = load(rekindle, **options)
    _, draft = load(rekindle, "d", True, **options)
    assert draft.embed_tokens.weight.tolist() == [10, 10]
    share(draft, target)  # as SGLang's workers do
    publish_embedding(rekindle, f"{name}@2", 2)
    publish_embedding(rekindle, f"{name}-draft@2", 20)
    from_disk(target)()
    from_disk(draft, is_draft_model=True)()
    assert target.embed_tokens.weight.tolist() == [2, 2]
    assert (target.own.tolist(), draft.own.tolist()) == ([2, 2], [20, 20])
