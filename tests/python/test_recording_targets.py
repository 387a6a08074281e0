"""Targets have the names that torch gives them."""
import pytest
import torch
from rekindle.recording import targets


class Renaming(torch.nn.Linear):
    """Says of itself that it is somewhere else."""

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield f"{prefix}.renamed" if prefix else "renamed", self


class Choosy(torch.nn.Sequential):
    """As the root it hides a parameter."""

    def named_parameters(self, *arguments, **options):
        return (pair for pair in super().named_parameters(*arguments, **options)
                if not pair[0].endswith("bias"))


def tied():
    root = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    root.again = root[0]
    root[0].same = root[0].weight
    root.register_buffer("scratch", torch.ones(2), persistent=False)
    root.register_buffer("none", None)
    root.missing = None
    root.register_module("absent", None)
    return root


def overridden():
    root = tied()
    root[0].named_modules = lambda *arguments, **options: iter(())
    return root


@pytest.mark.parametrize("make, walked", [
    (tied, True), (lambda: torch.nn.Sequential(tied(), tied()), True),
    (lambda: torch.nn.Sequential(Renaming(2, 3), tied()), False),
    (lambda: Choosy(tied()), False), (lambda: torch.nn.Sequential(Choosy(tied())), True),
    (overridden, False), (lambda: torch.nn.utils.parametrizations.weight_norm(
        torch.nn.Linear(2, 2)), True)],
    ids=["tied", "nested", "renaming", "choosy root", "choosy inside", "instance", "parametrized"])
def test_names_are_those_of_torch(make, walked, monkeypatch):
    module = make()
    wanted = {**dict(module.named_parameters(remove_duplicate=False)),
              **dict(module.named_buffers(remove_duplicate=False))}
    asked = []
    monkeypatch.setattr(torch.nn.Module, "_named_members", count(asked))
    found = targets.named_targets(module)
    assert list(found) == list(wanted)
    assert all(found[name] is wanted[name] for name in wanted)
    assert not asked == walked


def count(asked):
    inner = torch.nn.Module._named_members

    def outer(self, *arguments, **options):
        asked.append(self)
        return inner(self, *arguments, **options)
    return outer
