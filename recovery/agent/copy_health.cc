#include "recovery/agent/copy_health.h"

#include <string_view>
#include <utility>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/convert.h"
#include "src/async/offload.h"
#include "src/async/task.h"
#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::agent {

using async::Task;

namespace {

// Enough for 1 TB at 300 MB/s.
constexpr std::chrono::hours kReadDeadline{1};

std::string_view word_for(store::CopyState state) {
  switch (state) {
    case store::CopyState::kVerified:
      return "verified";
    case store::CopyState::kUnverified:
      return "unverified";
    case store::CopyState::kQuarantined:
      break;
  }
  return "quarantined";
}

proto::CopyStatus status_of(const store::StoredVersion& stored) {
  proto::CopyStatus status;
  *status.mutable_id() = rpc::to_proto(stored.manifest.checkpoint->id);
  *status.mutable_layout() = rpc::to_proto(stored.manifest.layout.digest());
  status.set_directory(stored.directory.string());
  status.set_bytes(stored.manifest.layout.payload_bytes());
  status.set_state(std::string(word_for(stored.verification->state())));
  if (const auto record = stored.verification->record()) {
    status.set_read_unix_us(static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::microseconds>(record->when.time_since_epoch())
            .count()));
  }
  status.set_found(stored.verification->why_quarantined());
  return status;
}

}  // namespace

CopyHealth::CopyHealth(boost::asio::any_io_executor executor, AgentParts parts,
                       worker::ScrubOptions scrub, Hooks hooks)
    : parts_(parts),
      ending_(executor),
      mender_(executor, parts.store, parts.blocking_pool, mender_hooks(std::move(hooks))),
      verifier_(executor, parts.store, parts.blocking_pool, parts.digest_pool, verifier_hooks()),
      scrubber_(executor, parts.store, verifier_, parts.blocking_pool, scrub) {}

worker::CopyVerifier::Hooks CopyHealth::verifier_hooks() {
  worker::CopyVerifier::Hooks hooks;
  hooks.suspect = [this](const std::shared_ptr<const store::StoredVersion>& copy) {
    // While the agent stops, its peers' sessions are ended by their owner, which may go any moment.
    if (closing_) return;
    parts_.link.announce_soon();
    const CopyKey key = key_of(copy->manifest);
    ending_.spawn("copies.suspect", parts_.readers.end_peers(key.id, key.layout));
  };
  hooks.verified = [this] { parts_.link.announce_soon(); };
  hooks.replace = [this](std::shared_ptr<const store::StoredVersion> copy,
                         worker::CopyVerifier::BadCopy bad) {
    return mender_.replace(std::move(copy), std::move(bad));
  };
  return hooks;
}

CopyMender::Hooks CopyHealth::mender_hooks(Hooks hooks) {
  CopyMender::Hooks result;
  result.hide = [this](CopyKey key) -> Task<void> {
    parts_.served.remove_copy(key);
    parts_.link.announce_soon();
    co_await parts_.readers.end_peers(key.id, key.layout);
  };
  result.drop = std::move(hooks.drop);
  result.pull = std::move(hooks.pull);
  result.event = [this](std::string kind, const ModelVersion& id, std::string why) {
    if (on_event_) on_event_(std::move(kind), id, std::move(why));
  };
  return result;
}

void CopyHealth::start() {
  verifier_.start();
  scrubber_.start();
}

Task<void> CopyHealth::close(std::chrono::milliseconds deadline) {
  closing_ = true;
  (void)co_await scrubber_.close(deadline);
  (void)co_await mender_.close(deadline);
  (void)co_await verifier_.close(deadline);
  (void)co_await ending_.close(deadline);
}

Task<Result<void>> CopyHealth::require_settled(std::shared_ptr<const store::StoredVersion> stored) {
  const ModelVersion id = stored->manifest.checkpoint->id;
  auto verified = co_await verifier_.require(std::move(stored), kReadDeadline);
  if (!verified && verified.error().code() == ErrorCode::kCorrupt) co_await mender_.settle(id);
  co_return verified;
}

Task<Result<std::vector<proto::CopyStatus>>> CopyHealth::verify(ModelVersion id) {
  auto here = parts_.store.find(id);
  // The state of the copy says what was found.
  for (const auto& copy : here) (void)co_await verifier_.read_again(copy, kReadDeadline);
  // A copy that is replaced may need the room of the old one.
  here.clear();
  co_await mender_.settle(id);
  // A copy that has come meanwhile is not verified yet if somebody had its files open when it was
  // committed.
  here = parts_.store.find(id);
  for (const auto& copy : here) (void)co_await verifier_.require(copy, kReadDeadline);
  here.clear();
  std::vector<proto::CopyStatus> found;
  for (auto& copy : statuses()) {
    if (copy.id().model() == id.model && copy.id().version() == id.version) {
      found.push_back(std::move(copy));
    }
  }
  if (found.empty()) {
    co_return fail(ErrorCode::kNotFound, "store {} of this host does not hold {}",
                   parts_.store.directory().string(), id.to_string());
  }
  co_return found;
}

std::vector<proto::CopyStatus> CopyHealth::statuses() const {
  std::vector<proto::CopyStatus> statuses;
  for (const auto& stored : parts_.store.versions()) statuses.push_back(status_of(*stored));
  mender_.add_status(statuses);
  return statuses;
}

}  // namespace rekindle::agent
