#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "proto/coordinator.pb.h"
#include "recovery/coordinator/access_control.h"
#include "recovery/coordinator/committer.h"
#include "recovery/coordinator/coordinator_wire.h"
#include "recovery/coordinator/core/core.h"
#include "recovery/coordinator/core/fleet_watch.h"
#include "recovery/rpc/peer_budgets.h"
#include "recovery/rpc/rpc.h"

namespace rekindle::coordinator {

// Lets answers out only while this coordinator may give them (see TermOptions::may_answer). Must
// outlive the server's close().
class AnswerGate {
 public:
  explicit AnswerGate(std::function<Result<void>()> may_answer)
      : may_answer_(std::move(may_answer)) {}

  Result<void> check() const { return may_answer_ ? may_answer_() : Result<void>(); }

  // Serves calls that wait. They are checked before they begin and before their answer goes out.
  using Handler = std::function<async::Task<Result<std::string>>(rpc::Peer, std::string)>;
  void serve(rpc::RpcServer& server, proto::Method method, Handler handler) const {
    server.handle(method,
                  [this, handler = std::move(handler)](const rpc::Peer& peer, std::string body,
                                                       const std::shared_ptr<rpc::EventSink>&) {
                    return checked(handler(peer, std::move(body)));
                  });
  }

 private:
  async::Task<Result<std::string>> checked(async::Task<Result<std::string>> answer) const {
    CO_TRY_VOID(check());
    auto body = co_await std::move(answer);
    CO_TRY_VOID(check());
    co_return body;
  }

  const std::function<Result<void>()> may_answer_;
};

// The coordinator's calls, but those of broadcast rounds (RoundService) and joint publications
// (JointService), served from a Core. On the executor's one thread; must outlive the server's
// close().
class CoordinatorService {
 public:
  struct Options {
    GrantSigner& signer;
    Timing timing;
    // See TermOptions.
    std::function<Result<void>()> may_answer;
    trace::Tracer* tracer = nullptr;
    // nullptr: everybody may read everything.
    AccessControl* access = nullptr;
  };
  // How many spans of pulls that no coordinator opened are kept, so that many of these do not push
  // out the spans of all other operations.
  class Allowance {
   public:
    bool take(std::uint64_t spans, TimePoint now) {
      constexpr double kPerSecond = 4;
      constexpr double kMost = 512;
      const double gained = std::chrono::duration<double>(now - last_).count() * kPerSecond;
      left_ = std::min(kMost, left_ + gained);
      last_ = now;
      if (static_cast<double>(spans) > left_) return false;
      left_ -= static_cast<double>(spans);
      return true;
    }

   private:
    double left_ = 0;
    TimePoint last_{};
  };

  CoordinatorService(Core& core, FleetWatch& watch, Committer& committer, Options options);
  void attach(rpc::RpcServer& server);

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
  // Whether a line that this peer can cause at will may go to the log.
  bool may_log(const rpc::Peer& peer);
  void note_replacement(const rpc::Peer& peer, const NodeInfo& info, const std::string& replaces);
  // The events which a host may tell.
  std::vector<FleetEvent> admissible(const rpc::Peer& peer, std::vector<FleetEvent> told);
  // Those of the versions that the peer has made known by announcing them go to the audit log.
  void note_announced(const rpc::Peer& peer, const std::vector<ModelVersion>& unknown);
  // Whether spans of a pull that was never opened are kept.
  bool takes_unopened(const rpc::Peer& peer, int spans);
  void keep_spans(const rpc::Peer& peer, const proto::ClosePullRequest& request);
  Result<proto::ClusterStatusResponse> status(const rpc::Peer& peer,
                                              const proto::ClusterStatusRequest& request);
  Result<proto::WhoamiResponse> whoami(const rpc::Peer& peer, const proto::WhoamiRequest& request);
  Result<proto::AuthorizeResponse> authorize(const rpc::Peer& peer,
                                             const proto::AuthorizeRequest& request);
  Result<proto::RankResponse> report_rank(const rpc::Peer& peer, const proto::RankReport& request);
  Result<proto::TraceResponse> find_trace(const rpc::Peer& peer,
                                          const proto::TraceRequest& request);
  Result<proto::LetGoResponse> let_go(const rpc::Peer& peer, const proto::LetGoRequest& request);
  // These wait until their changes are durable.
  async::Task<Result<proto::RegisterResponse>> enroll(rpc::Peer peer,
                                                      proto::RegisterRequest request);
  async::Task<Result<proto::AnnounceResponse>> announce(rpc::Peer peer,
                                                        proto::AnnounceRequest request);
  async::Task<Result<proto::PublishResponse>> publish(rpc::Peer peer,
                                                      proto::PublishRequest request);
  async::Task<Result<proto::RetireResponse>> retire(rpc::Peer peer, proto::RetireRequest request);
  async::Task<Result<proto::DrainResponse>> drain(rpc::Peer peer, proto::DrainRequest request);

  template <typename Request, typename Response>
  void serve(rpc::RpcServer& server, proto::Method method,
             Result<Response> (CoordinatorService::*handler)(const rpc::Peer&, const Request&));
  template <typename Request, typename Response>
  void serve_durably(rpc::RpcServer& server, proto::Method method,
                     async::Task<Result<Response>> (CoordinatorService::*handler)(rpc::Peer,
                                                                                  Request));

  Core& core_;
  FleetWatch& watch_;
  Committer& committer_;
  const Options options_;
  Allowance unopened_;
  // The part of it of each peer.
  rpc::RateBudgets unopened_of_;
  // Of lines in the log and of events.
  rpc::RateBudgets rates_;
  const AnswerGate gate_;
};

}  // namespace rekindle::coordinator
