#pragma once

#include <string>
#include <string_view>

namespace rekindle::crypto {

// Returns 32 bytes.
std::string hmac_sha256(std::string_view key, std::string_view message);
bool equal_constant_time(std::string_view a, std::string_view b);

}  // namespace rekindle::crypto
