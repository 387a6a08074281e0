#include "recovery/agent/version_retirement.h"

#include <vector>

#include <boost/asio/this_coro.hpp>

#include "src/async/offload.h"
#include "src/base/log.h"

namespace rekindle::agent {

using async::Task;

Result<void> VersionRetirement::check_not_retiring(const ModelVersion& id) const {
  if (!is_retiring(id)) return {};
  return fail(
      ErrorCode::kUnavailable,
      "{} is being retired on {}, which waits for its readers: try again when that has ended",
      id.to_string(), parts_.identity.node_id);
}

Task<Result<std::uint64_t>> VersionRetirement::retire(ModelVersion id) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  struct Entry {
    std::multiset<ModelVersion>& all;
    const std::multiset<ModelVersion>::iterator at;
    ~Entry() { all.erase(at); }
  };
  const Entry entry{retiring_, retiring_.insert(id)};
  const bool filling = hooks_.is_being_filled(id);
  parts_.served.remove(id);
  parts_.link.announce_soon();
  co_await parts_.readers.end_peers(id);
  co_await parts_.readers.end_workers(id);
  auto freed =
      co_await async::offload(parts_.blocking_pool, [&] { return parts_.store.retire(id); });
  co_await stop_serving_removed(id);
  if (!freed && freed.error().code() == ErrorCode::kNotFound && filling) {
    co_return fail(ErrorCode::kUnavailable,
                   "retire {}: a pull of it is under way on {}; retry when that has ended",
                   id.to_string(), parts_.identity.node_id);
  }
  if (!freed && freed.error().code() == ErrorCode::kNotFound) {
    co_return fail(ErrorCode::kNotFound,
                   "retire {}: store {} of this host does not hold it{}; --store DIR names another "
                   "store, --everywhere means all hosts of the fleet",
                   id.to_string(), parts_.store.directory().string(),
                   parts_.link.is_member() ? "" : " (no agent runs on it)");
  }
  if (freed) log::info("version.retired", "version", id.to_string(), "bytes", *freed);
  co_return freed;
}

Task<Result<std::uint64_t>> VersionRetirement::drop(
    std::shared_ptr<const store::StoredVersion> copy) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const CopyKey key = key_of(copy->manifest);
  parts_.served.remove_copy(key);
  parts_.link.announce_soon();
  // Somebody writes to its files, or their memory is bad: no other copy may get them.
  for (const auto& segment : copy->segments) parts_.store.never_reuse(*segment);
  auto freed = co_await async::offload(parts_.blocking_pool,
                                       [&] { return parts_.store.retire_copy(*copy); });
  co_await parts_.readers.end_peers(key.id, key.layout);
  co_await stop_serving_removed(key.id);
  co_return freed;
}

// A pull or a publication may have ended, and its copy been served, while its version was on the
// way out.
Task<void> VersionRetirement::stop_serving_removed(ModelVersion id) {
  hooks_.copies_removed();
  std::vector<CopyKey> removed;
  for (const Served* served : parts_.served.find(id)) {
    const CopyKey key = key_of(*served->manifest);
    if (served->complete() && parts_.store.find(id, key.layout) == nullptr) removed.push_back(key);
  }
  for (const CopyKey& key : removed) {
    parts_.served.remove_copy(key);
    co_await parts_.readers.end_peers(key.id, key.layout);
  }
  parts_.link.announce_soon();
}

}  // namespace rekindle::agent
