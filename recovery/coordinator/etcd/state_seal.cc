#include "recovery/coordinator/etcd/state_seal.h"

#include <utility>

#include "src/crypto/bound_text.h"
#include "src/crypto/hmac.h"

namespace rekindle::coordinator::etcd {

namespace {

constexpr std::string_view kMagic("\0RKS1", 5);
constexpr std::size_t kMacBytes = 32;
constexpr std::string_view kRecordLabel = "rekindle state record v1";
constexpr std::string_view kHeadLabel = "rekindle state head v1";
constexpr std::string_view kSetLabel = "rekindle state set v1";

std::string sealed(std::string_view mac, std::string_view value) {
  return std::string(kMagic) + std::string(mac) + std::string(value);
}

Failure wrong_mac(const std::string& name) {
  return fail(
      ErrorCode::kCorrupt,
      "{} in etcd was not written with this --etcd-state-key: somebody else wrote it, or the "
      "key is another one",
      name);
}

Failure not_sealed(const std::string& name) {
  return fail(ErrorCode::kCorrupt,
              "{} in etcd carries no authentication: somebody else wrote it, or it is older than "
              "--etcd-state-key. To believe it once, start with --etcd-adopt-unsigned",
              name);
}

}  // namespace

bool StateSeal::is_sealed(std::string_view stored) { return stored.starts_with(kMagic); }

std::string StateSeal::mac(std::string_view label, std::string_view name,
                           std::string_view value) const {
  crypto::BoundText text(label);
  text.bytes(name).bytes(value);
  return crypto::hmac_sha256(key_.reveal(), std::move(text).take());
}

// In the order of their names. Each MAC binds the name of its record.
std::string StateSeal::all() const {
  crypto::BoundText text(kSetLabel);
  for (const auto& [name, mac] : macs_) text.bytes(mac);
  return crypto::hmac_sha256(key_.reveal(), std::move(text).take());
}

std::string StateSeal::seal(const std::string& name, std::string_view value) {
  std::string& own = macs_[name];
  own = mac(kRecordLabel, name, value);
  return sealed(own, value);
}

void StateSeal::forget(const std::string& name) { macs_.erase(name); }

std::string StateSeal::seal_head(const std::string& name, std::string_view value) const {
  const std::string whole = all() + std::string(value);
  return sealed(mac(kHeadLabel, name, whole), whole);
}

Result<std::string> StateSeal::open(const std::string& name, std::string_view stored) {
  if (!is_sealed(stored)) return not_sealed(name);
  stored.remove_prefix(kMagic.size());
  const std::string_view given = stored.substr(0, kMacBytes);
  const std::string_view value = stored.substr(given.size());
  const std::string wanted = mac(kRecordLabel, name, value);
  if (!crypto::equal_constant_time(given, wanted)) return wrong_mac(name);
  macs_[name] = wanted;
  return std::string(value);
}

Result<std::string> StateSeal::open_head(const std::string& name, std::string_view stored,
                                         Others others) const {
  if (!is_sealed(stored)) return not_sealed(name);
  stored.remove_prefix(kMagic.size());
  const std::string_view given = stored.substr(0, kMacBytes);
  const std::string_view whole = stored.substr(given.size());
  if (whole.size() < kMacBytes ||
      !crypto::equal_constant_time(given, mac(kHeadLabel, name, whole))) {
    return wrong_mac(name);
  }
  if (others == Others::kMustFit &&
      !crypto::equal_constant_time(whole.substr(0, kMacBytes), all())) {
    return fail(ErrorCode::kCorrupt,
                "the records in etcd are not those that {} was written with: somebody took records "
                "away, or brought older ones back. Restore etcd as a whole from a backup",
                name);
  }
  return std::string(whole.substr(kMacBytes));
}

}  // namespace rekindle::coordinator::etcd
