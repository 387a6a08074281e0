#include <utility>

#include "src/client/c_boundary.h"
#include "src/client/c_handles.h"

// rk_update.
using namespace rekindle;          // NOLINT(google-build-using-namespace)
using namespace rekindle::client;  // NOLINT(google-build-using-namespace)

namespace {

constexpr std::int64_t kUpdateTimeoutMs = 600'000;

Result<UpdateRequest> request_of(const rk_update_options& options) {
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

void fill(const UpdatedReply& updated, rk_update_result& result) {
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

int32_t rk_update(rk_agent* agent, const rk_update_options* options, rk_update_result* result,
                  rk_error* error) {
  return guarded(error, [&]() -> Result<void> {
    TRY(const auto connection, object_of(agent, "agent"));
    if (result != nullptr && result->size < sizeof result->size) {
      return fail(ErrorCode::kInvalid, "the `size` of the result is {}: set it to its sizeof",
                  result->size);
    }
    TRY(const rk_update_options given, read_options(options));
    TRY(const UpdateRequest request, request_of(given));
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
    if (result != nullptr) fill(*updated, *result);
    if (updated->ready >= updated->members) return {};
    return fail(ErrorCode::kUnavailable, "update {}: {} of {} workers are ready; {}",
                given.model_version, updated->ready, updated->members, updated->why);
  });
}

}  // extern "C"
