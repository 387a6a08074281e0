// The language of shard specs: places, patterns, kinds, errors.
#include "recovery/planner/shard_spec.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "recovery/planner/rule_applier.h"

namespace rekindle::planner {
namespace {

using ::testing::HasSubstr;

TensorSet make_set(std::vector<TensorInfo> tensors) {
  auto set = TensorSet::create(std::move(tensors));
  EXPECT_TRUE(set) << set.error().message();
  return std::move(*set);
}

ShardPlace place(std::string_view text) {
  auto parsed = ShardPlace::parse(text);
  EXPECT_TRUE(parsed) << parsed.error().message();
  return parsed.value_or(ShardPlace{});
}

ShardSpec spec(std::string_view rules) {
  auto parsed = ShardSpec::parse(fmt::format(R"({{"name": "test", "rules": [{}]}})", rules));
  EXPECT_TRUE(parsed) << parsed.error().message();
  return std::move(*parsed);
}

std::string parse_error(std::string_view rules) {
  auto parsed = ShardSpec::parse(fmt::format(R"({{"name": "test", "rules": [{}]}})", rules));
  EXPECT_FALSE(parsed) << rules;
  if (parsed) return "";
  EXPECT_EQ(parsed.error().code(), ErrorCode::kInvalid);
  EXPECT_THAT(parsed.error().message(), ::testing::Not(HasSubstr("\n")));
  return parsed.error().message();
}

// "name[0:2, 3:4]" for each box.
std::vector<std::string> boxes(const ShardSpec& shard_spec, const TensorSet& tensors,
                               std::string_view at, std::string_view config = "{}") {
  auto result = shard_spec.boxes(tensors, config, place(at));
  EXPECT_TRUE(result) << result.error().message();
  std::vector<std::string> texts;
  if (!result) return texts;
  for (const TensorBox& box : *result) {
    texts.push_back(tensors[box.tensor].name + box.box.to_string());
  }
  return texts;
}

std::string boxes_error(const ShardSpec& shard_spec, const TensorSet& tensors, std::string_view at,
                        std::string_view config = "{}") {
  auto result = shard_spec.boxes(tensors, config, place(at));
  EXPECT_FALSE(result);
  if (result) return "";
  EXPECT_THAT(result.error().message(), ::testing::Not(HasSubstr("\n")));
  return result.error().message();
}

using Texts = std::vector<std::string>;

TEST(ShardPlace, ReadsAxesInAnyOrderAndWritesThemBack) {
  const ShardPlace parsed = place("pp=1/2,tp=3/8");
  EXPECT_EQ(parsed.tp, (ShardPlace::Axis{3, 8}));
  EXPECT_EQ(parsed.pp, (ShardPlace::Axis{1, 2}));
  EXPECT_EQ(parsed.ep, (ShardPlace::Axis{0, 1}));
  EXPECT_EQ(parsed.to_string(), "tp=3/8,pp=1/2");
  EXPECT_EQ(ShardPlace{}.to_string(), "tp=0/1");
  EXPECT_EQ(place(place("ep=2/8").to_string()).ep, (ShardPlace::Axis{2, 8}));
}

TEST(ShardPlace, RefusesWhatIsNotAPlace) {
  for (const char* text : {"", "tp", "tp=1", "tp=1/", "tp=/2", "tp=2/2", "tp=0/0", "tp=-1/2",
                           "tp=1/2,", "tp=1/2,tp=1/2", "dp=1/2", "tp=1/2 ", "tp=1/99999999999",
                           "tp=1/70000", "tp/2=1", "=1/2", ",", "tp=1/2;pp=0/1"}) {
    const auto parsed = ShardPlace::parse(text);
    ASSERT_FALSE(parsed) << text;
    EXPECT_EQ(parsed.error().code(), ErrorCode::kInvalid) << text;
  }
}

TEST(ShardPattern, MatchesFromEndToEnd) {
  const auto matches = [](const char* pattern, const char* name) {
    auto parsed = Pattern::parse(pattern);
    EXPECT_TRUE(parsed) << parsed.error().message();
    return parsed->match(name).has_value();
  };
  EXPECT_TRUE(matches("a.b", "a.b"));
  EXPECT_FALSE(matches("a.b", "a.b.c"));
  EXPECT_FALSE(matches("a.b", "xa.b"));
  EXPECT_FALSE(matches("a.b", "aXb"));
  EXPECT_TRUE(matches("a.*.c", "a.bb.c"));
  EXPECT_FALSE(matches("a.*.c", "a.b.b.c"));
  EXPECT_FALSE(matches("a.*.c", "a..c"));
  EXPECT_TRUE(matches("a.**.c", "a.b.b.c"));
  EXPECT_TRUE(matches("**", "anything.at all"));
  EXPECT_TRUE(matches("x.{q|k|v}_proj", "x.k_proj"));
  EXPECT_FALSE(matches("x.{q|k|v}_proj", "x.o_proj"));
  EXPECT_TRUE(matches("{|bert.}x", "bert.x"));
  EXPECT_TRUE(matches("{|bert.}x", "x"));
  EXPECT_TRUE(matches("{a|ab}c", "abc"));
  EXPECT_TRUE(matches("l.{n}.w", "l.12.w"));
  EXPECT_FALSE(matches("l.{n}.w", "l.x.w"));
  EXPECT_FALSE(matches("l.{n}.w", "l.012.w"));
  EXPECT_FALSE(matches("l.{n}.w", "l.99999999999999999999.w"));
}

TEST(ShardPattern, FindsLayerAndExpert) {
  const auto pattern = Pattern::parse("model.layers.{layer}.experts.{expert}.w");
  ASSERT_TRUE(pattern);
  const auto match = pattern->match("model.layers.7.experts.300.w");
  ASSERT_TRUE(match);
  EXPECT_EQ(match->layer, 7u);
  EXPECT_EQ(match->expert, 300u);
}

TEST(ShardPattern, RefusesUnclearOnes) {
  for (const char* text : {"", "{", "{layer", "{layers}", "{}", "{layer}.{layer}", "{a*|b}",
                           "*a*b*c*", "**.**.**.**"}) {
    EXPECT_FALSE(Pattern::parse(text)) << text;
  }
}

TEST(ShardPattern, HostilePatternsEndSoon) {
  const auto pattern = Pattern::parse("**{a|a|a|a|a|a|}**{a|a|a|a|a|a|}**{a|a|a|a|a|a|}b{n}");
  ASSERT_TRUE(pattern);
  EXPECT_FALSE(pattern->match(std::string(4096, 'a')));
}

TEST(ShardSpec, SplitsRowsAndColumns) {
  const TensorSet tensors = make_set({{"down", DType::kU8, {4, 8}}, {"up", DType::kU8, {8, 4}}});
  const ShardSpec rules = spec(R"({"match": "up", "kind": "split", "dim": 0},
                                  {"match": "down", "kind": "split", "dim": 1})");
  EXPECT_EQ(boxes(rules, tensors, "tp=1/4"), (Texts{"down[0:4, 2:4]", "up[2:4, 0:4]"}));
  EXPECT_EQ(boxes(rules, tensors, "tp=0/1"), (Texts{"down[0:4, 0:8]", "up[0:8, 0:4]"}));
  EXPECT_THAT(boxes_error(rules, tensors, "tp=0/3"), HasSubstr("do not divide by tp=3"));
}

TEST(ShardSpec, SplitsEachPartOfAFusedTensor) {
  const TensorSet tensors = make_set({{"gate_up", DType::kU8, {16, 4}}});
  const ShardSpec rules = spec(R"({"match": "gate_up", "kind": "split", "dim": 0, "parts": 2})");
  EXPECT_EQ(boxes(rules, tensors, "tp=1/4"), (Texts{"gate_up[2:4, 0:4]", "gate_up[10:12, 0:4]"}));
  EXPECT_EQ(boxes(rules, tensors, "tp=0/1"), (Texts{"gate_up[0:16, 0:4]"}));
}

TEST(ShardSpec, FusedQkvTakesItsHeadsOfEach) {
  // 8 query heads, 2 of K and V, 4 elements each: rows 0-31 q, 32-39 k, 40-47 v.
  const TensorSet tensors = make_set({{"qkv", DType::kU8, {48, 3}}});
  const ShardSpec rules =
      spec(R"({"match": "qkv", "kind": "qkv", "dim": 0, "heads": "nq", "kv_heads": "nkv"})");
  const char* config = R"({"nq": 8, "nkv": 2})";
  EXPECT_EQ(boxes(rules, tensors, "tp=1/2", config),
            (Texts{"qkv[16:32, 0:3]", "qkv[36:40, 0:3]", "qkv[44:48, 0:3]"}));
  EXPECT_EQ(boxes(rules, tensors, "tp=2/4", config),
            (Texts{"qkv[16:24, 0:3]", "qkv[36:40, 0:3]", "qkv[44:48, 0:3]"}));
}

TEST(ShardSpec, KvHeadsAreSharedWhereRanksOutnumberThem) {
  const TensorSet tensors = make_set({{"k", DType::kU8, {8, 3}}});  // 2 heads
  const ShardSpec rules =
      spec(R"({"match": "k", "kind": "kv_heads", "dim": 0, "heads": "missing|nkv"})");
  const char* config = R"({"nkv": 2})";
  EXPECT_EQ(boxes(rules, tensors, "tp=1/2", config), (Texts{"k[4:8, 0:3]"}));
  for (int rank = 0; rank < 8; ++rank) {
    EXPECT_EQ(boxes(rules, tensors, fmt::format("tp={}/8", rank), config),
              (Texts{rank < 4 ? "k[0:4, 0:3]" : "k[4:8, 0:3]"}));
  }
  EXPECT_THAT(boxes_error(rules, tensors, "tp=0/3", config),
              HasSubstr("2 heads do not divide by tp=3"));
  EXPECT_THAT(boxes_error(rules, tensors, "tp=0/2"), HasSubstr("lacks 'missing' and 'nkv'"));
  const ShardSpec strict = spec(R"({"match": "k", "kind": "heads", "dim": 0, "heads": 2})");
  EXPECT_THAT(boxes_error(strict, tensors, "tp=0/8"), HasSubstr("2 heads do not divide by tp=8"));
}

TEST(ShardSpec, VocabIsPaddedAndTheLastRankGetsLess) {
  const TensorSet tensors = make_set({{"embed", DType::kU8, {200, 2}}});
  const ShardSpec rules = spec(R"({"match": "embed", "kind": "vocab", "dim": 0})");
  EXPECT_EQ(boxes(rules, tensors, "tp=0/2"), (Texts{"embed[0:128, 0:2]"}));
  EXPECT_EQ(boxes(rules, tensors, "tp=1/2"), (Texts{"embed[128:200, 0:2]"}));
  EXPECT_EQ(boxes(rules, tensors, "tp=3/4"), (Texts{"embed[192:200, 0:2]"}));
  EXPECT_EQ(boxes(rules, tensors, "tp=7/8"), (Texts{}));  // padding only
}

TEST(ShardSpec, ExpertsGoByRangesOrBySplitting) {
  std::vector<TensorInfo> infos;
  for (int i = 0; i < 5; ++i) infos.push_back({fmt::format("e.{}.w", i), DType::kU8, {4, 2}});
  const TensorSet tensors = make_set(infos);
  const ShardSpec rules =
      spec(R"({"match": "e.{expert}.w", "kind": "experts", "count": "E", "dim": 0})");
  const char* config = R"({"E": 5})";
  EXPECT_EQ(boxes(rules, tensors, "ep=0/2", config),
            (Texts{"e.0.w[0:4, 0:2]", "e.1.w[0:4, 0:2]", "e.2.w[0:4, 0:2]"}));
  EXPECT_EQ(boxes(rules, tensors, "tp=1/2,ep=1/2", config),
            (Texts{"e.3.w[0:4, 0:2]", "e.4.w[0:4, 0:2]"}));
  EXPECT_EQ(boxes(rules, tensors, "tp=1/2", config).front(), "e.0.w[2:4, 0:2]");
  EXPECT_THAT(boxes_error(rules, tensors, "ep=0/2", R"({"E": 4})"),
              HasSubstr("expert 4 is beyond the 4"));
  // More ranks than experts: some get none.
  EXPECT_EQ(boxes(rules, tensors, "ep=7/8", config), (Texts{}));
}

TEST(ShardSpec, FusedExpertsAreCutInTheirOwnDimension) {
  const TensorSet tensors = make_set({{"all", DType::kU8, {5, 90, 2}}});
  const ShardSpec rules = spec(R"({"match": "all", "kind": "experts", "count": 5, "expert_dim": 0,
                                   "dim": 1, "unit": 10, "padded": true})");
  EXPECT_EQ(boxes(rules, tensors, "ep=1/2"), (Texts{"all[3:5, 0:90, 0:2]"}));
  EXPECT_EQ(boxes(rules, tensors, "tp=0/4"), (Texts{"all[0:5, 0:30, 0:2]"}));
  EXPECT_EQ(boxes(rules, tensors, "tp=2/4"), (Texts{"all[0:5, 60:90, 0:2]"}));
  EXPECT_EQ(boxes(rules, tensors, "tp=3/4"), (Texts{}));
}

TEST(ShardSpec, LayersGoToPipelineStages) {
  std::vector<TensorInfo> infos{{"embed", DType::kU8, {2}}, {"head", DType::kU8, {2}}};
  for (int i = 0; i < 6; ++i) infos.push_back({fmt::format("l.{}", i), DType::kU8, {2}});
  const TensorSet tensors = make_set(infos);
  const ShardSpec rules = spec(R"({"match": "embed", "kind": "replicate", "stage": "embedding"},
                                  {"match": "head", "kind": "replicate", "stage": "last"},
                                  {"match": "l.{layer}", "kind": "replicate"})");
  const char* config = R"({"num_hidden_layers": 5, "num_nextn_predict_layers": 1})";
  EXPECT_EQ(boxes(rules, tensors, "pp=0/3", config), (Texts{"embed[0:2]", "l.0[0:2]", "l.1[0:2]"}));
  EXPECT_EQ(boxes(rules, tensors, "pp=1/3", config), (Texts{"l.2[0:2]", "l.3[0:2]"}));
  EXPECT_EQ(boxes(rules, tensors, "pp=2/3", config), (Texts{"head[0:2]", "l.4[0:2]", "l.5[0:2]"}));
  const char* tied = R"({"num_hidden_layers": 6, "tie_word_embeddings": true})";
  EXPECT_EQ(boxes(rules, tensors, "pp=2/3", tied).front(), "embed[0:2]");
  EXPECT_THAT(boxes_error(rules, tensors, "pp=0/3", R"({"num_hidden_layers": 5})"),
              HasSubstr("layer 5 is beyond num_hidden_layers 5"));
  EXPECT_THAT(boxes_error(rules, tensors, "pp=0/3"), HasSubstr("lacks 'num_hidden_layers'"));
  EXPECT_THAT(boxes_error(rules, tensors, "pp=0/8", config), HasSubstr("has 5 layers only"));
}

TEST(ShardSpec, StagesAreContiguousBalancedAndComplete) {
  for (std::uint32_t size = 1; size <= 12; ++size) {
    for (std::uint64_t layers = size; layers < 80; ++layers) {
      std::uint64_t next = 0;
      for (std::uint32_t rank = 0; rank < size; ++rank) {
        const Range range = stage_layers(layers, {rank, size});
        ASSERT_EQ(range.begin, next);
        next = range.end;
        const std::uint64_t count = range.end - range.begin;
        ASSERT_TRUE(count == layers / size || count == layers / size + 1);
      }
      ASSERT_EQ(next, layers);
      ASSERT_EQ(stage_layers(layers, {size - 1, size}).end - next, 0u);
    }
  }
}

TEST(ShardSpec, BlockScalesFollowTheirWeight) {
  // 5 × 4 weight in blocks of 2 × 2: 3 × 2 scales. Rows 2-3 of tp=1/... lie in block row 1.
  const TensorSet tensors = make_set({{"m.w", DType::kU8, {6, 4}}, {"m.s", DType::kF32, {2, 2}}});
  const ShardSpec rules = spec(R"({"match": "m.w", "kind": "split", "dim": 0},
                                  {"match": "m.s", "kind": "scale", "of": "w", "block": [4, 2]})");
  EXPECT_EQ(boxes(rules, tensors, "tp=0/3"), (Texts{"m.s[0:1, 0:2]", "m.w[0:2, 0:4]"}));
  EXPECT_EQ(boxes(rules, tensors, "tp=1/3"), (Texts{"m.s[0:1, 0:2]", "m.w[2:4, 0:4]"}));
  EXPECT_EQ(boxes(rules, tensors, "tp=2/3"), (Texts{"m.s[1:2, 0:2]", "m.w[4:6, 0:4]"}));
  EXPECT_EQ(boxes(rules, tensors, "tp=0/2"), (Texts{"m.s[0:1, 0:2]", "m.w[0:3, 0:4]"}));
  EXPECT_EQ(boxes(rules, tensors, "tp=1/2"), (Texts{"m.s[0:2, 0:2]", "m.w[3:6, 0:4]"}));
}

TEST(ShardSpec, ScalesOfFusedPartsThatShareABlockAreListedOnce) {
  const TensorSet tensors = make_set({{"w", DType::kU8, {8, 4}}, {"s", DType::kF32, {1, 1}}});
  const ShardSpec rules = spec(R"({"match": "w", "kind": "split", "dim": 0, "parts": 2},
                                  {"match": "s", "kind": "scale", "of": "w", "block": [8, 8]})");
  EXPECT_EQ(boxes(rules, tensors, "tp=0/2"), (Texts{"s[0:1, 0:1]", "w[0:2, 0:4]", "w[4:6, 0:4]"}));
}

TEST(ShardSpec, ScalesThatDoNotFitTheirWeightAreRefused) {
  const char* rules = R"({"match": "m.w", "kind": "replicate", "optional": true},
                         {"match": "m.s", "kind": "scale", "of": "w", "block": "q.block"})";
  const TensorSet wrong = make_set({{"m.w", DType::kU8, {6, 4}}, {"m.s", DType::kF32, {2, 3}}});
  EXPECT_THAT(boxes_error(spec(rules), wrong, "tp=0/2", R"({"q": {"block": [4, 2]}})"),
              HasSubstr("does not have one scale for each block [4, 2] of 'm.w'"));
  EXPECT_THAT(boxes_error(spec(rules), wrong, "tp=0/2"), HasSubstr("lacks 'q.block'"));
  const TensorSet lone = make_set({{"m.s", DType::kF32, {2, 2}}});
  EXPECT_THAT(boxes_error(spec(rules), lone, "tp=0/2"),
              HasSubstr("scales 'm.w', which is not in the checkpoint"));
}

TEST(ShardSpec, TheFirstRuleThatMatchesDecides) {
  const TensorSet tensors = make_set({{"a.x", DType::kU8, {4}}, {"a.y", DType::kU8, {4}}});
  const ShardSpec rules = spec(R"({"match": "a.x", "kind": "replicate"},
                                  {"match": "a.*", "kind": "split", "dim": 0})");
  EXPECT_EQ(boxes(rules, tensors, "tp=0/2"), (Texts{"a.x[0:4]", "a.y[0:2]"}));
  const ShardSpec hidden = spec(R"({"match": "a.*", "kind": "replicate"},
                                   {"match": "a.x", "kind": "split", "dim": 0})");
  EXPECT_THAT(boxes_error(hidden, tensors, "tp=0/2"),
              HasSubstr("rule 2 ('a.x') matches no tensor"));
}

TEST(ShardSpec, UnknownTensorsAndIdleRulesAreErrors) {
  const TensorSet tensors = make_set({{"a", DType::kU8, {4}}, {"b", DType::kU8, {4}}});
  EXPECT_THAT(boxes_error(spec(R"({"match": "a", "kind": "replicate"})"), tensors, "tp=0/2"),
              HasSubstr("no rule names tensor 'b' [4]"));
  const char* idle = R"({"match": "*", "kind": "replicate"}, {"match": "c", "kind": "replicate"})";
  EXPECT_THAT(boxes_error(spec(idle), tensors, "tp=0/2"), HasSubstr("matches no tensor"));
  const char* allowed =
      R"({"match": "*", "kind": "replicate"},
         {"match": "c", "kind": "replicate", "optional": true})";
  EXPECT_EQ(boxes(spec(allowed), tensors, "tp=0/2").size(), 2u);
}

TEST(ShardSpec, PackedTensorsAreRefusedUnlessNamed) {
  const TensorSet tensors = make_set({{"q.qweight", DType::kI32, {4, 8}}});
  EXPECT_THAT(boxes_error(spec(R"({"match": "x", "kind": "replicate"})"), tensors, "tp=0/2"),
              HasSubstr("is packed (GPTQ or AWQ)"));
  EXPECT_EQ(boxes(spec(R"({"match": "q.qweight", "kind": "split", "dim": 1})"), tensors, "tp=0/2"),
            (Texts{"q.qweight[0:4, 0:4]"}));
}

TEST(ShardSpec, FileTensorsAreAlwaysReplicated) {
  const TensorSet tensors =
      make_set({{"__rekindle_file__/config.json", DType::kU8, {10}}, {"w", DType::kU8, {4}}});
  EXPECT_EQ(boxes(spec(R"({"match": "w", "kind": "split", "dim": 0})"), tensors, "tp=1/2"),
            (Texts{"__rekindle_file__/config.json[0:10]", "w[2:4]"}));
}

TEST(ShardSpec, EmptyTensorsAndScalarsAreCarriedAlong) {
  const TensorSet tensors = make_set({{"none", DType::kU8, {0, 4}}, {"one", DType::kF32, {}}});
  EXPECT_EQ(boxes(spec(R"({"match": "*", "kind": "replicate"})"), tensors, "tp=1/2"),
            (Texts{"none[0:0, 0:4]", "one[]"}));
  EXPECT_THAT(boxes_error(spec(R"({"match": "*", "kind": "split", "dim": 0})"), tensors, "tp=1/2"),
              HasSubstr("there is no dimension 0"));
}

TEST(ShardSpec, ErrorsNameTheRule) {
  EXPECT_THAT(parse_error(R"({"match": "a", "kind": "replicate"}, {"match": "b", "kind": "cut"})"),
              HasSubstr("rule 2 ('b'): 'kind' must be"));
  EXPECT_THAT(parse_error(R"({"match": "a", "kind": "split"})"), HasSubstr("needs 'dim'"));
  EXPECT_THAT(parse_error(R"({"match": "a", "kind": "split", "dim": 0, "head": 3})"),
              HasSubstr("has no field \"head\""));
  EXPECT_THAT(parse_error(R"({"match": "a", "kind": "split", "dim": 8})"), HasSubstr("'dim'"));
  EXPECT_THAT(parse_error(R"({"match": "a", "kind": "split", "dim": -1})"), HasSubstr("'dim'"));
  EXPECT_THAT(parse_error(R"({"match": "a", "kind": "split", "dim": 0, "unit": 0})"),
              HasSubstr("'unit'"));
  EXPECT_THAT(parse_error(R"({"match": "a", "kind": "replicate", "optional": 1})"),
              HasSubstr("'optional'"));
  EXPECT_THAT(parse_error(R"({"match": "a", "kind": "replicate", "stage": "second"})"),
              HasSubstr("'stage'"));
  EXPECT_THAT(parse_error(R"({"match": "{layer}", "kind": "replicate", "stage": "first"})"),
              HasSubstr("{layer} decides"));
  EXPECT_THAT(parse_error(R"({"match": "{expert}", "kind": "replicate"})"),
              HasSubstr("{expert} belongs to kind 'experts'"));
  EXPECT_THAT(parse_error(R"({"match": "a", "kind": "experts", "count": 4})"),
              HasSubstr("needs either {expert}"));
  EXPECT_THAT(parse_error(R"({"match": "a", "kind": "heads", "dim": 0, "heads": "a||b"})"),
              HasSubstr("'heads'"));
  EXPECT_THAT(parse_error(R"({"match": [], "kind": "replicate"})"), HasSubstr("'match'"));
  EXPECT_THAT(parse_error(R"({"match": "{x}", "kind": "replicate"})"), HasSubstr("neither"));
  EXPECT_THAT(parse_error(R"({"kind": "replicate"})"), HasSubstr("rule 1: 'match' is missing"));
  EXPECT_THAT(parse_error("7"), HasSubstr("rule 1: not a JSON object"));
  EXPECT_THAT(parse_error(R"({"match": "a", "match": "b", "kind": "replicate"})"),
              HasSubstr("twice"));
}

TEST(ShardSpec, RefusesWhatIsNoSpec) {
  for (const std::string& text : std::vector<std::string>{
           "", "{", "[]", "null", "{}", R"({"name": "x"})", R"({"name": "x", "rules": []})",
           R"({"name": "", "rules": [{"match": "a", "kind": "replicate"}]})",
           R"({"name": "x", "rules": [{"match": "a", "kind": "replicate"}], "more": 1})",
           std::string(100000, '['), R"({"name": "x", "rules": [[[[[[[[[[[[]]]]]]]]]]]]})",
           "\xff\xfe", std::string(2 << 20, ' ')}) {
    const auto parsed = ShardSpec::parse(text);
    ASSERT_FALSE(parsed) << text.substr(0, 100);
    EXPECT_EQ(parsed.error().code(), ErrorCode::kInvalid);
    EXPECT_THAT(parsed.error().message(), ::testing::Not(HasSubstr("\n")));
  }
}

TEST(ShardSpec, ErrorsStayOneLineWhateverIsInThem) {
  const auto lines = [](const Error& error) { return error.message().find('\n'); };
  EXPECT_EQ(lines(ShardPlace::parse("tp=\n/\x01\xff").error()), std::string::npos);
  EXPECT_EQ(lines(ShardSpec::builtin(R"({"model_type": "a\nb"})").error()), std::string::npos);
  const TensorSet tensors = make_set({{"a\nb", DType::kU8, {3}}});
  const ShardSpec rules = spec(R"({"match": "x\ny", "kind": "replicate"})");
  EXPECT_EQ(lines(rules.boxes(tensors, "{}", {{0, 2}, {}, {}}).error()), std::string::npos);
  EXPECT_EQ(lines(boxes_matching(tensors, "\n(").error()), std::string::npos);
  EXPECT_LT(ShardPlace::parse(std::string(1 << 20, 'x')).error().message().size(), 2001u);
}

TEST(Selection, RegularExpressionsPickWholeTensors) {
  const TensorSet tensors = make_set({{"__rekindle_file__/config.json", DType::kU8, {10}},
                                      {"a.0.w", DType::kU8, {4}},
                                      {"a.1.w", DType::kU8, {4}}});
  const auto picked = boxes_matching(tensors, R"(\.1\.)");
  ASSERT_TRUE(picked);
  ASSERT_EQ(picked->size(), 2u);
  EXPECT_EQ((*picked)[1].tensor, 2u);
  EXPECT_EQ(boxes_matching(tensors, "(").error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(boxes_matching(tensors, "config").error().code(), ErrorCode::kNotFound);
  EXPECT_EQ(boxes_matching(tensors, "^nothing$").error().code(), ErrorCode::kNotFound);
  EXPECT_EQ(whole_boxes(tensors).size(), 3u);
}

TEST(TensorsMatching, NoExpressionTakesForEver) {
  const auto tensors =
      TensorSet::create({{std::string(300, 'a'), DType::kU8, {4}}, {"b", DType::kU8, {4}}});
  ASSERT_TRUE(tensors);
  for (const char* evil : {"(.|a)*c", "(a*)*c", "(a|aa)+c", "((((a*)*)*)*)*c"}) {
    const auto boxes = boxes_matching(*tensors, evil);
    ASSERT_FALSE(boxes) << evil;
    EXPECT_EQ(boxes.error().code(), ErrorCode::kNotFound) << boxes.error().message();
  }
  EXPECT_EQ(boxes_matching(*tensors, "^a+$|^x")->size(), 1u);
  EXPECT_EQ(boxes_matching(*tensors, "(a)\\1").error().code(), ErrorCode::kInvalid);
}

}  // namespace
}  // namespace rekindle::planner
