#include "src/tensor/version_signature.h"

#include <algorithm>
#include <set>

#include <fmt/ranges.h>

#include "src/base/glob.h"
#include "src/base/text.h"
#include "src/crypto/bound_text.h"

namespace rekindle {

namespace {

std::string signed_text(const ModelVersion& id, const Digest& root) {
  crypto::BoundText text("rekindle version v1");
  text.bytes(id.model).u64(id.version).bytes(root.to_bytes());
  return std::move(text).take();
}

bool has_signer(std::span<const VersionSignature> signatures, const std::string& key) {
  return std::ranges::any_of(signatures,
                             [&](const VersionSignature& one) { return one.public_key == key; });
}

}  // namespace

VersionSignature sign_version(const crypto::SigningKey& key, const ModelVersion& id,
                              const Digest& root) {
  return {key.public_key(), key.sign(signed_text(id, root))};
}

bool is_valid(const VersionSignature& signature, const ModelVersion& id, const Digest& root) {
  return crypto::verify(signature.public_key, signed_text(id, root), signature.signature);
}

std::vector<VersionSignature> valid_signatures(std::span<const VersionSignature> signatures,
                                               const ModelVersion& id, const Digest& root) {
  std::vector<VersionSignature> valid;
  for (const VersionSignature& one :
       signatures.first(std::min(signatures.size(), kMaxSignatures))) {
    if (!has_signer(valid, one.public_key) && is_valid(one, id, root)) valid.push_back(one);
  }
  return valid;
}

bool add_signatures(std::vector<VersionSignature>& to, std::span<const VersionSignature> more) {
  bool added = false;
  for (const VersionSignature& one : more) {
    if (to.size() == kMaxSignatures || has_signer(to, one.public_key)) continue;
    to.push_back(one);
    added = true;
  }
  return added;
}

std::string describe_signers(std::span<const VersionSignature> signatures) {
  std::set<std::string> ids;
  for (const VersionSignature& one : signatures) ids.insert(crypto::key_id(one.public_key));
  return fmt::format("{}", fmt::join(ids, ", "));
}

Result<void> PublisherTrust::add(std::string models, std::string public_key) {
  if (models.empty()) return fail(ErrorCode::kInvalid, "no models before the '='");
  if (const auto checked = check_model_glob(models); !checked) {
    return fail(ErrorCode::kInvalid, "'{}' is no pattern of models: {}", cut_text(models, 64),
                checked.error().message());
  }
  rules_.push_back({std::move(models), std::move(public_key)});
  return {};
}

bool PublisherTrust::covers(const std::string& model) const {
  return std::ranges::any_of(rules_,
                             [&](const Rule& rule) { return matches_glob(rule.models, model); });
}

std::vector<std::string> PublisherTrust::keys(const std::string& model) const {
  std::vector<std::string> keys;
  for (const Rule& rule : rules_) {
    if (matches_glob(rule.models, model)) keys.push_back(rule.public_key);
  }
  return keys;
}

Result<void> PublisherTrust::check(const ModelVersion& id, const Digest& root,
                                   std::span<const VersionSignature> signatures) const {
  std::set<std::string> trusted;
  for (const Rule& rule : rules_) {
    if (!matches_glob(rule.models, id.model)) continue;
    for (const VersionSignature& one : signatures) {
      if (one.public_key == rule.public_key && is_valid(one, id, root)) return {};
    }
    trusted.insert(crypto::key_id(rule.public_key));
  }
  if (trusted.empty()) return {};
  const auto valid = valid_signatures(signatures, id, root);
  const std::string had =
      !valid.empty() ? "is signed by " + describe_signers(valid)
      : signatures.empty()
          ? "has no signature"
          : "has a signature of another version or root (key " + describe_signers(signatures) + ")";
  return fail(ErrorCode::kDenied,
              "{} {}, and --trust-publisher asks for one by {} (root {}): publish it with the "
              "--sign-key of that publisher, or trust the key that signed it",
              id.to_string(), had, fmt::join(trusted, " or "), root.hex());
}

}  // namespace rekindle
