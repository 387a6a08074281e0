#pragma once

#include <map>
#include <utility>
#include <vector>

#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/tensor/version_signature.h"

namespace rekindle::coordinator {

// The signatures of the versions that the table knows, and the publishers that this coordinator
// trusts. They are not durable: after a restart, the holders of a version bring its signatures
// again.
class VersionSigners {
 public:
  // Asked for each version that becomes known from here on.
  void trust(PublisherTrust trust) { trust_ = std::move(trust); }

  // The valid ones of `offered`. Signatures of keys that have signed this root already are not
  // verified again.
  std::vector<VersionSignature> admit(const ModelVersion& id, const Digest& root,
                                      const std::vector<VersionSignature>& offered) const {
    std::vector<VersionSignature> all = of(id, root);
    std::vector<VersionSignature> unseen;
    for (const VersionSignature& one : offered) {
      if (!has_key(all, one.public_key)) unseen.push_back(one);
    }
    add_signatures(all, valid_signatures(unseen, id, root));
    return all;
  }
  // Whether versions of the model need a signature of a trusted publisher.
  bool demands(const std::string& model) const { return trust_.covers(model); }
  // kDenied: the version needs such a signature, and has none.
  Result<void> check(const ModelVersion& id, const Digest& root,
                     const std::vector<VersionSignature>& signatures) const {
    return trust_.check(id, root, signatures);
  }
  // The table knows this version. `admitted` came from admit().
  void keep(const ModelVersion& id, const Digest& root, std::vector<VersionSignature> admitted) {
    if (!admitted.empty()) known_.insert_or_assign(id, Signed{root, std::move(admitted)});
  }
  void forget(const ModelVersion& id) { known_.erase(id); }
  std::vector<VersionSignature> of(const ModelVersion& id, const Digest& root) const {
    const auto found = known_.find(id);
    return found != known_.end() && found->second.root == root ? found->second.signatures
                                                               : std::vector<VersionSignature>();
  }

 private:
  struct Signed {
    Digest root;
    std::vector<VersionSignature> signatures;
  };
  static bool has_key(const std::vector<VersionSignature>& all, const std::string& key) {
    for (const VersionSignature& one : all) {
      if (one.public_key == key) return true;
    }
    return false;
  }

  PublisherTrust trust_;
  std::map<ModelVersion, Signed> known_;
};

}  // namespace rekindle::coordinator
