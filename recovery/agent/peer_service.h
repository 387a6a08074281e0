#pragma once

#include <cstdint>

#include "proto/agent.pb.h"
#include "recovery/agent/metadata_pages.h"
#include "recovery/agent/peer_sessions.h"
#include "recovery/rpc/methods.h"
#include "recovery/rpc/rpc.h"

namespace rekindle::agent {

// Routes the calls of other agents and pullers to sessions and metadata, and answers the others
// itself: direct pulls (--from), tiles of copies that are being filled, and proofs of ranges.
// Control thread only.
class PeerService {
 public:
  PeerService(boost::asio::any_io_executor executor, PeerSessions::Parts parts,
              WorkerPool& digest_pool, PeerSessions::Options options);

  void install(rpc::RpcServer& server);
  PeerSessions& sessions() { return sessions_; }

 private:
  async::Task<Result<proto::OpenDirectResponse>> open_direct(rpc::Peer peer,
                                                             proto::OpenDirectRequest request);
  async::Task<Result<proto::WatchHaveResponse>> watch_have(rpc::Peer peer,
                                                           proto::WatchHaveRequest request,
                                                           rpc::Events events);
  async::Task<Result<proto::ProveRangesResponse>> prove_ranges(proto::ProveRangesRequest request);
  async::Task<Result<void>> feed_have(SessionToken token, CopyKey copy, rpc::Events events);
  proto::Grant direct_grant(const rpc::Peer& puller, const Digest& root);

  const rpc::Identity& identity_;
  ServedVersions& served_;
  GrantClock& grant_clock_;
  WorkerPool& digest_pool_;
  PeerSessions sessions_;
  MetadataPages pages_;
  std::uint64_t next_serial_ = 1;
};

}  // namespace rekindle::agent
