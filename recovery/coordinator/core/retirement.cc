#include "recovery/coordinator/core/retirement.h"

#include <algorithm>
#include <utility>

#include "recovery/coordinator/core/part_holders.h"

namespace rekindle::coordinator {

namespace {

constexpr std::size_t kMaxRetireDeadlines = 4096;

}  // namespace

Durably<std::uint32_t> Retirement::retire(const ModelVersion& id, TimePoint now,
                                          std::optional<Duration> deadline) {
  Durably<void> retired = fleet_.catalog.retire(id);
  if (!retired.answer) return {fail(std::move(retired.answer).error()), retired.commit};
  const auto holders = std::ranges::count_if(
      fleet_.members.all(), [&](const auto& entry) { return entry.second.holdings.holds(id); });
  if (deadlines_.size() >= kMaxRetireDeadlines) {
    std::erase_if(deadlines_, [&](const auto& entry) { return entry.second <= now; });
  }
  if (deadline || !fleet_.catalog.is_retired(id)) {
    deadlines_[id] = now + deadline.value_or(fleet_.timing.retire_deadline);
  }
  return {static_cast<std::uint32_t>(holders), retired.commit};
}

bool Retirement::is_overdue(const ModelVersion& id, TimePoint now) const {
  const auto found = deadlines_.find(id);
  return now >= (found == deadlines_.end() ? retired_before_ : found->second);
}

Retirement::Orders Retirement::orders_for(const Member& member, TimePoint now) const {
  Orders orders;
  const ModelVersion* last = nullptr;
  for (const auto& [key, holding] : member.holdings.all()) {
    if ((last != nullptr && *last == key.id) || !fleet_.catalog.is_retired(key.id)) continue;
    last = &key.id;
    // A count of zero is final only from a holder that admits no new readers. A pull that was sent
    // there may yet come.
    const auto reported = member.readers.find(key.id);
    const bool free = reported != member.readers.end() && reported->second == 0 &&
                      pulls_.readers_of(member.info.incarnation, key.id) == 0;
    (free || is_overdue(key.id, now) ? orders.retire : orders.retiring).push_back(key.id);
  }
  return orders;
}

std::size_t Retirement::readers_at(const Member& member, const ModelVersion& id) const {
  const auto reported = member.readers.find(id);
  return std::max<std::size_t>(pulls_.readers_of(member.info.incarnation, id),
                               reported == member.readers.end() ? 0 : reported->second);
}

void Retirement::shift(Duration by) {
  for (auto& [id, deadline] : deadlines_) deadline += by;
  retired_before_ += by;
}

bool EvictionPermits::has_permit(const Member& member, const ModelVersion& id,
                                 TimePoint now) const {
  const auto found = valid_until_.find({member.info.incarnation, id});
  return found != valid_until_.end() && found->second > now;
}

std::string EvictionPermits::why_not_reliable(const Member& holder, const ModelVersion& id,
                                              TimePoint now) const {
  if (fleet_.drained(holder.info.node_id)) return "drained";
  if (holder.standing.quarantined(now)) return "quarantined";
  if (has_permit(holder, id, now)) return "letting go of it, too";
  return holder.alive(now) ? "" : "not heard of";
}

Result<void> EvictionPermits::grant(const Member& member, const ModelVersion& id, TimePoint now) {
  const std::string& node_id = member.info.node_id;
  const DurableVersion* version = fleet_.catalog.find(id);
  if (fleet_.catalog.is_retired(id)) return {};
  if (version == nullptr || !member.holdings.holds(id)) {
    return fail(ErrorCode::kDenied,
                "{} must stay on {}: it is not announced to the coordinator; try again later",
                id.to_string(), node_id);
  }
  std::set<Digest> needed = parts_to_keep(member, id, *version);
  const bool has_parts = !needed.empty();
  bool may_go = false;
  std::string others;
  for (const auto& [other_id, other] : fleet_.members.all()) {
    if (other_id == node_id) continue;
    const bool whole = other.holdings.holds_whole(id, version->root);
    const std::set<Digest> parts = parts_of(other, id, *version);
    if (!whole && parts.empty()) continue;
    const std::string why = why_not_reliable(other, id, now);
    if (why.empty()) {
      for (const Digest& part : parts) needed.erase(part);
      may_go = whole || (has_parts && needed.empty());
      if (may_go) break;
    }
    others += fmt::format("{}{} ({})", others.empty() ? "" : ", ", other_id,
                          why.empty() ? "a part of it" : why);
  }
  if (may_go) {
    valid_until_[{member.info.incarnation, id}] = now + fleet_.timing.eviction_permit;
    return {};
  }
  if (others.empty()) others = "none";
  return fail(ErrorCode::kDenied,
              "{} must stay on {}: it is the last copy to rely on; other holders: {}",
              id.to_string(), node_id, others);
}

std::set<Digest> EvictionPermits::parts_to_keep(const Member& member, const ModelVersion& id,
                                                const DurableVersion& version) {
  std::set<Digest> kept;
  for (const auto& [key, holding] : member.holdings.of(id)) {
    if (!std::ranges::binary_search(version.parts, key.layout)) {
      return {version.parts.begin(), version.parts.end()};
    }
    kept.insert(key.layout);
  }
  return kept;
}

void EvictionPermits::registered(const Incarnation& node) {
  std::erase_if(valid_until_, [&](const auto& entry) { return entry.first.first == node; });
}

void EvictionPermits::announced(const Member& member, TimePoint now) {
  std::erase_if(valid_until_, [&](const auto& entry) {
    const auto& [node, id] = entry.first;
    return entry.second <= now || (node == member.info.incarnation && !member.holdings.holds(id));
  });
}

void EvictionPermits::shift(Duration by) {
  for (auto& [key, until] : valid_until_) until += by;
}

}  // namespace rekindle::coordinator
