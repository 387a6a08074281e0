#include "src/base/digest.h"

#include "src/base/ids.h"

namespace rekindle {

std::string Digest::hex() const { return to_hex(bytes.data(), bytes.size()); }

Result<Digest> Digest::from_hex(std::string_view text) {
  Digest digest;
  if (!rekindle::from_hex(text, digest.bytes.data(), digest.bytes.size())) {
    return fail(ErrorCode::kInvalid, "'{}' is not a digest of 64 hexadecimal digits", text);
  }
  return digest;
}

Digest Digest::from_bytes(std::string_view raw) {
  Digest digest;
  if (raw.size() == digest.bytes.size()) std::memcpy(digest.bytes.data(), raw.data(), raw.size());
  return digest;
}

}  // namespace rekindle
