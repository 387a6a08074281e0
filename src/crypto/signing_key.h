#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "src/base/result.h"

// Ed25519 signatures (RFC 8032). Public keys and signatures are strings of raw bytes.
namespace rekindle::crypto {

inline constexpr std::size_t kPublicKeyBytes = 32;
inline constexpr std::size_t kSignatureBytes = 64;

// A private key. Immutable, so threads may share it.
class SigningKey {
 public:
  // From the system's random numbers.
  static SigningKey generate();
  // Reads an unencrypted PKCS#8 file, as `openssl genpkey -algorithm ed25519` writes it. kInvalid:
  // it is none, or of another algorithm.
  static Result<SigningKey> from_pem(std::string_view pem);
  std::string to_pem() const;

  const std::string& public_key() const { return public_key_; }
  std::string sign(std::string_view text) const;

 private:
  struct Free {
    void operator()(void* key) const;
  };
  explicit SigningKey(std::unique_ptr<void, Free> key);

  // An EVP_PKEY, which is reference-counted: copies share it.
  std::shared_ptr<void> key_;
  std::string public_key_;
};

// False also if the key or the signature has the wrong size.
bool verify(std::string_view public_key, std::string_view text, std::string_view signature);

// An Ed25519 public key in PEM (SubjectPublicKeyInfo), as `openssl pkey -pubout` writes it.
// kInvalid: it is none.
Result<std::string> public_key_from_pem(const std::string& pem);
std::string public_key_to_pem(std::string_view public_key);
// The name of a key for people: 8 hexadecimal digits, the first ones of its SHA-256.
std::string key_id(std::string_view public_key);

}  // namespace rekindle::crypto
