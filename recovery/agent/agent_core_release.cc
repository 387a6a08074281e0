#include <algorithm>
#include <utility>
#include <vector>

#include <boost/asio/this_coro.hpp>

#include "recovery/agent/agent_core.h"
#include "recovery/rpc/convert.h"
#include "src/async/offload.h"
#include "src/base/log.h"

// How versions and copies are let go of.
namespace rekindle::agent {

using async::Task;

namespace {

constexpr std::chrono::hours kReadPatience{1};  // 1 TB at 300 MB/s

}  // namespace

std::uint32_t AgentCore::readers_of(const ModelVersion& id) const {
  return (service_ != nullptr ? service_->session_count(id) : 0) +
         (other_readers_ ? other_readers_(id) : 0);
}

bool AgentCore::is_being_filled(const ModelVersion& id) const {
  return std::ranges::any_of(growing_, [&](const auto& entry) { return entry.first.id == id; });
}

RoomMaker::Hooks AgentCore::room_hooks() {
  RoomMaker::Hooks hooks;
  hooks.workers = [this](const ModelVersion& id) {
    return other_readers_ ? other_readers_(id) : 0;
  };
  hooks.being_filled = [this](const ModelVersion& id) { return is_being_filled(id); };
  hooks.coordinator = [this]() -> std::shared_ptr<rpc::RpcClient> {
    return member_ && link_ != nullptr ? link_->client() : nullptr;
  };
  hooks.hide = [this](const ModelVersion& id) {
    served_->remove(id);
    changed();
  };
  hooks.retire = [this](ModelVersion id) { return retire(std::move(id)); };
  hooks.discard_unfinished_before = [this](ModelVersion id) {
    return discard_unfinished_before(std::move(id));
  };
  return hooks;
}

worker::CopyVerifier::Hooks AgentCore::verifier_hooks() {
  worker::CopyVerifier::Hooks hooks;
  hooks.suspect = [this](const std::shared_ptr<const store::StoredVersion>& copy) {
    if (stopping_) return;  // the service may go any moment, and ends its sessions itself
    changed();
    if (service_ == nullptr) return;
    const CopyKey key = key_of(copy->manifest);
    suspects_.spawn("copies.suspect", service_->end_sessions_of(key.id, key.layout));
  };
  hooks.verified = [this] { changed(); };
  hooks.replace = [this](std::shared_ptr<const store::StoredVersion> copy,
                         worker::CopyVerifier::BadCopy bad) {
    return mender_->replace(std::move(copy), std::move(bad));
  };
  return hooks;
}

CopyMender::Hooks AgentCore::mender_hooks() {
  CopyMender::Hooks hooks;
  hooks.hide = [this](CopyKey key) -> Task<void> {
    served_->remove_copy(key);
    changed();
    if (service_ != nullptr) co_await service_->end_sessions_of(key.id, key.layout);
  };
  hooks.drop = [this](std::shared_ptr<const store::StoredVersion> copy) {
    return drop(std::move(copy));
  };
  hooks.pull = [this](PullRequest request) -> Task<Result<void>> {
    pull::PullWatch nobody_watches;
    auto outcome = co_await pull_alone(std::move(request), OnProgress(), std::move(nobody_watches));
    if (!outcome) co_return fail(std::move(outcome).error());
    co_return Result<void>();
  };
  hooks.event = [this](std::string kind, const ModelVersion& id, std::string why) {
    if (copy_event_) copy_event_(std::move(kind), id, std::move(why));
  };
  return hooks;
}

void AgentCore::watch_copies() {
  verifier_->start();
  scrubber_->start();
}

Task<Result<std::vector<proto::CopyStatus>>> AgentCore::verify(ModelVersion id) {
  const auto is_of_version = [&](const proto::CopyStatus& copy) {
    return copy.id().model() == id.model && copy.id().version() == id.version;
  };
  auto here = store_->find(id);
  for (const auto& copy : here) {
    (void)co_await verifier_->read_again(copy, kReadPatience);  // its state says what was found
  }
  here.clear();  // one that is replaced may need the room of the old one
  co_await mender_->settle(id);
  // A copy that has come meanwhile is not verified yet if somebody had its files open when it was
  // committed.
  here = store_->find(id);
  for (const auto& copy : here) (void)co_await verifier_->require(copy, kReadPatience);
  here.clear();
  std::vector<proto::CopyStatus> found;
  for (auto& copy : copies()) {
    if (is_of_version(copy)) found.push_back(std::move(copy));
  }
  if (found.empty()) {
    co_return fail(ErrorCode::kNotFound, "store {} of this host does not hold {}",
                   store_->directory().string(), id.to_string());
  }
  co_return found;
}

std::vector<proto::CopyStatus> AgentCore::copies() const {
  std::vector<proto::CopyStatus> copies;
  for (const auto& stored : store_->versions()) {
    proto::CopyStatus& copy = copies.emplace_back();
    *copy.mutable_id() = rpc::to_proto(stored->manifest.checkpoint->id);
    *copy.mutable_layout() = rpc::to_proto(stored->manifest.layout.digest());
    copy.set_directory(stored->directory.string());
    copy.set_bytes(stored->manifest.layout.payload_bytes());
    const auto state = stored->verification->state();
    copy.set_state(state == store::CopyState::kVerified     ? "verified"
                   : state == store::CopyState::kUnverified ? "unverified"
                                                            : "quarantined");
    if (const auto record = stored->verification->record()) {
      copy.set_read_unix_us(static_cast<std::uint64_t>(
          std::chrono::duration_cast<std::chrono::microseconds>(record->when.time_since_epoch())
              .count()));
    }
    copy.set_found(stored->verification->why_quarantined());
  }
  mender_->add_status(copies);
  return copies;
}

Task<Result<std::uint64_t>> AgentCore::retire(ModelVersion id) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);  // once begun it is done
  // Until this has ended, whatever happens.
  struct Intent {
    std::multiset<ModelVersion>& all;
    const std::multiset<ModelVersion>::iterator at;
    ~Intent() { all.erase(at); }
  };
  const Intent intent{retiring_, retiring_.insert(id)};
  const bool filling = is_being_filled(id);
  served_->remove(id);
  changed();
  if (service_ != nullptr) co_await service_->end_sessions_of(id);
  if (before_retire_) co_await before_retire_(id);
  auto freed = co_await async::offload(*blocking_pool_, [&] { return store_->retire(id); });
  co_await let_go_of_unlisted(id);
  if (!freed && freed.error().code() == ErrorCode::kNotFound && filling) {
    co_return fail(ErrorCode::kUnavailable,
                   "retire {}: a pull of it is under way on {}; retry when that has ended",
                   id.to_string(), identity_.node_id);
  }
  if (!freed && freed.error().code() == ErrorCode::kNotFound) {
    co_return fail(ErrorCode::kNotFound,
                   "retire {}: store {} of this host does not hold it{}; --store DIR names another "
                   "store, --everywhere means all hosts of the fleet",
                   id.to_string(), store_->directory().string(),
                   member_ ? "" : " (no agent runs on it)");
  }
  if (freed) log::info("version.retired", "version", id.to_string(), "bytes", *freed);
  co_return freed;
}

Task<Result<std::uint64_t>> AgentCore::discard_unfinished_before(ModelVersion id) {
  co_return co_await async::offload(*blocking_pool_,
                                    [&] { return store_->discard_unfinished_before(id); });
}

Task<Result<std::uint64_t>> AgentCore::drop(std::shared_ptr<const store::StoredVersion> copy) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);  // once begun it is done
  const CopyKey key = key_of(copy->manifest);
  served_->remove_copy(key);
  changed();
  // Somebody writes to its files, or their memory is bad: no other copy gets them.
  for (const auto& segment : copy->segments) store_->never_reuse(*segment);
  auto freed = co_await async::offload(*blocking_pool_, [&] { return store_->retire_copy(*copy); });
  if (service_ != nullptr) co_await service_->end_sessions_of(key.id, key.layout);
  co_await let_go_of_unlisted(key.id);
  co_return freed;
}

// A pull or a publication may have ended, and been served, while its version was on the way out.
Task<void> AgentCore::let_go_of_unlisted(ModelVersion id) {
  verifier_->let_go_of_unlisted();
  std::vector<CopyKey> gone;
  for (const Served* served : served_->find(id)) {
    const CopyKey key = key_of(*served->manifest);
    if (served->complete() && store_->find(id, key.layout) == nullptr) gone.push_back(key);
  }
  for (const CopyKey& key : gone) {
    served_->remove_copy(key);
    if (service_ != nullptr) co_await service_->end_sessions_of(key.id, key.layout);
  }
  changed();
}

}  // namespace rekindle::agent
