#include "tools/cli/sample_model.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <nlohmann/json.hpp>

#include "src/base/units.h"
#include "src/base/worker_pool.h"
#include "src/store/segment_store.h"
#include "src/tensor/safetensors.h"

namespace rekindle::cli {
namespace {

struct Shapes {
  std::uint64_t hidden = 2560;
  std::uint64_t intermediate = 9728;
  std::uint64_t heads = 32;
  std::uint64_t kv_heads = 8;
  std::uint64_t head_dim = 128;
  std::uint64_t vocabulary = 151936;
  std::uint64_t layers = 1;
};

std::vector<TensorInfo> layer_tensors(const Shapes& s, std::uint64_t layer) {
  const std::string prefix = fmt::format("model.layers.{}.", layer);
  const auto tensor = [&](const char* name, Shape shape) {
    return TensorInfo{prefix + name, DType::kBF16, shape};
  };
  return {tensor("input_layernorm.weight", {s.hidden}),
          tensor("mlp.down_proj.weight", {s.hidden, s.intermediate}),
          tensor("mlp.gate_proj.weight", {s.intermediate, s.hidden}),
          tensor("mlp.up_proj.weight", {s.intermediate, s.hidden}),
          tensor("post_attention_layernorm.weight", {s.hidden}),
          tensor("self_attn.k_norm.weight", {s.head_dim}),
          tensor("self_attn.k_proj.weight", {s.kv_heads * s.head_dim, s.hidden}),
          tensor("self_attn.o_proj.weight", {s.hidden, s.heads * s.head_dim}),
          tensor("self_attn.q_norm.weight", {s.head_dim}),
          tensor("self_attn.q_proj.weight", {s.heads * s.head_dim, s.hidden}),
          tensor("self_attn.v_proj.weight", {s.kv_heads * s.head_dim, s.hidden})};
}

std::uint64_t total_bytes(const std::vector<TensorInfo>& tensors) {
  std::uint64_t bytes = 0;
  for (const TensorInfo& tensor : tensors) bytes += tensor.size_bytes();
  return bytes;
}

// Below the size of the real embeddings plus a layer, the vocabulary shrinks.
std::vector<TensorInfo> model_tensors(std::uint64_t wanted_bytes, Shapes& s) {
  const std::uint64_t layer_bytes = total_bytes(layer_tensors(s, 0));
  const std::uint64_t row_bytes = s.hidden * 2;
  const std::uint64_t rest = wanted_bytes > layer_bytes ? wanted_bytes - layer_bytes : 0;
  s.vocabulary = std::clamp<std::uint64_t>(rest / row_bytes / 64 * 64, 1024, s.vocabulary);
  const std::uint64_t embedding_bytes = s.vocabulary * row_bytes;
  if (wanted_bytes > embedding_bytes) {
    s.layers = std::max<std::uint64_t>(1, (wanted_bytes - embedding_bytes) / layer_bytes);
  }
  std::vector<TensorInfo> tensors = {
      {"model.embed_tokens.weight", DType::kBF16, {s.vocabulary, s.hidden}}};
  for (std::uint64_t layer = 0; layer < s.layers; ++layer) {
    const auto more = layer_tensors(s, layer);
    tensors.insert(tensors.end(), more.begin(), more.end());
  }
  tensors.push_back({"model.norm.weight", DType::kBF16, {s.hidden}});
  return tensors;
}

nlohmann::ordered_json config(const Shapes& s) {
  return {{"architectures", {"Qwen3ForCausalLM"}},
          {"model_type", "qwen3"},
          {"hidden_size", s.hidden},
          {"intermediate_size", s.intermediate},
          {"num_attention_heads", s.heads},
          {"num_key_value_heads", s.kv_heads},
          {"head_dim", s.head_dim},
          {"num_hidden_layers", s.layers},
          {"vocab_size", s.vocabulary},
          {"tie_word_embeddings", true},
          {"torch_dtype", "bfloat16"}};
}

// By splitmix64.
void fill(std::span<std::byte> bytes, std::uint64_t seed) {
  std::uint64_t state = seed;
  for (std::size_t i = 0; i < bytes.size(); i += 8) {
    std::uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    z ^= z >> 31;
    std::memcpy(bytes.data() + i, &z, std::min<std::size_t>(8, bytes.size() - i));
  }
}

Result<void> write_file(const std::filesystem::path& path, const std::vector<TensorInfo>& tensors,
                        std::uint64_t seed, WorkerPool& pool) {
  TRY(const std::string header, safetensors::make_header(tensors, {{"format", "pt"}}, 8));
  TRY(const auto file, store::MappedSegment::create(path, header.size() + total_bytes(tensors)));
  const std::span<std::byte> bytes = file->writable();
  std::memcpy(bytes.data(), header.data(), header.size());
  constexpr std::uint64_t kPiece = 8 << 20;
  const std::span<std::byte> data = bytes.subspan(header.size());
  pool.parallel_for((data.size() + kPiece - 1) / kPiece, [&](std::size_t i) {
    const std::size_t offset = i * kPiece;
    fill(data.subspan(offset, std::min<std::size_t>(kPiece, data.size() - offset)), seed + i);
  });
  return {};
}

Result<void> write_json(const std::filesystem::path& path, const nlohmann::ordered_json& value) {
  std::ofstream file(path);
  file << value.dump(2) << "\n";
  file.close();
  if (!file) return fail(ErrorCode::kExhausted, "cannot write {}", path.string());
  return {};
}

}  // namespace

Result<SampleModel> make_sample_model(const std::filesystem::path& directory,
                                      std::uint64_t wanted_bytes, std::uint64_t seed) {
  constexpr std::uint64_t kMaxFileBytes = kGiB;
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) return fail_errno(error.value(), directory.string());
  Shapes shapes;
  const std::vector<TensorInfo> tensors = model_tensors(wanted_bytes, shapes);
  std::vector<std::vector<TensorInfo>> files(1);
  for (const TensorInfo& tensor : tensors) {
    if (!files.back().empty() && total_bytes(files.back()) + tensor.size_bytes() > kMaxFileBytes) {
      files.emplace_back();
    }
    files.back().push_back(tensor);
  }
  WorkerPool pool("fill", std::max(1U, std::thread::hardware_concurrency()), 64);
  nlohmann::ordered_json weight_map = nlohmann::ordered_json::object();
  for (std::size_t i = 0; i < files.size(); ++i) {
    const std::string name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, files.size());
    TRY_VOID(write_file(directory / name, files[i], seed + (i << 32), pool));
    for (const TensorInfo& tensor : files[i]) weight_map[tensor.name] = name;
  }
  const nlohmann::ordered_json index = {{"metadata", {{"total_size", total_bytes(tensors)}}},
                                        {"weight_map", weight_map}};
  TRY_VOID(write_json(directory / "model.safetensors.index.json", index));
  TRY_VOID(write_json(directory / "config.json", config(shapes)));
  return SampleModel{tensors.size(), files.size(), total_bytes(tensors)};
}

}  // namespace rekindle::cli
