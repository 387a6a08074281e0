#include "src/client/c_boundary.h"
#include "src/client/c_handles.h"

// A session's weights on a device.
using namespace rekindle;          // NOLINT(google-build-using-namespace)
using namespace rekindle::client;  // NOLINT(google-build-using-namespace)

namespace {

int32_t list(rk_session* session, std::span<const rk_tensor> (Session::*tensors_of)(),
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

int32_t rk_tensors(rk_session* session, const rk_tensor** tensors, size_t* count, rk_error* error) {
  return list(session, &Session::tensors, tensors, count, error);
}

int32_t rk_catalog(rk_session* session, const rk_tensor** tensors, size_t* count, rk_error* error) {
  return list(session, &Session::catalog, tensors, count, error);
}

int32_t rk_next_bucket(rk_session* session, int64_t timeout_ms, const rk_part** parts,
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

int32_t rk_load_into(rk_session* session, const rk_target* targets, size_t count,
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

int32_t rk_prefetch(rk_session* session, uint64_t bytes, int64_t timeout_ms, rk_error* error) {
  return guarded(error, [&]() -> Result<void> {
    TRY(const auto object, object_of(session, "session"));
    TRY(const auto timeout, checked_timeout(timeout_ms));
    return object->prefetch(bytes, after(timeout));
  });
}

}  // extern "C"
