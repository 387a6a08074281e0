#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "proto/agent.pb.h"
#include "recovery/agent/grant_clock.h"
#include "recovery/agent/page_cache.h"
#include "recovery/agent/served_versions.h"
#include "recovery/rpc/methods.h"
#include "recovery/rpc/rpc.h"
#include "src/base/worker_pool.h"
#include "transport/registry.h"

namespace rekindle::agent {

struct PeerServiceOptions {
  std::uint64_t max_bytes_per_second = 0;  // per puller; 0 = what the grant says
  std::size_t max_pullers = 64;
  std::function<std::string()> advertised_host;  // for the transports' endpoints
  std::string tcp_endpoint;                      // instead of the TCP server's own; "" = its own
  // Waits so long for a copy that is not known to be right; an error refuses it. With 0 its
  // verification begins all the same.
  std::function<async::Task<Result<void>>(std::shared_ptr<const store::StoredVersion>,
                                          std::chrono::milliseconds)>
      require_verified;
};

// Answers other agents and pullers: pages of metadata, sessions, digests of ranges. Keys leave this
// process only in open_session, against a grant. Control thread only.
class PeerService {
 public:
  PeerService(const rpc::Identity& identity, ServedVersions& served, GrantClock& grant_clock,
              transport::SegmentRegistry& registry, std::vector<transport::Server*> servers,
              WorkerPool& digest_pool, WorkerPool& blocking_pool, PeerServiceOptions options);

  void install(rpc::RpcServer& server);
  std::size_t session_count() const { return sessions_.size(); }
  std::uint32_t session_count(const ModelVersion& id) const;
  // Ends every session that reads this version (in this layout), and waits until none can touch its
  // memory.
  async::Task<void> end_sessions_of(ModelVersion id, std::optional<Digest> layout = std::nullopt);
  // Waits for sessions that are ending: the servers must live until then.
  async::Task<void> drain(std::chrono::milliseconds deadline);

 private:
  struct OpenSession {
    std::string connection;  // the session ends with the control connection that opened it
    CopyKey copy;
    std::string puller;
    bool watched = false;  // a call tells its puller what a copy that is being filled holds
  };

  async::Task<Result<proto::OpenDirectResponse>> open_direct(rpc::Peer peer,
                                                             proto::OpenDirectRequest request,
                                                             rpc::Events events);
  async::Task<Result<proto::GetPageResponse>> get_page(rpc::Peer peer,
                                                       proto::GetPageRequest request,
                                                       rpc::Events events);
  async::Task<Result<proto::OpenSessionResponse>> open_session(rpc::Peer peer,
                                                               proto::OpenSessionRequest request,
                                                               rpc::Events events);
  async::Task<Result<proto::ConnectPathsResponse>> connect_paths(rpc::Peer peer,
                                                                 proto::ConnectPathsRequest request,
                                                                 rpc::Events events);
  async::Task<Result<proto::CloseSessionResponse>> close_session(rpc::Peer peer,
                                                                 proto::CloseSessionRequest request,
                                                                 rpc::Events events);
  async::Task<Result<proto::WatchHaveResponse>> watch_have(rpc::Peer peer,
                                                           proto::WatchHaveRequest request,
                                                           rpc::Events events);
  async::Task<Result<proto::ProveRangesResponse>> prove_ranges(rpc::Peer peer,
                                                               proto::ProveRangesRequest request,
                                                               rpc::Events events);
  // What a page is cut from. Only bytes that are known to be right: they are cached.
  Result<std::string> make_blob(const proto::GetPageRequest& request) const;
  async::Task<Result<std::string>> read_file(proto::GetPageRequest request);
  Error not_held(const proto::GetPageRequest& request) const;
  Result<void> admit(const rpc::Peer& peer, const proto::OpenSessionRequest& request,
                     const Served*& served) const;
  async::Task<Result<void>> require_verified(CopyKey key, std::chrono::milliseconds patience);
  async::Task<void> end_session(SessionToken token);
  static std::string connection_of(const rpc::Peer& peer);
  void on_disconnect(const rpc::Peer& peer);

  const rpc::Identity& identity_;
  ServedVersions& served_;
  GrantClock& grant_clock_;
  transport::SegmentRegistry& registry_;
  const std::vector<transport::Server*> servers_;
  WorkerPool& digest_pool_;
  WorkerPool& blocking_pool_;
  const PeerServiceOptions options_;
  boost::asio::any_io_executor executor_;
  PageCache pages_;
  std::map<SessionToken, OpenSession> sessions_;
  std::uint64_t next_serial_ = 1;
  int ending_ = 0;
};

}  // namespace rekindle::agent
