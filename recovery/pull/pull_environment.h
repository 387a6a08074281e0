#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "proto/common.pb.h"
#include "recovery/rpc/rpc.h"
#include "recovery/swarm/held_tiles.h"
#include "src/async/task.h"
#include "src/base/worker_pool.h"
#include "src/store/segment_store.h"
#include "transport/engine.h"
#include "transport/path.h"

namespace rekindle::pull {

// What a pull uses of the agent that runs it. Owned by the agent, outlives every pull.
struct PullEnvironment {
  boost::asio::any_io_executor executor;  // the control thread
  rpc::Identity identity;
  proto::NodeAddress self;
  store::SegmentStore* store = nullptr;
  transport::Engine* engine = nullptr;
  WorkerPool* digest_pool = nullptr;
  WorkerPool* blocking_pool = nullptr;
  std::vector<transport::Connector*> connectors;
  std::vector<transport::HandshakeConnector*> handshakes;
  // The live connection to the coordinator, or nullptr while there is none.
  std::function<std::shared_ptr<rpc::RpcClient>()> coordinator;
  bool has_coordinator = false;  // one is configured
  // A copy is being filled: what `held` lists of it may be served from here on, also after its
  // commit. `for_round`: devices may write to it before the pull fetches anything. Empty: nothing
  // is served here.
  std::function<void(const store::PendingVersion&, std::shared_ptr<const swarm::HeldTiles> held,
                     bool for_round)>
      share;
  // It will not be committed: when this returns nobody reads it any more.
  std::function<async::Task<void>(ModelVersion id, Digest root, Digest layout)> unshare;
  // Lets go of older versions of the model until `missing` is 0. An error says which stay, and why.
  std::function<async::Task<Result<void>>(ModelVersion wanted,
                                          std::function<std::uint64_t()> missing)>
      make_room;
  // Before a copy that is here already is used. kCorrupt: it does not verify, and is not to be
  // used; nobody is at work on its files any more. Empty: nobody can tell.
  std::function<async::Task<Result<void>>(std::shared_ptr<const store::StoredVersion>)>
      require_verified;
  // Why coordinator() is nullptr, naming its address.
  std::function<Error()> coordinator_problem;
};

}  // namespace rekindle::pull
