#include "recovery/agent/served_versions.h"

#include <algorithm>

namespace rekindle::agent {

ServedVersions::~ServedVersions() {
  for (const auto& [key, served] : served_) {
    for (const auto& region : served.regions) registry_.remove(region);
  }
}

void ServedVersions::add(const std::shared_ptr<const store::StoredVersion>& stored) {
  const auto key = std::pair(stored->manifest.checkpoint->root, stored->manifest.layout.digest());
  if (served_.contains(key)) return;
  Served served{stored, {}};
  for (const auto& segment : stored->segments) {
    served.regions.push_back(
        registry_.add(segment->bytes(), segment->fd(), 0, segment->path(), stored));
  }
  served_.emplace(key, std::move(served));
}

void ServedVersions::remove(const ModelVersion& id) {
  for (auto it = served_.begin(); it != served_.end();) {
    if (it->second.stored->manifest.checkpoint->id != id) {
      ++it;
      continue;
    }
    for (const auto& region : it->second.regions) registry_.remove(region);
    it = served_.erase(it);
  }
}

const Served* ServedVersions::find(const Digest128& root, const Digest128& layout) const {
  const auto found = served_.find({root, layout});
  return found == served_.end() ? nullptr : &found->second;
}

std::vector<const Served*> ServedVersions::find(const ModelVersion& id) const {
  std::vector<const Served*> found;
  for (const auto& [key, served] : served_) {
    if (served.stored->manifest.checkpoint->id == id) found.push_back(&served);
  }
  return found;
}

std::shared_ptr<const Checkpoint> ServedVersions::checkpoint(const Digest128& root) const {
  const auto found = served_.lower_bound({root, Digest128{}});
  if (found == served_.end() || found->first.first != root) return nullptr;
  return found->second.stored->manifest.checkpoint;
}

std::optional<std::string> ServedVersions::layout_bytes(const Digest128& digest) const {
  for (const auto& [key, served] : served_) {
    if (key.second == digest) return served.stored->manifest.layout.serialize();
  }
  return std::nullopt;
}

std::optional<std::string> ServedVersions::tensor_set_bytes(const Digest128& digest) const {
  for (const auto& [key, served] : served_) {
    const auto& tensors = served.stored->manifest.checkpoint->tensors;
    if (tensors.digest() == digest) return tensors.serialize();
  }
  return std::nullopt;
}

std::optional<std::uint64_t> ServedVersions::newest_version(const std::string& model) const {
  std::optional<std::uint64_t> newest;
  for (const auto& [key, served] : served_) {
    const ModelVersion& id = served.stored->manifest.checkpoint->id;
    if (id.model == model) newest = std::max(newest.value_or(0), id.version);
  }
  return newest;
}

}  // namespace rekindle::agent
