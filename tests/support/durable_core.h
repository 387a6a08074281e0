#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "recovery/coordinator/core/core.h"

namespace rekindle::testing {

// The coordinator's core on a disk that has each batch written within the call that staged it: its
// calls have their final answers at once.
class DurableCore : public coordinator::Core {
 public:
  using Disk = std::function<Result<void>(const coordinator::StateChange& change)>;

  DurableCore(const coordinator::Timing& timing, const coordinator::Limits& limits,
              coordinator::DurableState durable, Disk disk, std::function<PullId()> new_pull_id)
      : Core(timing, limits, std::move(durable), std::move(new_pull_id)), disk_(std::move(disk)) {}

  Result<void> start(TimePoint now) { return write(Core::start(now), now); }
  void tick(TimePoint now) {
    Core::tick(now);
    (void)write(0, now);
  }
  Result<coordinator::Registered> enroll(const coordinator::NodeInfo& info,
                                         const std::string& failure_domain,
                                         std::uint64_t highest_epoch, const std::string& connection,
                                         TimePoint now) {
    auto answer = Core::enroll(info, failure_domain, highest_epoch, connection, now);
    if (answer.commit == 0) return std::move(answer.answer);
    TRY_VOID(write(answer.commit, now));
    return Core::enroll(info, failure_domain, highest_epoch, connection, now).answer;
  }
  Result<std::vector<coordinator::AnnounceConflict>> announce(
      const std::string& node_id, const Incarnation& incarnation, std::uint64_t epoch, bool full,
      std::vector<coordinator::Holding> add, const std::vector<coordinator::HoldingKey>& remove,
      TimePoint now) {
    auto announced = Core::announce(node_id, incarnation, epoch, full, std::move(add), remove, now);
    if (!announced.answer) return fail(std::move(announced.answer).error());
    const auto written = write(announced.commit, now);
    return finish(std::move(announced), written);
  }
  Result<std::uint64_t> publish(const std::string& node_id, const Incarnation& incarnation,
                                const ModelVersion& id, const Digest& root,
                                const Digest& tensor_set, std::uint64_t checkpoint_bytes,
                                TimePoint now, std::optional<std::uint32_t> replicas = {},
                                std::vector<Digest> parts = {}) {
    return settle(
        Core::publish(node_id, incarnation,
                      {id, root, tensor_set, checkpoint_bytes, replicas, std::move(parts)}, now),
        now);
  }
  Result<std::uint32_t> retire(const ModelVersion& id, TimePoint now,
                               std::optional<Duration> deadline = {}) {
    return settle(Core::retire(id, now, deadline), now);
  }
  Result<coordinator::Draining> drain(const std::string& node_id, bool drained, TimePoint now) {
    return settle(Core::drain(node_id, drained, now), now);
  }

 private:
  template <typename T>
  Result<T> settle(coordinator::Durably<T> answer, TimePoint now) {
    TRY_VOID(write(answer.commit, now));
    return std::move(answer.answer);
  }
  // What became of `commit`; batches that follow from it are written, too.
  Result<void> write(coordinator::CommitNumber commit, TimePoint now) {
    Result<void> outcome;
    bool ended = commit == 0;
    while (const auto batch = take_batch()) {
      const auto written = disk_(batch->change);
      const coordinator::CommitNumber through = committed(batch->number, written.has_value(), now);
      if (ended || through < commit) continue;
      outcome = written;
      ended = true;
    }
    return outcome;
  }

  const Disk disk_;
};

}  // namespace rekindle::testing
