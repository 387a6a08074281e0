#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "recovery/coordinator/core/durable_table.h"

namespace rekindle::coordinator {

// The version table: the root of each version, which versions are retired, and what `latest` means.
// Every change is durable before anybody relies on it.
class Catalog {
 public:
  explicit Catalog(DurableTable& table);

  struct Claim {
    ModelVersion id;
    Digest root;
    Digest tensor_set;
    std::uint64_t checkpoint_bytes = 0;
    // By its publisher, which also brings a retired version back. Otherwise a member announces it.
    bool published = false;
    // A trusted publisher has signed it: an announcement is as good as its claim.
    bool vouched = false;
    // The claimant holds a whole copy.
    bool ready = false;
    std::optional<std::uint32_t> replicas = {};
    // See DurableVersion. Empty: those of an earlier claim stay.
    std::vector<Digest> parts = {};
  };
  // The same claim again succeeds. kDenied: the version has another root, also one that members
  // have merely announced, because engines may have loaded it; or it lies below the watermark.
  Durably<void> claim(const Claim& claim);
  // The live nodes hold the whole version. 0: that is known already, or there is no such version.
  CommitNumber mark_ready(const ModelVersion& id);
  Durably<void> retire(const ModelVersion& id);
  // These versions have changed durably.
  void changed(const std::vector<ModelVersion>& ids);

  // nullptr: the table has no such version.
  const DurableVersion* find(const ModelVersion& id) const;
  // Its entry says so, or it has none and lies below the watermark.
  bool is_retired(const ModelVersion& id) const;
  const std::map<ModelVersion, DurableVersion>& all() const { return table_.state().versions; }
  // The versions that are not retired. Periodic work looks at these only: there may be many
  // tombstones.
  const std::set<ModelVersion>& live() const { return live_; }
  // The highest claimed version that has been READY and is not retired; without one, the highest
  // announced one below all that were ever claimed. So no member makes itself the source of
  // `latest` by a high number. Neither a restart nor the silence of its holders makes it an older
  // one.
  std::optional<ModelVersion> latest(const std::string& model) const;

 private:
  CommitNumber drop_old_tombstones(const std::string& model, CommitNumber commit);

  DurableTable& table_;
  std::set<ModelVersion> live_;
};

}  // namespace rekindle::coordinator
