#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "proto/agent.pb.h"
#include "proto/coordinator.pb.h"
#include "recovery/pull/pull_environment.h"
#include "src/async/task.h"
#include "src/base/digest.h"
#include "src/base/ids.h"

namespace rekindle::pull {

// What `model` or `model@version` stands for in one operation: resolved once.
struct Resolved {
  ModelVersion id;
  Digest root;
  Digest tensor_set;
  std::uint64_t checkpoint_bytes = 0;
};

// Finds who holds a version: through the coordinator, or straight from the addresses of --from.
// Control thread only.
class SourceFinder {
 public:
  SourceFinder(const PullEnvironment& environment, ModelRef ref, std::vector<std::string> from,
               std::string shard);

  struct Patience {
    std::chrono::milliseconds starting;   // with a coordinator that is away or has just started
    std::chrono::milliseconds verifying;  // with holders that verify the only copies there are
  };
  // Resolves the version and lists the sources. Out of patience: kNotFound (NO_SOURCE) or
  // kUnavailable. `on_verifying` is told once why this waits for holders.
  async::Task<Result<Resolved>> resolve(Patience patience,
                                        std::function<void(const Error&)> on_verifying);
  // Asks again for sources of the resolved version; keeps the old list when nobody answers.
  async::Task<void> refresh(std::chrono::milliseconds deadline);
  const std::vector<proto::Source>& sources() const { return sources_; }
  // Since somebody said who holds it.
  Duration age(TimePoint now) const { return now - answered_; }
  // All that hold it are busy, and the coordinator keeps a place for this pull that asks again:
  // about when. nullopt: it has sources, or the coordinator does not answer.
  std::optional<std::chrono::milliseconds> queued() const { return queued_; }

  // Tells the coordinator how far the pull is, and takes its list of sources.
  async::Task<void> exchange(std::uint64_t bytes_done, std::uint64_t bytes_total,
                             std::vector<proto::SourceReport> reports);
  // Tells the coordinator, beside the caller: its absence or slowness stops nothing.
  void report(std::uint64_t bytes_done, std::uint64_t bytes_total,
              std::vector<proto::SourceReport> reports) const;
  // Gives its place at the sources back; the next refresh() asks for another.
  async::Task<void> pause();
  // Waits for the answer only where one is to be expected.
  async::Task<void> close(const Result<void>& outcome);

 private:
  using Answer = Result<proto::OpenDirectResponse>;
  struct Found {
    Resolved resolved;
    std::vector<proto::Source> sources;
  };
  async::Task<Result<Resolved>> resolve_once(std::chrono::milliseconds deadline);
  async::Task<Result<Resolved>> resolve_through_coordinator(std::chrono::milliseconds deadline);
  void take_offer(const proto::OpenPullResponse& response);
  async::Task<void> open_again(std::chrono::milliseconds deadline);
  async::Task<Result<Found>> ask_peers(std::optional<std::uint64_t> version,
                                       std::chrono::milliseconds deadline);
  async::Task<void> ask_peer(std::string address, std::optional<std::uint64_t> version,
                             std::chrono::milliseconds deadline, std::optional<Answer>& answer);
  Result<Found> put_together(std::vector<std::optional<Answer>> answers);
  Error still_verifying(const std::string& who);
  proto::PullProgressRequest progress_request() const;

  const PullEnvironment& environment_;
  const ModelRef ref_;
  const std::vector<std::string> from_;
  const std::string shard_;
  Resolved resolved_;
  std::string pull_id_;
  std::vector<proto::Source> sources_;
  std::optional<std::chrono::milliseconds> queued_;
  TimePoint answered_{};
  bool coordinator_silent_ = false;  // it did not answer the last time
  bool holders_verify_ = false;      // why nobody could be named as a source the last time
};

}  // namespace rekindle::pull
