#include <utility>

#include "src/base/version.h"
#include "src/client/c_boundary.h"
#include "src/client/c_handles.h"

// Version, errors and rk_connect.
namespace rekindle::client {

std::int32_t report(std::int32_t code, std::string_view message, rk_error* error) noexcept {
  if (error == nullptr) return code;
  std::size_t size = std::min(message.size(), sizeof error->message - 1);
  // Not amid a character of UTF-8: back over what continues one.
  while (size < message.size() && size > 0 && (message[size] & 0xc0) == 0x80) --size;
  error->code = code;
  std::memcpy(error->message, message.data(), size);
  error->message[size] = '\0';
  std::replace(error->message, error->message + size, '\n', ' ');
  return code;
}

namespace {

constexpr const char* kDefaultStore = "/dev/shm/rekindle";
constexpr std::int64_t kConnectTimeoutMs = 5000;

}  // namespace

}  // namespace rekindle::client

using namespace rekindle;          // NOLINT(google-build-using-namespace)
using namespace rekindle::client;  // NOLINT(google-build-using-namespace)

extern "C" {

uint32_t rk_api_version(void) { return RK_API_VERSION; }

const char* rk_library_version(void) { return version().data(); }  // a literal, ends with 0

const char* rk_code_name(int32_t code) {
  if (code == RK_OK) return "OK";
  if (code < RK_INVALID || code > RK_INTERNAL) return "UNKNOWN";
  return to_string(static_cast<ErrorCode>(code - 1)).data();  // a literal, too
}

int32_t rk_connect(const rk_connect_options* options, rk_agent** agent, rk_error* error) {
  if (agent != nullptr) *agent = nullptr;
  return guarded(error, [&]() -> Result<void> {
    if (agent == nullptr)
      return fail(ErrorCode::kInvalid, "where should the agent go? `agent` is null");
    TRY(const rk_connect_options given, read_options(options));
    const std::int64_t ms = given.timeout_ms == 0 ? kConnectTimeoutMs : given.timeout_ms;
    TRY(const auto timeout, checked_timeout(ms));
    auto handle = std::make_unique<rk_agent>();
    TRY(handle->object,
        Connection::open(given.store == nullptr ? kDefaultStore : given.store, after(timeout)));
    *agent = handle.release();
    return {};
  });
}

void rk_disconnect(rk_agent* agent) {
  if (agent == nullptr) return;
  guarded(nullptr, [&]() -> Result<void> {
    if (!agent->is_owner()) {
      agent->object->abandon();  // the rest belongs to the parent's threads: left as it is
      return {};
    }
    agent->object->close(Error(ErrorCode::kStale, "the agent was disconnected"));
    delete agent;
    return {};
  });
}

}  // extern "C"
