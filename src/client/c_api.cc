#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <memory>
#include <utility>

#include "src/base/text.h"
#include "src/base/version.h"
#include "src/client/c_boundary.h"
#include "src/ipc/standby.h"

// The calls of rekindle.h, but for rk_describe_tensors (c_dlpack.cc).
namespace rekindle::client {

namespace {

template <std::size_t kSize>
void copy_text(std::string_view text, char (&out)[kSize]) noexcept {
  text = cut_text(text, kSize - 1);
  std::memcpy(out, text.data(), text.size());
  out[text.size()] = '\0';
}

}  // namespace

std::int32_t report(std::int32_t code, std::string_view message, rk_error* error) noexcept {
  if (error == nullptr) return code;
  error->code = code;
  copy_text(message, error->message);
  std::replace(error->message, error->message + std::strlen(error->message), '\n', ' ');
  return code;
}

namespace {

constexpr const char* kDefaultStore = "/dev/shm/rekindle";
constexpr std::int64_t kConnectTimeoutMs = 5000;
constexpr std::int64_t kAttachTimeoutMs = 10000;
constexpr std::int64_t kUpdateTimeoutMs = 600'000;
// The store may have to make room.
constexpr std::chrono::milliseconds kBeginTimeout{30'000};
constexpr std::int64_t kJointTimeoutMs = 600'000;

const char* text(const char* given) { return given == nullptr ? "" : given; }

// MODEL@NUMBER. `call` names the caller in the error.
Result<ModelVersion> exact_version(std::string_view call, const char* given) {
  TRY(ModelRef model, ModelRef::parse(given));
  if (!model.version) {
    return fail(ErrorCode::kInvalid, "{} '{}': which version? Say {}@NUMBER", call, given, given);
  }
  return ModelVersion{std::move(model.model), *model.version};
}

// Fills as much of a caller's structure as the caller knows, by its `size`.
template <typename T>
void fill_known(T filled, T& out) {
  filled.size = out.size;
  std::memcpy(static_cast<void*>(&out), &filled, std::min<std::size_t>(filled.size, sizeof filled));
}

Result<UpdateRequest> update_request_of(const rk_update_options& options) {
  if (options.model_version == nullptr) {
    return fail(ErrorCode::kInvalid, "update without a version");
  }
  UpdateRequest request;
  TRY(request.id, exact_version("update to", options.model_version));
  TRY(const auto gather, checked_timeout(options.gather_ms));
  request.group = text(options.group);
  request.gather_ms = static_cast<std::uint32_t>(gather.count());
  request.members = options.members;
  return request;
}

rk_update_result result_of(const UpdatedReply& updated) {
  rk_update_result result{};
  result.members = updated.members;
  result.ready = updated.ready;
  result.by_broadcast = updated.by_broadcast;
  result.elapsed_ms = updated.elapsed_ms;
  for (const PhaseSummary& phase : updated.phases) {
    if (result.phase_count == std::size(result.phases)) break;
    rk_phase_summary& out = result.phases[result.phase_count++];
    copy_text(phase.name, out.name);
    out.median_us = phase.median_us;
    out.p95_us = phase.p95_us;
    out.slowest_us = phase.slowest_us;
    copy_text(phase.slowest, out.slowest);
  }
  return result;
}

Result<PhasesReport> phases_of(const rk_phase* phases, std::size_t count) {
  if (phases == nullptr && count > 0) {
    return fail(ErrorCode::kInvalid, "{} phases at a null pointer", count);
  }
  PhasesReport report;
  for (const rk_phase& phase : std::span(phases, count)) {
    report.phases.push_back({text(phase.name), phase.elapsed_us});
  }
  return report;
}

Result<WantedBox> box_of(const rk_box& box) {
  if (box.tensor == nullptr) return fail(ErrorCode::kInvalid, "a box without a tensor's name");
  WantedBox out{box.tensor, {}, {}};
  if (box.dimensions == 0) return out;
  if (box.dimensions > kMaxRank) {
    return fail(ErrorCode::kInvalid, "a box of '{}' with {} dimensions, {} are supported",
                box.tensor, box.dimensions, kMaxRank);
  }
  if (box.offset == nullptr || box.extent == nullptr) {
    return fail(ErrorCode::kInvalid, "a box of '{}' without offset or extent", box.tensor);
  }
  out.offset.assign(box.offset, box.offset + box.dimensions);
  out.extent.assign(box.extent, box.extent + box.dimensions);
  return out;
}

// Returns at once in a process that is no standby.
Result<std::uint32_t> wait_as_standby(TimePoint deadline) {
  const char* const name = std::getenv(ipc::kStandbyVariable);
  if (name == nullptr || *name == '\0') return 0u;
  TRY(const ipc::Variables variables, ipc::wait_for_turn(name, deadline));
  std::uint32_t failures = 0;
  for (const auto& [variable, value] : variables) {
    if (variable != "REKINDLE_FAILURES") continue;
    (void)std::from_chars(value.data(), value.data() + value.size(), failures);
  }
  return failures;
}

// A trace context is ASCII. An agent would refuse a frame with text in another encoding.
std::string traceparent_of(const rk_attach_options& options) {
  constexpr std::size_t kLongest = 512;
  std::string found = text(options.traceparent);
  const bool ascii = std::ranges::all_of(found, [](char c) { return c > ' ' && c <= '~'; });
  return ascii && found.size() <= kLongest ? found : std::string();
}

Result<AttachRequest> attach_request_of(const rk_attach_options& options) {
  if (options.model == nullptr) return fail(ErrorCode::kInvalid, "attach without a model");
  TRY(ModelRef model, ModelRef::parse(options.model));
  AttachRequest request;
  request.model = std::move(model.model);
  request.latest = !model.version;
  request.version = model.version.value_or(0);
  request.shard = text(options.shard);
  request.spec_json = text(options.spec_json);
  request.instance = text(options.instance);
  request.generation = options.generation;
  request.rank = options.rank;
  request.world = std::max<std::uint32_t>(options.world, 1);
  request.fallback_dir = text(options.fallback_dir);
  request.group = text(options.group);
  request.staged = options.staged != 0;
  request.traceparent = traceparent_of(options);
  request.resident_key = text(options.resident_key);
  request.resident_shared = options.resident_shared != 0;
  if (request.rank >= request.world) {
    return fail(ErrorCode::kInvalid, "rank {} of {}: ranks count from 0", request.rank,
                request.world);
  }
  if (options.box_count > 0 && options.boxes == nullptr) {
    return fail(ErrorCode::kInvalid, "{} boxes at a null pointer", options.box_count);
  }
  if (options.box_count > 0 && !request.shard.empty()) {
    return fail(ErrorCode::kInvalid, "both a shard and boxes are named: which one?");
  }
  for (std::size_t i = 0; i < options.box_count; ++i) {
    TRY(WantedBox box, box_of(options.boxes[i]));
    request.boxes.push_back(std::move(box));
  }
  if (options.bucket_bytes > bucket::kLargestBucket ||
      (options.bucket_bytes > 0 && options.bucket_bytes < bucket::kPartAlignment)) {
    return fail(ErrorCode::kInvalid, "buckets of {} bytes: {} to {} are possible",
                options.bucket_bytes, bucket::kPartAlignment, bucket::kLargestBucket);
  }
  request.bucket_bytes = options.bucket_bytes;
  return request;
}

Result<std::optional<WorkerDevice>> device_of(const rk_attach_options& options) {
  if (options.device == nullptr) return std::nullopt;
  TRY(WorkerDevice device, open_worker_device(options.device, options.stream));
  return device;
}

Result<TensorInfo> tensor_info_of(const rk_tensor_spec& spec) {
  if (spec.name == nullptr || spec.dtype == nullptr) {
    return fail(ErrorCode::kInvalid, "a tensor without a name or dtype");
  }
  if (spec.dimensions > 0 && spec.shape == nullptr) {
    return fail(ErrorCode::kInvalid, "tensor '{}' without a shape", spec.name);
  }
  TensorInfo tensor;
  tensor.name = spec.name;
  TRY(tensor.dtype, parse_dtype(spec.dtype));
  TRY(tensor.shape, Dims::from(std::span(spec.shape, spec.dimensions)));
  return tensor;
}

using Tensors = Result<std::span<const rk_tensor>>;

// A call that returns a list of the session in `out`, which is the parameter `name`, and `count`.
template <typename T, typename List>
std::int32_t list_of(rk_session* session, const T** out, std::size_t* count, const char* name,
                     rk_error* error, List list) {
  if (out != nullptr) *out = nullptr;
  if (count != nullptr) *count = 0;
  return with_object(session, error, [&](Session& object) -> Result<void> {
    if (out == nullptr || count == nullptr) {
      return fail(ErrorCode::kInvalid, "`{}` or `count` is null", name);
    }
    TRY(const std::span<const T> all, list(object));
    *out = all.data();
    *count = all.size();
    return {};
  });
}

}  // namespace

extern "C" {

RK_API uint32_t rk_api_version(void) { return RK_API_VERSION; }

// A literal, terminated by 0.
RK_API const char* rk_library_version(void) { return version().data(); }

RK_API const char* rk_code_name(int32_t code) {
  if (code == RK_OK) return "OK";
  if (code < RK_INVALID || code > RK_INTERNAL) return "UNKNOWN";
  // A literal, terminated by 0.
  return to_string(static_cast<ErrorCode>(code - 1)).data();
}

// --- an agent

RK_API int32_t rk_wait_standby(int64_t timeout_ms, uint32_t* failures, rk_error* error) {
  if (failures != nullptr) *failures = 0;
  return guarded(error, [&]() -> Result<void> {
    TRY(const auto deadline, deadline_in(timeout_ms));
    TRY(const std::uint32_t counted, wait_as_standby(deadline));
    if (failures != nullptr) *failures = counted;
    return {};
  });
}

RK_API int32_t rk_connect(const rk_connect_options* options, rk_agent** agent, rk_error* error) {
  if (agent != nullptr) *agent = nullptr;
  return guarded(error, [&]() -> Result<void> {
    if (agent == nullptr) return fail(ErrorCode::kInvalid, "`agent` is null");
    TRY(const rk_connect_options given, read_options(options));
    TRY_VOID(checked_timeout(given.timeout_ms));
    // A program that knows nothing of standbys must not take the rank of the worker that serves.
    TRY_VOID(wait_as_standby(TimePoint::max()));
    TRY(const auto deadline, deadline_in(given.timeout_ms, kConnectTimeoutMs));
    auto handle = std::make_unique<rk_agent>();
    TRY(handle->object,
        Connection::open(given.store == nullptr ? kDefaultStore : given.store, deadline));
    *agent = handle.release();
    return {};
  });
}

RK_API void rk_interrupt(rk_agent* agent) {
  if (agent == nullptr) return;
  with_object(agent, nullptr, [](Connection& connection) -> Result<void> {
    connection.close(Error(ErrorCode::kStale, "the connection was interrupted"));
    return {};
  });
}

RK_API void rk_disconnect(rk_agent* agent) {
  // In a child after fork(), all but the descriptor belongs to the parent's threads and stays.
  if (agent != nullptr && !agent->is_owner()) return agent->object->abandon();
  end_handle(agent, [](Connection& connection) {
    connection.close(Error(ErrorCode::kStale, "the agent was disconnected"));
  });
}

RK_API int32_t rk_update(rk_agent* agent, const rk_update_options* options,
                         rk_update_result* result, rk_error* error) {
  return with_object(agent, error, [&](Connection& connection) -> Result<void> {
    if (result != nullptr && result->size < sizeof result->size) {
      return fail(ErrorCode::kInvalid, "the `size` of the result is {}: set it to its sizeof",
                  result->size);
    }
    TRY(const rk_update_options given, read_options(options));
    TRY(const UpdateRequest request, update_request_of(given));
    TRY(const auto timeout, checked_timeout(given.timeout_ms, kUpdateTimeoutMs));
    auto answer = connection.call(request, 0, timeout, std::make_shared<Inbox>());
    if (!answer) {
      return fail(
          std::move(answer).error().with_context(fmt::format("update {}", given.model_version)));
    }
    const auto* const updated = std::get_if<UpdatedReply>(&answer->agent.reply);
    if (updated == nullptr) {
      return fail(ErrorCode::kInternal, "the agent answered an update with something else");
    }
    if (result != nullptr) fill_known(result_of(*updated), *result);
    if (updated->ready >= updated->members) return {};
    return fail(ErrorCode::kUnavailable, "update {}: {} of {} workers are ready; {}",
                given.model_version, updated->ready, updated->members, updated->why);
  });
}

// --- a session

RK_API int32_t rk_attach(rk_agent* agent, const rk_attach_options* options, rk_session** session,
                         rk_error* error) {
  if (session != nullptr) *session = nullptr;
  return guarded(error, [&]() -> Result<void> {
    if (session == nullptr) return fail(ErrorCode::kInvalid, "`session` is null");
    TRY(auto connection, object_of(agent));
    TRY(const rk_attach_options given, read_options(options));
    TRY(AttachRequest request, attach_request_of(given));
    TRY(const auto timeout, checked_timeout(given.timeout_ms, kAttachTimeoutMs));
    auto handle = std::make_unique<rk_session>();
    TRY(auto device, device_of(given));
    if (device) request.device = device->device->id();
    auto attached = Session::attach(std::move(connection), request, timeout, std::move(device));
    if (!attached) {
      return fail(std::move(attached).error().with_context(fmt::format("attach {}", given.model)));
    }
    handle->object = std::move(*attached);
    *session = handle.release();
    return {};
  });
}

RK_API int32_t rk_info(rk_session* session, rk_session_info* info, rk_error* error) {
  return with_object(session, error, [&](Session& object) -> Result<void> {
    if (info == nullptr || info->size < sizeof info->size) {
      return fail(ErrorCode::kInvalid, "`info` is null, or its `size` is not set");
    }
    rk_session_info filled{};
    const bool only_version = info->size <= offsetof(rk_session_info, bytes_done);
    TRY_VOID(object.fill(filled, only_version));
    fill_known(filled, *info);
    return {};
  });
}

RK_API int32_t rk_next(rk_session* session, int64_t timeout_ms, const rk_tensor** tensors,
                       size_t* count, rk_error* error) {
  return list_of(session, tensors, count, "tensors", error, [&](Session& object) -> Tensors {
    TRY(const auto deadline, deadline_in(timeout_ms));
    return object.next(deadline);
  });
}

RK_API int32_t rk_tensors(rk_session* session, const rk_tensor** tensors, size_t* count,
                          rk_error* error) {
  return list_of(session, tensors, count, "tensors", error,
                 [](Session& object) -> Tensors { return object.tensors(); });
}

RK_API int32_t rk_tensor_count(rk_session* session, size_t* count, rk_error* error) {
  if (count != nullptr) *count = 0;
  return with_object(session, error, [&](const Session& object) -> Result<void> {
    if (count == nullptr) return fail(ErrorCode::kInvalid, "`count` is null");
    *count = object.tensor_count();
    return {};
  });
}

RK_API int32_t rk_catalog(rk_session* session, const rk_tensor** tensors, size_t* count,
                          rk_error* error) {
  return list_of(session, tensors, count, "tensors", error,
                 [](Session& object) -> Tensors { return object.catalog(); });
}

RK_API int32_t rk_next_bucket(rk_session* session, int64_t timeout_ms, const rk_part** parts,
                              size_t* count, rk_error* error) {
  return list_of(session, parts, count, "parts", error,
                 [&](Session& object) -> Result<std::span<const rk_part>> {
                   TRY(const auto deadline, deadline_in(timeout_ms));
                   return object.next_bucket(deadline);
                 });
}

RK_API int32_t rk_load_into(rk_session* session, const rk_target* targets, size_t count,
                            int64_t timeout_ms, rk_error* error) {
  return with_object(session, error, [&](Session& object) -> Result<void> {
    if (targets == nullptr && count > 0) {
      return fail(ErrorCode::kInvalid, "{} targets at a null pointer", count);
    }
    TRY(const auto timeout, checked_timeout(timeout_ms));
    return object.load_into({targets, count}, timeout);
  });
}

RK_API int32_t rk_prefetch(rk_session* session, uint64_t bytes, int64_t timeout_ms,
                           rk_error* error) {
  return with_object(session, error, [&](Session& object) -> Result<void> {
    TRY(const auto deadline, deadline_in(timeout_ms));
    return object.prefetch(bytes, deadline);
  });
}

RK_API int32_t rk_stage(rk_session* session, uint64_t reserve_bytes, int64_t timeout_ms,
                        rk_error* error) {
  return with_object(session, error, [&](Session& object) -> Result<void> {
    TRY(const auto timeout, checked_timeout(timeout_ms));
    return object.stage(reserve_bytes, timeout);
  });
}

RK_API int32_t rk_begin_switch(rk_session* session, int64_t timeout_ms, rk_error* error) {
  return with_object(session, error, [&](Session& object) -> Result<void> {
    TRY(const auto timeout, checked_timeout(timeout_ms));
    return object.begin_switch(timeout);
  });
}

RK_API int32_t rk_report_phases(rk_session* session, const rk_phase* phases, size_t count,
                                rk_error* error) {
  return with_object(session, error, [&](Session& object) -> Result<void> {
    TRY(PhasesReport report, phases_of(phases, count));
    return object.report_phases(std::move(report));
  });
}

RK_API int32_t rk_report_phases_ago(rk_session* session, const rk_phase* phases,
                                    const uint64_t* ago_us, size_t count, rk_error* error) {
  return with_object(session, error, [&](Session& object) -> Result<void> {
    TRY(PhasesReport report, phases_of(phases, count));
    if (ago_us == nullptr && count > 0) {
      return fail(ErrorCode::kInvalid, "the beginnings of {} phases at a null pointer", count);
    }
    report.ago_us.assign(ago_us, ago_us + count);
    return object.report_phases(std::move(report));
  });
}

RK_API int32_t rk_loaded(rk_session* session, rk_error* error) {
  return with_object(session, error, [](Session& object) { return object.loaded(); });
}

RK_API int32_t rk_wait_commit(rk_session* session, int64_t timeout_ms, rk_error* error) {
  return with_object(session, error, [&](Session& object) -> Result<void> {
    TRY(const auto deadline, deadline_in(timeout_ms));
    return object.wait_commit(deadline);
  });
}

RK_API int32_t rk_wait_update(rk_session* session, int64_t timeout_ms, uint64_t* version,
                              rk_error* error) {
  return with_object(session, error, [&](Session& object) -> Result<void> {
    TRY(const auto deadline, deadline_in(timeout_ms));
    TRY(const std::uint64_t newer, object.wait_update(deadline));
    if (version != nullptr) *version = newer;
    return {};
  });
}

RK_API int32_t rk_watch_order(rk_session* session, int64_t timeout_ms, rk_order* order,
                              rk_error* error) {
  return with_object(session, error, [&](Session& object) -> Result<void> {
    TRY(const auto deadline, deadline_in(timeout_ms));
    if (order == nullptr || order->size < sizeof order->size) {
      return fail(ErrorCode::kInvalid, "`order` is null, or its `size` is not set");
    }
    TRY(const rk_order got, object.watch_order(deadline));
    fill_known(got, *order);
    return {};
  });
}

RK_API int32_t rk_order_done(rk_session* session, uint64_t number, int32_t code, const char* why,
                             const rk_phase* phases, size_t count, rk_error* error) {
  return with_object(session, error, [&](Session& object) -> Result<void> {
    TRY(PhasesReport report, phases_of(phases, count));
    if (code < RK_OK || code > RK_INTERNAL) {
      return fail(ErrorCode::kInvalid, "the outcome of order {} is {}, which is no code", number,
                  code);
    }
    std::optional<Error> failed;
    if (code != RK_OK) failed.emplace(static_cast<ErrorCode>(code - 1), text(why));
    return object.order_done(number, std::move(failed), std::move(report.phases));
  });
}

RK_API void rk_detach(rk_session* session) {
  end_handle(session, [](Session& object) { object.end(); });
}

// --- a publication

RK_API int32_t rk_publish_begin(rk_agent* agent, const char* model_version,
                                const rk_tensor_spec* tensors, size_t count,
                                rk_publication** publication, rk_error* error) {
  if (publication != nullptr) *publication = nullptr;
  return guarded(error, [&]() -> Result<void> {
    TRY(auto connection, object_of(agent));
    if (publication == nullptr || model_version == nullptr || tensors == nullptr || count == 0) {
      return fail(ErrorCode::kInvalid,
                  "publish without a version, without tensors or without a "
                  "place for the publication");
    }
    TRY(const ModelVersion id, exact_version("publish", model_version));
    std::vector<TensorInfo> infos;
    infos.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      TRY(TensorInfo info, tensor_info_of(tensors[i]));
      infos.push_back(std::move(info));
    }
    auto handle = std::make_unique<rk_publication>();
    auto begun = Publication::begin(std::move(connection), id, std::move(infos), kBeginTimeout);
    if (!begun) {
      return fail(std::move(begun).error().with_context(fmt::format("publish {}", model_version)));
    }
    handle->object = std::move(*begun);
    *publication = handle.release();
    return {};
  });
}

RK_API int32_t rk_publish_data(rk_publication* publication, size_t index, void** data,
                               uint64_t* bytes, rk_error* error) {
  return with_object(publication, error, [&](Publication& object) -> Result<void> {
    TRY(const auto place, object.data(index));
    if (data != nullptr) *data = place.data();
    if (bytes != nullptr) *bytes = place.size();
    return {};
  });
}

RK_API int32_t rk_publish_commit(rk_publication* publication, int64_t timeout_ms, rk_error* error) {
  return with_object(publication, error, [&](Publication& object) -> Result<void> {
    // The publication ends, also on an error.
    const std::unique_ptr<rk_publication> handle(publication);
    TRY(const auto timeout, checked_timeout(timeout_ms));
    return object.commit(timeout);
  });
}

RK_API void rk_publish_abandon(rk_publication* publication) {
  end_handle(publication, [](Publication& object) { object.abandon(); });
}

RK_API int32_t rk_publish_begin_joint(rk_agent* agent, const rk_joint_options* options,
                                      const rk_joint_part* parts, size_t count,
                                      rk_publication** publication, rk_error* error) {
  if (publication != nullptr) *publication = nullptr;
  return guarded(error, [&]() -> Result<void> {
    TRY(auto connection, object_of(agent));
    if (publication == nullptr || (parts == nullptr && count > 0)) {
      return fail(ErrorCode::kInvalid,
                  "publish without options, or without a place for the result");
    }
    TRY(const rk_joint_options with, read_options(options));
    if (with.model_version == nullptr)
      return fail(ErrorCode::kInvalid, "publish without a version");
    TRY(const ModelVersion id, exact_version("publish", with.model_version));
    TRY(const auto timeout, checked_timeout(with.timeout_ms, kJointTimeoutMs));
    std::vector<PublishedPart> wanted;
    wanted.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      PublishedPart part;
      TRY(part.tensor, tensor_info_of(parts[i].tensor));
      const std::size_t rank = parts[i].tensor.dimensions;
      if (rank > 0 && (parts[i].offset == nullptr || parts[i].extent == nullptr)) {
        return fail(ErrorCode::kInvalid, "'{}' has no offset or extent", part.tensor.name);
      }
      TRY(part.box.offset, Dims::from({parts[i].offset, rank}));
      TRY(part.box.extent, Dims::from({parts[i].extent, rank}));
      wanted.push_back(std::move(part));
    }
    auto handle = std::make_unique<rk_publication>();
    auto begun = Publication::begin_joint(std::move(connection), id, {with.rank, with.world},
                                          std::move(wanted), timeout);
    if (!begun) {
      return fail(
          std::move(begun).error().with_context(fmt::format("publish {}", with.model_version)));
    }
    handle->object = std::move(*begun);
    *publication = handle.release();
    return {};
  });
}

RK_API int32_t rk_publish_pieces(rk_publication* publication, size_t index, rk_piece* pieces,
                                 size_t capacity, size_t* count, rk_error* error) {
  return with_object(publication, error, [&](Publication& object) -> Result<void> {
    TRY(const auto found, object.pieces(index));
    if (count != nullptr) *count = found.size();
    if (pieces == nullptr) return {};
    for (std::size_t i = 0; i < std::min(capacity, found.size()); ++i) {
      const auto& [box, bytes] = found[i];
      pieces[i] = {box.offset.span().data(), box.extent.span().data(), bytes.data(), bytes.size()};
    }
    return {};
  });
}

// --- copies

RK_API int32_t rk_copies_open(rk_publication* publication, uint32_t threads, rk_copies** copies,
                              rk_error* error) {
  if (copies != nullptr) *copies = nullptr;
  return guarded(error, [&]() -> Result<void> {
    if (copies == nullptr) return fail(ErrorCode::kInvalid, "no place for the copies");
    auto handle = std::make_unique<rk_copies>();
    if (publication == nullptr) {
      handle->object = std::make_shared<CopyThreads>(threads, copy_to_memory);
    } else {
      TRY(handle->publication, object_of(publication));
      TRY(handle->object, handle->publication->open_copies(threads));
    }
    *copies = handle.release();
    return {};
  });
}

RK_API int32_t rk_copies_put(rk_copies* copies, const rk_copy* list, size_t count, uint64_t* number,
                             rk_error* error) {
  return with_object(copies, error, [&](CopyThreads& object) -> Result<void> {
    if (number == nullptr || (list == nullptr && count > 0)) {
      return fail(ErrorCode::kInvalid, "copies without a list, or without a place for the number");
    }
    std::vector<Copy> some;
    some.reserve(count);
    for (const rk_copy& one : std::span(list, count)) {
      some.push_back({static_cast<std::byte*>(one.target),
                      static_cast<const std::byte*>(one.source), one.bytes});
    }
    if (copies->publication) TRY_VOID(copies->publication->expect(some));
    TRY(*number, object.put(some));
    return {};
  });
}

RK_API int32_t rk_copies_wait(rk_copies* copies, uint64_t number, int64_t timeout_ms,
                              rk_error* error) {
  return with_object(copies, error, [&](CopyThreads& object) -> Result<void> {
    TRY(const TimePoint deadline, deadline_in(timeout_ms));
    return object.wait(number, deadline);
  });
}

RK_API void rk_copies_close(rk_copies* copies) {
  end_handle(copies, [](CopyThreads& object) { object.close(); });
}

}  // extern "C"

}  // namespace rekindle::client
