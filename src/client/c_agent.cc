#include <memory>
#include <utility>

#include "src/base/version.h"
#include "src/client/c_boundary.h"

// Version, errors, rk_connect and rk_update.
namespace rekindle::client {

std::int32_t report(std::int32_t code, std::string_view message, rk_error* error) noexcept {
  if (error == nullptr) return code;
  std::size_t size = std::min(message.size(), sizeof error->message - 1);
  // Cuts between characters: steps back over continuation bytes of UTF-8.
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
constexpr std::int64_t kUpdateTimeoutMs = 600'000;

Result<UpdateRequest> update_request_of(const rk_update_options& options) {
  if (options.model_version == nullptr) {
    return fail(ErrorCode::kInvalid, "update without a version");
  }
  TRY(ModelRef model, ModelRef::parse(options.model_version));
  if (!model.version) {
    return fail(ErrorCode::kInvalid, "update to '{}': which version? Say {}@NUMBER",
                options.model_version, options.model_version);
  }
  TRY(const auto gather, checked_timeout(options.gather_ms));
  UpdateRequest request;
  request.id = {std::move(model.model), *model.version};
  request.group = options.group == nullptr ? "" : options.group;
  request.gather_ms = static_cast<std::uint32_t>(gather.count());
  return request;
}

void fill_result(const UpdatedReply& updated, rk_update_result& result) {
  rk_update_result filled{};
  filled.size = result.size;
  filled.members = updated.members;
  filled.ready = updated.ready;
  filled.by_broadcast = updated.by_broadcast;
  filled.elapsed_ms = updated.elapsed_ms;
  std::memcpy(static_cast<void*>(&result), &filled,
              std::min<std::size_t>(filled.size, sizeof filled));
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

RK_API int32_t rk_connect(const rk_connect_options* options, rk_agent** agent, rk_error* error) {
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

RK_API void rk_disconnect(rk_agent* agent) {
  if (agent == nullptr) return;
  guarded(nullptr, [&]() -> Result<void> {
    if (!agent->is_owner()) {
      // Everything else belongs to the parent's threads and stays as it is.
      agent->object->abandon();
      return {};
    }
    agent->object->close(Error(ErrorCode::kStale, "the agent was disconnected"));
    delete agent;
    return {};
  });
}

RK_API int32_t rk_update(rk_agent* agent, const rk_update_options* options,
                         rk_update_result* result, rk_error* error) {
  return guarded(error, [&]() -> Result<void> {
    TRY(const auto connection, object_of(agent, "agent"));
    if (result != nullptr && result->size < sizeof result->size) {
      return fail(ErrorCode::kInvalid, "the `size` of the result is {}: set it to its sizeof",
                  result->size);
    }
    TRY(const rk_update_options given, read_options(options));
    TRY(const UpdateRequest request, update_request_of(given));
    const std::int64_t ms = given.timeout_ms == 0 ? kUpdateTimeoutMs : given.timeout_ms;
    TRY(const auto timeout, checked_timeout(ms));
    auto answer = connection->call(request, 0, timeout, std::make_shared<Inbox>());
    if (!answer) {
      return fail(
          std::move(answer).error().with_context(fmt::format("update {}", given.model_version)));
    }
    const auto* const updated = std::get_if<UpdatedReply>(&answer->agent.reply);
    if (updated == nullptr) {
      return fail(ErrorCode::kInternal, "the agent answered an update with something else");
    }
    if (result != nullptr) fill_result(*updated, *result);
    if (updated->ready >= updated->members) return {};
    return fail(ErrorCode::kUnavailable, "update {}: {} of {} workers are ready; {}",
                given.model_version, updated->ready, updated->members, updated->why);
  });
}

}  // extern "C"

}  // namespace rekindle::client
