"""Loaders as inference engines have them, for every rank: the plan's bytes are the loader's, and
only this rank's parts are fetched. Small modules, with the weight_loader of each parameter written
as engines cut: fused QKV with replicated KV heads, gate and up merged, rows, padded vocabularies,
experts over ranks.
"""
import pytest
import torch
from recording_fakes import check
from torch import nn

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCAB, EXPERTS = 16, 8, 2, 4, 24, 50, 6


def parameter(*shape, **attributes):
    made = nn.Parameter(torch.empty(*shape, dtype=torch.bfloat16), requires_grad=False)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


class Rank(nn.Module):
    """One rank's part of a two-layer model, loaded tensor by tensor."""

    def __init__(self, tp, size):
        super().__init__()
        self.tp, self.size = tp, size
        self.heads = HEADS // size
        self.kv_heads = max(1, KV_HEADS // size)
        self.copies = max(1, size // KV_HEADS)
        self.vocab = -(-VOCAB // (8 * size)) * 8
        self.experts = range(tp * EXPERTS // size, (tp + 1) * EXPERTS // size)
        self.embed = parameter(self.vocab, HIDDEN, weight_loader=self.load_vocab)
        self.layers = nn.ModuleList(self.layer() for _ in range(2))
        self.norm = parameter(HIDDEN)

    def layer(self):
        layer = nn.Module()
        rows = (self.heads + 2 * self.kv_heads) * HEAD
        layer.qkv = parameter(rows, HIDDEN, weight_loader=self.load_qkv)
        layer.qkv_bias = parameter(rows, weight_loader=self.load_qkv)
        layer.o = parameter(HIDDEN, self.heads * HEAD, weight_loader=self.load_row)
        layer.gate_up = parameter(2 * INNER // self.size, HIDDEN, weight_loader=self.load_gate_up)
        layer.down = parameter(HIDDEN, INNER // self.size, weight_loader=self.load_row)
        count = len(self.experts)
        layer.w13 = parameter(count, 2 * INNER, HIDDEN, weight_loader=self.load_expert)
        layer.w2 = parameter(count, INNER, HIDDEN, weight_loader=self.load_expert)  # transposed
        layer.scale = parameter(count, weight_loader=self.load_scale)
        return layer

    def load_vocab(self, param, tensor, _):
        start = self.tp * self.vocab
        count = max(0, min(VOCAB - start, self.vocab))
        param[:count].data.copy_(tensor.narrow(0, min(start, VOCAB), count))
        param[count:].data.fill_(0)

    def load_qkv(self, param, tensor, part):
        q, kv = self.heads * HEAD, self.kv_heads * HEAD
        at, count, rank = {"q": (0, q, self.tp), "k": (q, kv, self.tp // self.copies),
                           "v": (q + kv, kv, self.tp // self.copies)}[part]
        param.data.narrow(0, at, count).copy_(tensor.narrow(0, rank * count, count))

    def load_gate_up(self, param, tensor, part):
        count = INNER // self.size
        place = param.data.narrow(0, count if part == "up" else 0, count)
        shard = tensor.chunk(self.size, 0)[self.tp]
        assert place.shape == shard.shape
        place.copy_(shard)

    def load_row(self, param, tensor, _):
        count = param.shape[1]
        param.data.copy_(tensor[:, self.tp * count:(self.tp + 1) * count])

    def load_expert(self, param, tensor, part):
        expert, kind = part
        if expert not in self.experts:
            return
        place = param.data[expert - self.experts.start]
        if kind == "down":
            place.copy_(tensor.t())
        else:
            place.narrow(0, INNER if kind == "up" else 0, INNER).copy_(tensor)

    def load_scale(self, param, tensor, part):
        if part in self.experts:
            param.data[part - self.experts.start] = tensor

    def load_weights(self, tensors):
        loaded = set()
        for name, tensor in tensors:
            target, part = self.target(name)
            param = self.get_parameter(target)
            loader = getattr(param, "weight_loader", lambda p, t, _: p.data.copy_(t))
            loader(param, tensor, part)
            loaded.add(target)
        return loaded

    @staticmethod
    def target(name):
        pieces = name.split(".")
        if pieces[0] != "layers":
            return name, None
        prefix = ".".join(pieces[:2])
        if pieces[2] == "experts":
            expert, kind = int(pieces[3]), pieces[4]
            if kind == "scale":
                return f"{prefix}.scale", expert
            return f"{prefix}.{'w2' if kind == 'down' else 'w13'}", (expert, kind)
        if pieces[2] in "qkv":
            return f"{prefix}.qkv{'_bias' if pieces[3] == 'bias' else ''}", pieces[2]
        if pieces[2] in ("gate", "up"):
            return f"{prefix}.gate_up", pieces[2]
        return f"{prefix}.{pieces[2]}", None


def checkpoint():
    shapes = {"embed": (VOCAB, HIDDEN), "norm": (HIDDEN,)}
    for i in range(2):
        p = f"layers.{i}"
        for part, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            shapes[f"{p}.{part}.weight"] = (heads * HEAD, HIDDEN)
            shapes[f"{p}.{part}.bias"] = (heads * HEAD,)
        shapes[f"{p}.o"] = (HIDDEN, HEADS * HEAD)
        shapes[f"{p}.gate"] = shapes[f"{p}.up"] = (INNER, HIDDEN)
        shapes[f"{p}.down"] = (HIDDEN, INNER)
        for e in range(EXPERTS):
            shapes[f"{p}.experts.{e}.gate"] = shapes[f"{p}.experts.{e}.up"] = (INNER, HIDDEN)
            shapes[f"{p}.experts.{e}.down"] = (HIDDEN, INNER)
            shapes[f"{p}.experts.{e}.scale"] = ()
    generator = torch.Generator().manual_seed(7)
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16)
            for name, shape in shapes.items()}


def of_rank(tp, size, kind=Rank):
    def make():
        with torch.no_grad():
            model = kind(tp, size)
        return model.load_weights, dict(model.named_parameters())
    return make


@pytest.mark.parametrize("tp,size", [(r, s) for s in (1, 2) for r in range(s)])
def test_each_rank_gets_its_parts_and_nothing_else(tp, size):
    tensors = checkpoint()
    plan, fetched = check(of_rank(tp, size), tensors)
    assert plan.opaque == ()
    wanted = sum(p.nbytes for p in of_rank(tp, size)()[1].values())
    padding = sum(torch.Size(c.size).numel() * 2 for c in plan.constants)
    assert fetched == wanted - padding
    assert plan.loaded == set(of_rank(tp, size)()[1])


@pytest.mark.parametrize("tp", range(4))
def test_more_ranks_than_kv_heads(tp):
    """Ranks 0 and 1 have KV head 0, ranks 2 and 3 head 1; the last has padding only past the
    vocabulary.
    """
    plan, _ = check(of_rank(tp, 4), checkpoint())
    assert plan.opaque == ()
    k = next(m for m in plan.moves() if m.name == "layers.1.k.weight")
    assert (k.box_offset, k.box_extent) == (((tp // 2) * HEAD, 0), (HEAD, HIDDEN))


class Quantizing(Rank):
    """Norms are computed with, and scales are read: these two kinds go through the loader."""

    def load_scale(self, param, tensor, part):
        if part in self.experts:
            param.data[part - self.experts.start] = float(tensor) * 2

    def load_weights(self, tensors):
        return super().load_weights(
            (name, tensor + 1 if name == "norm" else tensor) for name, tensor in tensors)


@pytest.mark.parametrize("tp", range(2))
def test_what_is_computed_with_goes_through_the_loader_and_the_rest_does_not(tp):
    plan, _ = check(of_rank(tp, 2, Quantizing), checkpoint())
    scales = {f"layers.{i}.experts.{e}.scale" for i in range(2) for e in range(EXPERTS)}
    assert set(plan.opaque) == {"norm"} | scales
    assert len(plan) > 20
