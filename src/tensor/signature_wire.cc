#include "src/tensor/signature_wire.h"

namespace rekindle {

SignatureMessages to_proto(std::span<const VersionSignature> signatures) {
  SignatureMessages messages;
  for (const VersionSignature& one : signatures) {
    auto* message = messages.Add();
    message->set_public_key(one.public_key);
    message->set_signature(one.signature);
  }
  return messages;
}

std::vector<VersionSignature> from_proto(const SignatureMessages& messages) {
  std::vector<VersionSignature> signatures;
  for (const auto& message : messages) {
    if (signatures.size() == kMaxSignatures) break;
    if (message.public_key().size() != crypto::kPublicKeyBytes ||
        message.signature().size() != crypto::kSignatureBytes) {
      continue;
    }
    signatures.push_back({message.public_key(), message.signature()});
  }
  return signatures;
}

}  // namespace rekindle
