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

// The version that `model` or `model@version` names in one pull. It is resolved once.
struct Resolved {
  ModelVersion id;
  Digest root;
  Digest tensor_set;
  std::uint64_t checkpoint_bytes = 0;
  // As they came. Nobody has verified them yet.
  std::vector<VersionSignature> signatures = {};
};

// The progress of a pull, for the coordinator.
struct PullReport {
  std::uint64_t bytes_done = 0;
  std::uint64_t bytes_total = 0;
  std::vector<proto::SourceReport> sources;
};

// Finds the holders of a version: it asks the coordinator, or the addresses of --from themselves.
// Control thread only.
class SourceFinder {
 public:
  SourceFinder(const PullEnvironment& environment, ModelRef ref, std::vector<std::string> from,
               std::string shard);

  struct Patience {
    // While the coordinator is away or has just started.
    std::chrono::milliseconds starting;
    // While holders still verify the only copies.
    std::chrono::milliseconds verifying;
  };
  // Resolves the version and lists the sources. Out of patience: kNotFound (NO_SOURCE) or
  // kUnavailable. `on_verifying` is called once when this begins to wait for holders.
  async::Task<Result<Resolved>> resolve(Patience patience,
                                        std::function<void(const Error&)> on_verifying);
  // Asks again for sources of the resolved version. The old list stays when nobody answers.
  async::Task<void> refresh(std::chrono::milliseconds deadline);
  const std::vector<proto::Source>& sources() const { return sources_; }
  // The age of that list.
  Duration age(TimePoint now) const { return now - answered_; }
  // When to ask again for a place at the sources, which are all busy now; the coordinator keeps one
  // for a pull that asks. nullopt: there are sources, or the coordinator does not answer.
  std::optional<std::chrono::milliseconds> queued() const { return queued_; }

  // Reports to the coordinator, and takes its list of sources.
  async::Task<void> exchange(PullReport report);
  // Reports to the coordinator in the background: its absence or slowness stops nothing.
  void report(PullReport report) const;
  // Gives the pull's place at the sources back. The next refresh() asks for another one.
  async::Task<void> pause();
  // The span that its calls belong to.
  void belongs_to(const trace::Context& trace) { trace_ = trace; }
  // In hexadecimal digits; "": no coordinator gave one.
  std::string pull_id() const;
  // The coordinator gets them when the pull is closed.
  void leave(std::vector<proto::Span> spans) { spans_ = std::move(spans); }
  // Waits for the answer only where one is to be expected.
  async::Task<void> close(const Result<void>& outcome);

 private:
  using Answer = Result<proto::OpenDirectResponse>;
  struct Found {
    Resolved resolved;
    std::vector<proto::Source> sources;
  };
  std::shared_ptr<rpc::RpcClient> coordinator() const;
  async::Task<Result<Resolved>> resolve_once(std::chrono::milliseconds deadline);
  async::Task<Result<Resolved>> resolve_through_coordinator(std::chrono::milliseconds deadline);
  async::Task<Result<proto::OpenPullResponse>> open(std::shared_ptr<rpc::RpcClient> client,
                                                    ModelRef ref,
                                                    std::chrono::milliseconds deadline) const;
  // `runs`: the pull has sources, and takes only an answer with some.
  async::Task<void> open_again(std::shared_ptr<rpc::RpcClient> client,
                               std::chrono::milliseconds deadline, bool runs);
  void take_offer(const proto::OpenPullResponse& response);
  void take_sources(const proto::PullProgressResponse& response);
  async::Task<Result<proto::PullProgressResponse>> tell_progress(
      std::shared_ptr<rpc::RpcClient> client, PullReport report, bool need_sources,
      std::chrono::milliseconds deadline) const;
  async::Task<void> refresh_from_peers(std::chrono::milliseconds deadline);
  async::Task<Result<Found>> ask_peers(std::optional<std::uint64_t> version,
                                       std::chrono::milliseconds deadline);
  async::Task<void> ask_peer(std::string address, std::optional<std::uint64_t> version,
                             std::chrono::milliseconds deadline, std::optional<Answer>& answer);
  Result<Found> put_together(std::vector<std::optional<Answer>> answers);
  Error still_verifying(const std::string& who);

  const PullEnvironment& environment_;
  const ModelRef ref_;
  const std::vector<std::string> from_;
  const std::string shard_;
  Resolved resolved_;
  // The coordinator's id of this pull. "": none is open.
  std::string pull_id_;
  // The coordinator does not know it, because it has restarted.
  bool unknown_ = false;
  std::vector<proto::Source> sources_;
  std::optional<std::chrono::milliseconds> queued_;
  TimePoint answered_{};
  // The coordinator did not answer the last time.
  bool coordinator_silent_ = false;
  trace::Context trace_;
  std::vector<proto::Span> spans_;
  // The last time there was no source because its holders still verify their copies.
  bool holders_verify_ = false;
};

}  // namespace rekindle::pull
