#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "recovery/coordinator/core/durable_table.h"
#include "recovery/coordinator/core/membership.h"
#include "recovery/coordinator/core/types.h"

namespace rekindle::coordinator {

enum class VersionState { kStaging, kReady, kRetiring };

// The version table and what it means together with the members' holdings.
class Catalog {
 public:
  explicit Catalog(DurableState state);

  std::uint64_t epoch() const { return state().epoch; }
  std::uint64_t next_epoch() const { return table_.next_epoch(); }
  CommitNumber raise_epoch(std::uint64_t epoch) { return table_.set_epoch(epoch); }

  struct Claim {
    ModelVersion id;
    Digest root;
    Digest tensor_set;
    std::uint64_t checkpoint_bytes = 0;
    bool revive = false;  // bring a retired version back
    bool ready = false;   // somebody holds all of it
    std::optional<std::uint32_t> replicas = {};
  };
  // The same claim again is fine. kDenied: the version has another root, or lies below the
  // watermark.
  Durably<void> claim(const Claim& claim);
  // Somebody alive holds all of it. 0: that is known, or the version is not in the table.
  CommitNumber mark_ready(const ModelVersion& id);
  Durably<void> retire(const ModelVersion& id);
  // A drained node stays drained over its own restarts and ours.
  CommitNumber set_drained(const std::string& node_id, bool drained);
  bool drained(const std::string& node_id) const { return state().drained.contains(node_id); }

  std::optional<CommitBatch> take_batch() { return table_.take_batch(); }
  DurableTable::Ended committed(CommitNumber number, bool durable);

  const DurableVersion* find(const ModelVersion& id) const;
  // Its entry says so, or it has none and lies below the watermark.
  bool is_retired(const ModelVersion& id) const;
  const DurableState& state() const { return table_.state(); }
  // The versions that are not retired. Whatever looks at all versions again and again looks at
  // these: there may be many tombstones.
  const std::set<ModelVersion>& live() const { return live_; }

  VersionState state_of(const ModelVersion& id, const Membership& members) const;
  std::uint32_t whole_copies(const ModelVersion& id, const Membership& members) const;
  // The verified tiles of the members that are alive are all that the checkpoint has.
  bool is_covered(const ModelVersion& id, const Membership& members) const;
  // The highest version that is READY at this moment.
  std::optional<ModelVersion> newest_ready(const std::string& model,
                                           const Membership& members) const;
  // The highest version that has been READY and is not retired: what `latest` means.
  std::optional<ModelVersion> latest(const std::string& model) const;
  // "qwen3@41 (ready), qwen3@40 (no live holder)": for error texts, newest first, a few.
  std::string describe_versions(const std::string& model, const Membership& members) const;

 private:
  CommitNumber drop_old_tombstones(const std::string& model, CommitNumber commit);

  DurableTable table_;
  std::set<ModelVersion> live_;
};

}  // namespace rekindle::coordinator
