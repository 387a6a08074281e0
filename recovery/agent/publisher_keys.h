#pragma once

#include <optional>

#include "src/crypto/signing_key.h"
#include "src/tensor/version_signature.h"

namespace rekindle::agent {

// The publishers that this agent trusts, and the key with which it signs.
struct PublisherKeys {
  PublisherTrust trust;
  // Of versions that workers publish. nullopt: these have no signature.
  std::optional<crypto::SigningKey> sign_key;
};

}  // namespace rekindle::agent
