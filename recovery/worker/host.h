#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <boost/asio/any_io_executor.hpp>

#include "proto/coordinator.pb.h"
#include "recovery/device/device_order.h"
#include "recovery/pull/pull_types.h"
#include "recovery/pull/pull_watch.h"
#include "recovery/rpc/rpc.h"
#include "recovery/worker/copy_verifier.h"
#include "src/base/worker_pool.h"
#include "src/bucket/contents.h"
#include "src/store/segment_store.h"

namespace rekindle::worker {

// One rank here, told to the coordinator: the ranks of an instance may live on several hosts.
struct RankWord {
  enum class State { kAttached, kLoaded, kFailed, kGone };
  std::string instance;
  std::uint64_t generation = 0;
  std::uint32_t rank = 0;
  std::uint32_t world = 1;
  std::string model;
  std::optional<std::uint64_t> version;  // asked for; nullopt: the newest
  std::optional<ModelVersion> has;       // what it was resolved to
  State state = State::kAttached;
  std::uint64_t sequence = 0;
  std::string why;  // of kFailed and kGone
};
// What the coordinator knows of all of them.
struct FleetWord {
  enum class State { kLoading, kCommitted, kUnfit };
  ModelVersion id;
  State state = State::kLoading;
  std::string why;         // of kUnfit: "rank 3 on b: the node died"
  std::uint64_t term = 0;  // the epoch of the coordinator that says so
};

// What workers need of the agent. Control thread only; outlives the service.
class Host {
 public:
  virtual ~Host() = default;

  virtual store::SegmentStore& store() = 0;
  virtual WorkerPool& blocking_pool() = 0;
  virtual WorkerPool& digest_pool() = 0;
  // The newest READY version of a model: the coordinator's, or, without one, this host's.
  // kNotFound.
  virtual async::Task<Result<ModelVersion>> newest(std::string model) = 0;
  // kStale: the version is being let go of, nobody new may have it.
  virtual Result<void> may_attach(const ModelVersion& id) const {
    (void)id;
    return {};
  }
  virtual async::Task<Result<std::shared_ptr<const store::StoredVersion>>> pull(
      pull::PullRequest request, pull::OnProgress progress, pull::PullWatch watch) = 0;
  // Whether there is a coordinator, and its answer to a rank's word. kStale, kDenied, kInvalid:
  // this rank is none of that instance. kUnavailable: it does not know yet, ask again. Anything
  // else: it could not be asked.
  virtual bool has_fleet() const = 0;
  virtual async::Task<Result<FleetWord>> report(RankWord word) = 0;
  virtual async::Task<Result<Digest>> publish(ModelVersion id, store::FilledSegments filled) = 0;
  // Asked before a copy of the store is used, each time.
  virtual CopyVerifier& verifier() = 0;

  // Has a session's buckets filled on a GPU: the worker's end of their channel. Otherwise the
  // error says, in a line for the worker, why it fills them itself.
  virtual Result<UniqueFd> serve_device(device::DeviceOrder order) {
    return fail(ErrorCode::kNotFound, "this agent has no {}", order.device);
  }
  virtual void tell_device(std::uint64_t /*session*/, const bucket::TileRuns& /*verified*/,
                           bool /*complete*/) {}
  virtual void end_device(std::uint64_t /*session*/, bool /*gone*/) {}

  // Broadcast rounds, docs/rounds.md. What the device process answers comes as
  // device::DeviceEvents.
  virtual void spread_device(const device::SpreadOrder& /*order*/) {}
  virtual void stop_spread(std::uint64_t /*session*/, const std::string& /*why*/) {}
  virtual void make_meeting_id(std::uint64_t /*number*/) {}
  virtual std::string device_life() const { return {}; }
  // kUnavailable: there is no coordinator, or it is away.
  virtual async::Task<Result<proto::RoundOrders>> report_rounds(proto::RoundReport /*report*/) {
    co_return fail(ErrorCode::kUnavailable, "a round needs a coordinator");
  }
  virtual async::Task<Result<std::uint64_t>> begin_update(ModelVersion /*id*/,
                                                          std::string /*group*/,
                                                          std::chrono::milliseconds /*gather*/) {
    co_return fail(ErrorCode::kUnavailable, "an update needs a coordinator");
  }
  // At the latest after `wait`, over or not.
  virtual async::Task<Result<proto::RoundStatus>> update_status(
      std::uint64_t /*round*/, std::chrono::milliseconds /*wait*/) {
    co_return fail(ErrorCode::kUnavailable, "an update needs a coordinator");
  }
};

}  // namespace rekindle::worker
