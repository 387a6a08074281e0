#include "recovery/agent/local_commands.h"

#include <utility>

#include "recovery/agent/agent_core.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/methods.h"

namespace rekindle::agent {

using async::Task;

namespace {

template <typename Repeated>
std::vector<std::string> strings(const Repeated& repeated) {
  return {repeated.begin(), repeated.end()};
}

proto::TransferProgress::SourceLine line_to_proto(const SourceLine& line) {
  proto::TransferProgress::SourceLine out;
  out.set_name(line.name);
  out.set_transport(line.transport);
  out.set_bytes(line.bytes);
  out.set_bytes_per_second(line.bytes_per_second);
  out.set_lost(line.lost);
  out.set_cause(line.cause);
  return out;
}

SourceLine line_from_proto(const proto::TransferProgress::SourceLine& line) {
  return {line.name(), line.transport(), line.bytes(), line.bytes_per_second(),
          line.lost(), line.cause()};
}

// How much of a frame of 16 MiB the lists of a plan may take.
constexpr std::size_t kWantedBytesMax = 8u << 20;
constexpr std::size_t kMissingBytesMax = 2u << 20;
// Tags, lengths and numbers.
constexpr std::size_t kItemOverheadBytes = 32;

ModelVersion id_from(const proto::ModelVersion& id) { return {id.model(), id.version()}; }

}  // namespace

proto::LocalPublishRequest to_proto(const PublishRequest& request) {
  proto::LocalPublishRequest out;
  *out.mutable_id() = rpc::to_proto(request.id);
  for (const auto& path : request.paths) out.add_paths(std::filesystem::absolute(path).string());
  if (request.replicas) out.set_replicas(*request.replicas);
  return out;
}

Result<PublishRequest> from_proto(const proto::LocalPublishRequest& request) {
  PublishRequest out;
  TRY(out.id, rpc::from_proto(request.id()));
  for (const auto& path : request.paths()) out.paths.emplace_back(path);
  if (out.paths.empty()) return fail(ErrorCode::kInvalid, "publish: no files were named");
  if (request.has_replicas()) out.replicas = request.replicas();
  return out;
}

proto::LocalPullRequest to_proto(const PullRequest& request) {
  proto::LocalPullRequest out;
  out.set_model(request.ref.model);
  out.set_latest(!request.ref.version.has_value());
  out.set_version(request.ref.version.value_or(0));
  out.set_shard(request.shard);
  out.set_spec_json(request.spec_json);
  out.set_tensors_regex(request.tensors_regex);
  for (const auto& from : request.from) out.add_from(from);
  out.set_transport(request.transport);
  if (!request.root.is_nil()) *out.mutable_root() = rpc::to_proto(request.root);
  if (!request.fallback.empty()) {
    out.set_fallback_dir(std::filesystem::absolute(request.fallback).string());
  }
  return out;
}

Result<PullRequest> from_proto(const proto::LocalPullRequest& request) {
  PullRequest out;
  TRY_VOID(check_model_name(request.model()));
  out.ref.model = request.model();
  if (!request.latest()) out.ref.version = request.version();
  out.shard = request.shard();
  out.spec_json = request.spec_json();
  out.tensors_regex = request.tensors_regex();
  out.from = strings(request.from());
  out.transport = request.transport();
  out.fallback = request.fallback_dir();
  if (request.has_root()) {
    out.root = rpc::from_proto(request.root());
    if (out.root.is_nil()) return fail(ErrorCode::kInvalid, "pull: the root is no digest");
  }
  return out;
}

proto::TransferProgress to_proto(const Progress& progress) {
  proto::TransferProgress out;
  out.set_phase(progress.phase);
  *out.mutable_id() = rpc::to_proto(progress.id);
  out.set_bytes_done(progress.bytes_done);
  out.set_bytes_total(progress.bytes_total);
  out.set_bytes_per_second(progress.bytes_per_second);
  for (const auto& line : progress.sources) *out.add_sources() = line_to_proto(line);
  out.set_note(progress.note);
  return out;
}

Progress from_proto(const proto::TransferProgress& progress) {
  Progress out;
  out.phase = progress.phase();
  out.id = id_from(progress.id());
  out.bytes_done = progress.bytes_done();
  out.bytes_total = progress.bytes_total();
  out.bytes_per_second = progress.bytes_per_second();
  for (const auto& line : progress.sources()) out.sources.push_back(line_from_proto(line));
  out.note = progress.note();
  return out;
}

proto::TransferResult to_proto(const TransferSummary& summary) {
  proto::TransferResult out;
  *out.mutable_id() = rpc::to_proto(summary.id);
  *out.mutable_root() = rpc::to_proto(summary.root);
  *out.mutable_layout() = rpc::to_proto(summary.layout);
  out.set_path(summary.path.string());
  out.set_bytes(summary.bytes);
  out.set_fetched_bytes(summary.fetched_bytes);
  out.set_resumed_bytes(summary.resumed_bytes);
  out.set_refetched_bytes(summary.refetched_bytes);
  out.set_elapsed_ms(static_cast<std::uint64_t>(summary.elapsed.count()));
  out.set_tensors(summary.tensors);
  for (const auto& phase : summary.phases) {
    auto* item = out.add_phases();
    item->set_name(phase.name);
    item->set_elapsed_us(static_cast<std::uint64_t>(phase.elapsed.count()));
  }
  for (const auto& line : summary.sources) *out.add_sources() = line_to_proto(line);
  return out;
}

TransferSummary from_proto(const proto::TransferResult& result) {
  TransferSummary out;
  out.id = id_from(result.id());
  out.root = rpc::from_proto(result.root());
  out.layout = rpc::from_proto(result.layout());
  out.path = result.path();
  out.bytes = result.bytes();
  out.fetched_bytes = result.fetched_bytes();
  out.resumed_bytes = result.resumed_bytes();
  out.refetched_bytes = result.refetched_bytes();
  out.tensors = result.tensors();
  out.elapsed = std::chrono::milliseconds(result.elapsed_ms());
  for (const auto& phase : result.phases()) {
    out.phases.push_back({phase.name(), std::chrono::microseconds(phase.elapsed_us())});
  }
  for (const auto& line : result.sources()) out.sources.push_back(line_from_proto(line));
  return out;
}

proto::LocalPlanResponse to_proto(const PlanSummary& plan) {
  proto::LocalPlanResponse out;
  *out.mutable_id() = rpc::to_proto(plan.id);
  *out.mutable_root() = rpc::to_proto(plan.root);
  out.set_tensors(plan.tensors);
  out.set_wanted_bytes(plan.wanted_bytes);
  out.set_wire_bytes(plan.wire_bytes);
  out.set_slices(plan.slices);
  out.set_buckets(plan.buckets);
  for (const auto& source : plan.sources) {
    auto* item = out.add_sources();
    item->set_name(source.name);
    item->set_endpoint(source.endpoint);
    item->set_bytes_available(source.bytes_available);
  }
  out.set_wanted_total(plan.wanted_total);
  out.set_missing_total(plan.missing_total);
  std::size_t wanted_bytes = 0;
  for (const auto& tensor : plan.wanted) {
    wanted_bytes += tensor.name.size() + tensor.dtype.size() + tensor.shape.size() +
                    tensor.box.size() + kItemOverheadBytes;
    if (wanted_bytes > kWantedBytesMax) break;
    auto* item = out.add_wanted();
    item->set_name(tensor.name);
    item->set_dtype(tensor.dtype);
    item->set_shape(tensor.shape);
    item->set_box(tensor.box);
    item->set_bytes(tensor.bytes);
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
  out.id = id_from(response.id());
  out.root = rpc::from_proto(response.root());
  out.tensors = response.tensors();
  out.wanted_bytes = response.wanted_bytes();
  out.wire_bytes = response.wire_bytes();
  out.slices = response.slices();
  out.buckets = response.buckets();
  for (const auto& item : response.sources()) {
    out.sources.push_back({item.name(), item.endpoint(), item.bytes_available()});
  }
  for (const auto& item : response.wanted()) {
    out.wanted.push_back({item.name(), item.dtype(), item.shape(), item.box(), item.bytes()});
  }
  out.missing = strings(response.missing());
  out.wanted_total = response.wanted_total();
  out.missing_total = response.missing_total();
  return out;
}

namespace {

OnProgress stream_to(rpc::Events events) {
  return
      [events = std::move(events)](const Progress& progress) { events->send(to_proto(progress)); };
}

Task<Result<proto::TransferResult>> publish(AgentCore& core, proto::LocalPublishRequest request,
                                            rpc::Events events) {
  CO_TRY(auto parsed, from_proto(request));
  CO_TRY(const auto summary,
         co_await core.publisher().publish(std::move(parsed), stream_to(std::move(events))));
  co_return to_proto(summary);
}

Task<Result<proto::TransferResult>> pull_version(AgentCore& core, proto::LocalPullRequest request,
                                                 rpc::Events events) {
  CO_TRY(auto parsed, from_proto(request));
  CO_TRY(const auto outcome,
         co_await core.pulls().pull(std::move(parsed), stream_to(std::move(events))));
  co_return to_proto(outcome.summary);
}

Task<Result<proto::LocalPlanResponse>> plan(AgentCore& core, proto::LocalPullRequest request,
                                            rpc::Events) {
  CO_TRY(auto parsed, from_proto(request));
  CO_TRY(const auto summary, co_await core.pulls().plan(std::move(parsed)));
  co_return to_proto(summary);
}

Task<Result<proto::LocalRetireResponse>> retire(AgentCore& core, proto::LocalRetireRequest request,
                                                rpc::Events) {
  CO_TRY(const auto id, rpc::from_proto(request.id()));
  proto::LocalRetireResponse response;
  CO_TRY(const auto freed, co_await core.retirement().retire(id));
  response.set_freed_bytes(freed);
  co_return response;
}

Task<Result<proto::LocalVerifyResponse>> verify(AgentCore& core, proto::LocalVerifyRequest request,
                                                rpc::Events) {
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
      [&core, answer](const rpc::Peer&, rpc::RequestOf<method> request, rpc::Events events) {
        return answer(core, std::move(request), std::move(events));
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
