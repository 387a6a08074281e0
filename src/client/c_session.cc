#include <algorithm>
#include <memory>
#include <utility>

#include "src/client/c_boundary.h"

// rk_attach, and the calls of a session.
namespace rekindle::client {

namespace {

constexpr std::int64_t kAttachTimeoutMs = 10000;

const char* text(const char* given) { return given == nullptr ? "" : given; }

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

std::int32_t list_tensors(rk_session* session, std::span<const rk_tensor> (Session::*tensors_of)(),
                          const rk_tensor** tensors, size_t* count, rk_error* error) {
  if (tensors != nullptr) *tensors = nullptr;
  if (count != nullptr) *count = 0;
  return guarded(error, [&]() -> Result<void> {
    TRY(const auto object, object_of(session, "session"));
    if (tensors == nullptr || count == nullptr) {
      return fail(ErrorCode::kInvalid, "`tensors` or `count` is null");
    }
    const auto all = (object.get()->*tensors_of)();
    *tensors = all.data();
    *count = all.size();
    return {};
  });
}

}  // namespace

extern "C" {

RK_API int32_t rk_attach(rk_agent* agent, const rk_attach_options* options, rk_session** session,
                         rk_error* error) {
  if (session != nullptr) *session = nullptr;
  return guarded(error, [&]() -> Result<void> {
    if (session == nullptr) return fail(ErrorCode::kInvalid, "`session` is null");
    TRY(auto connection, object_of(agent, "agent"));
    TRY(const rk_attach_options given, read_options(options));
    TRY(AttachRequest request, attach_request_of(given));
    const std::int64_t ms = given.timeout_ms == 0 ? kAttachTimeoutMs : given.timeout_ms;
    TRY(const auto timeout, checked_timeout(ms));
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
  return guarded(error, [&]() -> Result<void> {
    TRY(const auto object, object_of(session, "session"));
    if (info == nullptr || info->size < sizeof info->size) {
      return fail(ErrorCode::kInvalid, "`info` is null, or its `size` is not set");
    }
    rk_session_info filled{};
    filled.size = info->size;
    object->fill(filled);
    std::memcpy(static_cast<void*>(info), &filled,
                std::min<std::size_t>(filled.size, sizeof filled));
    return {};
  });
}

RK_API int32_t rk_next(rk_session* session, int64_t timeout_ms, const rk_tensor** tensors,
                       size_t* count, rk_error* error) {
  if (tensors != nullptr) *tensors = nullptr;
  if (count != nullptr) *count = 0;
  return guarded(error, [&]() -> Result<void> {
    TRY(const auto object, object_of(session, "session"));
    if (tensors == nullptr || count == nullptr) {
      return fail(ErrorCode::kInvalid, "`tensors` or `count` is null");
    }
    TRY(const auto timeout, checked_timeout(timeout_ms));
    TRY(const auto batch, object->next(after(timeout)));
    *tensors = batch.data();
    *count = batch.size();
    return {};
  });
}

RK_API int32_t rk_loaded(rk_session* session, rk_error* error) {
  return guarded(error, [&]() -> Result<void> {
    TRY(const auto object, object_of(session, "session"));
    return object->loaded();
  });
}

RK_API int32_t rk_wait_commit(rk_session* session, int64_t timeout_ms, rk_error* error) {
  return guarded(error, [&]() -> Result<void> {
    TRY(const auto object, object_of(session, "session"));
    TRY(const auto timeout, checked_timeout(timeout_ms));
    return object->wait_commit(after(timeout));
  });
}

RK_API int32_t rk_wait_update(rk_session* session, int64_t timeout_ms, uint64_t* version,
                              rk_error* error) {
  return guarded(error, [&]() -> Result<void> {
    TRY(const auto object, object_of(session, "session"));
    TRY(const auto timeout, checked_timeout(timeout_ms));
    TRY(const std::uint64_t newer, object->wait_update(after(timeout)));
    if (version != nullptr) *version = newer;
    return {};
  });
}

RK_API int32_t rk_tensors(rk_session* session, const rk_tensor** tensors, size_t* count,
                          rk_error* error) {
  return list_tensors(session, &Session::tensors, tensors, count, error);
}

RK_API int32_t rk_catalog(rk_session* session, const rk_tensor** tensors, size_t* count,
                          rk_error* error) {
  return list_tensors(session, &Session::catalog, tensors, count, error);
}

RK_API int32_t rk_next_bucket(rk_session* session, int64_t timeout_ms, const rk_part** parts,
                              size_t* count, rk_error* error) {
  if (parts != nullptr) *parts = nullptr;
  if (count != nullptr) *count = 0;
  return guarded(error, [&]() -> Result<void> {
    TRY(const auto object, object_of(session, "session"));
    if (parts == nullptr || count == nullptr) {
      return fail(ErrorCode::kInvalid, "`parts` or `count` is null");
    }
    TRY(const auto timeout, checked_timeout(timeout_ms));
    TRY(const auto bucket, object->next_bucket(after(timeout)));
    *parts = bucket.data();
    *count = bucket.size();
    return {};
  });
}

RK_API int32_t rk_load_into(rk_session* session, const rk_target* targets, size_t count,
                            int64_t timeout_ms, rk_error* error) {
  return guarded(error, [&]() -> Result<void> {
    TRY(const auto object, object_of(session, "session"));
    if (targets == nullptr && count > 0) {
      return fail(ErrorCode::kInvalid, "{} targets at a null pointer", count);
    }
    TRY(const auto timeout, checked_timeout(timeout_ms));
    return object->load_into({targets, count}, timeout);
  });
}

RK_API int32_t rk_prefetch(rk_session* session, uint64_t bytes, int64_t timeout_ms,
                           rk_error* error) {
  return guarded(error, [&]() -> Result<void> {
    TRY(const auto object, object_of(session, "session"));
    TRY(const auto timeout, checked_timeout(timeout_ms));
    return object->prefetch(bytes, after(timeout));
  });
}

RK_API void rk_detach(rk_session* session) {
  if (session == nullptr) return;
  guarded(nullptr, [&]() -> Result<void> {
    // The session belongs to the parent, whose threads and locks do not exist here.
    if (!session->is_owner()) return {};
    session->object->end();
    delete session;
    return {};
  });
}

}  // extern "C"

}  // namespace rekindle::client
