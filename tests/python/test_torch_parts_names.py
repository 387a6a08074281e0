"""Rules from the trainer's names to the checkpoint's, on whole tensors and on shards."""
import itertools

import pytest

torch = pytest.importorskip("torch")

import rekindle  # noqa: E402
from rekindle.torch import (Block, Fuse, Rename, Rows, Split, Unstack,  # noqa: E402
                            fp8_blocks, parts_of)
from torch_parts import assembled, assert_same, read  # noqa: E402


def numbers(*shape, start=0):
    count = torch.Size(shape).numel()
    return torch.arange(start, start + count, dtype=torch.int32).view(shape)


def shards(state, rows, columns=((0, None),)):
    """For each pair of ranges: a state that is cut there, and its layout. `rows` are fractions."""
    for (top, bottom), (left, right) in itertools.product(rows, columns):
        mine, layout = {}, {}
        for name, tensor in state.items():
            size = tensor.shape[0]
            start, stop = int(size * top), int(size * bottom)
            mine[name] = tensor[start:stop, left:right]
            layout[name] = (tuple(tensor.shape), (start, left))
        yield mine, layout


THIRDS = ((0, 0.3), (0.3, 0.55), (0.55, 1))
HALVES = ((0, 2), (2, None))


def published(states, names):
    return assembled([part for mine, layout in states
                      for part in read(parts_of(mine, names=names, layout=layout))])


def check(state, names, expected):
    """The rules give the same for the whole tensors and for uneven shards of them."""
    assert_same(published([(state, None)], names), expected)
    assert_same(published(shards(state, THIRDS, HALVES), names), expected)


def test_pairs_rename_in_order_and_none_drops():
    state = {"module.decoder.layers.3.w": numbers(2), "module.extra": numbers(1)}
    names = [(r"^module\.", ""), ("decoder", "model"), (r"layers\.(\d+)\.w$", r"layers.\1.weight"),
             ("^extra$", None)]
    assert_same(published([(state, None)], names), {"model.layers.3.weight": numbers(2)})


def test_a_function_renames_and_drops():
    def names(name):
        return None if name == "b" else name + ".weight"
    state = {"a": numbers(2), "b": numbers(3)}
    for one in (names, [names], [("a", "c"), names, ("c", "a")]):
        assert_same(published([(state, None)], one), {"a.weight": numbers(2)})


def test_split_gives_each_piece_its_rows():
    qkv = numbers(12, 4)
    check({"l.0.qkv_proj.weight": qkv},
          [Split(r"(.*)\.qkv_proj\.(\w+)", {r"\1.q_proj.\2": 8, r"\1.k_proj.\2": 2,
                                            r"\1.v_proj.\2": 2})],
          {"l.0.q_proj.weight": qkv[:8], "l.0.k_proj.weight": qkv[8:10],
           "l.0.v_proj.weight": qkv[10:]})


def test_split_along_columns():
    fused = numbers(6, 5)
    check({"w": fused}, [Split("w", {"a": 3, "b": 2}, dim=-1)],
          {"a": fused[:, :3].contiguous(), "b": fused[:, 3:].contiguous()})


def test_the_padding_of_a_vocabulary_is_not_published():
    padded = numbers(10, 4)
    check({"embed": padded}, [Split("embed", {"embed.weight": 7, None: 3})],
          {"embed.weight": padded[:7]})
    check({"embed": padded}, [Rows("embed", [Block(0, 2, None), Block(2, 10, "e", 0)])],
          {"e": padded[2:]})


def test_groups_of_megatrons_qkv_are_taken_apart():
    """Three K/V heads of 2 rows, each with two query heads: q q k v, q q k v, q q k v."""
    q, k, v = numbers(12, 4), numbers(6, 4, start=100), numbers(6, 4, start=200)
    groups = [[q[4 * g:4 * g + 4], k[2 * g:2 * g + 2], v[2 * g:2 * g + 2]] for g in range(3)]
    qkv = torch.cat([rows for group in groups for rows in group])
    check({"linear_qkv.weight": qkv},
          [Split(r"linear_qkv\.(.*)", {r"q.\1": 12, r"k.\1": 6, r"v.\1": 6}, groups=3)],
          {"q.weight": q, "k.weight": k, "v.weight": v})


def test_a_gate_and_up_projection_that_tensor_parallelism_has_cut():
    """Each of two ranks has its half of both, one after the other."""
    gate, up = numbers(8, 4), numbers(8, 4, start=100)
    names = [Split("fc1", {"gate": 8, "up": 8}, groups=2)]
    states = [({"fc1": torch.cat([gate[4 * r:4 * r + 4], up[4 * r:4 * r + 4]])},
               {"fc1": ((16, 4), (8 * r, 0))}) for r in range(2)]
    assert_same(published(states, names), {"gate": gate, "up": up})
    assert [part[3:5] for part in parts_of(states[1][0], names=names, layout=states[1][1])] == [
        ((4, 0), (4, 4)), ((4, 0), (4, 4))]


def test_fuse_joins_in_order():
    gate, up = numbers(8, 4), numbers(4, 4, start=100)
    check({"m.gate_proj.weight": gate, "m.up_proj.weight": up},
          [Fuse([r"(.*)\.gate_proj\.weight", r"\1.up_proj.weight"], r"\1.gate_up_proj.weight")],
          {"m.gate_up_proj.weight": torch.cat([gate, up])})


def test_fuse_with_groups_undoes_split():
    state = {"qkv": numbers(24, 4)}
    check(state, [Split("qkv", {"q": 12, "k": 6, "v": 6}, groups=3),
                  Fuse(["q", "k", "v"], "fused", groups=3)], {"fused": state["qkv"]})


def test_rows_move_blocks():
    w = numbers(10, 4)
    check({"l.w": w}, [Rows(r"(.*)\.w", [Block(0, 2, r"\1.a", 3), Block(2, 5, r"\1.a", 0),
                                         Block(5, 10, r"\1.b", 0)])],
          {"l.a": torch.cat([w[2:5], w[:2]]), "l.b": w[5:]})


def test_unstack_makes_a_tensor_of_each_expert():
    stacked = numbers(3, 4, 5)
    states = [({"experts": stacked[a:b, :, c:d]}, {"experts": ((3, 4, 5), (a, 0, c))})
              for a, b in ((0, 2), (2, 3)) for c, d in ((0, 2), (2, 5))]
    names = [Unstack("experts", "experts.{index}.gate_up"),
             Split(r"experts\.(\d+)\.gate_up", {r"e.\1.gate": 1, r"e.\1.up": 3})]
    assert_same(published(states, names), {
        **{f"e.{index}.gate": stacked[index, :1] for index in range(3)},
        **{f"e.{index}.up": stacked[index, 1:] for index in range(3)}})


def test_pieces_that_lie_side_by_side_are_one_part():
    """Otherwise a conversion by blocks would see borders every 64 rows."""
    rule = [Split("qkv", {"q": 512, "k": 128}, groups=2)]
    weight = torch.randn(640, 128)
    parts = parts_of({"qkv": weight}, names=rule, convert=fp8_blocks(".*"))
    assert [(part.name, part.extent) for part in parts] == [
        ("q", (512, 128)), ("q_scale_inv", (4, 1)), ("k", (128, 128)), ("k_scale_inv", (1, 1))]
    again = parts_of({"qkv": weight[:320]}, names=rule, layout={"qkv": ((640, 128), (0, 0))})
    assert [(part.name, part.offset, part.extent) for part in again] == [
        ("q", (0, 0), (256, 128)), ("k", (0, 0), (64, 128))]


def test_a_rule_may_match_on_a_rank_that_has_nothing_of_the_tensor():
    mine = {"w": torch.zeros(0, 4), "n": numbers(1)}
    names = [Split("w", {"a": 3, "b": 2}), Fuse(["b", "a"], "c"), Rename("^c$", "d")]
    assert [part.name for part in parts_of(mine, names=names, layout={"w": ((5, 4), (0, 0))})] == [
        "n"]


@pytest.mark.parametrize("rule", [
    ("^x", "y"), Split("x", {"y": 4}), Fuse(["x", "y"], "z"), Rows("x", [Block(0, 4, "y", 0)]),
    Unstack("x", "y.{index}")], ids=lambda rule: type(rule).__name__)
def test_a_rule_that_matches_nothing_is_refused_unless_optional(rule):
    state = {"w": numbers(4)}
    with pytest.raises(rekindle.InvalidError, match="'x'|\\^x.* matches no tensor: correct it, or"):
        parts_of(state, names=[rule])
    rule = Rename(*rule) if type(rule) is tuple else rule
    assert [part.name for part in parts_of(state, names=[rule._replace(optional=True)])] == ["w"]


@pytest.mark.parametrize(("rule", "said"), [
    (Split("w", {"a": 3, "b": 2}), "'w' has 6 rows in dimension 0, its pieces 3 [+] 2 = 5"),
    (Split("w", {"a": 3, "b": 3}, groups=2), "'w' has 2 groups, which 3 rows of 'a' do not divide"),
    (Split("w", {"a": 6}, dim=2), r"'w', of shape \[6, 4\], has no dimension 2"),
    (Fuse(["w", "v"], "f"), "'f' needs 'v' beside 'w', and there is none"),
    (Fuse(["w", "w"], "f"), "'f' needs 'w' beside 'w', and there is only one"),
    (Fuse(["w", "u"], "f"), r"'f' cannot join 'w' \(I32 \[6, 4\]\) and 'u' \(I32 \[6, 5\]\)"),
    (Rows("w", [Block(0, 4, "a", 0)]), "blocks for 'w' do not cover the 6 rows of 'w' .* row 4"),
    (Rows("w", [Block(0, 4, "a", 0), Block(3, 6, "a", 4)]), "do not cover .* 'w' .* see row 4"),
    (Rows("w", [Block(0, 4, "a", 0), Block(4, 6, "a", 5)]), "cover the 7 rows of 'a' .* row 4"),
    (("w", "u"), "'u' has shape .6, 4. from 'w' and .6, 5. from 'u': map them to two names"),
    (("w", "x"), r"'w' and 'x' both give 'x' \[0:6, 0:4\]: map them to two names"),
    ("w", "'w' is no rule for names"),
], ids=str)
def test_mistakes_are_one_line_that_names_the_tensor(rule, said):
    state = {"w": numbers(6, 4), "u": numbers(6, 5), "x": numbers(6, 4)}
    with pytest.raises(rekindle.InvalidError, match=said) as why:
        parts_of(state, names=[rule])
    assert "\n" not in str(why.value)


def test_two_sources_that_overlap_in_one_row_are_refused():
    with pytest.raises(rekindle.InvalidError, match=r"'a' and 'b' both give 't' \[2:4\]"):
        parts_of({"a": numbers(3), "b": numbers(2)}, names=lambda name: "t",
                 layout={"a": ((4,), (0,)), "b": ((4,), (2,))})


@pytest.mark.parametrize("tp_size", [1, 2])
def test_megatrons_parameters_by_the_layout_and_rules_of_the_guide(tp_size):
    """Two K/V heads of 4 rows with two query heads each, on each rank of tensor parallelism."""
    q, k, v = numbers(16, 6), numbers(8, 6, start=100), numbers(8, 6, start=200)
    gate, up, down = numbers(8, 6, start=300), numbers(8, 6, start=400), numbers(6, 8, start=500)
    embed, norm = numbers(12, 6, start=600), numbers(6, start=700)
    qkv = torch.cat([torch.cat([q[8 * g:8 * g + 8], k[4 * g:4 * g + 4], v[4 * g:4 * g + 4]])
                     for g in range(2)])
    names = [
        (r"^module\.", ""), Rename(r"_extra_state$", None), (r"^decoder\.", "model."),
        Split(r"(.*)\.linear_qkv\.weight", {r"\1.q.weight": 16, r"\1.k.weight": 8,
                                            r"\1.v.weight": 8}, groups=2),
        Split(r"(.*)\.linear_fc1\.weight", {r"\1.gate.weight": 8, r"\1.up.weight": 8},
              groups=tp_size),
        Split("embed.weight", {"model.embed.weight": 10, None: 2})]
    parts = []
    for tp_rank in range(tp_size):
        def mine(tensor, dim):
            made = torch.nn.Parameter(tensor.chunk(tp_size, dim)[tp_rank], requires_grad=False)
            made.tensor_model_parallel, made.partition_dim = True, dim
            return made

        def layout(name, parameter):
            if not getattr(parameter, "tensor_model_parallel", False):
                return None
            shape, offset = list(parameter.shape), [0] * parameter.dim()
            dim = parameter.partition_dim
            offset[dim] = tp_rank * shape[dim]
            shape[dim] *= tp_size
            return tuple(shape), tuple(offset)
        fc1 = torch.cat([torch.cat([gate.chunk(tp_size)[rank], up.chunk(tp_size)[rank]])
                         for rank in range(tp_size)])
        state = {"module.decoder.0.linear_qkv.weight": mine(qkv, 0),
                 "module.decoder.0.linear_fc1.weight": mine(fc1, 0),
                 "module.decoder.0.linear_fc2.weight": mine(down, 1),
                 "module.decoder.0.norm.weight": norm, "module.embed.weight": mine(embed, 0),
                 "module.decoder.0.linear_fc1._extra_state": torch.zeros(3, dtype=torch.uint8)}
        parts += read(parts_of(state, names=names, layout=layout))
    assert_same(assembled(parts), {
        "model.0.q.weight": q, "model.0.k.weight": k, "model.0.v.weight": v,
        "model.0.gate.weight": gate, "model.0.up.weight": up,
        "model.0.linear_fc2.weight": down, "model.0.norm.weight": norm,
        "model.embed.weight": embed[:10]})
