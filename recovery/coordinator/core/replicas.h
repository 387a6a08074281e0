#pragma once

#include <functional>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "recovery/coordinator/core/catalog.h"
#include "recovery/coordinator/core/membership.h"
#include "recovery/coordinator/core/types.h"

namespace rekindle::coordinator {

// A node that shall pull a whole copy.
struct Recopy {
  ModelVersion id;
  Digest root;
  std::string node_id;
  Incarnation incarnation;
  TimePoint assigned;
  TimePoint last_progress;
  std::uint64_t bytes_done = 0;
};

// Keeps as many whole copies of each version as it shall have, each in another failure domain. One
// task per version and per node at a time; a task whose node fails, or does not get on, goes to
// another node. Copies on draining or quarantined nodes do not count.
class Replicas {
 public:
  using LoadOf = std::function<std::size_t(const Incarnation&)>;  // pullers that it serves now
  struct Shortage {
    TimePoint since;
    std::string why;  // nobody could be asked; "" while that is not known
  };

  Replicas(const Timing& timing, const Limits& limits) : timing_(timing), limits_(limits) {}

  // Looks at some of the versions, the next ones with each call.
  void advance(const Catalog& catalog, Membership& members, const LoadOf& load, TimePoint now);
  void progressed(const ModelVersion& id, const Incarnation& puller, std::uint64_t bytes_done,
                  TimePoint now);
  // The node says that it is at it. Room for a large copy takes long to get ready: until the first
  // byte this counts as progress, for ten minutes at most.
  void begun(const ModelVersion& id, const Incarnation& puller, TimePoint now);
  // The node says that it cannot. Ignored when it has no such task.
  void failed(const ModelVersion& id, const Incarnation& puller, TimePoint now);
  void shift(Duration by);

  std::uint32_t wanted(const DurableVersion& version) const;
  const Recopy* task_of(const Incarnation& node) const;
  bool is_task(const ModelVersion& id, const Incarnation& node) const;
  const std::map<ModelVersion, Recopy>& tasks() const { return tasks_; }
  const std::map<ModelVersion, Shortage>& shortages() const { return shortages_; }
  std::uint64_t assigned_count() const { return assigned_count_; }

 private:
  struct Copies {
    std::set<std::string> domains;  // of the copies that count
    bool readable = false;          // somebody alive has all of it, counted or not
  };
  void look_at(const ModelVersion& id, const DurableVersion& version, const Catalog& catalog,
               Membership& members, const LoadOf& load, TimePoint now);
  // True while the task is to go on.
  bool keep_task(const Recopy& task, const Catalog& catalog, Membership& members, TimePoint now);
  Copies count(const ModelVersion& id, const DurableVersion& version, const Catalog& catalog,
               const Membership& members, TimePoint now) const;
  const Member* choose(const ModelVersion& id, const DurableVersion& version, const Copies& copies,
                       const Catalog& catalog, const Membership& members, const LoadOf& load,
                       TimePoint now) const;
  bool can_take(const Member& member, const ModelVersion& id, const DurableVersion& version,
                const Copies& copies, const Catalog& catalog, TimePoint now) const;

  const Timing timing_;
  const Limits limits_;
  std::map<ModelVersion, Recopy> tasks_;
  std::map<ModelVersion, Shortage> shortages_;
  std::map<std::pair<ModelVersion, std::string>, TimePoint> avoid_until_;
  ModelVersion cursor_;
  TimePoint next_look_{};
  std::uint64_t assigned_count_ = 0;
};

// A complete copy of every tensor.
bool holds_whole(const Member& member, const ModelVersion& id, const Digest& root);

}  // namespace rekindle::coordinator
