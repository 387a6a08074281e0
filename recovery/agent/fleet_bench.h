#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "proto/drill.pb.h"
#include "recovery/agent/peer_sessions.h"
#include "recovery/agent/rdma.h"
#include "recovery/pull/pull_environment.h"
#include "recovery/pull/source_table.h"
#include "recovery/rpc/rpc.h"
#include "src/async/task.h"
#include "transport/registry.h"

namespace rekindle::agent {

// The agent's part in `rekindle bench fleet`: it lends memory to readers, and reads from others.
// The reads take the way of a pull: a session, paths and the transfer engine. Control thread only.
class FleetBench {
 public:
  // `rdma`: nullptr if this host has none.
  FleetBench(const pull::PullEnvironment& environment, PeerSessions& sessions,
             transport::SegmentRegistry& registry, const Rdma* rdma);

  async::Task<Result<proto::DrillResponse>> answer(rpc::Peer peer, proto::DrillRequest request);

 private:
  class Memory;
  class Lent;

  async::Task<Result<proto::DrillResponse>> open(rpc::Peer peer,
                                                 proto::DrillRequest::OpenBench request);
  async::Task<Result<proto::BenchReading>> read(proto::DrillRequest::BenchRead request);
  async::Task<Result<proto::BenchReading>> read_from(proto::NodeAddress source,
                                                     std::chrono::milliseconds time,
                                                     std::string transport);
  async::Task<Result<proto::BenchReading>> read_over(pull::ActiveSource& source,
                                                     std::chrono::milliseconds time,
                                                     std::string transport);

  const pull::PullEnvironment& environment_;
  PeerSessions& sessions_;
  // Not owned. It ends with this object, as far as the lent memory is concerned.
  const std::shared_ptr<transport::SegmentRegistry> registry_;
  const Rdma* const rdma_;
  // All readers share it. It exists while one of their sessions does.
  std::weak_ptr<const Lent> lent_;
  bool reading_ = false;
};

}  // namespace rekindle::agent
