#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/crypto/signing_key.h"

// Who vouches for a version: a publisher signs its root (docs/internals/security.md).
namespace rekindle {

inline constexpr std::size_t kMaxSignatures = 8;

struct VersionSignature {
  std::string public_key;
  std::string signature;
  bool operator==(const VersionSignature&) const = default;
};

VersionSignature sign_version(const crypto::SigningKey& key, const ModelVersion& id,
                              const Digest& root);
bool is_valid(const VersionSignature& signature, const ModelVersion& id, const Digest& root);
// Those of them that are valid, one of each key, at most kMaxSignatures.
std::vector<VersionSignature> valid_signatures(std::span<const VersionSignature> signatures,
                                               const ModelVersion& id, const Digest& root);
// Adds signatures that are known to be valid. False: all of their keys had signed before, or there
// is no room.
bool add_signatures(std::vector<VersionSignature>& to, std::span<const VersionSignature> more);
// The ids of the keys, ascending: "1a2b3c4d, 9f8e7d6c"; "" for none.
std::string describe_signers(std::span<const VersionSignature> signatures);

// The publishers that this process trusts, by model. Immutable once it is filled.
class PublisherTrust {
 public:
  // `models` is a glob: "qwen3*". kInvalid: it can match no model.
  Result<void> add(std::string models, std::string public_key);
  // Whether versions of the model need a signature.
  bool covers(const std::string& model) const;
  // Those that may sign versions of the model.
  std::vector<std::string> keys(const std::string& model) const;
  // kDenied: the model is covered, and no trusted publisher has signed this root.
  Result<void> check(const ModelVersion& id, const Digest& root,
                     std::span<const VersionSignature> signatures) const;

 private:
  struct Rule {
    std::string models;
    std::string public_key;
  };
  std::vector<Rule> rules_;
};

}  // namespace rekindle
