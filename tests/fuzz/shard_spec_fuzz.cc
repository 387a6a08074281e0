#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "recovery/planner/shard_spec.h"

// A shard spec, a config.json and a place, one behind the other with a NUL between them. Whatever
// parses is applied to a small checkpoint: boxes must lie in their tensors, not overlap, and errors
// must be one line.
namespace {

using namespace rekindle;

void require(bool condition) {
  if (!condition) __builtin_trap();
}

const TensorSet& tensors() {
  static const TensorSet set =
      *TensorSet::create({{"__rekindle_file__/config.json", DType::kU8, {7}},
                          {"model.embed_tokens.weight", DType::kBF16, {130, 8}},
                          {"model.layers.0.mlp.experts.0.w", DType::kF8E4M3, {12, 16}},
                          {"model.layers.0.mlp.experts.0.w_scale", DType::kF32, {3, 4}},
                          {"model.layers.0.mlp.experts.1.w", DType::kF8E4M3, {12, 16}},
                          {"model.layers.0.q.weight", DType::kBF16, {24, 8}},
                          {"model.layers.1.blocks", DType::kU8, {4, 6, 5, 2}},
                          {"model.layers.1.q.weight", DType::kBF16, {24, 8}},
                          {"none", DType::kU8, {0, 3}},
                          {"scalar", DType::kF32, {}}});
  return set;
}

void check_error(const Error& error) {
  require(!error.message().empty());
  require(error.message().find('\n') == std::string::npos);
}

void check_boxes(const std::vector<TensorBox>& boxes) {
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    require(boxes[i].tensor < tensors().size());
    require(check_box(boxes[i].box, tensors()[boxes[i].tensor].shape).has_value());
    for (std::size_t j = i + 1; j < boxes.size() && boxes[j].tensor == boxes[i].tensor; ++j) {
      require(!intersect(boxes[i].box, boxes[j].box));
    }
    require(i == 0 || boxes[i - 1] < boxes[i]);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  std::string_view parts[3];
  for (std::string_view& part : parts) {
    const auto end = rest.find('\0');
    part = rest.substr(0, end);
    rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  }
  planner::ShardPlace place{{1, 2}, {0, 1}, {0, 1}};
  if (const auto parsed = planner::ShardPlace::parse(parts[2])) {
    place = *parsed;
    require(planner::ShardPlace::parse(place.to_string()).has_value());
  } else {
    check_error(parsed.error());
  }
  const std::string_view config = parts[1].empty() ? "{}" : parts[1];
  for (auto spec : {planner::ShardSpec::parse(parts[0]), planner::ShardSpec::builtin(config)}) {
    if (!spec) {
      check_error(spec.error());
      continue;
    }
    const auto boxes = spec->boxes(tensors(), config, place);
    boxes ? check_boxes(*boxes) : check_error(boxes.error());
  }
  return 0;
}
