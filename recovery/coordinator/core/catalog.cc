#include "recovery/coordinator/core/catalog.h"

#include <utility>

#include "recovery/coordinator/core/seeded_bugs.h"

namespace rekindle::coordinator {

namespace {
constexpr std::size_t kMaxNamedVersions = 8;
}

Result<void> Catalog::change(DurableState next) {
  unsure_ = true;
  TRY_VOID(persist_(next));
  unsure_ = false;
  state_ = std::move(next);
  return {};
}

Result<void> Catalog::keep() {
  if (!unsure_) return {};
  return change(state_);
}

Result<void> Catalog::raise_epoch(std::uint64_t epoch) {
  DurableState next = state_;
  next.epoch = epoch;
  return change(std::move(next));
}

Result<void> Catalog::claim(const ModelVersion& id, const Digest128& root,
                            const Digest128& tensor_set, std::uint64_t checkpoint_bytes,
                            bool revive, std::optional<std::uint32_t> replicas) {
  const auto found = state_.versions.find(id);
  if (found != state_.versions.end() && found->second.root != root) {
    return fail(ErrorCode::kDenied,
                "{} was published before with other contents (root {}, this one {}); publish under "
                "a new version",
                id.to_string(), found->second.root.hex(), root.hex());
  }
  const bool known = found != state_.versions.end();
  const bool revives = known && revive && found->second.retiring;
  const bool new_count = known && replicas && replicas != found->second.replicas;
  // An agent that announces what was durable before does not wait for the disk.
  if (known && !revives && !new_count) return revive ? keep() : Result<void>{};
  DurableState next = state_;
  DurableVersion& version = next.versions[id];
  if (!known || revives) version = {root, tensor_set, checkpoint_bytes, false, version.replicas};
  if (replicas) version.replicas = replicas;
  return change(std::move(next));
}

Result<void> Catalog::retire(const ModelVersion& id) {
  const auto found = state_.versions.find(id);
  if (found == state_.versions.end()) {
    return fail(ErrorCode::kNotFound, "{} is not known to the coordinator", id.to_string());
  }
  if (found->second.retiring) return keep();
  DurableState next = state_;
  if (seeded(SeededBug::kTombstoneForgotten)) {
    next.versions.erase(id);
  } else {
    next.versions[id].retiring = true;
  }
  return change(std::move(next));
}

Result<void> Catalog::set_drained(const std::string& node_id, bool drained) {
  if (state_.drained.contains(node_id) == drained) return keep();
  DurableState next = state_;
  if (drained) {
    next.drained.insert(node_id);
  } else {
    next.drained.erase(node_id);
  }
  return change(std::move(next));
}

const DurableVersion* Catalog::find(const ModelVersion& id) const {
  const auto found = state_.versions.find(id);
  return found == state_.versions.end() ? nullptr : &found->second;
}

std::uint32_t Catalog::whole_copies(const ModelVersion& id, const Membership& members) const {
  const DurableVersion* version = find(id);
  if (version == nullptr) return 0;
  std::uint32_t copies = 0;
  for (const auto& [node_id, member] : members.all()) {
    for (auto it = member.holdings.lower_bound({id, {}});
         it != member.holdings.end() && it->first.id == id; ++it) {
      const Holding& holding = it->second;
      if (holding.whole && holding.complete && holding.root == version->root) {
        ++copies;
        break;
      }
    }
  }
  return copies;
}

VersionState Catalog::state_of(const ModelVersion& id, const Membership& members) const {
  const DurableVersion* version = find(id);
  if (version != nullptr && version->retiring) return VersionState::kRetiring;
  return whole_copies(id, members) > 0 ? VersionState::kReady : VersionState::kStaging;
}

std::optional<ModelVersion> Catalog::newest_ready(const std::string& model,
                                                  const Membership& members) const {
  const auto begin = state_.versions.lower_bound({model, 0});
  auto it = state_.versions.upper_bound({model, UINT64_MAX});
  while (it != begin) {
    --it;
    if (state_of(it->first, members) == VersionState::kReady) return it->first;
  }
  return std::nullopt;
}

std::optional<ModelVersion> Catalog::newest_claimed(const std::string& model) const {
  const auto begin = state_.versions.lower_bound({model, 0});
  auto it = state_.versions.upper_bound({model, UINT64_MAX});
  while (it != begin) {
    --it;
    if (!it->second.retiring) return it->first;
  }
  return std::nullopt;
}

std::string Catalog::describe_versions(const std::string& model, const Membership& members) const {
  std::string text;
  std::size_t named = 0;
  const auto begin = state_.versions.lower_bound({model, 0});
  auto it = state_.versions.upper_bound({model, UINT64_MAX});
  while (it != begin && named < kMaxNamedVersions) {
    --it;
    const VersionState state = state_of(it->first, members);
    if (!text.empty()) text += ", ";
    text += fmt::format("{} ({})", it->first.to_string(),
                        state == VersionState::kReady      ? "ready"
                        : state == VersionState::kRetiring ? "retired"
                                                           : "no live whole copy");
    ++named;
  }
  if (it != begin && !text.empty()) text += ", …";
  return text.empty() ? fmt::format("no version of {} is known", model) : "known are: " + text;
}

}  // namespace rekindle::coordinator
