#include "recovery/coordinator/core/update_plan.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "recovery/coordinator/core/part_holders.h"

namespace rekindle::coordinator {

namespace {

using Hosts = std::map<std::string, UpdatePlan::Host>;

// The share of item i of n.
std::uint64_t share_of(std::uint64_t bytes, std::size_t i, std::size_t n) {
  return bytes * (i + 1) / n - bytes * i / n;
}

class Planner {
 public:
  Planner(const ModelVersion& id, const DurableVersion& version, const KnownPieces& pieces,
          const Membership& nodes)
      : id_(id), version_(version), pieces_(pieces), nodes_(nodes) {}

  UpdatePlan plan(const std::vector<UpdateMember>& members) {
    std::map<Digest, std::vector<const UpdateMember*>> wanted;
    for (const UpdateMember& each : members) {
      if (each.member->id == id_) {
        ++plan_.ready;
      } else if (each.member->payload_bytes == 0) {
        ++plan_.unknown;
      } else {
        wanted[each.member->contents].push_back(&each);
      }
    }
    std::vector<const UpdateMember*> lonely;
    for (auto& [contents, same] : wanted) {
      if (same.size() > 1) {
        const std::uint64_t bytes = same.front()->member->payload_bytes;
        add(std::move(same), bytes);
      } else {
        lonely.push_back(same.front());
      }
    }
    add_lonely(std::move(lonely));
    for (const auto& [node_id, bytes] : fetched_) hosts_[node_id].fetches = bytes;
    add_givers();
    for (auto& [node_id, host] : hosts_) {
      host.node_id = node_id;
      plan_.hosts.push_back(host);
    }
    return std::move(plan_);
  }

 private:
  bool has_all(const std::string& node_id) const {
    const auto member = nodes_.all().find(node_id);
    return member != nodes_.all().end() && member->second.holdings.holds_whole(id_, version_.root);
  }

  // Ranks that want different contents.
  void add_lonely(std::vector<const UpdateMember*> lonely) {
    const auto unknown = std::ranges::stable_partition(lonely, [&](const UpdateMember* each) {
      return !each->member->device.empty() && pieces_to_share(*each->member, pieces_) != nullptr;
    });
    for (const UpdateMember* each : unknown) add({each}, each->member->payload_bytes);
    lonely.erase(unknown.begin(), unknown.end());
    std::vector<const Pieces*> wanted;
    for (const UpdateMember* each : lonely)
      wanted.push_back(pieces_to_share(*each->member, pieces_));
    std::vector<bool> alone(lonely.size(), true);
    for (const CommonPieces& common : find_common_pieces(wanted)) {
      std::vector<const UpdateMember*> members;
      for (const std::size_t i : common.members) {
        members.push_back(lonely[i]);
        alone[i] = false;
      }
      add(std::move(members), common.bytes);
    }
    for (std::size_t i = 0; i < lonely.size(); ++i) {
      if (alone[i]) add({lonely[i]}, lonely[i]->member->payload_bytes);
    }
  }

  // Ranks that want `bytes` of the same. Of those on the same device only the first one is in the
  // party.
  void add(std::vector<const UpdateMember*> same, std::uint64_t bytes) {
    std::ranges::stable_sort(same, {}, [](const UpdateMember* each) {
      return std::pair(each->node_id, each->member->device);
    });
    std::set<std::pair<std::string, std::string>> devices;
    UpdatePlan::Party party;
    party.bytes = bytes;
    for (const UpdateMember* each : same) {
      UpdatePlan::Rank rank{each->node_id, each->member->instance, each->member->rank,
                            each->member->device};
      rank.rest = each->member->payload_bytes - bytes;
      const bool on_device = !rank.device.empty();
      if (on_device && devices.emplace(rank.node_id, rank.device).second) {
        party.ranks.push_back(std::move(rank));
      } else {
        add_alone(std::move(rank), bytes);
      }
    }
    if (party.ranks.size() < 2) {
      for (auto& rank : party.ranks) add_alone(std::move(rank), bytes);
      return;
    }
    share(party);
    plan_.parties.push_back(std::move(party));
  }

  // With what it wants beyond `bytes`.
  void add_alone(UpdatePlan::Rank rank, std::uint64_t bytes) {
    bytes += std::exchange(rank.rest, 0);
    rank.owner = true;
    rank.uploads = rank.device.empty() ? 0 : bytes;
    auto& host = hosts_[rank.node_id];
    host.busiest_upload = std::max(host.busiest_upload, rank.uploads);
    const bool fetches = !has_all(rank.node_id);
    if (fetches) fetched_[rank.node_id] += bytes;
    plan_.parties.push_back({bytes, fetches, {std::move(rank)}});
  }

  void share(UpdatePlan::Party& party) {
    for (auto& rank : party.ranks) rank.owner = has_all(rank.node_id);
    const auto owns = [](const UpdatePlan::Rank& rank) { return rank.owner; };
    party.owners_fetch = std::ranges::none_of(party.ranks, owns);
    if (party.owners_fetch) {
      for (auto& rank : party.ranks) rank.owner = true;
    }
    const auto owners = static_cast<std::size_t>(std::ranges::count_if(party.ranks, owns));
    std::size_t next = 0;
    std::map<std::string, std::uint64_t> uploads;  // by node
    for (auto& rank : party.ranks) {
      const std::uint64_t share = rank.owner ? share_of(party.bytes, next++, owners) : 0;
      uploads[rank.node_id] += share;
      rank.uploads = share + rank.rest;
      auto& host = hosts_[rank.node_id];
      host.busiest_upload = std::max(host.busiest_upload, rank.uploads);
      if (!has_all(rank.node_id) && rank.rest > 0) fetched_[rank.node_id] += rank.rest;
    }
    if (party.owners_fetch) {
      for (const auto& [node_id, bytes] : uploads) fetched_[node_id] += bytes;
    }
    if (uploads.size() < 2) return;
    // A ring: each host sends to the next one all but what that one has uploaded.
    for (auto node = uploads.begin(); node != uploads.end(); ++node) {
      const auto next_node = std::next(node) == uploads.end() ? uploads.begin() : std::next(node);
      hosts_[node->first].receives += party.bytes - node->second;
      hosts_[node->first].sends += party.bytes - next_node->second;
    }
  }

  // Nobody fetches from itself.
  void add_givers() {
    std::map<std::string, std::uint64_t> weights;
    for (const auto& [node_id, member] : nodes_.all()) {
      if (member.is_dead()) continue;
      if (member.holdings.holds_whole(id_, version_.root))
        weights[node_id] = version_.checkpoint_bytes;
    }
    if (weights.empty()) {
      for (const auto& [node_id, member] : nodes_.all()) {
        if (member.is_dead() || parts_of(member, id_, version_).empty()) continue;
        for (const auto& [key, holding] : member.holdings.of(id_)) {
          weights[node_id] += holding.payload_bytes;
        }
      }
    }
    for (const auto& [fetcher, bytes] : fetched_) {
      std::uint64_t together = 0;
      for (const auto& [node_id, weight] : weights) together += node_id == fetcher ? 0 : weight;
      for (const auto& [node_id, weight] : weights) {
        if (node_id == fetcher || together == 0) continue;
        const double part = static_cast<double>(weight) / static_cast<double>(together);
        hosts_[node_id].gives += static_cast<std::uint64_t>(part * static_cast<double>(bytes));
      }
    }
  }

  const ModelVersion& id_;
  const DurableVersion& version_;
  const KnownPieces& pieces_;
  const Membership& nodes_;
  UpdatePlan plan_;
  Hosts hosts_;
  std::map<std::string, std::uint64_t> fetched_;
};

}  // namespace

UpdatePlan plan_update(const ModelVersion& id, const DurableVersion& version,
                       const std::vector<UpdateMember>& members, const KnownPieces& pieces,
                       const Membership& nodes) {
  return Planner(id, version, pieces, nodes).plan(members);
}

}  // namespace rekindle::coordinator
