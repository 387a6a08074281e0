// A whole safetensors file. What parses must tile its data exactly, and its header must survive
// being written and read again.
#include <cstdint>
#include <span>
#include <vector>

#include "src/tensor/safetensors.h"
#include "src/tensor/tensor_set.h"
#include "tests/fuzz/fuzz_check.h"

using namespace rekindle;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto header = safetensors::parse_header(std::as_bytes(std::span(data, size)), size);
  if (!header) {
    FUZZ_CHECK(header.error().code() == ErrorCode::kInvalid);
    FUZZ_CHECK(header.error().message().find('\n') == std::string::npos);
    return 0;
  }
  std::uint64_t next = header->data_offset_bytes;
  std::vector<TensorInfo> tensors;
  for (const auto& entry : header->entries) {
    FUZZ_CHECK(entry.offset_bytes == next);
    next += entry.info.size_bytes();
    FUZZ_CHECK(next <= size);
    tensors.push_back(entry.info);
  }
  FUZZ_CHECK(next == size);
  const auto written = safetensors::make_header(tensors, header->metadata, 4096);
  FUZZ_CHECK(written.has_value());
  const std::uint64_t data_bytes = size - header->data_offset_bytes;
  const auto again = safetensors::parse_header(as_bytes(*written), written->size() + data_bytes);
  FUZZ_CHECK(again.has_value());
  FUZZ_CHECK(again->metadata == header->metadata);
  FUZZ_CHECK(again->entries.size() == tensors.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) FUZZ_CHECK(again->entries[i].info == tensors[i]);
  if (const auto set = TensorSet::create(tensors)) FUZZ_CHECK(set->size() == tensors.size());
  return 0;
}
