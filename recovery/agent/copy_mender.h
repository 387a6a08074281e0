#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "proto/common.pb.h"
#include "recovery/agent/served_versions.h"
#include "recovery/pull/pull_types.h"
#include "recovery/worker/copy_verifier.h"
#include "src/async/task.h"
#include "src/async/task_group.h"
#include "src/base/worker_pool.h"
#include "src/store/segment_store.h"

namespace rekindle::agent {

// Mends copies that do not verify. The copy leaves the list, so that nobody reads it. Then a pull
// brings its wrong tiles from peers into the same files and commits it again. Where that would not
// last (somebody may write to the files, their memory cannot be read, or the copy has been mended
// before), the copy is dropped and all of it is pulled into new files. Without a peer the rest of
// the copy is kept aside, and mended later. Control thread only; must outlive its calls.
class CopyMender {
 public:
  struct Hooks {
    // Ends the announcement and the reads of a copy.
    std::function<async::Task<void>(CopyKey)> hide;
    std::function<async::Task<Result<std::uint64_t>>(std::shared_ptr<const store::StoredVersion>)>
        drop;
    // Completes the copy in PullRequest::mend. The copy is served on return.
    std::function<async::Task<Result<void>>(pull::PullRequest)> pull;
    // `kind` is copy_rotten, copy_mended or copy_lost.
    std::function<void(std::string kind, const ModelVersion& id, std::string why)> event;
  };
  CopyMender(boost::asio::any_io_executor executor, store::SegmentStore& store,
             WorkerPool& blocking_pool, Hooks hooks);

  // Returns when nobody reads the copy any more. The copy is mended in the background.
  async::Task<void> replace(std::shared_ptr<const store::StoredVersion> copy,
                            worker::CopyVerifier::BadCopy bad);
  // Mends copies of the version that wait for their next try at once. Returns when each of them is
  // mended, or cannot be mended now.
  async::Task<void> settle(ModelVersion id);
  // Adds copies that are off the list, and completes the entries of the others.
  void add_status(std::vector<proto::CopyStatus>& copies) const;
  async::Task<bool> close(std::chrono::milliseconds deadline);

 private:
  struct Case {
    enum class State { kMending, kWaiting, kMended, kLost };
    State state = State::kMending;
    std::string directory;
    std::uint64_t bytes = 0;
    // Why the copy is wrong.
    std::string found;
    std::string outcome;
    std::uint32_t tries = 0;
    // How often this copy was found wrong since the agent started.
    int times = 0;
  };
  using CasePtr = std::shared_ptr<Case>;
  static std::string_view word_for(Case::State state);
  async::Task<Result<store::SetAside>> set_aside(std::shared_ptr<const store::StoredVersion> copy,
                                                 std::vector<TileIndex> bad);
  // Of the copy, while it waits for its next try.
  enum class Kept { kAside, kNothing };
  async::Task<void> mend(CopyKey key, CasePtr one, std::shared_ptr<const store::SetAside> rest,
                         Kept kept);
  void settle_as(const CopyKey& key, Case& one, Case::State state, std::string outcome);

  const boost::asio::any_io_executor executor_;
  store::SegmentStore& store_;
  WorkerPool& blocking_pool_;
  const Hooks hooks_;
  // The newest case of each copy.
  std::map<CopyKey, CasePtr> cases_;
  async::Notifier changed_;
  async::Notifier hurry_;
  async::TaskGroup tasks_;
};

}  // namespace rekindle::agent
