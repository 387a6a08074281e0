#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/result.h"
#include "src/tensor/tensor_set.h"

// The safetensors format (https://github.com/huggingface/safetensors): an 8-byte little-endian
// header length, a JSON object, tensor bytes. Validation is strict: what this accepts, any reader
// accepts.
namespace rekindle::safetensors {

inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;  // as the reference implementation

struct Entry {
  TensorInfo info;
  std::uint64_t offset_bytes = 0;  // from the start of the file
};

struct Header {
  std::vector<Entry> entries;                   // in the order of their offsets
  std::map<std::string, std::string> metadata;  // "__metadata__"
  std::uint64_t data_offset_bytes = 0;          // 8 + header length
  std::uint64_t file_bytes = 0;
};

// `prefix` is the start of a file of `file_bytes` bytes and must hold the whole header. kInvalid,
// with the offending name, for: a length beyond the file or the cap, JSON that is malformed, too
// deep, or has unknown keys or duplicate names, an unknown or sub-byte dtype, shape × dtype that
// overflows or differs from the byte range, overlaps, holes, a tail.
Result<Header> parse_header(std::span<const std::byte> prefix, std::uint64_t file_bytes);
// Bytes of the prefix to read for parse_header: 8 + header length.
Result<std::uint64_t> header_bytes(std::span<const std::byte> first_8_bytes,
                                   std::uint64_t file_bytes);
Result<Header> read_header(const std::filesystem::path& path);

// Header bytes (length + JSON + padding with spaces to a multiple of `align_bytes`) for tensors
// laid out one after the other in this order.
Result<std::string> make_header(std::span<const TensorInfo> tensors,
                                const std::map<std::string, std::string>& metadata,
                                std::uint64_t align_bytes);

// Which files make up the checkpoint at `path`: one .safetensors file, an index JSON, or a
// directory (its model.safetensors.index.json when present, else every *.safetensors), sorted by
// name; and, for an index or a directory, the small files beside them that a model needs to load
// (*.json, *.txt, *.model, *.jinja, *.tiktoken, *.py, also one folder down; at most 64 MiB each).
// Index files are no extras: each describes one layout.
struct CheckpointFiles {
  std::vector<std::filesystem::path> weights;
  std::vector<std::pair<std::string, std::filesystem::path>> extras;  // relative name, path
};
Result<CheckpointFiles> find_checkpoint(const std::filesystem::path& path);

}  // namespace rekindle::safetensors
