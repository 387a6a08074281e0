#include <algorithm>
#include <utility>
#include <vector>

#include <boost/asio/this_coro.hpp>

#include "recovery/agent/agent_core.h"
#include "recovery/pull/offload.h"
#include "src/base/log.h"

// How versions and copies are let go of.
namespace rekindle::agent {

using rpc::Task;

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

Task<Result<std::uint64_t>> AgentCore::retire(ModelVersion id) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);  // once begun it is done
  const bool filling = is_being_filled(id);
  served_->remove(id);
  changed();
  if (service_ != nullptr) co_await service_->end_sessions_of(id);
  if (before_retire_) co_await before_retire_(id);
  auto freed = co_await pull::offload(*blocking_pool_, [&] { return store_->retire(id); });
  co_await let_go_of_unlisted(id);
  if (!freed && freed.error().code() == ErrorCode::kNotFound && filling) {
    co_return fail(ErrorCode::kUnavailable,
                   "retire {}: a pull of it is under way on {}; retry when that has ended",
                   id.to_string(), identity_.node_id);
  }
  if (!freed && freed.error().code() == ErrorCode::kNotFound) {
    co_return fail(ErrorCode::kNotFound, "retire {}: {} does not hold it", id.to_string(),
                   identity_.node_id);
  }
  if (freed) log::info("version.retired", "version", id.to_string(), "bytes", *freed);
  co_return freed;
}

Task<Result<std::uint64_t>> AgentCore::discard_unfinished_before(ModelVersion id) {
  co_return co_await pull::offload(*blocking_pool_,
                                   [&] { return store_->discard_unfinished_before(id); });
}

Task<Result<std::uint64_t>> AgentCore::drop(std::shared_ptr<const store::StoredVersion> copy) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);  // once begun it is done
  const CopyKey key = key_of(copy->manifest);
  served_->remove_copy(key);
  changed();
  auto freed = co_await pull::offload(*blocking_pool_, [&] { return store_->retire_copy(*copy); });
  if (service_ != nullptr) co_await service_->end_sessions_of(key.id, key.layout);
  co_await let_go_of_unlisted(key.id);
  co_return freed;
}

// A pull or a publication may have ended, and been served, while its version was on the way out.
Task<void> AgentCore::let_go_of_unlisted(ModelVersion id) {
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
