#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <boost/asio/any_io_executor.hpp>

#include "recovery/coordinator/committer.h"
#include "recovery/coordinator/core/core.h"
#include "recovery/coordinator/round_log.h"
#include "recovery/coordinator/wire.h"
#include "recovery/rpc/rpc.h"
#include "src/async/notifier.h"

namespace rekindle::coordinator {

// The coordinator's calls, served from a Core. On the executor's one thread; must outlive the
// server's close().
class Service {
 public:
  struct Options {
    Issuer issuer;
    Timing timing;
    std::function<Result<void>()> may_answer;  // see TermOptions
  };
  Service(boost::asio::any_io_executor executor, Core& core, Committer& committer, Options options);
  void attach(rpc::RpcServer& server);
  // After the core was told the time: who waits for a change of the rounds hears of it.
  void wake_waiters();

 private:
  Result<proto::HeartbeatResponse> heartbeat(const rpc::Peer& peer,
                                             const proto::HeartbeatRequest& request);
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
  Result<proto::RankResponse> report_rank(const rpc::Peer& peer, const proto::RankReport& request);
  Result<proto::LetGoResponse> let_go(const rpc::Peer& peer, const proto::LetGoRequest& request);
  // These wait until what they change is durable.
  async::Task<Result<proto::RegisterResponse>> enroll(rpc::Peer peer,
                                                      proto::RegisterRequest request);
  async::Task<Result<proto::AnnounceResponse>> announce(rpc::Peer peer,
                                                        proto::AnnounceRequest request);
  async::Task<Result<proto::PublishResponse>> publish(rpc::Peer peer,
                                                      proto::PublishRequest request);
  async::Task<Result<proto::RetireResponse>> retire(rpc::Peer peer, proto::RetireRequest request);
  async::Task<Result<proto::DrainResponse>> drain(rpc::Peer peer, proto::DrainRequest request);
  // These wait, at most as long as their caller wants and 5 s.
  async::Task<Result<std::string>> begin_update(std::string body);
  async::Task<Result<std::string>> report_round(rpc::Peer peer, std::string body);
  async::Task<Result<std::string>> update_status(std::string body);
  proto::RoundOrders orders_of(const std::string& node_id) const;

  template <typename Request, typename Response>
  void serve(rpc::RpcServer& server, proto::Method method,
             Result<Response> (Service::*handler)(const rpc::Peer&, const Request&));
  template <typename Request, typename Response>
  void serve_durably(rpc::RpcServer& server, proto::Method method,
                     async::Task<Result<Response>> (Service::*handler)(rpc::Peer, Request));
  void serve_waiting(
      rpc::RpcServer& server, proto::Method method,
      std::function<async::Task<Result<std::string>>(rpc::Peer, std::string)> handler);
  // An answer that has waited, if it may still be given.
  async::Task<Result<std::string>> gated(async::Task<Result<std::string>> answer);
  Result<void> may_answer() const;

  Core& core_;
  Committer& committer_;
  const Options options_;
  async::Notifier rounds_changed_;
  std::uint64_t told_revision_ = 0;
  RoundLog round_log_;
};

}  // namespace rekindle::coordinator
