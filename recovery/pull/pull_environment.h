#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "proto/common.pb.h"
#include "recovery/pull/pull_types.h"
#include "recovery/rpc/rpc.h"
#include "recovery/swarm/have_feed.h"
#include "recovery/trace/tracer.h"
#include "src/async/task.h"
#include "src/base/worker_pool.h"
#include "src/store/segment_store.h"
#include "transport/engine.h"
#include "transport/link_cuts.h"
#include "transport/path.h"

namespace rekindle::pull {

class PullMetrics;
class PullPlans;

// The parts of the agent that a pull uses. The agent owns them; they outlive every pull.
struct PullEnvironment {
  boost::asio::any_io_executor executor;  // the control thread
  rpc::Identity identity;
  proto::NodeAddress self;
  store::SegmentStore* store = nullptr;
  transport::Engine* engine = nullptr;
  WorkerPool* digest_pool = nullptr;
  WorkerPool* blocking_pool = nullptr;
  PullPlans* plans = nullptr;
  // nullptr: every publisher is trusted.
  const PublisherTrust* trust = nullptr;
  // nullptr: nobody asks for metrics.
  PullMetrics* metrics = nullptr;
  // nullptr: pulls leave no spans.
  trace::Tracer* tracer = nullptr;
  // nullptr: no drill may cut links.
  transport::LinkCuts* links = nullptr;
  std::vector<transport::Connector*> connectors;
  // For pulls that demand encryption: TCP streams with TLS.
  transport::Connector* encrypting = nullptr;
  std::vector<transport::HandshakeConnector*> handshakes;
  // All rails of `handshakes` are safe without encryption.
  bool trusts_rails = false;
  // The live connection to the coordinator, or nullptr while there is none.
  std::function<std::shared_ptr<rpc::RpcClient>()> coordinator;
  bool has_coordinator = false;  // one is configured
  // Makes this puller a source: serves the tiles in `held` of a copy that is being filled, from
  // here on and after its commit. `for_round`: devices may write to the copy before the pull
  // fetches anything. Empty: this process serves nothing.
  std::function<void(const store::PendingVersion&, std::shared_ptr<const swarm::HeldTiles> held,
                     bool for_round)>
      share;
  // Ends that for a copy that will not be committed. When this returns, the copy has no readers.
  std::function<async::Task<void>(ModelVersion id, Digest root, Digest layout)> unshare;
  // Lets go of older versions of the model until `missing` is 0. An error says which stay, and why.
  std::function<async::Task<Result<void>>(ModelVersion wanted,
                                          std::function<std::uint64_t()> missing)>
      make_room;
  // Checks a copy of the own store before a pull returns it. kCorrupt: its bytes are wrong, and
  // nobody works on its files any more. Empty: no copy is checked.
  std::function<async::Task<Result<void>>(std::shared_ptr<const store::StoredVersion>)>
      require_verified;
  // The NUMA node that will read the copy most; -1: unknown. Empty: always unknown.
  std::function<int(const PullRequest&)> numa_node;
  // Why coordinator() is nullptr. Names its address.
  std::function<Error()> coordinator_problem;
};

}  // namespace rekindle::pull
