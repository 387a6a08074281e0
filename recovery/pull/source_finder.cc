#include "recovery/pull/source_finder.h"

#include <algorithm>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>

#include "proto/agent.pb.h"
#include "recovery/rpc/convert.h"
#include "src/base/log.h"

namespace rekindle::pull {

namespace {

constexpr std::chrono::milliseconds kCallDeadline{3000};
constexpr std::chrono::milliseconds kRefreshDeadline{1000};
constexpr std::chrono::milliseconds kRetryDelay{200};

bool worth_retrying(ErrorCode code) {
  return code == ErrorCode::kUnavailable || code == ErrorCode::kPeerLost ||
         code == ErrorCode::kTimeout;
}

}  // namespace

SourceFinder::SourceFinder(const PullEnvironment& environment, ModelRef ref,
                           std::vector<std::string> from, std::string shard)
    : environment_(environment),
      ref_(std::move(ref)),
      from_(std::move(from)),
      shard_(std::move(shard)) {}

rpc::Task<Result<Resolved>> SourceFinder::resolve(std::chrono::milliseconds patience) {
  const auto give_up = std::chrono::steady_clock::now() + patience;
  while (true) {
    auto resolved = co_await resolve_once();
    if (resolved || !worth_retrying(resolved.error().code()) ||
        std::chrono::steady_clock::now() + kRetryDelay > give_up) {
      if (resolved) resolved_ = *resolved;
      co_return resolved;
    }
    boost::asio::steady_timer timer(environment_.executor, kRetryDelay);
    co_await timer.async_wait(boost::asio::use_awaitable);
  }
}

rpc::Task<Result<Resolved>> SourceFinder::resolve_once() {
  if (!from_.empty()) co_return co_await resolve_direct();
  co_return co_await resolve_through_coordinator();
}

rpc::Task<Result<Resolved>> SourceFinder::resolve_through_coordinator() {
  if (!environment_.has_coordinator) {
    co_return fail(
        ErrorCode::kInvalid,
        "no source for {}: give --coordinator HOST:PORT, or --from HOST:PORT of an agent that "
        "holds it",
        ref_.to_string());
  }
  const auto client = environment_.coordinator();
  if (client == nullptr) {
    co_return fail(environment_.coordinator_problem());
  }
  proto::OpenPullRequest request;
  *request.mutable_puller() = environment_.self;
  request.set_model(ref_.model);
  request.set_latest(!ref_.version.has_value());
  request.set_version(ref_.version.value_or(0));
  request.set_shard(shard_);
  CO_TRY(auto response,
         co_await rpc::call<proto::OpenPullResponse>(client, proto::COORDINATOR_OPEN_PULL,
                                                     std::move(request), kCallDeadline));
  Resolved resolved;
  CO_TRY(resolved.id, rpc::from_proto(response.id()));
  resolved.root = rpc::from_proto(response.root());
  resolved.tensor_set = rpc::from_proto(response.tensor_set());
  resolved.checkpoint_bytes = response.checkpoint_bytes();
  pull_id_ = response.pull_id();
  sources_.assign(response.sources().begin(), response.sources().end());
  co_return resolved;
}

rpc::Task<Result<Resolved>> SourceFinder::resolve_direct() {
  Resolved resolved;
  std::vector<proto::Source> found;
  std::optional<Error> last_error;
  for (const auto& address : from_) {
    auto client = co_await rpc::RpcClient::connect(address, environment_.identity, kCallDeadline);
    if (!client) {
      last_error = std::move(client).error();
      continue;
    }
    proto::OpenDirectRequest request;
    request.set_model(ref_.model);
    // `latest` is resolved by the first source that answers; the others are asked for that version.
    const bool fixed = ref_.version.has_value() || !found.empty() || !resolved_.root.is_nil();
    request.set_latest(!fixed);
    const std::uint64_t known =
        !resolved_.root.is_nil() ? resolved_.id.version : resolved.id.version;
    request.set_version(ref_.version.value_or(known));
    request.set_puller_incarnation(environment_.identity.incarnation.to_bytes());
    auto response = co_await rpc::call<proto::OpenDirectResponse>(
        *client, proto::AGENT_OPEN_DIRECT, std::move(request), kCallDeadline);
    (*client)->close();
    if (!response) {
      last_error = std::move(response).error().with_context(address);
      continue;
    }
    const Digest128 root = rpc::from_proto(response->root());
    if (!found.empty() && root != resolved.root) {
      co_return fail(
          ErrorCode::kCorrupt,
          "{} and an earlier --from hold different bytes as {}: name only sources of one publish",
          address, resolved.id.to_string());
    }
    CO_TRY(resolved.id, rpc::from_proto(response->id()));
    resolved.root = root;
    resolved.tensor_set = rpc::from_proto(response->tensor_set());
    resolved.checkpoint_bytes = response->checkpoint_bytes();
    for (auto& source : *response->mutable_sources()) {
      source.mutable_node()->set_control_endpoint(address);
      found.push_back(std::move(source));
    }
  }
  if (found.empty()) {
    co_return fail(last_error
                       ? std::move(*last_error)
                       : Error(ErrorCode::kNotFound, "NO_SOURCE: no --from address was given"));
  }
  sources_ = std::move(found);
  co_return resolved;
}

rpc::Task<void> SourceFinder::refresh() {
  if (!from_.empty()) {
    const auto before = sources_;
    auto again = co_await resolve_direct();
    if (again && again->root != resolved_.root) {
      log::warn("pull.refresh", "error",
                "a --from source now holds other bytes under this version");
      sources_ = before;
    }
    co_return;
  }
  const auto client = environment_.coordinator ? environment_.coordinator() : nullptr;
  if (client == nullptr || pull_id_.empty()) co_return;
  auto request = progress_request();
  request.set_need_sources(true);
  auto response = co_await rpc::call<proto::PullProgressResponse>(
      client, proto::COORDINATOR_PULL_PROGRESS, std::move(request), kRefreshDeadline);
  if (!response) {
    log::debug("pull.refresh", "error", response.error());
    co_return;
  }
  sources_.assign(response->sources().begin(), response->sources().end());
}

proto::PullProgressRequest SourceFinder::progress_request() const {
  proto::PullProgressRequest request;
  request.set_pull_id(pull_id_);
  *request.mutable_puller() = environment_.self;
  *request.mutable_id() = rpc::to_proto(resolved_.id);
  return request;
}

void SourceFinder::report(std::uint64_t bytes_done, std::uint64_t bytes_total,
                          std::vector<proto::SourceReport> reports) const {
  const auto client = environment_.coordinator ? environment_.coordinator() : nullptr;
  if (client == nullptr || pull_id_.empty()) return;
  auto request = progress_request();
  request.set_bytes_done(bytes_done);
  request.set_bytes_total(bytes_total);
  for (auto& item : reports) *request.add_sources() = std::move(item);
  // Refers to nothing of this object: it may end after the pull.
  boost::asio::co_spawn(
      environment_.executor,
      rpc::call<proto::PullProgressResponse>(client, proto::COORDINATOR_PULL_PROGRESS,
                                             std::move(request), kCallDeadline),
      boost::asio::detached);
}

rpc::Task<void> SourceFinder::close(const Result<void>& outcome) {
  const auto client = environment_.coordinator ? environment_.coordinator() : nullptr;
  if (client == nullptr || pull_id_.empty()) co_return;
  proto::ClosePullRequest request;
  request.set_pull_id(pull_id_);
  *request.mutable_outcome() = outcome ? rpc::ok_status() : rpc::to_status(outcome.error());
  (void)co_await rpc::call<proto::ClosePullResponse>(client, proto::COORDINATOR_CLOSE_PULL,
                                                     std::move(request), kRefreshDeadline);
}

}  // namespace rekindle::pull
