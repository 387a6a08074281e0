#include "src/crypto/hmac.h"

#include <array>
#include <stdexcept>

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

namespace rekindle::crypto {

namespace {

using Mac = std::array<unsigned char, EVP_MAX_MD_SIZE>;

std::string_view compute(Mac& mac, std::string_view key, std::string_view message) {
  unsigned int size = 0;
  if (HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
           reinterpret_cast<const unsigned char*>(message.data()), message.size(), mac.data(),
           &size) == nullptr) {
    throw std::runtime_error("HMAC-SHA256 failed");
  }
  return {reinterpret_cast<const char*>(mac.data()), size};
}

}  // namespace

std::string hmac_sha256(std::string_view key, std::string_view message) {
  Mac mac;
  return std::string(compute(mac, key, message));
}

Secret derived_key(std::string_view key, std::string_view label) {
  Mac mac;
  Secret derived(compute(mac, key, label));
  OPENSSL_cleanse(mac.data(), mac.size());
  return derived;
}

bool equal_constant_time(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

}  // namespace rekindle::crypto
