#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "recovery/coordinator/core/fleet_state.h"

namespace rekindle::coordinator {

// A node that is to pull a whole copy.
struct Recopy {
  ModelVersion id;
  Digest root;
  std::string node_id;
  Incarnation incarnation;
  TimePoint assigned;
  TimePoint last_progress;
  std::uint64_t bytes_done = 0;
};

// Keeps the wanted number of whole copies of each version, each in another failure domain. There is
// one task per version and per node at a time; when its node fails or makes no progress, the task
// goes to another node. Copies on drained or quarantined nodes do not count.
class Replicas {
 public:
  // The number of pulls that a node serves now.
  using LoadOf = std::function<std::size_t(const Incarnation&)>;
  struct Shortage {
    TimePoint since;
    // Why no node could be asked; "" while that is not known.
    std::string why;
  };

  explicit Replicas(const FleetState& fleet) : fleet_(fleet) {}

  // Looks at some of the versions, the next ones with each call.
  void advance(const LoadOf& load, TimePoint now);
  void progressed(const ModelVersion& id, const Incarnation& puller, std::uint64_t bytes_done,
                  TimePoint now);
  // The node works on it. Room for a large copy takes long to prepare: until the first byte, and
  // for ten minutes at most, this counts as progress.
  void begun(const ModelVersion& id, const Incarnation& puller, TimePoint now);
  // The node cannot do it. Ignored when it has no such task.
  void failed(const ModelVersion& id, const Incarnation& puller, TimePoint now);
  // Excuses the time for which the coordinator slept.
  void shift(Duration by);

  std::uint32_t wanted(const DurableVersion& version) const;
  const Recopy* task_of(const Incarnation& node) const;
  bool is_task(const ModelVersion& id, const Incarnation& node) const;
  // The versions of which this node holds a whole copy, or a part of a joint publication, and no
  // other live node that is not drained does.
  std::vector<ModelVersion> sole_copies(const Member& member) const;
  const std::map<ModelVersion, Recopy>& tasks() const { return tasks_; }
  const std::map<ModelVersion, Shortage>& shortages() const { return shortages_; }
  std::uint64_t assigned_count() const { return assigned_count_; }

 private:
  struct Copies {
    // The domains of the copies that count.
    std::set<std::string> domains;
    // Live nodes have all of it, whether their copies count or not.
    bool readable = false;
  };
  // One version with too few copies.
  struct Need {
    const ModelVersion& id;
    const DurableVersion& version;
    Copies copies;
  };
  // nullptr: the node has no such task.
  Recopy* find_task(const ModelVersion& id, const Incarnation& puller);
  void look_at(const ModelVersion& id, const LoadOf& load, TimePoint now);
  // True while the task is to go on.
  bool keep_task(const Recopy& task, TimePoint now);
  Copies count(const ModelVersion& id, const DurableVersion& version, TimePoint now) const;
  const Member* choose(const Need& need, const LoadOf& load, TimePoint now) const;
  bool can_take(const Member& member, const Need& need, TimePoint now) const;

  const FleetState& fleet_;
  std::map<ModelVersion, Recopy> tasks_;
  std::map<ModelVersion, Shortage> shortages_;
  std::map<std::pair<ModelVersion, std::string>, TimePoint> avoid_until_;
  // The version that was looked at last.
  ModelVersion cursor_;
  TimePoint next_look_{};
  std::uint64_t assigned_count_ = 0;
};

}  // namespace rekindle::coordinator
