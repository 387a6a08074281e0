#include "recovery/agent/local_commands.h"

#include <utility>

#include "recovery/agent/agent_core.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/message_fields.h"
#include "recovery/rpc/methods.h"
#include "src/tensor/signature_wire.h"

namespace rekindle::agent {

using async::Task;

namespace {

// How much of a frame of 16 MiB the lists of a plan may take.
constexpr std::size_t kWantedBytesMax = 8u << 20;
constexpr std::size_t kMissingBytesMax = 2u << 20;
// Tags, lengths and numbers.
constexpr std::size_t kItemOverheadBytes = 32;

constexpr rpc::Fields kPullRequest{WIRE_FIELD(shard),         WIRE_FIELD(spec_json),
                                   WIRE_FIELD(tensors_regex), WIRE_FIELD(from),
                                   WIRE_FIELD(transport),     WIRE_FIELD(encrypt)};
constexpr rpc::Fields kSourceLine{WIRE_FIELD(name),  WIRE_FIELD(transport),
                                  WIRE_FIELD(bytes), WIRE_FIELD(bytes_per_second),
                                  WIRE_FIELD(lost),  WIRE_FIELD(cause)};
constexpr rpc::Fields kProgress{WIRE_FIELD(phase), WIRE_FIELD(bytes_done), WIRE_FIELD(bytes_total),
                                WIRE_FIELD(bytes_per_second), WIRE_FIELD(note)};
constexpr rpc::Fields kSummary{WIRE_FIELD(root),
                               WIRE_FIELD(layout),
                               WIRE_FIELD(path),
                               WIRE_FIELD(bytes),
                               WIRE_FIELD(fetched_bytes),
                               WIRE_FIELD(resumed_bytes),
                               WIRE_FIELD(refetched_bytes),
                               WIRE_FIELD(tensors)};
constexpr rpc::Fields kPlan{
    WIRE_FIELD(root),   WIRE_FIELD(tensors), WIRE_FIELD(wanted_bytes), WIRE_FIELD(wire_bytes),
    WIRE_FIELD(slices), WIRE_FIELD(buckets), WIRE_FIELD(wanted_total), WIRE_FIELD(missing_total)};
constexpr rpc::Fields kPlanSource{WIRE_FIELD(name), WIRE_FIELD(endpoint),
                                  WIRE_FIELD(bytes_available)};
constexpr rpc::Fields kPlanTensor{WIRE_FIELD(name), WIRE_FIELD(dtype), WIRE_FIELD(shape),
                                  WIRE_FIELD(box), WIRE_FIELD(bytes)};

// For tables of numbers and strings, which every message fits.
template <typename Table, typename Message, typename Value>
void read_plain(const Table& table, const Message& message, Value& value) {
  (void)table.read(message, value);
}
template <typename Table, typename List, typename Value>
void read_list(const Table& table, const List& list, std::vector<Value>& values) {
  for (const auto& message : list) read_plain(table, message, values.emplace_back());
}
template <typename Table, typename List, typename Value>
void write_list(const Table& table, const std::vector<Value>& values, List& list) {
  for (const Value& value : values) table.write(value, *list.Add());
}

// An agent of this host names versions; progress may come before the version is known.
ModelVersion id_from(const proto::ModelVersion& id) { return {id.model(), id.version()}; }

}  // namespace

proto::LocalPublishRequest to_proto(const PublishRequest& request) {
  proto::LocalPublishRequest out;
  *out.mutable_id() = rpc::to_proto(request.id);
  for (const auto& path : request.paths) out.add_paths(std::filesystem::absolute(path).string());
  if (request.replicas) out.set_replicas(*request.replicas);
  *out.mutable_signatures() = rekindle::to_proto(request.signatures);
  return out;
}

Result<PublishRequest> from_proto(const proto::LocalPublishRequest& request) {
  PublishRequest out;
  TRY(out.id, rpc::from_proto(request.id()));
  for (const auto& path : request.paths()) out.paths.emplace_back(path);
  if (out.paths.empty()) return fail(ErrorCode::kInvalid, "publish: no files were named");
  if (request.has_replicas()) out.replicas = request.replicas();
  out.signatures = rekindle::from_proto(request.signatures());
  return out;
}

proto::LocalPullRequest to_proto(const PullRequest& request) {
  proto::LocalPullRequest out;
  kPullRequest.write(request, out);
  out.set_model(request.ref.model);
  out.set_latest(!request.ref.version.has_value());
  out.set_version(request.ref.version.value_or(0));
  if (!request.root.is_nil()) *out.mutable_root() = rpc::to_proto(request.root);
  out.set_silence_ms(static_cast<std::uint64_t>(request.silence.count()));
  for (const auto& key : request.trust.keys(request.ref.model)) out.add_trusted_keys(key);
  if (!request.fallback.empty()) {
    out.set_fallback_dir(std::filesystem::absolute(request.fallback).string());
  }
  return out;
}

Result<PullRequest> from_proto(const proto::LocalPullRequest& request) {
  PullRequest out;
  TRY_VOID(check_model_name(request.model()));
  TRY_VOID(kPullRequest.read(request, out));
  out.ref.model = request.model();
  if (!request.latest()) out.ref.version = request.version();
  out.fallback = request.fallback_dir();
  for (const auto& key : request.trusted_keys()) TRY_VOID(out.trust.add("*", key));
  constexpr std::uint64_t kLongest = std::uint64_t{30} * 24 * 3600 * 1000;
  out.silence = std::chrono::milliseconds(std::min(request.silence_ms(), kLongest));
  if (request.has_root()) {
    out.root = rpc::from_proto(request.root());
    if (out.root.is_nil()) return fail(ErrorCode::kInvalid, "pull: the root is no digest");
  }
  return out;
}

proto::TransferProgress to_proto(const Progress& progress) {
  proto::TransferProgress out;
  kProgress.write(progress, out);
  *out.mutable_id() = rpc::to_proto(progress.id);
  write_list(kSourceLine, progress.sources, *out.mutable_sources());
  return out;
}

Progress from_proto(const proto::TransferProgress& progress) {
  Progress out;
  read_plain(kProgress, progress, out);
  out.id = id_from(progress.id());
  read_list(kSourceLine, progress.sources(), out.sources);
  return out;
}

proto::TransferResult to_proto(const TransferSummary& summary) {
  proto::TransferResult out;
  kSummary.write(summary, out);
  *out.mutable_id() = rpc::to_proto(summary.id);
  out.set_elapsed_ms(static_cast<std::uint64_t>(summary.elapsed.count()));
  for (const auto& phase : summary.phases) {
    auto* item = out.add_phases();
    item->set_name(phase.name);
    item->set_elapsed_us(static_cast<std::uint64_t>(phase.elapsed.count()));
  }
  write_list(kSourceLine, summary.sources, *out.mutable_sources());
  *out.mutable_signatures() = rekindle::to_proto(summary.signatures);
  return out;
}

TransferSummary from_proto(const proto::TransferResult& result) {
  TransferSummary out;
  read_plain(kSummary, result, out);
  out.id = id_from(result.id());
  out.elapsed = std::chrono::milliseconds(result.elapsed_ms());
  for (const auto& phase : result.phases()) {
    out.phases.push_back({phase.name(), std::chrono::microseconds(phase.elapsed_us())});
  }
  read_list(kSourceLine, result.sources(), out.sources);
  out.signatures = rekindle::from_proto(result.signatures());
  return out;
}

proto::LocalPlanResponse to_proto(const PlanSummary& plan) {
  proto::LocalPlanResponse out;
  kPlan.write(plan, out);
  *out.mutable_id() = rpc::to_proto(plan.id);
  write_list(kPlanSource, plan.sources, *out.mutable_sources());
  std::size_t wanted_bytes = 0;
  for (const auto& tensor : plan.wanted) {
    wanted_bytes += tensor.name.size() + tensor.dtype.size() + tensor.shape.size() +
                    tensor.box.size() + kItemOverheadBytes;
    if (wanted_bytes > kWantedBytesMax) break;
    kPlanTensor.write(tensor, *out.add_wanted());
  }
  std::size_t missing_bytes = 0;
  for (const auto& missing : plan.missing) {
    missing_bytes += missing.size() + kItemOverheadBytes;
    if (missing_bytes > kMissingBytesMax) break;
    out.add_missing(missing);
  }
  return out;
}

PlanSummary from_proto(const proto::LocalPlanResponse& response) {
  PlanSummary out;
  read_plain(kPlan, response, out);
  out.id = id_from(response.id());
  read_list(kPlanSource, response.sources(), out.sources);
  read_list(kPlanTensor, response.wanted(), out.wanted);
  out.missing.assign(response.missing().begin(), response.missing().end());
  return out;
}

namespace {

OnProgress stream_to(rpc::Events events) {
  return
      [events = std::move(events)](const Progress& progress) { events->send(to_proto(progress)); };
}

Task<Result<proto::TransferResult>> publish(AgentCore& core, trace::Context parent,
                                            proto::LocalPublishRequest request,
                                            rpc::Events events) {
  CO_TRY(auto parsed, from_proto(request));
  parsed.trace = parent;
  CO_TRY(const auto summary,
         co_await core.publisher().publish(std::move(parsed), stream_to(std::move(events))));
  co_return to_proto(summary);
}

Task<Result<proto::TransferResult>> pull_version(AgentCore& core, trace::Context parent,
                                                 proto::LocalPullRequest request,
                                                 rpc::Events events) {
  CO_TRY(auto parsed, from_proto(request));
  parsed.trace = parent;
  CO_TRY(const auto outcome,
         co_await core.pulls().pull(std::move(parsed), stream_to(std::move(events))));
  co_return to_proto(outcome.summary);
}

Task<Result<proto::LocalPlanResponse>> plan(AgentCore& core, trace::Context,
                                            proto::LocalPullRequest request, rpc::Events) {
  CO_TRY(auto parsed, from_proto(request));
  CO_TRY(const auto summary, co_await core.pulls().plan(std::move(parsed)));
  co_return to_proto(summary);
}

Task<Result<proto::LocalRetireResponse>> retire(AgentCore& core, trace::Context,
                                                proto::LocalRetireRequest request, rpc::Events) {
  CO_TRY(const auto id, rpc::from_proto(request.id()));
  proto::LocalRetireResponse response;
  CO_TRY(const auto freed, co_await core.retirement().retire(id));
  response.set_freed_bytes(freed);
  co_return response;
}

Task<Result<proto::LocalVerifyResponse>> verify(AgentCore& core, trace::Context,
                                                proto::LocalVerifyRequest request, rpc::Events) {
  CO_TRY(const auto id, rpc::from_proto(request.id()));
  CO_TRY(auto copies, co_await core.health().verify(id));
  proto::LocalVerifyResponse response;
  for (auto& copy : copies) *response.add_copies() = std::move(copy);
  co_return response;
}

// Only processes of our own user on this host may call it.
template <proto::Method method, typename Answer>
void handle_locally(rpc::RpcServer& server, AgentCore& core, Answer answer) {
  constexpr bool kLocalOnly = true;
  rpc::handle<method>(
      server,
      [&core, answer](const rpc::Peer& peer, rpc::RequestOf<method> request, rpc::Events events) {
        return answer(core, peer.trace, std::move(request), std::move(events));
      },
      kLocalOnly);
}

}  // namespace

void serve_local_commands(rpc::RpcServer& server, AgentCore& core) {
  handle_locally<proto::LOCAL_PUBLISH>(server, core, publish);
  handle_locally<proto::LOCAL_PULL>(server, core, pull_version);
  handle_locally<proto::LOCAL_PLAN>(server, core, plan);
  handle_locally<proto::LOCAL_RETIRE>(server, core, retire);
  handle_locally<proto::LOCAL_VERIFY>(server, core, verify);
}

}  // namespace rekindle::agent
