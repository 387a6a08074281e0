#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>

#include "proto/agent.pb.h"
#include "proto/coordinator.pb.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/credentials.h"
#include "recovery/rpc/methods.h"
#include "recovery/rpc/rpc.h"
#include "src/async/task.h"

namespace rekindle::rpc::testing {

// A member of the fleet that says it holds a version, and then holds up whoever asks it. Its
// metadata has 64 MiB, so it says, and comes in pages of 64 KiB, each after `page_delay`. No page
// is late, and all of them are zeros. It opens no session. Works on a thread of its own.
class DrippingSource {
 public:
  struct Options {
    std::string coordinator;
    ModelVersion version;
    // nullptr: without TLS.
    std::shared_ptr<Credentials> credentials;
    std::string node_id = "drip";
    std::chrono::milliseconds page_delay{800};
  };

  // Throws std::runtime_error if the coordinator does not take its announcement.
  explicit DrippingSource(Options options) : options_(std::move(options)) {
    identity_ = make_identity(proto::ROLE_AGENT, options_.node_id, options_.credentials);
    server_ = RpcServer::create(io_.get_executor(), identity_);
    handle<proto::AGENT_GET_PAGE>(
        *server_, [this](const Peer&, auto request, auto) { return drip(std::move(request)); });
    handle<proto::AGENT_OPEN_SESSION>(*server_, [this](const Peer&, auto request, auto) {
      return open_nothing(std::move(request));
    });
    const auto address = server_->listen("127.0.0.1:0");
    if (!address) throw std::runtime_error(address.error().message());
    address_ = *address;
    auto ready = ready_.get_future();
    boost::asio::co_spawn(io_, be_a_member(this), boost::asio::detached);
    thread_ = std::thread([this] { io_.run(); });
    const std::string problem =
        ready.wait_for(std::chrono::seconds(20)) == std::future_status::ready
            ? ready.get()
            : "the coordinator does not answer";
    if (problem.empty()) return;
    stop();
    throw std::runtime_error(problem);
  }
  ~DrippingSource() { stop(); }
  DrippingSource(const DrippingSource&) = delete;
  DrippingSource& operator=(const DrippingSource&) = delete;

  // Pages that pullers have asked for.
  int asked() const { return asked_; }

 private:
  static constexpr std::uint64_t kPageBytes = 64u << 10;
  static constexpr std::uint64_t kBlobBytes = 64u << 20;
  static constexpr std::chrono::seconds kDeadline{10};

  void stop() {
    boost::asio::post(io_, [this] {
      stopping_ = true;
      if (client_ != nullptr) client_->close();
    });
    boost::asio::co_spawn(io_, server_->close(std::chrono::seconds(5)), boost::asio::detached);
    if (thread_.joinable()) thread_.join();
  }

  async::Task<Result<proto::GetPageResponse>> drip(proto::GetPageRequest request) {
    ++asked_;
    co_await async::sleep_for(options_.page_delay);
    proto::GetPageResponse page;
    page.set_total_bytes(kBlobBytes);
    page.set_data(std::string(
        std::min(kPageBytes, kBlobBytes - std::min(kBlobBytes, request.offset())), '\0'));
    co_return page;
  }

  async::Task<Result<proto::OpenSessionResponse>> open_nothing(proto::OpenSessionRequest) {
    co_await async::sleep_for(options_.page_delay);
    co_return fail(ErrorCode::kUnavailable, "no session is opened here");
  }

  // Says of itself what other members have said of their whole copies of the version.
  async::Task<Result<proto::AnnounceRequest>> announcement(std::shared_ptr<RpcClient> client) {
    proto::AnnounceRequest announce;
    announce.set_node_id(identity_.node_id);
    announce.set_incarnation(identity_.incarnation.to_bytes());
    announce.set_full(true);
    proto::ClusterStatusRequest asks;
    auto asking = call<proto::COORDINATOR_STATUS>(client, std::move(asks), kDeadline);
    CO_TRY(const auto status, co_await std::move(asking));
    for (const auto& node : status.nodes()) {
      for (const auto& holding : node.holdings()) {
        const auto id = from_proto(holding.id());
        if (announce.add_size() > 0 || !id || *id != options_.version) continue;
        *announce.add_add() = holding;
      }
    }
    if (announce.add_size() == 0) co_return fail(ErrorCode::kNotFound, "nobody holds the version");
    co_return announce;
  }

  async::Task<Result<std::shared_ptr<RpcClient>>> join() {
    CO_TRY(auto client, co_await RpcClient::connect(options_.coordinator, identity_, kDeadline));
    proto::RegisterRequest enroll;
    enroll.mutable_node()->set_node_id(identity_.node_id);
    enroll.mutable_node()->set_incarnation(identity_.incarnation.to_bytes());
    enroll.mutable_node()->set_control_endpoint(address_);
    enroll.mutable_node()->set_host_id(identity_.node_id);
    auto enrolling = call<proto::COORDINATOR_REGISTER>(client, std::move(enroll), kDeadline);
    CO_TRY_VOID(co_await std::move(enrolling));
    auto writing = announcement(client);
    CO_TRY(auto announce, co_await std::move(writing));
    auto announcing = call<proto::COORDINATOR_ANNOUNCE>(client, std::move(announce), kDeadline);
    CO_TRY(const auto announced, co_await std::move(announcing));
    if (announced.conflicts_size() > 0) {
      co_return fail(ErrorCode::kDenied, "{}", announced.conflicts(0).why());
    }
    co_return client;
  }

  static async::Task<void> be_a_member(DrippingSource* self) {
    auto joined = co_await self->join();
    if (joined) self->client_ = std::move(*joined);
    self->ready_.set_value(joined ? "" : joined.error().message());
    while (joined && !self->stopping_ && self->client_->connected()) {
      proto::HeartbeatRequest beat;
      beat.set_node_id(self->identity_.node_id);
      beat.set_incarnation(self->identity_.incarnation.to_bytes());
      auto beating = call<proto::COORDINATOR_HEARTBEAT>(self->client_, std::move(beat), kDeadline);
      (void)co_await std::move(beating);
      co_await async::sleep_for(std::chrono::milliseconds(250));
    }
  }

  const Options options_;
  Identity identity_;
  boost::asio::io_context io_{1};
  std::unique_ptr<RpcServer> server_;
  std::shared_ptr<RpcClient> client_;
  bool stopping_ = false;
  std::string address_;
  std::promise<std::string> ready_;
  std::atomic<int> asked_ = 0;
  std::thread thread_;
};

}  // namespace rekindle::rpc::testing
