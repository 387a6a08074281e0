#include "tests/gpu/checkpoint.h"

#include <cstring>
#include <fstream>
#include <stdexcept>

#include <fmt/format.h>
#include <xxhash.h>

#include "src/tensor/safetensors.h"
#include "tests/support/process.h"

namespace rekindle::testing {

namespace {

constexpr std::string_view kConfig = R"({"model_type": "odd", "hidden_size": 3})";

std::string sum(std::string_view bytes) {
  const auto hash = XXH3_128bits(bytes.data(), bytes.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace

std::string Checkpoint::bytes_of(std::size_t tensor) const {
  std::string bytes(tensors_[tensor].bytes(), '\0');
  const std::uint64_t base = (seed_ << 8 | tensor) << 40;
  for (std::uint64_t at = 0; at < bytes.size(); at += 8) {
    const std::uint64_t word = (base + at) * 0x9e3779b97f4a7c15ull;
    std::memcpy(bytes.data() + at, &word, std::min<std::uint64_t>(8, bytes.size() - at));
  }
  return bytes;
}

void Checkpoint::write(const std::filesystem::path& dir) const {
  std::filesystem::create_directories(dir);
  std::vector<TensorInfo> infos;
  for (const auto& one : tensors_) {
    infos.push_back({one.name, one.dtype, one.shape});
  }
  const auto header = safetensors::make_header(infos, {}, 8);
  if (!header) throw std::runtime_error(header.error().message());
  std::ofstream file(dir / "model.safetensors", std::ios::binary);
  file << *header;
  for (std::size_t i = 0; i < tensors_.size(); ++i) file << bytes_of(i);
  if (!file.flush()) throw std::runtime_error("no room for a checkpoint in " + dir.string());
  write_file(dir / "config.json", kConfig);
}

std::map<std::string, std::string> Checkpoint::sums() const {
  std::map<std::string, std::string> sums{{"__rekindle_file__/config.json", sum(kConfig)}};
  for (std::size_t i = 0; i < tensors_.size(); ++i) sums[tensors_[i].name] = sum(bytes_of(i));
  return sums;
}

std::string Checkpoint::sum_of(const std::string& name, std::uint64_t row, std::uint64_t column,
                               std::uint64_t rows, std::uint64_t columns) const {
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    if (tensors_[i].name != name) continue;
    const std::string whole = bytes_of(i);
    const std::uint64_t element = dtype_size_bytes(tensors_[i].dtype);
    std::string part;
    for (std::uint64_t r = row; r < row + rows; ++r) {
      const std::uint64_t at = (r * tensors_[i].shape[1] + column) * element;
      part += whole.substr(at, columns * element);
    }
    return sum(part);
  }
  throw std::runtime_error("no tensor " + name);
}

Checkpoint odd_checkpoint(std::uint64_t seed) {
  constexpr DType kAll[] = {DType::kBool,   DType::kU8,     DType::kI8,  DType::kF8E4M3,
                            DType::kF8E5M2, DType::kF8E8M0, DType::kI16, DType::kU16,
                            DType::kF16,    DType::kBF16,   DType::kI32, DType::kU32,
                            DType::kF32,    DType::kI64,    DType::kU64, DType::kF64};
  std::vector<TestTensor> tensors;
  for (const DType dtype : kAll) {
    const auto n = static_cast<std::uint64_t>(dtype);
    tensors.push_back({fmt::format("odd.{}", dtype_name(dtype)), dtype, {3 * n + 1, 257}});
  }
  tensors.push_back({"empty", DType::kBF16, {0, 5}});
  tensors.push_back({"scalar", DType::kF32, {}});
  tensors.push_back({"one", DType::kU8, {1}});
  tensors.push_back({"large", DType::kF32, {1009, 853}});
  tensors.push_back({"cols", DType::kBF16, {511, 1030}});
  tensors.push_back({"rows", DType::kF16, {514, 333}});
  return {std::move(tensors), seed};
}

Checkpoint plain_checkpoint(int tensors, std::uint64_t seed) {
  std::vector<TestTensor> all;
  for (int i = 0; i < tensors; ++i) {
    all.push_back({fmt::format("plain.{:03}", i), DType::kBF16, {512, 1024}});
  }
  return {std::move(all), seed};
}

}  // namespace rekindle::testing
