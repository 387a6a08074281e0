// The built-in specs against tensors as the published checkpoints of each family have them.
#include <algorithm>
#include <map>
#include <set>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <re2/re2.h>

#include "recovery/planner/shard_rule.h"
#include "tests/planner/model_tensors.h"

namespace rekindle::planner::testing {
namespace {

struct Model {
  std::string config;
  TensorSet tensors;
  ShardSpec spec;
};

Model make_model(const std::string& config) {
  auto tensors = TensorSet::create(model_tensors(config));
  EXPECT_TRUE(tensors) << tensors.error().message();
  auto spec = ShardSpec::builtin(config);
  EXPECT_TRUE(spec) << spec.error().message();
  return {config, std::move(*tensors), std::move(*spec)};
}

std::vector<TensorBox> boxes_at(const Model& model, const ShardPlace& place) {
  auto boxes = model.spec.boxes(model.tensors, model.config, place);
  EXPECT_TRUE(boxes) << place.to_string() << ": " << boxes.error().message();
  return boxes.value_or(std::vector<TensorBox>{});
}

std::vector<Box> boxes_of(const Model& model, const std::string& name, const ShardPlace& place) {
  const auto index = model.tensors.find(name);
  EXPECT_TRUE(index) << name;
  std::vector<Box> found;
  for (const TensorBox& box : boxes_at(model, place)) {
    if (index && box.tensor == *index) found.push_back(box.box);
  }
  return found;
}

// How many boxes hold each element, as the set of counts that occur. The boxes' borders cut the
// tensor into cells, whose elements are all in the same boxes.
std::set<int> copies(const Shape& shape, const std::vector<Box>& boxes) {
  std::vector<Box> cells{Box::whole(shape)};
  for (std::size_t axis = 0; axis < shape.rank(); ++axis) {
    std::set<std::uint64_t> borders{0, shape[axis]};
    for (const Box& box : boxes) {
      borders.insert({box.offset[axis], box.offset[axis] + box.extent[axis]});
    }
    std::vector<Box> finer;
    for (const Box& cell : cells) {
      for (auto begin = borders.begin(); std::next(begin) != borders.end(); ++begin) {
        finer.push_back(cell);
        finer.back().offset[axis] = *begin;
        finer.back().extent[axis] = *std::next(begin) - *begin;
      }
    }
    cells = std::move(finer);
  }
  std::set<int> counts;
  for (const Box& cell : cells) {
    counts.insert(static_cast<int>(std::count_if(
        boxes.begin(), boxes.end(), [&](const Box& box) { return contains(box, cell); })));
  }
  return counts;
}

// The number of ranks that hold each element of a tensor under tp, said once more in the words of
// the architectures, not of the rules.
int expected_copies(const std::string& type, const std::string& name, int tp) {
  static const RE2 replicated(
      "norm|LayerNorm|\\.gate\\.weight|shared_expert_gate|e_score|router|q_a_proj|kv_a_proj|"
      "eh_proj|embeddings|position_ids|pooler|(o_proj|down_proj)[._]bias|output\\.dense\\.bias");
  if (RE2::PartialMatch(name, replicated)) return tp;
  static const RE2 kv("self_attn\\.[kv]_proj");
  const int kv_heads = type == "gpt_oss" ? 8 : 4;
  if (RE2::PartialMatch(name, kv) && tp > kv_heads) return tp / kv_heads;
  return 1;
}

class Builtin : public ::testing::TestWithParam<std::string> {};

TEST_P(Builtin, NamesEveryTensorAndSplitsItOnceOverAllRanks) {
  const Model model = make_model(small_config(GetParam()));
  for (const std::uint32_t tp : {1u, 2u, 4u, 8u}) {
    if (GetParam() == "bert" && tp == 8) continue;  // 12 heads
    std::map<TensorIndex, std::vector<Box>> held;
    for (std::uint32_t rank = 0; rank < tp; ++rank) {
      for (const TensorBox& box : boxes_at(model, {{rank, tp}, {}, {}})) {
        held[box.tensor].push_back(box.box);
      }
    }
    for (TensorIndex i = 0; i < model.tensors.size(); ++i) {
      const TensorInfo& tensor = model.tensors[i];
      if (tensor.name.ends_with("weight_scale_inv")) continue;  // another test
      EXPECT_THAT(
          copies(tensor.shape, held[i]),
          ::testing::ElementsAre(expected_copies(GetParam(), tensor.name, static_cast<int>(tp))))
          << tensor.name << " tp=" << tp;
    }
  }
}

TEST_P(Builtin, PipelineStagesTogetherHoldEverything) {
  const Model model = make_model(small_config(GetParam()));
  const bool tied = GetParam() == "qwen3";
  for (const std::uint32_t pp : {2u, 3u, 4u}) {
    if (GetParam() == "gpt_oss" && pp > 2) continue;  // 2 layers
    std::map<TensorIndex, int> held;
    for (std::uint32_t rank = 0; rank < pp; ++rank) {
      for (const TensorBox& box : boxes_at(model, {{}, {rank, pp}, {}})) ++held[box.tensor];
    }
    for (TensorIndex i = 0; i < model.tensors.size(); ++i) {
      const std::string& name = model.tensors[i].name;
      EXPECT_EQ(held[i], tied && name == "model.embed_tokens.weight" ? 2 : 1) << name;
    }
  }
}

TEST_P(Builtin, ExpertRanksHoldEachExpertWholeAndOnce) {
  const Model model = make_model(small_config(GetParam()));
  const std::uint32_t ep = 5;
  std::map<TensorIndex, std::vector<Box>> held;
  for (std::uint32_t rank = 0; rank < ep; ++rank) {
    for (const TensorBox& box : boxes_at(model, {{}, {}, {rank, ep}})) {
      held[box.tensor].push_back(box.box);
    }
  }
  for (TensorIndex i = 0; i < model.tensors.size(); ++i) {
    const TensorInfo& tensor = model.tensors[i];
    const bool expert = tensor.name.find(".experts.") != std::string::npos;
    EXPECT_THAT(copies(tensor.shape, held[i]), ::testing::ElementsAre(expert ? 1 : 5))
        << tensor.name;
  }
}

TEST_P(Builtin, BlockScalesCoverTheirWeightsOnEveryRank) {
  const Model model = make_model(small_config(GetParam()));
  const std::string suffix = "_scale_inv";
  for (const std::uint32_t tp : {2u, 4u, 8u}) {
    if (GetParam() == "bert" && tp == 8) continue;
    for (std::uint32_t rank = 0; rank < tp; ++rank) {
      std::map<std::string, std::vector<Box>> held;
      for (const TensorBox& box : boxes_at(model, {{rank, tp}, {}, {}})) {
        held[model.tensors[box.tensor].name].push_back(box.box);
      }
      for (const auto& [name, boxes] : held) {
        const auto weights = held.find(name.substr(0, name.size() - suffix.size()));
        if (!name.ends_with(suffix)) continue;
        ASSERT_TRUE(weights != held.end()) << name;
        ASSERT_EQ(boxes.size(), 1u);
        const Box& weight = weights->second.at(0);
        for (std::size_t i = 0; i < 2; ++i) {
          EXPECT_EQ(boxes[0].offset[i], weight.offset[i] / 128) << name;
          EXPECT_EQ(boxes[0].offset[i] + boxes[0].extent[i],
                    (weight.offset[i] + weight.extent[i] + 127) / 128)
              << name;
        }
      }
    }
  }
}

TEST_P(Builtin, AxesCombine) {
  const Model model = make_model(small_config(GetParam()));
  const ShardPlace place{{1, 2}, {1, 2}, {1, 2}};
  std::map<TensorIndex, Box> by_stage;
  for (const TensorBox& box : boxes_at(model, {{}, {1, 2}, {}})) by_stage[box.tensor] = box.box;
  std::uint64_t experts = 0;
  for (const TensorBox& box : boxes_at(model, place)) {
    ASSERT_TRUE(by_stage.contains(box.tensor)) << model.tensors[box.tensor].name;
    EXPECT_TRUE(contains(by_stage[box.tensor], box.box));
    experts += model.tensors[box.tensor].name.find(".experts.") != std::string::npos;
  }
  const bool mixture = GetParam().ends_with("_moe") || GetParam() == "mixtral" ||
                       GetParam() == "gpt_oss" || GetParam().starts_with("deepseek") ||
                       GetParam() == "kimi_k2";
  EXPECT_EQ(experts > 0, mixture);
}

TEST_P(Builtin, APlaceOfOneIsTheWholeCheckpoint) {
  const Model model = make_model(small_config(GetParam()));
  EXPECT_EQ(boxes_at(model, {}), whole_boxes(model.tensors));
}

INSTANTIATE_TEST_SUITE_P(Families, Builtin, ::testing::ValuesIn(ShardSpec::builtin_model_types()),
                         [](const auto& family) { return family.param; });

TEST(BuiltinSpec, KnownShards) {
  const Model llama = make_model(small_config("llama"));  // 16 heads of 64, 4 of K and V
  const std::string attention = "model.layers.0.self_attn.";
  EXPECT_THAT(boxes_of(llama, attention + "q_proj.weight", {{3, 8}, {}, {}}),
              ::testing::ElementsAre(Box{{384, 0}, {128, 1024}}));
  EXPECT_THAT(boxes_of(llama, attention + "k_proj.weight", {{3, 8}, {}, {}}),
              ::testing::ElementsAre(Box{{64, 0}, {64, 1024}}));  // head 3 / 2
  EXPECT_THAT(boxes_of(llama, attention + "o_proj.weight", {{3, 8}, {}, {}}),
              ::testing::ElementsAre(Box{{0, 384}, {1024, 128}}));
  EXPECT_THAT(boxes_of(llama, "model.layers.4.mlp.down_proj.weight", {{3, 4}, {}, {}}),
              ::testing::ElementsAre(Box{{0, 2304}, {1024, 768}}));
  EXPECT_THAT(boxes_of(llama, "lm_head.weight", {{1, 2}, {}, {}}),
              ::testing::ElementsAre(Box{{512, 0}, {495, 1024}}));

  const Model oss = make_model(small_config("gpt_oss"));  // 90 groups of 32: 23, 23, 23, 21
  const std::string experts = "model.layers.0.mlp.experts.";
  EXPECT_THAT(boxes_of(oss, experts + "gate_up_proj_blocks", {{3, 4}, {}, {}}),
              ::testing::ElementsAre(Box{{0, 4416, 0, 0}, {6, 1344, 90, 16}}));
  EXPECT_THAT(boxes_of(oss, experts + "down_proj_blocks", {{3, 4}, {}, {}}),
              ::testing::ElementsAre(Box{{0, 0, 69, 0}, {6, 2880, 21, 16}}));
  EXPECT_THAT(boxes_of(oss, experts + "down_proj_scales", {{3, 4}, {}, {}}),
              ::testing::ElementsAre(Box{{0, 0, 69}, {6, 2880, 21}}));

  const Model v3 = make_model(small_config("deepseek_v3"));
  EXPECT_THAT(boxes_of(v3, "model.layers.0.self_attn.kv_b_proj.weight", {{1, 4}, {}, {}}),
              ::testing::ElementsAre(Box{{1024, 0}, {1024, 512}}));
  EXPECT_THAT(boxes_of(v3, "model.layers.4.eh_proj.weight", {{}, {1, 2}, {}}).size(), 1u);
  EXPECT_THAT(boxes_of(v3, "model.layers.4.eh_proj.weight", {{}, {0, 2}, {}}).size(), 0u);
}

TEST(BuiltinSpec, PlainPrecisionExpertsOfGptOssSplitAsThePackedOnesDo) {
  std::string config = small_config("gpt_oss");
  config.erase(config.find(", \"quantization_config\""));
  config += "}";
  const Model model = make_model(config);
  EXPECT_THAT(boxes_of(model, "model.layers.0.mlp.experts.gate_up_proj", {{3, 4}, {}, {}}),
              ::testing::ElementsAre(Box{{0, 0, 4416}, {6, 2880, 1344}}));
  EXPECT_THAT(boxes_of(model, "model.layers.0.mlp.experts.down_proj", {{3, 4}, {}, {}}),
              ::testing::ElementsAre(Box{{0, 2208, 0}, {6, 672, 2880}}));
}

TEST(BuiltinSpec, VocabularyIsPaddedTo64BeforeItIsDivided) {
  // 151,936 = 2,374 × 64 does not divide by 4 in blocks of 64, but does as it is.
  auto tensors = TensorSet::create({{"model.embed_tokens.weight", DType::kBF16, {151936, 64}}});
  const auto spec = ShardSpec::parse(R"({"name": "v", "rules":
      [{"match": "model.embed_tokens.weight", "kind": "vocab", "dim": 0}]})");
  const auto boxes = spec->boxes(*tensors, "{}", {{1, 4}, {}, {}});
  ASSERT_TRUE(boxes);
  EXPECT_EQ(boxes->at(0).box, (Box{{37984, 0}, {37984, 64}}));
}

TEST(BuiltinSpec, UnevenHeadsAreAnErrorThatSaysWhich) {
  const Model model = make_model(small_config("llama"));
  const auto boxes = model.spec.boxes(model.tensors, model.config, {{0, 3}, {}, {}});
  ASSERT_FALSE(boxes);
  EXPECT_THAT(boxes.error().message(), ::testing::HasSubstr("tp=3"));
  EXPECT_THAT(boxes.error().message(), ::testing::HasSubstr("model.layers.0."));
}

TEST(BuiltinSpec, UnknownFamiliesAreListed) {
  const auto spec = ShardSpec::builtin(R"({"model_type": "rwkv"})");
  ASSERT_FALSE(spec);
  EXPECT_EQ(spec.error().code(), ErrorCode::kNotFound);
  EXPECT_THAT(spec.error().message(), ::testing::HasSubstr("'rwkv'"));
  EXPECT_THAT(spec.error().message(), ::testing::HasSubstr("qwen3_moe"));
  EXPECT_EQ(ShardSpec::builtin("not json").error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(ShardSpec::builtin("{}").error().code(), ErrorCode::kNotFound);
}

TEST(BuiltinSpec, KimiK2HasAboutTheTensorsAndBytesThatArePublished) {
  auto tensors = TensorSet::create(model_tensors(kimi_k2_config()));
  ASSERT_TRUE(tensors);
  EXPECT_GT(tensors->size(), 139'000u);
  EXPECT_LT(tensors->size(), 141'000u);
  EXPECT_GT(tensors->total_bytes(), 1'020'000'000'000u);
  EXPECT_LT(tensors->total_bytes(), 1'040'000'000'000u);
}

}  // namespace
}  // namespace rekindle::planner::testing
