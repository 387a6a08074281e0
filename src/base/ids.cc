#include "src/base/ids.h"

#include <charconv>
#include <stdexcept>

#include <sys/random.h>

namespace rekindle {

std::string to_hex(const std::uint8_t* bytes, std::size_t size) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  text.reserve(size * 2);
  for (std::size_t i = 0; i < size; ++i) {
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

bool from_hex(std::string_view text, std::uint8_t* bytes, std::size_t size) {
  if (text.size() != size * 2) return false;
  for (std::size_t i = 0; i < size; ++i) {
    const char* begin = text.data() + 2 * i;
    auto [end, error] = std::from_chars(begin, begin + 2, bytes[i], 16);
    if (error != std::errc() || end != begin + 2) return false;
  }
  return true;
}

void fill_random(void* bytes, std::size_t size) {
  auto* cursor = static_cast<std::uint8_t*>(bytes);
  while (size > 0) {
    const ssize_t got = getrandom(cursor, size, 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      throw std::runtime_error("getrandom failed");
    }
    cursor += got;
    size -= static_cast<std::size_t>(got);
  }
}

std::string ModelVersion::to_string() const { return fmt::format("{}@{}", model, version); }

std::string ModelRef::to_string() const {
  return version ? fmt::format("{}@{}", model, *version) : model;
}

Result<ModelRef> ModelRef::parse(std::string_view text) {
  ModelRef ref;
  const auto at = text.rfind('@');
  if (at != std::string_view::npos) {
    const auto digits = text.substr(at + 1);
    std::uint64_t version = 0;
    auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), version);
    if (digits.empty() || error != std::errc() || end != digits.data() + digits.size()) {
      return fail(ErrorCode::kInvalid,
                  "'{}': the version after '@' is not an unsigned 64-bit number; write MODEL@41 or "
                  "MODEL for the newest",
                  text);
    }
    ref.version = version;
    text = text.substr(0, at);
  }
  TRY_VOID(check_model_name(text));
  ref.model = text;
  return ref;
}

Result<void> check_model_name(std::string_view name) {
  constexpr std::size_t kMaxNameBytes = 200;
  const auto bad = [&](std::string_view why) {
    return fail(ErrorCode::kInvalid,
                "model name '{}' {}; use 1 to {} characters of A-Z a-z 0-9 . _ / + -",
                name.substr(0, kMaxNameBytes), why, kMaxNameBytes);
  };
  if (name.empty()) return bad("is empty");
  if (name.size() > kMaxNameBytes) return bad("is too long");
  for (const char c : name) {
    const bool ok = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                    c == '.' || c == '_' || c == '/' || c == '+' || c == '-';
    if (!ok) return bad("has a character that is not allowed");
  }
  if (name.front() == '/' || name.back() == '/' || name.front() == '.' ||
      name.find("..") != std::string_view::npos || name.find("//") != std::string_view::npos) {
    return bad("is not a plain relative name");
  }
  return {};
}

}  // namespace rekindle
