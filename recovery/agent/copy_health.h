#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "proto/common.pb.h"
#include "recovery/agent/agent_parts.h"
#include "recovery/agent/copy_mender.h"
#include "recovery/worker/copy_verifier.h"
#include "recovery/worker/scrubber.h"
#include "src/async/task.h"
#include "src/async/task_group.h"
#include "src/store/segment_store.h"

namespace rekindle::agent {

// Keeps the copies of this host right: verifies and scrubs them in the background, ends the reads
// of a copy that may be wrong, and has it mended. Control thread only.
class CopyHealth {
 public:
  struct Hooks {
    // VersionRetirement::drop().
    std::function<async::Task<Result<std::uint64_t>>(std::shared_ptr<const store::StoredVersion>)>
        drop;
    // Completes the copy in PullRequest::mend. The copy is served on return.
    std::function<async::Task<Result<void>>(pull::PullRequest)> pull;
  };
  // Receives what CopyMender::Hooks::event reports.
  using OnEvent = std::function<void(std::string kind, const ModelVersion& id, std::string why)>;

  CopyHealth(boost::asio::any_io_executor executor, AgentParts parts, worker::ScrubOptions scrub,
             Hooks hooks);

  // From here on copies are looked at, verified and read again in the background.
  void start();
  async::Task<void> close(std::chrono::milliseconds deadline);
  // As ScrubOptions::every.
  void set_scrub_interval(std::chrono::milliseconds every) { scrubber_.set_interval(every); }
  void tell_events(OnEvent on_event) { on_event_ = std::move(on_event); }

  worker::CopyVerifier& verifier() { return verifier_; }
  // Before a copy of the store is used. kCorrupt: it does not verify, and mending it has ended, so
  // that its place is free.
  async::Task<Result<void>> require_settled(std::shared_ptr<const store::StoredVersion> stored);
  // Reads all copies of a version again, now, and mends wrong ones where peers can help. kNotFound:
  // there is none.
  async::Task<Result<std::vector<proto::CopyStatus>>> verify(ModelVersion id);
  // Whole copies here, and those that are set aside.
  std::vector<proto::CopyStatus> statuses() const;
  const worker::ScrubTotals& scrubbed() const { return scrubber_.totals(); }

 private:
  worker::CopyVerifier::Hooks verifier_hooks();
  CopyMender::Hooks mender_hooks(Hooks hooks);

  const AgentParts parts_;
  OnEvent on_event_;
  // Sessions that end because a file has changed.
  async::TaskGroup ending_;
  CopyMender mender_;
  worker::CopyVerifier verifier_;
  worker::Scrubber scrubber_;
  bool closing_ = false;
};

}  // namespace rekindle::agent
