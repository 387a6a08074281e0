// PullJob: what the version consists of, from the first source that can say.
#include <algorithm>
#include <iterator>
#include <utility>

#include "recovery/pull/pull.h"
#include "recovery/pull/verified_file.h"
#include "src/async/task.h"
#include "src/base/log.h"

namespace rekindle::pull {

namespace {

constexpr std::string_view kConfigFile = "config.json";
constexpr std::chrono::milliseconds kRetryDelay{250};
constexpr std::chrono::milliseconds kLeastPageTime{1000};

// Keeps the reason that tells most: bytes that are wrong, rather than somebody who has none.
void pass_over_config(const std::string& source, Error cause, std::optional<Error>& why) {
  const bool wrong = cause.code() != ErrorCode::kNotFound;
  if (wrong) log::warn("pull.config", "source", source, "error", cause);
  if (!why || (wrong && why->code() == ErrorCode::kNotFound)) {
    why = std::move(cause).with_context(source);
  }
}

}  // namespace

async::Task<Result<void>> PullJob::learn_checkpoint() {
  for (const auto& stored : environment_.store->find(resolved_.id)) {
    if (stored->manifest.checkpoint->root == resolved_.root)
      checkpoint_ = stored->manifest.checkpoint;
  }
  if (checkpoint_ != nullptr) co_return Result<void>();
  std::optional<Error> last_error;
  co_await connect_peers();
  while (true) {
    for (ActiveSource& source : *sources_) {
      if (source.peer == nullptr) continue;
      auto learned = co_await learn_from(source.peer);
      if (learned) {
        forget_lost_sources();
        co_return learned;
      }
      last_error = std::move(learned).error();
      log::warn("pull.metadata", "source", source.name, "error", *last_error);
      lose(source, *last_error);
    }
    forget_lost_sources();
    const bool cancelled = co_await async::is_cancelled();
    if (cancelled || silence_.over(std::chrono::steady_clock::now())) break;
    co_await wait_to_ask_again(kRetryDelay);
    co_await look_for_sources();
  }
  if (!request_.fallback.empty()) {
    show({}, fmt::format("no source is left; reading {}", request_.fallback.string()));
    co_return co_await add_fallback();
  }
  co_return fail(ErrorCode::kNotFound, "NO_SOURCE: nobody can say what {} consists of: {}",
                 resolved_.id.to_string(),
                 last_error ? last_error->message() : "no source can be reached");
}

// Who does not answer leaves time for the others to be asked.
SourcePeer::Paging PullJob::paging() {
  const TimePoint now = std::chrono::steady_clock::now();
  const auto share = silence_.left(now) / std::max<std::int64_t>(1, std::ssize(*sources_));
  return {silence_.at_most(std::max<std::chrono::milliseconds>(share, kLeastPageTime), now),
          [this] { silence_.heard(std::chrono::steady_clock::now()); }};
}

async::Task<Result<void>> PullJob::learn_from(std::shared_ptr<SourcePeer> peer) {
  CO_TRY(auto tensors, co_await peer->fetch_tensor_set(resolved_.tensor_set, paging()));
  CO_TRY(auto digests, co_await peer->fetch_tile_digests(resolved_.root, paging()));
  // Checks that they hash to the root that was resolved.
  CO_TRY(checkpoint_,
         Checkpoint::create(resolved_.id, std::move(tensors), std::move(digests), resolved_.root));
  co_return Result<void>();
}

// From the own copies first, then from peers, then from the fallback. A copy of the file that
// cannot be read or does not match its leaves is passed over.
async::Task<Result<std::string>> PullJob::read_config() {
  const auto tensor = checkpoint_->tensors.find(std::string(kFileTensorPrefix).append(kConfigFile));
  if (!tensor) co_return std::string();
  std::optional<Error> why;
  for (const auto& stored : environment_.store->find(resolved_.id)) {
    if (stored->manifest.checkpoint->root != resolved_.root) continue;
    auto content =
        read_verified_file(*checkpoint_, stored->manifest.layout, *tensor,
                           [&](const LayoutEntry& entry) { return stored->array(entry); });
    if (content) co_return content;
    pass_over_config(stored->directory.string(), std::move(content).error(), why);
  }
  co_await connect_peers();
  for (const auto& source : *sources_) {
    if (source.peer == nullptr) continue;
    auto content =
        co_await source.peer->fetch_file(resolved_.root, std::string(kConfigFile), paging());
    auto usable = content ? check_file(*checkpoint_, *tensor, *content)
                          : Result<void>(fail(std::move(content).error()));
    if (usable) co_return content;
    pass_over_config(source.name, std::move(usable).error(), why);
  }
  if (!request_.fallback.empty() && !fallback_used_) {
    if (auto added = co_await add_fallback(); !added) {
      pass_over_config(request_.fallback.string(), std::move(added).error(), why);
    }
  }
  for (const auto& source : *sources_) {
    if (source.local_segments.empty()) continue;
    const auto array_of = [&](const LayoutEntry& entry) {
      const std::uint64_t element_bytes = dtype_size_bytes(checkpoint_->tensors[*tensor].dtype);
      return source.local_segments[entry.segment].subspan(entry.offset_bytes,
                                                          entry.box.elements() * element_bytes);
    };
    auto content = read_verified_file(*checkpoint_, *source.layout, *tensor, array_of);
    if (content) co_return content;
    pass_over_config(source.name, std::move(content).error(), why);
  }
  co_return fail(ErrorCode::kNotFound,
                 "NO_SOURCE: nobody has the config.json of {} that --shard needs: {}",
                 resolved_.id.to_string(), why ? why->message() : "no source");
}

}  // namespace rekindle::pull
