#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "proto/agent.pb.h"
#include "recovery/agent/peer_sessions.h"
#include "recovery/agent/served_versions.h"
#include "recovery/rpc/methods.h"
#include "recovery/rpc/peer_budgets.h"
#include "recovery/rpc/rpc.h"
#include "src/async/task.h"
#include "src/base/worker_pool.h"

namespace rekindle::agent {

// Answers pullers with pages of metadata: tensor sets, layouts, tile digests and the small files of
// a checkpoint. The last few are kept as bytes, so that the pages of a 30 MB tensor set are cut
// from one serialization. Control thread only.
class MetadataPages {
 public:
  MetadataPages(const rpc::Identity& identity, ServedVersions& served, WorkerPool& digest_pool)
      : identity_(identity), served_(served), digest_pool_(digest_pool) {}

  // `readable`: roots whose metadata the caller may read. nullptr: all.
  Result<void> check(const std::set<Digest>* readable, const proto::GetPageRequest& request) const;
  async::Task<Result<proto::GetPageResponse>> get(proto::GetPageRequest request);

 private:
  struct Key {
    int kind = 0;
    Digest digest;
    std::string name;
    bool operator==(const Key&) const = default;
  };
  using Blob = std::shared_ptr<const std::string>;
  Blob find(const Key& key);
  Blob keep(const Key& key, std::string blob);
  Result<std::string> serialize(const proto::GetPageRequest& request) const;
  async::Task<Result<std::string>> read_file(proto::GetPageRequest request);
  Error not_held(const proto::GetPageRequest& request) const;

  const rpc::Identity& identity_;
  ServedVersions& served_;
  WorkerPool& digest_pool_;
  // The one that was used last comes first. Only verified bytes are kept.
  std::list<std::pair<Key, Blob>> kept_;
};

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
  async::Task<Result<proto::ProveRangesResponse>> prove_ranges(rpc::Peer peer,
                                                               proto::ProveRangesRequest request,
                                                               rpc::Events events);
  async::Task<Result<void>> feed_have(SessionToken token, CopyKey copy, rpc::Events events);
  async::Task<Result<proto::GetPageResponse>> get_page(rpc::Peer peer,
                                                       proto::GetPageRequest request);
  proto::Grant direct_grant(const rpc::Peer& puller, const Digest& root);

  const rpc::Identity& identity_;
  ServedVersions& served_;
  GrantClock& grant_clock_;
  WorkerPool& digest_pool_;
  const std::function<async::Task<Result<void>>(rpc::Peer, std::string model)> may_read_;
  PeerSessions sessions_;
  MetadataPages pages_;
  rpc::RateBudgets rates_;
  std::uint64_t next_serial_ = 1;
};

}  // namespace rekindle::agent
