#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/coordinator/core/core.h"
#include "recovery/coordinator/round_log.h"
#include "recovery/coordinator/wire.h"
#include "recovery/rpc/notifier.h"
#include "recovery/rpc/rpc.h"

namespace rekindle::coordinator {

// The coordinator's calls, served from a Core. On the executor's one thread; must outlive the
// server's close().
class Service {
 public:
  Service(boost::asio::any_io_executor executor, Core& core, Issuer issuer, const Timing& timing);
  void attach(rpc::RpcServer& server);
  // After the core was told the time: who waits for a change of the rounds hears of it.
  void wake_waiters();

 private:
  Result<proto::RegisterResponse> enroll(const rpc::Peer& peer,
                                         const proto::RegisterRequest& request);
  Result<proto::HeartbeatResponse> heartbeat(const rpc::Peer& peer,
                                             const proto::HeartbeatRequest& request);
  Result<proto::AnnounceResponse> announce(const rpc::Peer& peer,
                                           const proto::AnnounceRequest& request);
  Result<proto::PublishResponse> publish(const rpc::Peer& peer,
                                         const proto::PublishRequest& request);
  Result<proto::ResolveResponse> resolve(const rpc::Peer& peer,
                                         const proto::ResolveRequest& request);
  Result<proto::OpenPullResponse> open_pull(const rpc::Peer& peer,
                                            const proto::OpenPullRequest& request);
  Result<proto::PullProgressResponse> pull_progress(const rpc::Peer& peer,
                                                    const proto::PullProgressRequest& request);
  Result<proto::ClosePullResponse> close_pull(const rpc::Peer& peer,
                                              const proto::ClosePullRequest& request);
  Result<proto::ClusterStatusResponse> status(const rpc::Peer& peer,
                                              const proto::ClusterStatusRequest& request);
  Result<proto::DrainResponse> drain(const rpc::Peer& peer, const proto::DrainRequest& request);
  Result<proto::RankResponse> report_rank(const rpc::Peer& peer, const proto::RankReport& request);
  Result<proto::RetireResponse> retire(const rpc::Peer& peer, const proto::RetireRequest& request);
  Result<proto::LetGoResponse> let_go(const rpc::Peer& peer, const proto::LetGoRequest& request);
  // These wait, at most as long as their caller wants and 5 s.
  rpc::Task<Result<std::string>> begin_update(std::string body);
  rpc::Task<Result<std::string>> report_round(rpc::Peer peer, std::string body);
  rpc::Task<Result<std::string>> update_status(std::string body);
  proto::RoundOrders orders_of(const std::string& node_id) const;

  template <typename Request, typename Response>
  void serve(rpc::RpcServer& server, proto::Method method,
             Result<Response> (Service::*handler)(const rpc::Peer&, const Request&));

  Core& core_;
  const Issuer issuer_;
  const Timing timing_;
  rpc::Notifier rounds_changed_;
  std::uint64_t told_revision_ = 0;
  RoundLog round_log_;
};

}  // namespace rekindle::coordinator
