#pragma once

#include <string>
#include <string_view>

#include "src/crypto/secret_memory.h"

namespace rekindle::crypto {

// Returns 32 bytes.
std::string hmac_sha256(std::string_view key, std::string_view message);
// The same for a key that is made of another one.
Secret derived_key(std::string_view key, std::string_view label);
bool equal_constant_time(std::string_view a, std::string_view b);

}  // namespace rekindle::crypto
