#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "src/base/digest.h"
#include "src/base/result.h"
#include "src/tensor/box.h"

// Canonical bytes: little-endian integers and length-prefixed strings without padding
// (docs/reference/formats.md). Private to src/tensor and src/store.
namespace rekindle::canonical {

class Writer {
 public:
  void u8(std::uint8_t value) { bytes_.push_back(static_cast<char>(value)); }
  void u32(std::uint32_t value) { integer(value); }
  void u64(std::uint64_t value) { integer(value); }
  void raw(std::string_view bytes) { bytes_.append(bytes); }
  void text(std::string_view text) {
    u32(static_cast<std::uint32_t>(text.size()));
    raw(text);
  }
  void digest(const Digest& digest) {
    raw({reinterpret_cast<const char*>(digest.bytes.data()), digest.bytes.size()});
  }
  void dims(const Dims& dims) {
    for (const std::uint64_t value : dims.span()) u64(value);
  }
  std::string take() { return std::move(bytes_); }

 private:
  static_assert(std::endian::native == std::endian::little);
  template <typename T>
  void integer(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
  }
  std::string bytes_;
};

// Reads past the end yield zeros and make ok() false: check it before using what was read.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  std::uint8_t u8() { return integer<std::uint8_t>(); }
  std::uint32_t u32() { return integer<std::uint32_t>(); }
  std::uint64_t u64() { return integer<std::uint64_t>(); }
  std::string_view raw(std::size_t size) {
    if (!ok_ || size > bytes_.size()) {
      ok_ = false;
      return {};
    }
    const auto taken = bytes_.substr(0, size);
    bytes_.remove_prefix(size);
    return taken;
  }
  std::string_view text() { return raw(u32()); }
  Digest digest() { return Digest::from_bytes(raw(sizeof(Digest))); }
  void dims(std::size_t rank, Dims& out);  // rank above kMaxRank: not ok

  bool ok() const { return ok_; }
  bool at_end() const { return ok_ && bytes_.empty(); }
  std::size_t left() const { return bytes_.size(); }

 private:
  template <typename T>
  T integer() {
    T value = 0;
    const auto taken = raw(sizeof value);
    if (ok_) std::memcpy(&value, taken.data(), sizeof value);
    return value;
  }
  std::string_view bytes_;
  bool ok_ = true;
};

bool is_utf8(std::string_view text);  // well-formed, without surrogates and overlong forms
// The text cut to 80 bytes and without control characters, for messages.
std::string printable(std::string_view text);
std::string json_string(std::string_view utf8);  // quoted and escaped
// Equal for names that are one file where a file system ignores the case of (ASCII) letters.
std::string folded_name(std::string_view name);

}  // namespace rekindle::canonical
