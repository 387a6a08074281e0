#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "src/base/digest.h"
#include "src/base/ids.h"
#include "src/store/segment_store.h"
#include "transport/registry.h"

namespace rekindle::agent {

// A committed copy whose segments are registered with the transports.
struct Served {
  std::shared_ptr<const store::StoredVersion> stored;
  std::vector<transport::RegionKey> regions;  // as in the layout
};

// What this agent serves: committed copies and their registered regions. Control thread only.
class ServedVersions {
 public:
  explicit ServedVersions(transport::SegmentRegistry& registry) : registry_(registry) {}
  ~ServedVersions();
  ServedVersions(const ServedVersions&) = delete;
  ServedVersions& operator=(const ServedVersions&) = delete;

  void add(const std::shared_ptr<const store::StoredVersion>& stored);  // idempotent
  void remove(const ModelVersion& id);

  const Served* find(const Digest128& root, const Digest128& layout) const;
  std::vector<const Served*> find(const ModelVersion& id) const;
  std::shared_ptr<const Checkpoint> checkpoint(const Digest128& root) const;
  // Canonical bytes of a layout or tensor set that some copy here uses.
  std::optional<std::string> layout_bytes(const Digest128& digest) const;
  std::optional<std::string> tensor_set_bytes(const Digest128& digest) const;
  std::optional<std::uint64_t> newest_version(const std::string& model) const;
  const std::map<std::pair<Digest128, Digest128>, Served>& all() const { return served_; }

 private:
  transport::SegmentRegistry& registry_;
  std::map<std::pair<Digest128, Digest128>, Served> served_;  // by (root, layout)
};

}  // namespace rekindle::agent
