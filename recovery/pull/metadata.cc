// PullJob: what the version consists of, from the first source that can say.
#include <algorithm>
#include <iterator>
#include <utility>

#include "recovery/pull/pull.h"
#include "recovery/pull/wait.h"
#include "src/base/log.h"

namespace rekindle::pull {

namespace {

constexpr std::string_view kConfigFile = "config.json";
constexpr std::chrono::milliseconds kRetryDelay{250};
constexpr std::chrono::milliseconds kLeastPageTime{1000};

}  // namespace

rpc::Task<Result<void>> PullJob::learn_checkpoint() {
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
    const bool cancelled = co_await is_cancelled();
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

rpc::Task<Result<void>> PullJob::learn_from(std::shared_ptr<SourcePeer> peer) {
  CO_TRY(auto tensors, co_await peer->fetch_tensor_set(resolved_.tensor_set, paging()));
  CO_TRY(auto digests, co_await peer->fetch_tile_digests(resolved_.root, paging()));
  // Checks that they hash to the root that was resolved.
  CO_TRY(checkpoint_,
         Checkpoint::create(resolved_.id, std::move(tensors), std::move(digests), resolved_.root));
  co_return Result<void>();
}

rpc::Task<Result<std::string>> PullJob::read_config() {
  const std::string name = std::string(kFileTensorPrefix).append(kConfigFile);
  const auto index = checkpoint_->tensors.find(name);
  if (!index) co_return std::string();
  for (const auto& stored : environment_.store->find(resolved_.id)) {
    for (const auto& entry : stored->manifest.layout.entries_of(*index)) {
      const auto bytes = stored->array(entry);
      co_return check_file(name, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    }
  }
  co_await connect_peers();
  std::optional<Error> last_error;
  for (const auto& source : *sources_) {
    if (source.peer == nullptr) continue;
    auto content =
        co_await source.peer->fetch_file(resolved_.root, std::string(kConfigFile), paging());
    if (content) content = check_file(name, std::move(*content));
    if (content) co_return content;
    last_error = std::move(content).error();
  }
  for (const auto& source : *sources_) {
    if (source.local_segments.empty()) continue;
    for (const auto& entry : source.layout->entries_of(*index)) {
      const auto bytes = source.local_segments[entry.segment].subspan(
          entry.offset_bytes, checkpoint_->tensors[*index].size_bytes());
      co_return check_file(name, {reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    }
  }
  co_return fail(ErrorCode::kNotFound,
                 "NO_SOURCE: nobody has the config.json of {} that --shard needs: {}",
                 resolved_.id.to_string(), last_error ? last_error->message() : "no source");
}

Result<std::string> PullJob::check_file(const std::string& name, std::string content) const {
  const TensorIndex index = *checkpoint_->tensors.find(name);
  const TensorInfo& info = checkpoint_->tensors[index];
  const TileGrid& grid = checkpoint_->tiles.grid(index);
  bool good = content.size() == info.size_bytes();
  for (std::uint64_t tile = 0; good && tile < grid.tile_count(); ++tile) {
    good = digest_tile(info, grid, tile, as_bytes(content), Box::whole(info.shape)) ==
           checkpoint_->tile_digests[checkpoint_->tiles.first_tile(index) + tile];
  }
  if (!good) return fail(ErrorCode::kCorrupt, "{} does not match its digest", name);
  return content;
}

}  // namespace rekindle::pull
