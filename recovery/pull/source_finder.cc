#include "recovery/pull/source_finder.h"

#include <algorithm>
#include <utility>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <fmt/ranges.h>

#include "recovery/rpc/convert.h"
#include "recovery/rpc/methods.h"
#include "src/async/task_group.h"
#include "src/base/log.h"
#include "src/tensor/signature_wire.h"

namespace rekindle::pull {

namespace {

constexpr std::chrono::milliseconds kCallDeadline{3000};
constexpr std::chrono::milliseconds kFinderCloseDeadline{1000};
constexpr std::chrono::milliseconds kResolveRetryDelay{200};

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

async::Task<Result<Resolved>> SourceFinder::resolve(
    Patience patience, std::function<void(const Error&)> on_verifying) {
  const auto begin = steady_now();
  auto give_up = begin + patience.starting;
  bool said = false;
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(give_up - steady_now());
    holders_verify_ = false;
    auto resolved =
        co_await resolve_once(std::clamp(left, std::chrono::milliseconds(1), kCallDeadline));
    const bool cancelled = co_await async::is_cancelled();
    if (holders_verify_) {
      give_up = begin + std::max(patience.starting, patience.verifying);
      if (!std::exchange(said, true)) on_verifying(resolved.error());
    }
    if (resolved || cancelled || !worth_retrying(resolved.error().code()) ||
        steady_now() + kResolveRetryDelay > give_up) {
      if (resolved) resolved_ = *resolved;
      co_return resolved;
    }
    co_await async::sleep_for(kResolveRetryDelay);
  }
}

Error SourceFinder::still_verifying(const std::string& who) {
  holders_verify_ = true;
  return {ErrorCode::kUnavailable,
          fmt::format("{}: {} has yet to verify the copy that it holds; retry in a while",
                      ref_.to_string(), who)};
}

async::Task<Result<Resolved>> SourceFinder::resolve_once(std::chrono::milliseconds deadline) {
  if (from_.empty()) co_return co_await resolve_through_coordinator(deadline);
  CO_TRY(auto found, co_await ask_peers(ref_.version, deadline));
  sources_ = std::move(found.sources);
  answered_ = steady_now();
  co_return std::move(found.resolved);
}

async::Task<Result<Resolved>> SourceFinder::resolve_through_coordinator(
    std::chrono::milliseconds deadline) {
  if (!environment_.has_coordinator) {
    co_return fail(
        ErrorCode::kInvalid,
        "no source for {}: give --coordinator HOST:PORT, or --from HOST:PORT of an agent that "
        "holds it",
        ref_.to_string());
  }
  const auto client = coordinator();
  if (client == nullptr) co_return fail(environment_.coordinator_problem());
  auto opened = co_await open(client, ref_, deadline);
  coordinator_silent_ = !opened && opened.error().code() == ErrorCode::kTimeout;
  CO_TRY(auto response, std::move(opened));
  if (response.verifying_size() > 0) {
    co_return fail(still_verifying(fmt::format("{}", fmt::join(response.verifying(), ", "))));
  }
  Resolved resolved;
  CO_TRY(resolved.id, rpc::from_proto(response.id()));
  resolved.root = rpc::from_proto(response.root());
  resolved.tensor_set = rpc::from_proto(response.tensor_set());
  resolved.checkpoint_bytes = response.checkpoint_bytes();
  resolved.signatures = rekindle::from_proto(response.signatures());
  take_offer(response);
  co_return resolved;
}

async::Task<Result<proto::OpenPullResponse>> SourceFinder::open(
    std::shared_ptr<rpc::RpcClient> client, ModelRef ref,
    std::chrono::milliseconds deadline) const {
  proto::OpenPullRequest request;
  *request.mutable_puller() = environment_.self;
  request.set_model(ref.model);
  request.set_latest(!ref.version.has_value());
  request.set_version(ref.version.value_or(0));
  request.set_shard(shard_);
  co_return co_await rpc::call<proto::COORDINATOR_OPEN_PULL>(client, std::move(request), deadline,
                                                             trace_);
}

void SourceFinder::take_offer(const proto::OpenPullResponse& response) {
  pull_id_ = response.pull_id();
  sources_.assign(response.sources().begin(), response.sources().end());
  answered_ = steady_now();
  queued_.reset();
  if (sources_.empty() && response.retry_after_ms() > 0) {
    queued_ = std::chrono::milliseconds(response.retry_after_ms());
  }
}

// The first peer that answers resolves `latest`. The others are asked for that version, all at
// once.
async::Task<Result<SourceFinder::Found>> SourceFinder::ask_peers(
    std::optional<std::uint64_t> version, std::chrono::milliseconds deadline) {
  std::vector<std::optional<Answer>> answers(from_.size());
  std::size_t next = 0;
  while (!version && next < from_.size()) {
    co_await ask_peer(from_[next], version, deadline, answers[next]);
    if (answers[next] && *answers[next] && !(*answers[next])->verifying()) {
      version = (*answers[next])->id().version();
    }
    ++next;
  }
  std::vector<async::Task<void>> rest;
  for (; next < from_.size(); ++next) {
    rest.push_back(ask_peer(from_[next], version, deadline, answers[next]));
  }
  co_await async::run_all(std::move(rest));
  co_return put_together(std::move(answers));
}

async::Task<void> SourceFinder::ask_peer(std::string address, std::optional<std::uint64_t> version,
                                         std::chrono::milliseconds deadline,
                                         std::optional<Answer>& answer) {
  const auto until = steady_now() + deadline;
  auto client = co_await rpc::RpcClient::connect(address, environment_.identity, deadline, {},
                                                 proto::ROLE_AGENT);
  if (!client) {
    answer = fail(std::move(client).error());
    co_return;
  }
  proto::OpenDirectRequest request;
  request.set_model(ref_.model);
  request.set_latest(!version.has_value());
  request.set_version(version.value_or(0));
  request.set_puller_incarnation(environment_.identity.incarnation.to_bytes());
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - steady_now());
  auto response =
      co_await rpc::call<proto::AGENT_OPEN_DIRECT>(*client, std::move(request), left, trace_);
  (*client)->close();
  if (response) {
    answer = std::move(response);
  } else {
    answer = fail(std::move(response).error().with_context(address));
  }
}

Result<SourceFinder::Found> SourceFinder::put_together(std::vector<std::optional<Answer>> answers) {
  Found found;
  std::optional<Error> last_error;
  for (std::size_t i = 0; i < answers.size(); ++i) {
    if (!answers[i]) continue;  // it was cancelled
    if (!*answers[i]) {
      last_error = std::move(*answers[i]).error();
      continue;
    }
    proto::OpenDirectResponse& response = **answers[i];
    if (response.verifying()) {
      last_error = still_verifying(from_[i]);
      continue;
    }
    const Digest root = rpc::from_proto(response.root());
    if (!found.sources.empty() && root != found.resolved.root) {
      return fail(
          ErrorCode::kCorrupt,
          "{} and an earlier --from hold different bytes as {}: name only sources of one publish",
          from_[i], found.resolved.id.to_string());
    }
    TRY(found.resolved.id, rpc::from_proto(response.id()));
    found.resolved.root = root;
    found.resolved.tensor_set = rpc::from_proto(response.tensor_set());
    found.resolved.checkpoint_bytes = response.checkpoint_bytes();
    for (auto& one : rekindle::from_proto(response.signatures())) {
      found.resolved.signatures.push_back(std::move(one));
    }
    for (auto& source : *response.mutable_sources()) {
      source.mutable_node()->set_control_endpoint(from_[i]);
      found.sources.push_back(std::move(source));
    }
  }
  if (!found.sources.empty()) return found;
  if (last_error) return fail(std::move(*last_error));
  return fail(ErrorCode::kNotFound, "NO_SOURCE: no --from address was given");
}

async::Task<void> SourceFinder::refresh(std::chrono::milliseconds deadline) {
  if (!from_.empty()) co_return co_await refresh_from_peers(deadline);
  const auto client = coordinator();
  coordinator_silent_ = client == nullptr;
  if (client == nullptr) {
    queued_.reset();
    co_return;
  }
  if (pull_id_.empty() || unknown_) co_return co_await open_again(client, deadline, false);
  // Named, not a temporary: g++ 12 destroys aggregates inside co_await twice.
  const PullReport nothing_new;
  auto response = co_await tell_progress(client, nothing_new, true, deadline);
  if (response) {
    take_sources(*response);
    co_return;
  }
  coordinator_silent_ = response.error().code() == ErrorCode::kTimeout;
  log::debug("pull.refresh", "error", response.error());
  if (response.error().code() != ErrorCode::kStale) co_return;
  unknown_ = true;
  co_await open_again(client, deadline, false);
}

async::Task<void> SourceFinder::refresh_from_peers(std::chrono::milliseconds deadline) {
  auto found = co_await ask_peers(resolved_.id.version, deadline);
  if (!found) co_return;
  if (found->resolved.root != resolved_.root) {
    log::warn("pull.refresh", "error", "a --from source now holds other bytes under this version");
    co_return;
  }
  sources_ = std::move(found->sources);
  answered_ = steady_now();
}

// No source had a share to give when the pull was opened, and pullers that were first may have one
// by now; or the coordinator does not know the pull, because it has restarted.
async::Task<void> SourceFinder::open_again(std::shared_ptr<rpc::RpcClient> client,
                                           std::chrono::milliseconds deadline, bool runs) {
  // Until the coordinator says again that the pull is queued.
  queued_.reset();
  if (resolved_.root.is_nil()) co_return;
  // Named, not a temporary: g++ 12 destroys aggregates inside co_await twice.
  const ModelRef ref{resolved_.id.model, resolved_.id.version};
  auto response = co_await open(std::move(client), ref, deadline);
  if (!response) {
    coordinator_silent_ = response.error().code() == ErrorCode::kTimeout;
  } else if (rpc::from_proto(response->root()) == resolved_.root &&
             (response->sources_size() > 0 || !runs)) {
    unknown_ = false;
    take_offer(*response);
  }
}

std::shared_ptr<rpc::RpcClient> SourceFinder::coordinator() const {
  return environment_.coordinator ? environment_.coordinator() : nullptr;
}

void SourceFinder::take_sources(const proto::PullProgressResponse& response) {
  sources_.assign(response.sources().begin(), response.sources().end());
  answered_ = steady_now();
}

// The call refers to nothing of this object: it may end after the pull.
async::Task<Result<proto::PullProgressResponse>> SourceFinder::tell_progress(
    std::shared_ptr<rpc::RpcClient> client, PullReport report, bool need_sources,
    std::chrono::milliseconds deadline) const {
  proto::PullProgressRequest request;
  request.set_pull_id(pull_id_);
  *request.mutable_puller() = environment_.self;
  *request.mutable_id() = rpc::to_proto(resolved_.id);
  request.set_bytes_done(report.bytes_done);
  request.set_bytes_total(report.bytes_total);
  request.set_need_sources(need_sources);
  for (auto& source : report.sources) *request.add_sources() = std::move(source);
  return rpc::call<proto::COORDINATOR_PULL_PROGRESS>(std::move(client), std::move(request),
                                                     deadline);
}

async::Task<void> SourceFinder::exchange(PullReport report) {
  const auto client = coordinator();
  if (client == nullptr || pull_id_.empty()) co_return;
  if (unknown_) co_return co_await open_again(client, kCallDeadline, true);
  const auto response = co_await tell_progress(client, std::move(report), true, kCallDeadline);
  if (!response) {
    log::debug("pull.exchange", "error", response.error());
    unknown_ = response.error().code() == ErrorCode::kStale;
  } else if (response->sources_size() > 0) {
    take_sources(*response);
  }
}

void SourceFinder::report(PullReport report) const {
  const auto client = coordinator();
  if (client == nullptr || pull_id_.empty()) return;
  boost::asio::co_spawn(environment_.executor,
                        tell_progress(client, std::move(report), false, kCallDeadline),
                        boost::asio::detached);
}

async::Task<void> SourceFinder::pause() {
  co_await close({});
  pull_id_.clear();
  queued_.reset();
}

std::string SourceFinder::pull_id() const {
  return to_hex(reinterpret_cast<const std::uint8_t*>(pull_id_.data()), pull_id_.size());
}

async::Task<void> SourceFinder::close(const Result<void>& outcome) {
  const auto client = coordinator();
  // A pull that the coordinator did not open has only spans for it.
  if (client == nullptr || (pull_id_.empty() && spans_.empty())) co_return;
  proto::ClosePullRequest request;
  request.set_pull_id(pull_id_);
  *request.mutable_outcome() = outcome ? rpc::ok_status() : rpc::to_status(outcome.error());
  for (const auto& span : spans_) *request.add_spans() = span;
  auto call =
      rpc::call<proto::COORDINATOR_CLOSE_PULL>(client, std::move(request), kFinderCloseDeadline);
  // A command that ends takes calls with it that are still under way.
  if (coordinator_silent_) {
    boost::asio::co_spawn(environment_.executor, std::move(call), boost::asio::detached);
  } else {
    (void)co_await std::move(call);
  }
}

}  // namespace rekindle::pull
