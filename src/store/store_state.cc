#include "src/store/store_state.h"

#include <algorithm>

#include "src/base/units.h"
#include "src/store/store_directory.h"

namespace rekindle::store {

StoreState::StoreState(std::filesystem::path directory, UniqueFd lock, std::uint64_t budget_bytes,
                       std::uint64_t pool_bytes, std::uint64_t reserve_bytes,
                       std::unique_ptr<const NumaPlacement> placement, Evidence evidence)
    : directory_(std::move(directory)),
      lock_(std::move(lock)),
      budget_bytes_(budget_bytes),
      evidence_(evidence),
      pool_(directory_ / kPoolName, pool_bytes, reserve_bytes, std::move(placement)) {}

std::uint64_t StoreState::used_locked() const {
  std::uint64_t used = reserved_;
  for (const auto& [path, version] : committed_) used += version->manifest.layout.segment_bytes();
  for (const auto& [path, busy] : busy_) used += busy.bytes;
  for (const auto& [path, left] : left_) used += left.bytes;
  for (const Lingering& lingering : lingering_) {
    if (!lingering.version.expired()) used += lingering.bytes;
  }
  return used;
}

std::uint64_t StoreState::used_bytes() const {
  const std::lock_guard lock(mutex_);
  return used_locked();
}

std::uint64_t StoreState::room_bytes() const {
  const std::lock_guard lock(mutex_);
  return budget_bytes_ - std::min(used_locked(), budget_bytes_);
}

std::uint64_t StoreState::next_generation() {
  const std::lock_guard lock(mutex_);
  return ++generation_;
}

std::vector<std::shared_ptr<const StoredVersion>> StoreState::versions() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<const StoredVersion>> result;
  for (const auto& [path, version] : committed_) result.push_back(version);
  return result;
}

std::vector<std::shared_ptr<const StoredVersion>> StoreState::find(const ModelVersion& id) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<const StoredVersion>> result;
  for (const auto& [path, version] : committed_) {
    if (version->manifest.checkpoint->id == id) result.push_back(version);
  }
  return result;
}

std::shared_ptr<const StoredVersion> StoreState::find(const ModelVersion& id,
                                                      const Digest& layout) const {
  for (auto& version : find(id)) {
    if (version->manifest.layout.digest() == layout) return std::move(version);
  }
  return nullptr;
}

Result<void> StoreState::check_root(const ModelVersion& id, const Digest& root) const {
  const std::lock_guard lock(mutex_);
  return check_root_locked(id, root);
}

Result<void> StoreState::check_root_locked(const ModelVersion& id, const Digest& root) const {
  const auto check = [&](const Digest& other, std::string_view what) -> Result<void> {
    if (other == root) return {};
    return fail(ErrorCode::kDenied,
                "{} {} with root {}, not {}: a version never changes; publish under a new version",
                id.to_string(), what, other.hex(), root.hex());
  };
  for (const auto& [path, version] : committed_) {
    const Checkpoint& checkpoint = *version->manifest.checkpoint;
    if (checkpoint.id == id) TRY_VOID(check(checkpoint.root, "is in the store"));
  }
  for (const auto& [path, busy] : busy_) {
    if (busy.id == id && !busy.root.is_nil()) TRY_VOID(check(busy.root, "is being written"));
  }
  return {};
}

std::uint64_t StoreState::missing_locked(std::uint64_t used, std::uint64_t bytes) const {
  const std::uint64_t room = used < budget_bytes_ ? budget_bytes_ - used : 0;
  return bytes > room ? bytes - room : 0;
}

std::uint64_t StoreState::missing_bytes(const std::filesystem::path& directory,
                                        std::uint64_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto left = left_.find(directory);
  return missing_locked(used_locked() - (left != left_.end() ? left->second.bytes : 0), bytes);
}

Result<void> StoreState::check_budget_locked(std::uint64_t bytes, const ModelVersion& id) const {
  const std::uint64_t used = used_locked();
  const std::uint64_t missing = missing_locked(used, bytes);
  if (missing == 0) return {};
  return fail(ErrorCode::kExhausted,
              "{} needs {} bytes ({}) in store {}, {} are missing: {} of a budget of {} are used; "
              "retire versions or raise the budget",
              id.to_string(), bytes, format_bytes(bytes), directory_.string(), missing,
              format_bytes(used), format_bytes(budget_bytes_));
}

Result<void> StoreState::claim(const std::filesystem::path& directory, const ModelVersion& id,
                               const Digest& root, std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  TRY_VOID(check_root_locked(id, root));
  if (busy_.contains(directory)) {
    return fail(ErrorCode::kUnavailable, "{} is already being written in {}", id.to_string(),
                directory.string());
  }
  if (committed_.contains(directory)) {
    return fail(ErrorCode::kUnavailable, "{} is already here, in {}; ask again", id.to_string(),
                directory.string());
  }
  const auto left = left_.extract(directory);
  if (auto room = check_budget_locked(bytes, id); !room) {
    if (left) left_.emplace(directory, left.mapped());
    return room;
  }
  busy_.emplace(directory, Busy{id, root, bytes});
  return {};
}

void StoreState::commit(std::shared_ptr<const StoredVersion> version) {
  const std::lock_guard lock(mutex_);
  busy_.erase(version->directory);
  generation_ = std::max(generation_, version->manifest.generation);
  committed_.insert_or_assign(version->directory, version);
  pool_.grow_reserve(version->manifest.layout.segment_bytes());
}

void StoreState::release(const std::filesystem::path& directory, const ModelVersion& id,
                         std::uint64_t left_bytes) {
  const std::lock_guard lock(mutex_);
  busy_.erase(directory);
  if (left_bytes > 0) left_.insert_or_assign(directory, Leftover{id, left_bytes});
}

Result<void> StoreState::reserve(std::uint64_t bytes, const ModelVersion& id) {
  const std::lock_guard lock(mutex_);
  TRY_VOID(check_budget_locked(bytes, id));
  reserved_ += bytes;
  return {};
}

void StoreState::unreserve(std::uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  reserved_ -= bytes;
}

StoreState::Committed::iterator StoreState::retire_locked(Committed::iterator copy,
                                                          Retired& retired) {
  const Manifest& manifest = copy->second->manifest;
  const std::uint64_t bytes = manifest.layout.segment_bytes();
  lingering_.push_back({copy->second, bytes});
  busy_.emplace(copy->first, Busy{manifest.checkpoint->id, {}, 0});
  retired.directories.emplace_back(copy->first, manifest.checkpoint->id);
  retired.bytes += bytes;
  retired.copies.push_back(copy->second);
  return committed_.erase(copy);
}

StoreState::Leftovers::iterator StoreState::retire_locked(Leftovers::iterator left,
                                                          Retired& retired) {
  busy_.emplace(left->first, Busy{left->second.id, {}, 0});
  retired.directories.emplace_back(left->first, left->second.id);
  retired.bytes += left->second.bytes;
  return left_.erase(left);
}

StoreState::Retired StoreState::retire_copy(const StoredVersion& version) {
  const std::lock_guard lock(mutex_);
  Retired retired;
  const auto found = committed_.find(version.directory);
  if (found != committed_.end() && found->second.get() == &version) retire_locked(found, retired);
  return retired;
}

bool StoreState::take_off(const StoredVersion& version) {
  const std::lock_guard lock(mutex_);
  const auto found = committed_.find(version.directory);
  if (found == committed_.end() || found->second.get() != &version) return false;
  const Manifest& manifest = version.manifest;
  busy_.emplace(version.directory, Busy{manifest.checkpoint->id, manifest.checkpoint->root,
                                        manifest.layout.segment_bytes()});
  committed_.erase(found);
  return true;
}

bool StoreState::replace(const StoredVersion& version, std::shared_ptr<const StoredVersion> with) {
  const std::lock_guard lock(mutex_);
  const auto found = committed_.find(version.directory);
  if (found == committed_.end() || found->second.get() != &version) return false;
  found->second = std::move(with);
  return true;
}

bool StoreState::is_left(const std::filesystem::path& directory) const {
  const std::lock_guard lock(mutex_);
  return left_.contains(directory);
}

StoreState::Retired StoreState::retire(const ModelVersion& id) {
  const std::lock_guard lock(mutex_);
  std::erase_if(lingering_, [](const Lingering& l) { return l.version.expired(); });
  Retired retired;
  for (auto it = committed_.begin(); it != committed_.end();) {
    if (it->second->manifest.checkpoint->id != id) {
      ++it;
      continue;
    }
    it = retire_locked(it, retired);
  }
  for (auto it = left_.begin(); it != left_.end();) {
    if (it->second.id != id) {
      ++it;
      continue;
    }
    it = retire_locked(it, retired);
  }
  return retired;
}

std::vector<std::filesystem::path> StoreState::left_before(const ModelVersion& id) const {
  const std::lock_guard lock(mutex_);
  std::vector<std::filesystem::path> found;
  for (const auto& [path, left] : left_) {
    if (left.id.model == id.model && left.id.version < id.version) found.push_back(path);
  }
  return found;
}

StoreState::Retired StoreState::retire_left(const std::vector<std::filesystem::path>& directories) {
  const std::lock_guard lock(mutex_);
  Retired retired;
  for (const auto& path : directories) {
    const auto found = left_.find(path);
    if (found != left_.end()) retire_locked(found, retired);
  }
  return retired;
}

}  // namespace rekindle::store
