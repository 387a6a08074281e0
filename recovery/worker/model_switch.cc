#include "recovery/worker/model_switch.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/convert.h"

namespace rekindle::worker {

namespace {

constexpr std::chrono::milliseconds kLongestSwitch{3'600'000};
constexpr std::chrono::milliseconds kDefaultSwitch{120'000};
// A worker may name any number of them.
constexpr int kMostPhases = 16;

// The sessions of every rank. Errors say why there is no instance to switch.
Result<std::vector<SessionPtr>> ranks_of(const SwitchParts& parts, const std::string& name) {
  const auto* const entry = parts.instances.find(name);
  auto sessions = parts.sessions.of_instance(name);
  if (entry == nullptr || sessions.empty()) {
    return fail(ErrorCode::kNotFound,
                "no worker of instance '{}' is on this host; `rekindle status` lists them", name);
  }
  if (sessions.size() < entry->state.world() && entry->state.state() == InstanceState::kCommitted) {
    return fail(ErrorCode::kUnavailable,
                "{} of the {} ranks of {} are on other hosts: only an instance that is on one host "
                "can switch",
                entry->state.world() - sessions.size(), entry->state.world(), name);
  }
  if (entry->state.state() != InstanceState::kCommitted) {
    return fail(ErrorCode::kUnavailable, "instance {} is {}, and not ready to switch: {}", name,
                to_string(entry->state.state()), entry->state.why());
  }
  return sessions;
}

async::Task<Result<ModelVersion>> version_here(SwitchParts parts,
                                               proto::LocalSwitchRequest request) {
  CO_TRY_VOID(check_model_name(request.model()));
  ModelVersion id{request.model(), request.version()};
  if (request.latest()) {
    CO_TRY(id, co_await parts.copies.newest(request.model()));
  }
  if (auto may = parts.copies.may_attach(id); !may) {
    co_return fail(std::move(may).error().with_context(id.to_string()));
  }
  if (!parts.copies.root_here(id)) {
    co_return fail(ErrorCode::kNotFound,
                   "this host has no complete copy of {}: bring it here first, with: rekindle pull "
                   "{}",
                   id.to_string(), id.to_string());
  }
  co_return id;
}

// What the instance serves after a switch that failed.
std::string present_state(const SwitchParts& parts, const std::string& name) {
  const auto* const entry = parts.instances.find(name);
  if (entry == nullptr) return "the instance is gone";
  if (entry->state.state() == InstanceState::kCommitted) {
    return fmt::format("{} serves {}", name, entry->state.version()->to_string());
  }
  return fmt::format("{} is {}: {}", name, to_string(entry->state.state()), entry->state.why());
}

std::uint64_t total_us(const proto::OrderResult& result) {
  std::uint64_t total = 0;
  for (const auto& phase : result.phases()) total += phase.elapsed_us();
  return total;
}

void note_switch(const SwitchParts& parts, const std::string& instance, const ModelVersion& id,
                 const char* kind, std::string why) {
  Event event;
  event.kind = kind;
  event.instance = instance;
  event.version = id;
  event.why = std::move(why);
  parts.events.add(std::move(event));
}

Result<proto::LocalSwitchResponse> summary_of(const SwitchParts& parts, const ModelVersion& id,
                                              const std::string& instance,
                                              const std::vector<SessionPtr>& ranks,
                                              const OrderDesk::Results& results) {
  proto::LocalSwitchResponse response;
  *response.mutable_id() = rpc::to_proto(id);
  response.set_ranks(static_cast<std::uint32_t>(ranks.size()));
  // The ranks that follow one that cannot are stale, and those that wait for it do not answer.
  const auto follows = [&](std::size_t rank) {
    const ErrorCode code = results[rank].error().code();
    return code == ErrorCode::kStale || code == ErrorCode::kTimeout;
  };
  std::optional<std::size_t> failed;
  const proto::OrderResult* slowest = nullptr;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (!results[i]) {
      if (!failed || follows(*failed)) failed = i;
      continue;
    }
    if (slowest == nullptr || total_us(*results[i]) > total_us(*slowest)) slowest = &*results[i];
  }
  if (failed) {
    const Session& rank = *ranks[*failed];
    const Error& why = results[*failed].error();
    return fail(why.code(), "rank {} of {} (pid {}): {}; {}", rank.rank(), instance,
                rank.client->pid(), why.message(), present_state(parts, instance));
  }
  for (int i = 0; i < std::min(slowest->phases_size(), kMostPhases); ++i) {
    auto& phase = *response.add_phases();
    phase.set_name(slowest->phases(i).name());
    phase.set_elapsed_us(slowest->phases(i).elapsed_us());
  }
  return response;
}

}  // namespace

async::Task<Result<proto::LocalSwitchResponse>> switch_model(SwitchParts parts,
                                                             proto::LocalSwitchRequest request) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const std::string instance = request.instance();
  const std::chrono::milliseconds asked(request.timeout_ms());
  const auto give_up =
      steady_now() + std::min(asked.count() > 0 ? asked : kDefaultSwitch, kLongestSwitch);
  auto finding = version_here(parts, request);
  CO_TRY(const ModelVersion id, co_await std::move(finding));
  CO_TRY(const auto ranks, ranks_of(parts, instance));
  if (ranks.front()->wanted() == id) {
    proto::LocalSwitchResponse already;
    *already.mutable_id() = rpc::to_proto(id);
    already.set_ranks(static_cast<std::uint32_t>(ranks.size()));
    co_return already;
  }
  proto::Order order;
  order.mutable_serve()->set_model(id.model);
  order.mutable_serve()->set_version(id.version);
  auto giving = parts.orders.give(ranks, std::move(order), give_up);
  auto results = co_await std::move(giving);
  auto done = results ? summary_of(parts, id, instance, ranks, *results)
                      : Result<proto::LocalSwitchResponse>(fail(std::move(results).error()));
  note_switch(parts, instance, id, done ? "switched" : "not_switched",
              done ? "" : done.error().message());
  co_return done;
}

}  // namespace rekindle::worker
