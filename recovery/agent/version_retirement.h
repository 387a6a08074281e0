#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <utility>

#include "recovery/agent/agent_parts.h"
#include "src/async/task.h"
#include "src/base/ids.h"
#include "src/store/segment_store.h"

namespace rekindle::agent {

// Removes versions and copies from this host: first nobody finds a copy here any more, then its
// readers end, then the store deletes it. Once begun, a removal is carried through. Control thread
// only.
class VersionRetirement {
 public:
  struct Hooks {
    // A pull of the version runs here.
    std::function<bool(const ModelVersion&)> is_being_filled;
    // The store has removed copies from its list.
    std::function<void()> copies_removed;
  };
  VersionRetirement(AgentParts parts, Hooks hooks) : parts_(parts), hooks_(std::move(hooks)) {}

  // Removes all copies of the version; returns the bytes that became free.
  async::Task<Result<std::uint64_t>> retire(ModelVersion id);
  // Removes one copy that does not verify. Its workers are not waited for.
  async::Task<Result<std::uint64_t>> drop(std::shared_ptr<const store::StoredVersion> copy);

  bool is_retiring(const ModelVersion& id) const { return retiring_.contains(id); }
  // kUnavailable while a retire() of the version runs, which would delete a copy that came now.
  Result<void> check_not_retiring(const ModelVersion& id) const;

 private:
  async::Task<void> stop_serving_removed(ModelVersion id);

  const AgentParts parts_;
  const Hooks hooks_;
  // One entry for each call of retire() that runs.
  std::multiset<ModelVersion> retiring_;
};

}  // namespace rekindle::agent
