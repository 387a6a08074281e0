#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <exception>
#include <limits>
#include <new>
#include <string_view>

#include <unistd.h>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/client/agent_messages.h"
#include "src/client/connection.h"
#include "src/client/publication.h"
#include "src/client/rekindle.h"
#include "src/client/session.h"
#include "src/tensor/box.h"

// A call shares the object, so another thread may close the handle while the call runs. A call that
// begins later is the caller's mistake.
struct rk_agent {
  static constexpr const char* kName = "agent";
  std::shared_ptr<rekindle::client::Connection> object;
  bool is_owner() const { return object->is_owner(); }
};

struct rk_session {
  static constexpr const char* kName = "session";
  std::shared_ptr<rekindle::client::Session> object;
  bool is_owner() const { return object->connection().is_owner(); }
};

struct rk_block {
  static constexpr const char* kName = "block";
  std::shared_ptr<rekindle::client::WorkerBlock> object;
  pid_t owner = ::getpid();
  bool is_owner() const { return owner == ::getpid(); }
};

struct rk_publication {
  static constexpr const char* kName = "publication";
  std::shared_ptr<rekindle::client::Publication> object;
  bool is_owner() const { return object->connection().is_owner(); }
};

struct rk_copies {
  static constexpr const char* kName = "copies";
  std::shared_ptr<rekindle::client::CopyThreads> object;
  // Null: copies into any memory.
  std::shared_ptr<rekindle::client::Publication> publication;
  pid_t owner = ::getpid();
  bool is_owner() const { return owner == ::getpid(); }
};

// The edges of every function of the C ABI: errors, options, time-outs, handles.
namespace rekindle::client {

static_assert(static_cast<int>(ErrorCode::kInvalid) + 1 == RK_INVALID);
static_assert(static_cast<int>(ErrorCode::kInternal) + 1 == RK_INTERNAL);

inline std::int32_t to_rk(ErrorCode code) { return static_cast<std::int32_t>(code) + 1; }

// Fills `error`, which may be null, with one line cut at a character. Returns the code.
std::int32_t report(std::int32_t code, std::string_view message, rk_error* error) noexcept;

// Runs `body`, which returns Result<void>. No exception leaves it.
template <typename Body>
std::int32_t guarded(rk_error* error, Body&& body) noexcept {
  try {
    const Result<void> result = body();
    if (result) return report(RK_OK, "", error);
    return report(to_rk(result.error().code()), result.error().message(), error);
  } catch (const std::bad_alloc&) {
    return report(RK_EXHAUSTED, "out of memory", error);
  } catch (const std::exception& caught) {
    return report(RK_INTERNAL, caught.what(), error);
  } catch (...) {
    return report(RK_INTERNAL, "an unknown exception", error);
  }
}

// Reads a structure of a caller that may know fewer fields than this library (the others are 0) or
// more (they must be 0). Null gives all zeros.
template <typename T>
Result<T> read_options(const T* given) {
  T options{};
  if (given == nullptr) return options;
  const std::size_t size = given->size;
  if (size < sizeof given->size) {
    return fail(ErrorCode::kInvalid, "the `size` of the options is {}: set it to their sizeof",
                size);
  }
  const auto* const bytes = reinterpret_cast<const unsigned char*>(given);
  if (size > sizeof(T) &&
      !std::all_of(bytes + sizeof(T), bytes + size, [](unsigned char b) { return b == 0; })) {
    return fail(ErrorCode::kInvalid, "the options have fields that this library does not know");
  }
  std::memcpy(static_cast<void*>(&options), given, std::min(size, sizeof(T)));
  return options;
}

// `timeout_ms` of the ABI; `if_zero` replaces a 0. kInvalid: it is negative. More than a month is
// cut to a month.
inline Result<std::chrono::milliseconds> checked_timeout(std::int64_t timeout_ms,
                                                         std::int64_t if_zero = 0) {
  constexpr std::int64_t kMost = std::int64_t{30} * 24 * 3600 * 1000;
  if (timeout_ms == 0) timeout_ms = if_zero;
  if (timeout_ms < 0) return fail(ErrorCode::kInvalid, "a time-out of {} ms", timeout_ms);
  return std::chrono::milliseconds(std::min(timeout_ms, kMost));
}

inline Result<TimePoint> deadline_in(std::int64_t timeout_ms, std::int64_t if_zero = 0) {
  TRY(const auto timeout, checked_timeout(timeout_ms, if_zero));
  return steady_now() + timeout;
}

// kInvalid: too many dimensions, or a null pointer.
inline Result<WantedBox> box_of(const rk_box& box) {
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

// The object behind a handle. kInvalid: the handle is null, or this is a child after fork().
template <typename Handle>
auto object_of(const Handle* handle) -> Result<std::remove_const_t<decltype(handle->object)>> {
  if (handle == nullptr) return fail(ErrorCode::kInvalid, "the {} is null", Handle::kName);
  if (!handle->is_owner()) {
    return fail(ErrorCode::kInvalid,
                "the {} was opened before fork(): only the parent may use it; open another one",
                Handle::kName);
  }
  return handle->object;
}

// Runs `body` with the object, which returns Result<void>.
template <typename Handle, typename Body>
std::int32_t with_object(const Handle* handle, rk_error* error, Body&& body) noexcept {
  return guarded(error, [&]() -> Result<void> {
    TRY(const auto object, object_of(handle));
    return body(*object);
  });
}

// Ends the object and deletes the handle. In a child after fork() it does nothing, because the
// threads and locks of the object are the parent's. `handle` may be null.
template <typename Handle, typename End>
void end_handle(Handle* handle, End&& end) noexcept {
  if (handle == nullptr) return;
  guarded(nullptr, [&]() -> Result<void> {
    if (!handle->is_owner()) return {};
    end(*handle->object);
    delete handle;
    return {};
  });
}

}  // namespace rekindle::client
