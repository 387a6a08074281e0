#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "proto/coordinator.pb.h"
#include "recovery/device/device_order.h"
#include "recovery/joint/joint_publications.h"
#include "recovery/pull/pull_types.h"
#include "recovery/pull/pull_watch.h"
#include "recovery/rpc/rpc.h"
#include "recovery/worker/copy_verifier.h"
#include "recovery/worker/core/fleet_report.h"
#include "src/base/worker_pool.h"
#include "src/bucket/block_digests.h"
#include "src/bucket/contents.h"
#include "src/store/segment_store.h"
#include "transport/path.h"

// What the workers' service needs of its agent. Control thread only; all of it outlives the
// service.
namespace rekindle::worker {

// A process that publishes through the socket of the workers.
struct Publisher {
  std::uint32_t uid = 0;
  // 0: unknown.
  std::uint32_t pid = 0;
};

// The versions that this host has, and can get.
class CopyHost {
 public:
  virtual ~CopyHost() = default;

  virtual store::SegmentStore& store() = 0;
  virtual WorkerPool& blocking_pool() = 0;
  // The newest READY version of a model: the coordinator's, or, without one, this host's.
  // kNotFound.
  virtual async::Task<Result<ModelVersion>> newest(std::string model) = 0;
  // kStale: the version is about to be retired, so no new worker may have it.
  virtual Result<void> may_attach(const ModelVersion& id) const {
    (void)id;
    return {};
  }
  virtual async::Task<Result<std::shared_ptr<const store::StoredVersion>>> pull(
      pull::PullRequest request, pull::OnProgress progress, pull::PullWatch watch) = 0;
  virtual async::Task<Result<Digest>> publish(ModelVersion id, store::FilledSegments filled) = 0;
  // A publication, alone or with others, has ended.
  virtual void publication_ended(const Publisher& /*by*/, const ModelVersion& /*id*/,
                                 const Result<void>& /*outcome*/) {}
  // The root of a version of which a complete copy is here. nullopt: there is none.
  virtual std::optional<Digest> root_here(const ModelVersion& /*id*/) const { return std::nullopt; }
  // nullptr: this host takes no part in joint publications.
  virtual joint::JointPublications* joint() { return nullptr; }
  // Asked before each use of a copy in the store.
  virtual CopyVerifier& verifier() = 0;
};

// The coordinator, as far as it concerns workers.
class FleetHost {
 public:
  virtual ~FleetHost() = default;

  virtual bool has_fleet() const = 0;
  // The verdict on the rank's instance. kStale, kDenied, kInvalid: this rank does not belong to the
  // instance. kUnavailable: the coordinator does not know yet, ask again. Other errors: it could
  // not be asked.
  virtual async::Task<Result<InstanceVerdict>> report(RankReport report) = 0;

  // --- broadcast rounds, docs/internals/rounds.md
  // kUnavailable: there is no coordinator, or it is away.
  virtual async::Task<Result<proto::RoundOrders>> report_rounds(proto::RoundReport /*report*/) {
    co_return fail(ErrorCode::kUnavailable, "a round needs a coordinator");
  }
  virtual async::Task<Result<std::uint64_t>> begin_update(ModelVersion /*id*/,
                                                          std::string /*group*/,
                                                          std::chrono::milliseconds /*gather*/,
                                                          std::uint32_t /*members*/) {
    co_return fail(ErrorCode::kUnavailable, "an update needs a coordinator");
  }
  // Returns after `wait` at the latest, whether the round is over or not.
  virtual async::Task<Result<proto::RoundStatus>> update_status(
      std::uint64_t /*round*/, std::chrono::milliseconds /*wait*/) {
    co_return fail(ErrorCode::kUnavailable, "an update needs a coordinator");
  }
};

// The device process. Its answers come as device::DeviceEvents.
class DeviceHost {
 public:
  virtual ~DeviceHost() = default;

  // Has the device process fill a session's buckets on a GPU. Returns the worker's end of their
  // channel. The error says, in a line for the worker, why it has to fill its buckets itself.
  virtual Result<UniqueFd> serve_device(device::DeviceOrder order) {
    return fail(ErrorCode::kNotFound, "this agent has no {}", order.device);
  }
  virtual void tell_device(std::uint64_t /*session*/, const TileRuns& /*verified*/,
                           bool /*complete*/) {}
  virtual void end_device(std::uint64_t /*session*/, bool /*gone*/) {}

  // --- broadcast rounds
  virtual void spread_device(const device::SpreadOrder& /*order*/) {}
  virtual void stop_spread(std::uint64_t /*session*/, const std::string& /*why*/) {}
  virtual void make_meeting_id(std::uint64_t /*number*/) {}
  virtual std::string device_life() const { return {}; }

  // As DeviceLink::check_blocks().
  virtual void check_blocks(const std::string& device, std::vector<bucket::BlockFile> /*blocks*/,
                            std::function<void(Result<std::vector<Digest>>)> on_checked) {
    on_checked(fail(ErrorCode::kNotFound, "this agent has no {}", device));
  }

  // As DeviceLink::copy_block().
  virtual void copy_block(const std::string& device, bucket::BlockFile /*block*/,
                          std::string /*data*/,
                          std::function<void(Result<std::string>)> on_copied) {
    on_copied(fail(ErrorCode::kNotFound, "this agent has no {}", device));
  }

  // --- direct reads, docs/internals/devices.md

  // The homes of the rails that may write to this device's memory. kNotFound: this agent lets no
  // NIC do so. Other errors say why there are none for this device.
  virtual Result<std::vector<std::string>> homes_near(const std::string& /*device*/) {
    return fail(ErrorCode::kNotFound, "this agent lets no NIC write to GPUs");
  }
  // As HandshakeConnector::use_device_memory(). Any thread; blocks.
  virtual Result<transport::DeviceLanding> land_in_device(int /*fd*/, std::uint64_t /*bytes*/,
                                                          std::vector<std::string> /*homes*/) {
    return fail(ErrorCode::kUnavailable, "this agent lets no NIC write to GPUs");
  }
  virtual void bucket_landed(std::uint64_t /*session*/, std::size_t /*bucket*/) {}
  virtual void reads_over(std::uint64_t /*session*/, const std::string& /*why*/) {}
};

class Host : public CopyHost, public FleetHost, public DeviceHost {};

}  // namespace rekindle::worker
