#include "src/tensor/dtype.h"

#include <array>

#include "src/tensor/canonical.h"

namespace rekindle {

namespace {

struct Entry {
  std::string_view name;
  std::uint8_t size_bytes;
};

// Indexed by DType; 0 is no dtype.
constexpr std::array<Entry, 17> kEntries = {{
    {"", 0},
    {"BOOL", 1},
    {"U8", 1},
    {"I8", 1},
    {"F8_E4M3", 1},
    {"F8_E5M2", 1},
    {"F8_E8M0", 1},
    {"I16", 2},
    {"U16", 2},
    {"F16", 2},
    {"BF16", 2},
    {"I32", 4},
    {"U32", 4},
    {"F32", 4},
    {"I64", 8},
    {"U64", 8},
    {"F64", 8},
}};

const Entry& entry_of(DType dtype) { return kEntries[static_cast<std::size_t>(dtype)]; }

}  // namespace

std::uint64_t dtype_size_bytes(DType dtype) { return entry_of(dtype).size_bytes; }

std::string_view dtype_name(DType dtype) { return entry_of(dtype).name; }

Result<DType> parse_dtype(std::string_view name) {
  for (std::size_t i = 1; i < kEntries.size(); ++i) {
    if (kEntries[i].name == name) return static_cast<DType>(i);
  }
  if (name == "F4" || name == "F6_E2M3" || name == "F6_E3M2") {
    return fail(
        ErrorCode::kInvalid,
        "dtype {} has elements smaller than a byte, which is not supported; store it packed "
        "as U8",
        name);
  }
  if (name == "C64") {
    return fail(ErrorCode::kInvalid,
                "dtype C64 is not supported; store real and imaginary parts as F32");
  }
  return fail(ErrorCode::kInvalid, "'{}' is not a safetensors dtype",
              canonical::printable(name.substr(0, 32)));
}

Result<DType> dtype_from_wire(std::uint32_t value) {
  if (value == 0 || value >= kEntries.size()) {
    return fail(ErrorCode::kInvalid, "{} is not the number of a dtype", value);
  }
  return static_cast<DType>(value);
}

}  // namespace rekindle
