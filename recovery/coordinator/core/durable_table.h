#pragma once

#include <optional>
#include <string>
#include <vector>

#include "recovery/coordinator/core/types.h"

namespace rekindle::coordinator {

// The durable state in three layers: what is durable, the batch that is being written, and what is
// gathered for the next batch. Readers see only what is durable; a change is judged by what will be
// durable when the batches before it are. While one batch is being written all changes are gathered
// into the next one: that is the group commit. When a batch fails, what was gathered behind it
// fails with it, and what it may have left on the disk is written over by the next batch.
class DurableTable {
 public:
  explicit DurableTable(DurableState state) : state_(std::move(state)) {}

  const DurableState& state() const { return state_; }
  // As of the last change that was staged.
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
  // Nothing is to change. 0 when that is durable now; else the commit after which it is: a change
  // is under way, or a failed one may have left something else on the disk.
  CommitNumber keep_version(const ModelVersion& id);
  CommitNumber keep_drained(const std::string& node_id);

  // The next batch to write; nothing while one is being written.
  std::optional<CommitBatch> take_batch();
  struct Ended {
    CommitNumber through = 0;            // all commits up to this number have ended
    std::vector<ModelVersion> versions;  // that changed
  };
  // The batch that was taken last is durable, or may or may not be.
  Ended committed(CommitNumber number, bool durable);

 private:
  CommitNumber staged() const { return next_number_; }

  DurableState state_;
  StateChange writing_;
  CommitNumber writing_number_ = 0;  // 0: none
  StateChange staged_;
  bool rewrite_ = false;  // the next batch is due although nothing is staged
  CommitNumber next_number_ = 1;
  // Names whose last write failed: it may have reached the disk all the same.
  StateChange unsure_;
};

}  // namespace rekindle::coordinator
