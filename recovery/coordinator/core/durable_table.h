#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "recovery/coordinator/core/types.h"

namespace rekindle::coordinator {

// A version has one root for ever. A retired version stays as a tombstone, so that a late copy
// cannot bring it back. The oldest tombstones of a model are dropped below its retention watermark.
struct DurableVersion {
  Digest root;
  Digest tensor_set;
  std::uint64_t checkpoint_bytes = 0;
  bool retiring = false;
  // nullopt: as many as the coordinator's options say.
  std::optional<std::uint32_t> replicas = std::nullopt;
  // It has been READY since it was published. Only retirement moves `latest` behind it.
  bool ready = false;
  // The layouts of a joint publication, ascending: their union is the version. Empty: it was
  // published as a whole.
  std::vector<Digest> parts = {};
  // Members have announced it, and no publisher has claimed it. It is `latest` only where no
  // claimed version is.
  bool announced = false;
  bool operator==(const DurableVersion&) const = default;
};
struct DurableState {
  std::uint64_t epoch = 0;
  std::map<ModelVersion, DurableVersion> versions;
  // The retention watermark of each model: a version up to it without an entry counts as retired.
  std::map<std::string, std::uint64_t> retired_through;
  // Node ids.
  std::set<std::string> drained;
  bool operator==(const DurableState&) const = default;
};
// Each member replaces the stored value of the same name.
struct StateChange {
  std::optional<std::uint64_t> epoch;
  // nullopt: erased.
  std::map<ModelVersion, std::optional<DurableVersion>> versions;
  std::map<std::string, std::uint64_t> retired_through;
  std::map<std::string, bool> drained;

  bool empty() const {
    return !epoch && versions.empty() && retired_through.empty() && drained.empty();
  }
  void apply_to(DurableState& state) const;
};

// Commits end in the order of their numbers; 0 is none.
using CommitNumber = std::uint64_t;
struct CommitBatch {
  CommitNumber number = 0;
  StateChange change;
};
// An answer that holds once `commit` is durable (0: it holds now). When that commit fails, its
// error is the answer.
template <typename T>
struct Durably {
  Result<T> answer;
  CommitNumber commit = 0;
};

// The durable state in three layers: the durable values, the batch that is being written, and the
// changes gathered for the next batch (group commit). Readers see only durable values; a change is
// judged by the values that will hold after the batches before it. When a batch fails, the changes
// gathered behind it fail with it, and the next batch writes the durable values over any trace that
// the failed one may have left on the disk.
class DurableTable {
 public:
  explicit DurableTable(DurableState state) : state_(std::move(state)) {}

  const DurableState& state() const { return state_; }
  // The values after all staged changes.
  std::uint64_t next_epoch() const;
  std::optional<DurableVersion> next_version(const ModelVersion& id) const;
  bool next_drained(const std::string& node_id) const;
  std::uint64_t next_retired_through(const std::string& model) const;

  // Each returns the commit that makes it durable.
  CommitNumber set_epoch(std::uint64_t epoch);
  CommitNumber set_version(const ModelVersion& id, const DurableVersion& version);
  CommitNumber erase_version(const ModelVersion& id);
  CommitNumber set_retired_through(const std::string& model, std::uint64_t version);
  CommitNumber set_drained(const std::string& node_id, bool drained);
  // The value stays as it is. Returns 0 when it is durable now, else the commit after which it is:
  // a change is under way, or a failed one may have left another value on the disk.
  CommitNumber keep_version(const ModelVersion& id);
  CommitNumber keep_drained(const std::string& node_id);

  // The next batch to write; nothing while one is being written.
  std::optional<CommitBatch> take_batch();
  struct Ended {
    // All commits up to this number have ended.
    CommitNumber through = 0;
    std::vector<ModelVersion> changed;
  };
  // The last batch is durable, or it is unknown whether it is.
  Ended committed(CommitNumber number, bool durable);

 private:
  DurableState state_;
  StateChange writing_;
  // 0: no batch is being written.
  CommitNumber writing_number_ = 0;
  StateChange staged_;
  // The next batch is due although nothing is staged.
  bool rewrite_ = false;
  CommitNumber next_number_ = 1;
  // Values whose last write failed. It may have reached the disk all the same.
  StateChange unsure_;
};

}  // namespace rekindle::coordinator
