#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "recovery/coordinator/core/membership.h"
#include "recovery/coordinator/core/types.h"

namespace rekindle::coordinator {

enum class VersionState { kStaging, kReady, kRetiring };

// The version table (durable) and what it means together with the members' holdings. A version has
// one root for ever; every change is persisted before it is visible.
class Catalog {
 public:
  Catalog(DurableState state, Persist persist)
      : state_(std::move(state)), persist_(std::move(persist)) {}

  std::uint64_t epoch() const { return state_.epoch; }
  Result<void> raise_epoch(std::uint64_t epoch);

  // The same claim again is fine. kDenied: the version has another root.
  Result<void> claim(const ModelVersion& id, const Digest128& root, const Digest128& tensor_set,
                     std::uint64_t checkpoint_bytes, bool revive,
                     std::optional<std::uint32_t> replicas = {});
  Result<void> retire(const ModelVersion& id);
  // A drained node stays drained over its own restarts and ours.
  Result<void> set_drained(const std::string& node_id, bool drained);
  bool drained(const std::string& node_id) const { return state_.drained.contains(node_id); }

  const DurableVersion* find(const ModelVersion& id) const;
  const DurableState& state() const { return state_; }
  VersionState state_of(const ModelVersion& id, const Membership& members) const;
  std::uint32_t whole_copies(const ModelVersion& id, const Membership& members) const;
  // The highest READY version of a model.
  std::optional<ModelVersion> newest_ready(const std::string& model,
                                           const Membership& members) const;
  // The highest version that is not retired, whether anybody holds it or not.
  std::optional<ModelVersion> newest_claimed(const std::string& model) const;
  // "qwen3@41 (ready), qwen3@40 (no live holder)": for error texts, newest first, a few.
  std::string describe_versions(const std::string& model, const Membership& members) const;

 private:
  Result<void> change(DurableState next);
  // Nothing to change, but what a failed write left on the disk may differ: write what holds.
  Result<void> keep();

  DurableState state_;
  Persist persist_;
  bool unsure_ = false;  // the last write failed; it may have reached the disk all the same
};

}  // namespace rekindle::coordinator
