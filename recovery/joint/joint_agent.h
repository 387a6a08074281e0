#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "proto/coordinator.pb.h"
#include "recovery/rpc/rpc.h"
#include "recovery/trace/tracer.h"
#include "src/async/task.h"
#include "src/base/digest.h"
#include "src/base/worker_pool.h"
#include "src/store/segment_store.h"
#include "src/tensor/checkpoint.h"

namespace rekindle::joint {

// What joint publications need of their agent. Control thread only; outlives them.
class JointAgent {
 public:
  virtual ~JointAgent() = default;

  virtual const rpc::Identity& identity() const = 0;
  virtual store::SegmentStore& store() = 0;
  virtual WorkerPool& blocking_pool() = 0;
  virtual WorkerPool& digest_pool() = 0;
  // nullptr: no spans are left.
  virtual trace::Tracer* tracer() const { return nullptr; }

  // Reports the ranks of this agent, and returns the roster: the coordinator's, or, without one,
  // that of this agent alone. kUnavailable, kPeerLost, kTimeout: ask again. Other errors are final.
  virtual async::Task<Result<proto::JointRoster>> report_ranks(proto::JointReport report) = 0;
  // By the keys of this agent, if it signs for its workers.
  virtual std::vector<VersionSignature> sign(const ModelVersion& id, const Digest& root) const = 0;
  // kDenied: the version needs a signature of another publisher.
  virtual Result<void> check_trusted(const Checkpoint& checkpoint) const = 0;
  // Claims the version for its root, and for the layouts that together hold it.
  virtual async::Task<Result<void>> claim(std::shared_ptr<const Checkpoint> checkpoint,
                                          std::vector<Digest> layouts) = 0;
  // Serves a committed copy and announces it.
  virtual async::Task<Result<void>> serve(std::shared_ptr<const store::StoredVersion> stored) = 0;
  // kStale: the version is on its way out of this host.
  virtual Result<void> check_not_retiring(const ModelVersion& id) const = 0;
};

}  // namespace rekindle::joint
