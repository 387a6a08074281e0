#pragma once

#include <map>
#include <string>
#include <string_view>

#include "src/base/result.h"
#include "src/crypto/secret_memory.h"

namespace rekindle::coordinator::etcd {

// Authenticates records with a key that etcd does not know. A sealed value is
//
//   0 "RKS1"  MAC (32 bytes)  [all (32 bytes)]  value
//
// `all` stands in the head record only. It is the MAC of the MACs of all other records, so the head
// tells which records there are, and of which values. No plain value begins with a 0.
class StateSeal {
 public:
  explicit StateSeal(crypto::Secret key) : key_(std::move(key)) {}

  static bool is_sealed(std::string_view stored);

  // `name`: the whole key in etcd.
  std::string seal(const std::string& name, std::string_view value);
  void forget(const std::string& name);
  // Seals the value of the head, over the records as they were sealed, forgotten and opened.
  std::string seal_head(const std::string& name, std::string_view value) const;

  // kCorrupt: it is not sealed, or not by this key for this name.
  Result<std::string> open(const std::string& name, std::string_view stored);
  // kCorrupt: also if the records that were opened are others than those of the head, and must not
  // be.
  enum class Others { kMustFit, kMayDiffer };
  Result<std::string> open_head(const std::string& name, std::string_view stored,
                                Others others = Others::kMustFit) const;

 private:
  std::string mac(std::string_view label, std::string_view name, std::string_view value) const;
  std::string all() const;

  const crypto::Secret key_;
  std::map<std::string, std::string> macs_;
};

}  // namespace rekindle::coordinator::etcd
