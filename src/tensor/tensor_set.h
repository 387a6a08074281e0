#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/digest.h"
#include "src/base/result.h"
#include "src/tensor/box.h"

namespace rekindle {

// The element types of safetensors that fill whole bytes. The values are part of the wire format.
enum class DType : std::uint8_t {
  kBool = 1,
  kU8,
  kI8,
  kF8E4M3,
  kF8E5M2,
  kF8E8M0,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kI64,
  kU64,
  kF64,
};

std::uint64_t dtype_size_bytes(DType dtype);
std::string_view dtype_name(DType dtype);  // as in a safetensors header: "BF16"
// Sub-byte types (F4, F6_…) and unknown names are kInvalid, each with its own text.
Result<DType> parse_dtype(std::string_view name);
Result<DType> dtype_from_wire(std::uint32_t value);

inline constexpr std::size_t kMaxTensorNameBytes = 4096;
inline constexpr std::size_t kMaxTensors = 4'000'000;

// Small files that belong to a checkpoint (config.json, tokenizer.json) travel as U8 tensors with
// this prefix, so that they are placed, pulled and verified like everything else.
inline constexpr std::string_view kFileTensorPrefix = "__rekindle_file__/";
inline bool is_file_tensor(std::string_view name) { return name.starts_with(kFileTensorPrefix); }
// The files that may follow the prefix, and that publishing takes along from a directory: *.json,
// *.txt, *.model, *.jinja, *.tiktoken and *.py, at most one folder down, nothing hidden, no index
// of weights files. On a puller's disk it becomes a path, so a source must not be able to name any
// other file.
bool is_checkpoint_file(std::string_view path);

struct TensorInfo {
  std::string name;
  DType dtype = DType::kU8;
  Shape shape;

  std::uint64_t size_bytes() const { return shape.product() * dtype_size_bytes(dtype); }
  bool operator==(const TensorInfo&) const = default;
};

// The tensor's bytes. kInvalid: a TensorSet refuses the tensor, whatever the others are.
Result<std::uint64_t> check_tensor(const TensorInfo& tensor);

using TensorIndex = std::uint32_t;

// The tensors of a checkpoint, sorted by name, unique, immutable: its identity without its bytes.
class TensorSet {
 public:
  // kInvalid for a duplicate, empty, over-long, reserved or non-UTF-8 name, a file tensor that is
  // not U8 or whose name is no is_checkpoint_file(), a size beyond 63 bits or too many tensors.
  static Result<TensorSet> create(std::vector<TensorInfo> tensors);

  std::span<const TensorInfo> tensors() const { return tensors_; }
  const TensorInfo& operator[](TensorIndex index) const { return tensors_[index]; }
  std::size_t size() const { return tensors_.size(); }
  std::optional<TensorIndex> find(std::string_view name) const;
  std::uint64_t total_bytes() const { return total_bytes_; }

  // Canonical bytes (docs/reference/formats.md) and their BLAKE3, which names this set.
  std::string serialize() const;
  static Result<TensorSet> parse(std::string_view canonical);
  const Digest& digest() const { return digest_; }

 private:
  TensorSet() = default;
  static Result<TensorSet> check(std::vector<TensorInfo> tensors);
  std::vector<TensorInfo> tensors_;
  std::uint64_t total_bytes_ = 0;
  Digest digest_;
};

}  // namespace rekindle
