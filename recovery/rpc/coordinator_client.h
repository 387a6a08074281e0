#pragma once

#include <chrono>
#include <memory>
#include <utility>

#include "proto/coordinator.pb.h"
#include "recovery/rpc/rpc.h"

namespace rekindle::rpc {

// The coordinator's calls, typed. Reconnecting (with a bounded back-off) is the owner's: make a new
// one from a new connection, register, announce everything.
class CoordinatorClient {
 public:
  CoordinatorClient() = default;  // not connected
  explicit CoordinatorClient(std::shared_ptr<RpcClient> client) : client_(std::move(client)) {}

  static async::Task<Result<CoordinatorClient>> connect(std::string address, Identity identity,
                                                        std::chrono::milliseconds deadline) {
    CO_TRY(auto client,
           co_await RpcClient::connect(std::move(address), std::move(identity), deadline));
    if (client->peer().role != proto::ROLE_COORDINATOR) {
      co_return fail(ErrorCode::kInvalid, "{} is not a coordinator", client->peer().address);
    }
    co_return CoordinatorClient(std::move(client));
  }

  const std::shared_ptr<RpcClient>& client() const { return client_; }
  bool connected() const { return client_ && client_->connected(); }

  using Deadline = std::chrono::milliseconds;
  async::Task<Result<proto::RegisterResponse>> register_node(proto::RegisterRequest request,
                                                             Deadline deadline) const {
    return call<proto::RegisterResponse>(client_, proto::COORDINATOR_REGISTER, std::move(request),
                                         deadline);
  }
  async::Task<Result<proto::HeartbeatResponse>> heartbeat(proto::HeartbeatRequest request,
                                                          Deadline deadline) const {
    return call<proto::HeartbeatResponse>(client_, proto::COORDINATOR_HEARTBEAT, std::move(request),
                                          deadline);
  }
  async::Task<Result<proto::AnnounceResponse>> announce(proto::AnnounceRequest request,
                                                        Deadline deadline) const {
    return call<proto::AnnounceResponse>(client_, proto::COORDINATOR_ANNOUNCE, std::move(request),
                                         deadline);
  }
  async::Task<Result<proto::PublishResponse>> publish(proto::PublishRequest request,
                                                      Deadline deadline) const {
    return call<proto::PublishResponse>(client_, proto::COORDINATOR_PUBLISH, std::move(request),
                                        deadline);
  }
  async::Task<Result<proto::OpenPullResponse>> open_pull(proto::OpenPullRequest request,
                                                         Deadline deadline) const {
    return call<proto::OpenPullResponse>(client_, proto::COORDINATOR_OPEN_PULL, std::move(request),
                                         deadline);
  }
  async::Task<Result<proto::PullProgressResponse>> pull_progress(proto::PullProgressRequest request,
                                                                 Deadline deadline) const {
    return call<proto::PullProgressResponse>(client_, proto::COORDINATOR_PULL_PROGRESS,
                                             std::move(request), deadline);
  }
  async::Task<Result<proto::ClosePullResponse>> close_pull(proto::ClosePullRequest request,
                                                           Deadline deadline) const {
    return call<proto::ClosePullResponse>(client_, proto::COORDINATOR_CLOSE_PULL,
                                          std::move(request), deadline);
  }
  async::Task<Result<proto::ClusterStatusResponse>> status(Deadline deadline) const {
    return call<proto::ClusterStatusResponse>(client_, proto::COORDINATOR_STATUS,
                                              proto::ClusterStatusRequest(), deadline);
  }
  async::Task<Result<proto::DrainResponse>> drain(proto::DrainRequest request,
                                                  Deadline deadline) const {
    return call<proto::DrainResponse>(client_, proto::COORDINATOR_DRAIN, std::move(request),
                                      deadline);
  }
  async::Task<Result<proto::RankResponse>> report_rank(proto::RankReport request,
                                                       Deadline deadline) const {
    return call<proto::RankResponse>(client_, proto::COORDINATOR_REPORT_RANK, std::move(request),
                                     deadline);
  }
  async::Task<Result<proto::RetireResponse>> retire(proto::RetireRequest request,
                                                    Deadline deadline) const {
    return call<proto::RetireResponse>(client_, proto::COORDINATOR_RETIRE, std::move(request),
                                       deadline);
  }
  async::Task<Result<proto::LetGoResponse>> let_go(proto::LetGoRequest request,
                                                   Deadline deadline) const {
    return call<proto::LetGoResponse>(client_, proto::COORDINATOR_LET_GO, std::move(request),
                                      deadline);
  }

 private:
  std::shared_ptr<RpcClient> client_;
};

}  // namespace rekindle::rpc
