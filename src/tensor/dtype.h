#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "src/base/result.h"

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

}  // namespace rekindle
