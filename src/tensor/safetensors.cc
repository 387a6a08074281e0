#include "src/tensor/safetensors.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <unordered_set>

#include <fcntl.h>
#include <sys/stat.h>

#include <nlohmann/json.hpp>

#include "src/base/unique_fd.h"
#include "src/base/units.h"
#include "src/tensor/canonical.h"

namespace rekindle::safetensors {

namespace {

using canonical::json_string;
using canonical::printable;

// Streams the header's JSON into entries; keeps the first error. Depth 1 is the header object, 2 a
// tensor or the metadata, 3 an array of numbers; anything deeper is refused where it opens.
class HeaderSax final : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderSax(Header& header) : header_(header) {}
  std::string take_error() { return std::move(error_); }

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_integer(number_integer_t) override { return unexpected("a negative number"); }
  bool number_float(number_float_t, const string_t&) override {
    return unexpected("a fraction or a number beyond 64 bits");
  }
  bool binary(binary_t&) override { return unexpected("binary"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (depth_ != 3) return unexpected("a number");
    if (field_ == kShape && numbers_.size() == kMaxRank) {
      return bad(fmt::format("has more than {} dimensions", kMaxRank));
    }
    if (field_ == kOffsets && numbers_.size() == 2) return bad("has more than two data_offsets");
    numbers_.push_back(value);
    return true;
  }

  bool string(string_t& text) override {
    if (depth_ == 2 && in_metadata_) {
      if (!header_.metadata.emplace(metadata_key_, std::move(text)).second) {
        return bad(fmt::format("has the key '{}' twice", printable(metadata_key_)));
      }
      return true;
    }
    if (depth_ != 2 || field_ != kDtype) return unexpected("a string");
    auto dtype = parse_dtype(text);
    if (!dtype) return bad(dtype.error().message());
    entry_.info.dtype = *dtype;
    return true;
  }

  bool start_object(std::size_t) override {
    if (++depth_ == 1) return true;
    if (depth_ == 2) {
      seen_ = 0;
      return true;
    }
    return unexpected("an object");
  }

  bool key(string_t& name) override {
    if (depth_ == 1) {
      in_metadata_ = name == "__metadata__";
      entry_ = {};
      entry_.info.name = std::move(name);
      if (in_metadata_ && std::exchange(had_metadata_, true)) return bad("appears twice");
      return true;
    }
    if (in_metadata_) {
      metadata_key_ = std::move(name);
      return true;
    }
    field_ = name == "dtype" ? kDtype : name == "shape" ? kShape : kOffsets;
    if (field_ == kOffsets && name != "data_offsets") {
      return bad(fmt::format("has an unknown key '{}'", printable(name)));
    }
    if ((seen_ & field_) != 0) return bad(fmt::format("has the key '{}' twice", name));
    seen_ |= field_;
    return true;
  }

  bool end_object() override {
    if (depth_-- != 2 || in_metadata_) return true;
    if (seen_ != (kDtype | kShape | kOffsets)) {
      return bad("needs exactly dtype, shape and data_offsets");
    }
    if (entry_.info.name.empty()) return bad("has an empty name");
    if (entry_.info.name.size() > kMaxTensorNameBytes) return bad("has a name above 4096 bytes");
    if (header_.entries.size() == kMaxTensors) return bad("is one tensor too many");
    header_.entries.push_back(std::move(entry_));
    ends_.push_back(end_);
    return true;
  }

  bool start_array(std::size_t) override {
    if (++depth_ != 3 || in_metadata_ || field_ == kDtype) return unexpected("an array");
    numbers_.clear();
    return true;
  }

  bool end_array() override {
    --depth_;
    if (field_ == kShape) {
      entry_.info.shape = *Dims::from(numbers_);
      return true;
    }
    if (numbers_.size() != 2) return bad("needs two data_offsets");
    entry_.offset_bytes = numbers_[0];
    end_ = numbers_[1];
    return true;
  }

  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    if (error_.empty()) {
      error_ =
          fmt::format("the header is not JSON: {} (byte {})", printable(error.what()), position);
    }
    return false;
  }

  // End offsets, relative to the data, of header.entries.
  const std::vector<std::uint64_t>& ends() const { return ends_; }

 private:
  enum Field : unsigned { kDtype = 1, kShape = 2, kOffsets = 4 };

  bool unexpected(std::string_view what) {
    if (depth_ == 0) {
      error_ = fmt::format("the header is {}, not an object", what);
      return false;
    }
    return bad(fmt::format("has {} where the format has none", what));
  }
  bool bad(std::string_view why) {
    const std::string& name = in_metadata_ ? "__metadata__" : entry_.info.name;
    error_ = fmt::format("tensor '{}' {}", printable(name), why);
    return false;
  }

  Header& header_;
  std::vector<std::uint64_t> ends_;
  std::string error_;
  int depth_ = 0;
  bool in_metadata_ = false;
  bool had_metadata_ = false;
  std::string metadata_key_;
  Entry entry_;
  std::uint64_t end_ = 0;
  Field field_ = kDtype;
  unsigned seen_ = 0;
  std::vector<std::uint64_t> numbers_;
};

Failure invalid(std::string_view why) { return fail(ErrorCode::kInvalid, "safetensors: {}", why); }

Result<void> check_names(const Header& header) {
  std::unordered_set<std::string_view> names;
  names.reserve(header.entries.size());
  for (const Entry& entry : header.entries) {
    if (!names.insert(entry.info.name).second) {
      return invalid(fmt::format("tensor '{}' appears twice", printable(entry.info.name)));
    }
  }
  return {};
}

// Sorts by offset and checks that the tensors tile the data exactly.
Result<void> check_ranges(Header& header, const std::vector<std::uint64_t>& ends) {
  std::vector<std::size_t> order(header.entries.size());
  for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return std::pair(header.entries[a].offset_bytes, ends[a]) <
           std::pair(header.entries[b].offset_bytes, ends[b]);
  });
  const std::uint64_t data_bytes = header.file_bytes - header.data_offset_bytes;
  std::vector<Entry> sorted;
  sorted.reserve(order.size());
  std::uint64_t next = 0;
  for (const std::size_t i : order) {
    Entry& entry = header.entries[i];
    const TensorInfo& info = entry.info;
    const auto bad = [&](const std::string& why) {
      return invalid(fmt::format("tensor '{}' {}", printable(info.name), why));
    };
    const std::uint64_t begin = entry.offset_bytes;
    if (begin > ends[i])
      return bad(fmt::format("ends at {} before it starts at {}", ends[i], begin));
    auto size = checked_size_bytes(info.shape, dtype_size_bytes(info.dtype));
    if (!size) return bad(size.error().message());
    if (*size != ends[i] - begin) {
      return bad(fmt::format("has {} bytes of data, its shape {} of {} needs {}", ends[i] - begin,
                             info.shape.to_string(), dtype_name(info.dtype), *size));
    }
    if (begin < next) return bad(fmt::format("overlaps its neighbour at offset {}", begin));
    if (begin > next) return bad(fmt::format("leaves a hole from {} to {}", next, begin));
    if (ends[i] > data_bytes) {
      return bad(fmt::format("ends at {}, the file has {} bytes of data: it is truncated", ends[i],
                             data_bytes));
    }
    next = ends[i];
    entry.offset_bytes += header.data_offset_bytes;
    sorted.push_back(std::move(entry));
  }
  if (next != data_bytes) {
    return invalid(fmt::format("{} bytes after the last tensor belong to none", data_bytes - next));
  }
  header.entries = std::move(sorted);
  return {};
}

Result<void> read_exactly(int fd, std::span<std::byte> out, std::uint64_t offset) {
  while (!out.empty()) {
    const ssize_t got = ::pread(fd, out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return fail_errno(errno, "read");
    if (got == 0) return fail(ErrorCode::kCorrupt, "the file was truncated while it was read");
    out = out.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
  return {};
}

Result<Header> read_header_of(const std::filesystem::path& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) return fail_errno(errno, "open");
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return fail_errno(errno, "stat");
  if (!S_ISREG(status.st_mode)) return fail(ErrorCode::kInvalid, "not a regular file");
  const auto file_bytes = static_cast<std::uint64_t>(status.st_size);
  std::vector<std::byte> prefix(std::min<std::uint64_t>(8, file_bytes));
  TRY_VOID(read_exactly(fd.get(), prefix, 0));
  TRY(const std::uint64_t needed, header_bytes(prefix, file_bytes));
  prefix.resize(needed);
  TRY_VOID(read_exactly(fd.get(), std::span(prefix).subspan(8), 8));
  return parse_header(prefix, file_bytes);
}

}  // namespace

Result<std::uint64_t> header_bytes(std::span<const std::byte> first_8_bytes,
                                   std::uint64_t file_bytes) {
  if (first_8_bytes.size() < 8 || file_bytes < 8) {
    return invalid(fmt::format("{} bytes are too few for a header", file_bytes));
  }
  std::uint64_t length = 0;
  std::memcpy(&length, first_8_bytes.data(), sizeof length);
  if (length > kMaxHeaderBytes) {
    return invalid(
        fmt::format("header of {} bytes, the most allowed is {}", length, kMaxHeaderBytes));
  }
  if (!in_range(8, length, file_bytes)) {
    return invalid(fmt::format("header of {} bytes in a file of {}", length, file_bytes));
  }
  return 8 + length;
}

Result<Header> parse_header(std::span<const std::byte> prefix, std::uint64_t file_bytes) {
  TRY(const std::uint64_t end, header_bytes(prefix, file_bytes));
  if (end > prefix.size()) {
    return invalid(fmt::format("header of {} bytes, only {} were given", end, prefix.size()));
  }
  Header header;
  header.data_offset_bytes = end;
  header.file_bytes = file_bytes;
  const std::string_view json(reinterpret_cast<const char*>(prefix.data()) + 8, end - 8);
  // The parser would skip a byte order mark and take a NUL for the end.
  if (!json.starts_with('{')) return invalid("the header does not start with '{'");
  if (json.find('\0') != std::string_view::npos) return invalid("the header has a NUL byte");
  HeaderSax sax(header);
  if (!nlohmann::json::sax_parse(json.begin(), json.end(), &sax)) return invalid(sax.take_error());
  TRY_VOID(check_names(header));
  TRY_VOID(check_ranges(header, sax.ends()));
  return header;
}

Result<Header> read_header(const std::filesystem::path& path) {
  auto header = read_header_of(path);
  if (!header) return fail(std::move(header).error().with_context(path.string()));
  return header;
}

Result<std::string> make_header(std::span<const TensorInfo> tensors,
                                const std::map<std::string, std::string>& metadata,
                                std::uint64_t align_bytes) {
  std::string json(8, '\0');
  json += '{';
  const auto separate = [&] {
    if (json.back() != '{') json += ',';
  };
  if (!metadata.empty()) {
    json += R"("__metadata__":{)";
    for (const auto& [key, value] : metadata) {
      separate();
      json += json_string(key) + ':' + json_string(value);
    }
    json += '}';
  }
  std::unordered_set<std::string_view> names;
  std::uint64_t offset = 0;
  for (const TensorInfo& tensor : tensors) {
    if (!names.insert(tensor.name).second || tensor.name == "__metadata__") {
      return invalid(fmt::format("two entries are called '{}'", printable(tensor.name)));
    }
    const std::uint64_t begin = offset;
    offset += tensor.size_bytes();
    separate();
    fmt::format_to(std::back_inserter(json),
                   R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})",
                   json_string(tensor.name), dtype_name(tensor.dtype),
                   fmt::join(tensor.shape.span(), ","), begin, offset);
  }
  json += '}';
  json.resize(round_up(json.size(), std::max<std::uint64_t>(1, align_bytes)), ' ');
  const std::uint64_t length = json.size() - 8;
  if (length > kMaxHeaderBytes) {
    return invalid(
        fmt::format("a header of {} bytes is above the cap of {}", length, kMaxHeaderBytes));
  }
  std::memcpy(json.data(), &length, sizeof length);
  return json;
}

}  // namespace rekindle::safetensors
