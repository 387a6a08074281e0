#include "recovery/joint/joint_lead.h"

#include <algorithm>
#include <utility>

#include <fmt/ranges.h>

#include "src/base/units.h"

namespace rekindle::joint {

namespace {

constexpr Duration kSilence = std::chrono::seconds(10);

}  // namespace

JointLead::JointLead(ModelVersion id, std::vector<Host> hosts, TimePoint now) : id_(std::move(id)) {
  for (Host& host : hosts) {
    hosts_.push_back({.host = std::move(host), .heard = now});
  }
}

void JointLead::end(Error why) {
  if (phase_ == Phase::kComplete || phase_ == Phase::kEnded) return;
  phase_ = Phase::kEnded;
  why_ = std::move(why);
}

void JointLead::advance(TimePoint now) {
  std::vector<std::uint32_t> silent;
  for (std::uint32_t i = 0; i < hosts_.size(); ++i) {
    // After its confirmation a host may leave.
    if (!hosts_[i].confirmed && now - hosts_[i].heard > kSilence) silent.push_back(i);
  }
  if (silent.empty()) return;
  end({ErrorCode::kPeerLost,
       fmt::format("{}: no word for {} s from {}; publish it again", id_.to_string(),
                   std::chrono::duration_cast<std::chrono::seconds>(kSilence).count(),
                   name_hosts(silent))});
}

void JointLead::forgive(Duration pause) {
  for (HostState& host : hosts_) host.heard += pause;
}

std::string JointLead::name_hosts(const std::vector<std::uint32_t>& hosts) const {
  std::vector<std::string> names;
  for (const std::uint32_t host : hosts) {
    const Host& of = hosts_[host].host;
    names.push_back(fmt::format("{} ({})", of.name, name_ranks(of.ranks)));
  }
  return fmt::format("{}", fmt::join(names, ", "));
}

Result<void> JointLead::put_declarations(std::uint32_t host, std::uint64_t offset,
                                         std::uint64_t total_bytes, std::string_view page) {
  HostState& state = hosts_[host];
  if (state.declared) return {};  // a repeated call
  // So is a page that is here already: its first answer was lost.
  if (!page.empty() && total_bytes == state.declared_bytes && offset <= state.declarations.size() &&
      std::string_view(state.declarations).substr(offset, page.size()) == page) {
    return {};
  }
  if (offset == 0) {
    const std::uint64_t others = declared_bytes_ - state.declared_bytes;
    if (total_bytes > kMaxJointDeclarationBytes - others) {
      return fail(ErrorCode::kExhausted,
                  "{}: the declarations of {} have {}, those of other hosts {}; {} are allowed for "
                  "all together, so declare fewer boxes",
                  id_.to_string(), state.host.name, format_bytes(total_bytes), format_bytes(others),
                  format_bytes(kMaxJointDeclarationBytes));
    }
    declared_bytes_ = others + total_bytes;
    state.declarations.clear();
    state.declared_bytes = total_bytes;
  }
  const std::uint64_t have = state.declarations.size();
  if (total_bytes != state.declared_bytes || offset != have || page.size() > total_bytes - have) {
    return fail(ErrorCode::kInvalid, "{}: the declarations of {} do not fit together",
                id_.to_string(), state.host.name);
  }
  state.declarations.append(page);
  if (state.declarations.size() < total_bytes) return {};
  state.declared = true;
  if (std::ranges::all_of(hosts_, &HostState::declared) && phase_ == Phase::kDeclaring) {
    phase_ = Phase::kWriting;
  }
  return {};
}

void JointLead::set_plan(std::shared_ptr<const JointPlan> plan,
                         std::vector<std::optional<Digest>> layouts) {
  for (std::size_t i = 0; i < hosts_.size(); ++i) hosts_[i].layout = layouts[i];
  plan_ = std::move(plan);
  const TileIndex tiles = plan_->tiles().tile_count();
  leaves_.resize(tiles);
  leaf_of_.resize(tiles);
  have_ = TileSet(tiles);
}

Result<void> JointLead::put_leaves(std::uint32_t host,
                                   std::span<const std::pair<TileIndex, TileIndex>> tiles,
                                   std::span<const Digest> leaves) {
  if (plan_ == nullptr) return fail(ErrorCode::kUnavailable, "{} has no plan yet", id_.to_string());
  std::uint64_t count = 0;
  for (const auto& [first, past] : tiles) {
    if (first >= past || past > have_.size()) {
      return fail(ErrorCode::kInvalid, "{}: {} sent leaves of tiles that are not there",
                  id_.to_string(), hosts_[host].host.name);
    }
    count += past - first;
  }
  if (count != leaves.size()) {
    return fail(ErrorCode::kInvalid, "{}: {} sent {} leaves for {} tiles", id_.to_string(),
                hosts_[host].host.name, leaves.size(), count);
  }
  std::size_t next = 0;
  for (const auto& [first, past] : tiles) {
    for (TileIndex tile = first; tile < past; ++tile, ++next) {
      if (!have_.test(tile)) {
        have_.set(tile);
        leaves_[tile] = leaves[next];
        leaf_of_[tile] = host;
      } else if (leaves_[tile] != leaves[next]) {
        const TensorIndex tensor = plan_->tiles().tensor_of(tile);
        end({ErrorCode::kInvalid,
             fmt::format("{}: '{}' {} differs between {}: ranks that have the same elements must "
                         "publish the same bytes",
                         id_.to_string(), plan_->tensors()[tensor].name,
                         plan_->tiles().tile_box(tile).to_string(),
                         name_hosts({leaf_of_[tile], host}))});
        return {};
      }
    }
  }
  check_leaves();
  return {};
}

Result<void> JointLead::put_layout(std::uint32_t host, std::optional<Digest> layout) {
  if (plan_ == nullptr) return fail(ErrorCode::kUnavailable, "{} has no plan yet", id_.to_string());
  HostState& state = hosts_[host];
  if (layout != state.layout) {
    const auto name = [](const std::optional<Digest>& one) { return one ? one->hex() : "none"; };
    end({ErrorCode::kInvalid,
         fmt::format("{}: {} has a copy of layout {}, but its declarations make it {}; all agents "
                     "need the same release of Rekindle",
                     id_.to_string(), name_hosts({host}), name(layout), name(state.layout))});
    return {};
  }
  state.sent_all = true;
  check_leaves();
  return {};
}

void JointLead::check_leaves() {
  if (phase_ != Phase::kWriting || !have_.all()) return;
  if (!std::ranges::all_of(hosts_, &HostState::sent_all)) return;
  phase_ = Phase::kClaiming;
}

std::vector<Digest> JointLead::layouts() const {
  std::vector<Digest> layouts;
  for (const HostState& host : hosts_) {
    if (host.layout) layouts.push_back(*host.layout);
  }
  std::ranges::sort(layouts);
  const auto repeated = std::ranges::unique(layouts);
  layouts.erase(repeated.begin(), repeated.end());
  return layouts;
}

void JointLead::claimed(const Digest& root) {
  if (phase_ != Phase::kClaiming) return;
  root_ = root;
  phase_ = Phase::kCommitting;
}

Result<void> JointLead::confirm(std::uint32_t host) {
  if (phase_ != Phase::kCommitting && phase_ != Phase::kComplete) {
    return fail(ErrorCode::kInvalid, "{}: {} confirms a copy that has no root yet", id_.to_string(),
                hosts_[host].host.name);
  }
  hosts_[host].confirmed = true;
  if (std::ranges::all_of(hosts_, &HostState::confirmed)) phase_ = Phase::kComplete;
  return {};
}

}  // namespace rekindle::joint
