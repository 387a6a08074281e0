#include "src/tensor/tensor_set.h"

#include <algorithm>
#include <array>

#include "src/base/blake3.h"
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

namespace {

constexpr std::string_view kTensorSetMagic = "RKTSET01";

}  // namespace

Result<std::uint64_t> check_tensor(const TensorInfo& tensor) {
  const auto bad = [&](std::string_view why) {
    return fail(ErrorCode::kInvalid, "tensor '{}' {}", canonical::printable(tensor.name), why);
  };
  if (tensor.name.empty()) return bad("has an empty name");
  if (tensor.name.size() > kMaxTensorNameBytes) return bad("has a name longer than 4096 bytes");
  if (tensor.name == "__metadata__") return bad("has a name that safetensors reserves");
  if (!canonical::is_utf8(tensor.name)) return bad("has a name that is not UTF-8");
  if (is_file_tensor(tensor.name)) {
    if (!is_checkpoint_file(std::string_view(tensor.name).substr(kFileTensorPrefix.size()))) {
      return bad("carries a file of a kind that checkpoints do not have: refused");
    }
    if (tensor.dtype != DType::kU8 || tensor.shape.rank() != 1) {
      return bad("carries a file and must be U8 of rank 1");
    }
  }
  auto size = checked_size_bytes(tensor.shape, dtype_size_bytes(tensor.dtype));
  if (!size) return bad(size.error().message());
  return *size;
}

bool is_checkpoint_file(std::string_view path) {
  constexpr std::string_view kIndexSuffix = ".safetensors.index.json";
  constexpr std::string_view kSuffixes[] = {".json",  ".txt",      ".model",
                                            ".jinja", ".tiktoken", ".py"};
  constexpr std::size_t kMaxPartBytes = 255;
  const auto is_part = [](std::string_view part) {
    return !part.empty() && !part.starts_with('.') && part.size() <= kMaxPartBytes &&
           part.find('/') == std::string_view::npos;
  };
  const auto is_odd = [](char c) {
    return static_cast<std::uint8_t>(c) < 0x20 || c == 0x7f || c == '\\';
  };
  const auto slash = path.find('/');
  const auto file = slash == std::string_view::npos ? path : path.substr(slash + 1);
  if (slash != std::string_view::npos && !is_part(path.substr(0, slash))) return false;
  return is_part(file) && std::ranges::none_of(path, is_odd) && !file.ends_with(kIndexSuffix) &&
         std::ranges::any_of(kSuffixes, [&](auto suffix) { return file.ends_with(suffix); });
}

Result<TensorSet> TensorSet::create(std::vector<TensorInfo> tensors) {
  const auto by_name = [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; };
  if (!std::is_sorted(tensors.begin(), tensors.end(), by_name)) {
    std::sort(tensors.begin(), tensors.end(), by_name);
  }
  TRY(TensorSet set, check(std::move(tensors)));
  const auto same =
      std::adjacent_find(set.tensors_.begin(), set.tensors_.end(),
                         [](const TensorInfo& a, const TensorInfo& b) { return a.name == b.name; });
  if (same != set.tensors_.end()) {
    return fail(ErrorCode::kInvalid, "tensor '{}' appears twice", canonical::printable(same->name));
  }
  set.digest_ = blake3(as_bytes(set.serialize()));
  return set;
}

// All but the order of the names and the digest.
Result<TensorSet> TensorSet::check(std::vector<TensorInfo> tensors) {
  if (tensors.size() > kMaxTensors) {
    return fail(ErrorCode::kInvalid, "{} tensors, the most supported is {}", tensors.size(),
                kMaxTensors);
  }
  TensorSet set;
  for (const TensorInfo& tensor : tensors) {
    TRY(const std::uint64_t bytes, check_tensor(tensor));
    set.total_bytes_ += bytes;
    if (set.total_bytes_ >> 63 != 0) {
      return fail(ErrorCode::kInvalid, "the tensors together do not fit in 63 bits");
    }
  }
  set.tensors_ = std::move(tensors);
  return set;
}

std::optional<TensorIndex> TensorSet::find(std::string_view name) const {
  const auto at = std::lower_bound(
      tensors_.begin(), tensors_.end(), name,
      [](const TensorInfo& tensor, std::string_view wanted) { return tensor.name < wanted; });
  if (at == tensors_.end() || at->name != name) return std::nullopt;
  return static_cast<TensorIndex>(at - tensors_.begin());
}

std::string TensorSet::serialize() const {
  canonical::Writer out;
  out.raw(kTensorSetMagic);
  out.u64(tensors_.size());
  for (const TensorInfo& tensor : tensors_) {
    out.text(tensor.name);
    out.u8(static_cast<std::uint8_t>(tensor.dtype));
    out.u8(static_cast<std::uint8_t>(tensor.shape.rank()));
    out.dims(tensor.shape);
  }
  return out.take();
}

Result<TensorSet> TensorSet::parse(std::string_view bytes) {
  constexpr std::size_t kMinTensorBytes = 4 + 1 + 1 + 1;
  const auto bad = [](std::string_view why) {
    return fail(ErrorCode::kInvalid, "tensor set: {}", why);
  };
  canonical::Reader in(bytes);
  if (in.raw(kTensorSetMagic.size()) != kTensorSetMagic)
    return bad("not a tensor set of a known format");
  const std::uint64_t count = in.u64();
  if (!in.ok() || count > in.left() / kMinTensorBytes) return bad("cut short");
  std::vector<TensorInfo> tensors;
  tensors.reserve(count);
  std::string_view before;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::string_view name = in.text();
    const std::uint8_t dtype = in.u8();
    TensorInfo& tensor = tensors.emplace_back();
    in.dims(in.u8(), tensor.shape);
    if (!in.ok()) return bad("cut short, or a rank above 8");
    TRY(tensor.dtype, dtype_from_wire(dtype));
    if (i > 0 && !(before < name)) return bad("names are not in order");
    tensor.name = before = name;
  }
  if (!in.at_end()) return bad("has a tail");
  TRY(TensorSet set, check(std::move(tensors)));
  set.digest_ = blake3(as_bytes(bytes));  // in order and without a tail: they are canonical
  return set;
}

}  // namespace rekindle
