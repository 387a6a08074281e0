#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
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
#include "recovery/agent/puller_rights.h"
#include "recovery/agent/served_versions.h"
#include "recovery/rpc/rpc.h"
#include "src/async/task.h"
#include "src/async/task_group.h"
#include "src/base/worker_pool.h"
#include "transport/registry.h"

namespace rekindle::agent {

// The sessions in which pullers read the copies of this host. Checks who may open one, offers
// transports to it, and tracks the end of its last read. Keys leave this process only in open(),
// against a grant. Control thread only.
class PeerSessions {
 public:
  struct Parts {
    const rpc::Identity& identity;
    ServedVersions& served;
    GrantClock& grant_clock;
    transport::SegmentRegistry& registry;
    std::vector<transport::Server*> servers;
    WorkerPool& blocking_pool;
  };
  struct Limits {
    // For each puller. 0: only the cap of its grant.
    std::uint64_t max_bytes_per_second = 0;
    std::size_t max_pullers = 64;
    // Of one peer: a quarter of them, but as many as a host may have GPUs.
    std::size_t max_of_one_peer() const { return std::max<std::size_t>(8, max_pullers / 4); }
  };
  struct Options {
    Limits limits;
    // The host name in the endpoints of the transports.
    std::function<std::string()> advertised_host;
    // Instead of the TCP server's own endpoint; "" for its own.
    std::string tcp_endpoint;
    // Waits until a copy is verified, at most for the duration in the second argument. An error
    // refuses the copy. With 0 it only starts the verification. Empty: every copy counts as
    // verified.
    std::function<async::Task<Result<void>>(std::shared_ptr<const store::StoredVersion>,
                                            std::chrono::milliseconds)>
        require_verified;
    // Whether the caller may read a model by a direct pull, which no coordinator has granted.
    // Empty: everybody may who reaches this agent.
    std::function<async::Task<Result<void>>(rpc::Peer, std::string model)> may_read;
  };
  PeerSessions(boost::asio::any_io_executor executor, Parts parts, Options options);

  async::Task<Result<proto::OpenSessionResponse>> open(rpc::Peer peer,
                                                       proto::OpenSessionRequest request);
  // Registered memory without a copy.
  struct Readable {
    transport::RegionKey key;
    std::uint64_t bytes = 0;
    // Released when the last read of the session has ended.
    std::shared_ptr<const void> memory;
  };
  // kUnavailable: every place of a puller is taken, and this peer has its part of them, or it has
  // as many as one peer may have.
  Result<void> check_room(const rpc::Peer& peer) const;
  // A session that reads only this memory, over one of these transports.
  Result<proto::OpenSessionResponse> open_readable(const rpc::Peer& peer, Readable readable,
                                                   const std::vector<std::string>& transports);
  async::Task<Result<proto::ConnectPathsResponse>> connect_paths(
      rpc::Peer peer, proto::ConnectPathsRequest request);
  async::Task<Result<proto::CloseSessionResponse>> close(rpc::Peer peer,
                                                         proto::CloseSessionRequest request);
  // Ends every session that reads the version, in this layout or in any, and waits until none of
  // them can touch its memory.
  async::Task<void> end_all_of(ModelVersion id, std::optional<Digest> layout = std::nullopt);
  // A session ends with the control connection that opened it.
  void on_disconnect(const rpc::Peer& peer);
  // Waits for sessions that are ending. The transports' servers must live until then.
  async::Task<void> drain(std::chrono::milliseconds deadline);

  // What the connections of pullers may read.
  PullerRights& rights() { return rights_; }

  // For sessions that open from here on.
  void set_limits(const Limits& limits) { limits_ = limits; }

  std::size_t count() const { return sessions_.size(); }
  std::uint32_t count(const ModelVersion& id) const;
  bool contains(const SessionToken& token) const { return sessions_.contains(token); }
  // The copy that a session of this connection reads. kDenied: there is no such session.
  Result<CopyKey> copy_of(const SessionToken& token, const rpc::Peer& peer) const;
  // At most one call at a time follows what a copy that is being filled holds. False: one does.
  bool begin_watch(const SessionToken& token);
  void end_watch(const SessionToken& token);
  // Waits until a complete copy is verified. A copy that is being filled shows only verified tiles.
  async::Task<Result<void>> require_verified(CopyKey key, std::chrono::milliseconds patience);

 private:
  struct Session {
    std::string connection;
    CopyKey copy;
    std::string puller;
    bool watched = false;
    // Of a session that reads no copy.
    std::shared_ptr<const void> memory = nullptr;
    // The end of the puller's last grant. nullopt: only its connection ends the session.
    std::optional<TimePoint> grant_end = {};
    // This agent gave that grant, and gives the next.
    bool own_grant = false;
    // See rpc::budget_key().
    std::string budget_key = {};
  };
  // Whether the grant in the request gives the peer what it asks for. Returns the end of the grant.
  Result<std::optional<TimePoint>> check_grant(const rpc::Peer& peer,
                                               const proto::OpenSessionRequest& request) const;
  Result<proto::OpenSessionResponse> renew(const rpc::Peer& peer,
                                           const proto::OpenSessionRequest& request);
  // Ends each session whose grant has run out, until no session has a grant.
  async::Task<void> watch_grants();
  std::vector<SessionToken> without_grant() const;
  bool is_own(const proto::Grant& grant) const;
  Result<const Served*> admit(const rpc::Peer& peer,
                              const proto::OpenSessionRequest& request) const;
  // The answer to the puller, without regions. kUnavailable: there is no transport in common.
  Result<proto::OpenSessionResponse> offer(const transport::Session& session,
                                           const std::vector<std::string>& transports) const;
  async::Task<void> end(SessionToken token);

  const Parts parts_;
  PullerRights rights_;
  const Options options_;
  Limits limits_ = options_.limits;
  std::map<SessionToken, Session> sessions_;
  // How many sessions wait for the end of their reads.
  int ending_ = 0;
  async::Notifier ended_;
  bool watching_grants_ = false;
  // Ends the sessions that have lost their connection, or their grant.
  async::TaskGroup ending_alone_;
};

}  // namespace rekindle::agent
