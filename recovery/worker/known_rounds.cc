#include "recovery/worker/known_rounds.h"

#include <algorithm>

#include "recovery/rpc/convert.h"

namespace rekindle::worker {

bool KnownRounds::take(const proto::RoundOrders& orders, std::uint64_t sequence) {
  // Of two questions under way the older one may be answered last. Another coordinator counts its
  // revisions anew.
  if (orders.revision() < seen_ && sequence < answered_) return false;
  seen_ = orders.revision();
  answered_ = std::max(answered_, sequence);
  silent_since_.reset();
  rounds_.clear();
  for (const auto& order : orders.rounds()) {
    const auto id = rpc::from_proto(order.id());
    if (!id || order.round() == 0) continue;
    rounds_[order.round()] = {*id, order.group(), order.gathering()};
    Last& last = last_[{id->model, order.group()}];
    if (order.round() >= last.round) last = {order.round(), id->version};
  }
  return true;
}

void KnownRounds::forget() {
  rounds_.clear();
  seen_ = 0;
}

void KnownRounds::retired(const ModelVersion& id) {
  std::erase_if(last_, [&](const auto& item) {
    return item.first.first == id.model && item.second.version == id.version;
  });
}

const KnownRounds::Round* KnownRounds::find(std::uint64_t round) const {
  const auto found = rounds_.find(round);
  return found == rounds_.end() ? nullptr : &found->second;
}

std::uint64_t KnownRounds::gathering(const ModelVersion& id, const std::string& group) const {
  std::uint64_t newest = 0;
  for (const auto& [number, round] : rounds_) {
    if (round.gathering && round.concerns(group) && round.id == id) newest = number;
  }
  return newest;
}

std::optional<std::uint64_t> KnownRounds::gathers(const std::string& model,
                                                  const std::string& group) const {
  std::optional<std::uint64_t> version;
  if (group.empty()) return version;
  for (const auto& [number, round] : rounds_) {  // the newest last
    if (round.gathering && round.concerns(group) && round.id.model == model) {
      version = round.id.version;
    }
  }
  return version;
}

std::optional<std::uint64_t> KnownRounds::news_for(const std::string& group,
                                                   const ModelVersion& have) const {
  if (const auto version = gathers(have.model, group)) {
    if (*version == have.version) return std::nullopt;
    return version;  // an update may go back to an older version
  }
  Last last;
  for (const std::string& named : {group, std::string()}) {
    const auto known = last_.find({have.model, named});
    if (known != last_.end() && known->second.round > last.round) last = known->second;
  }
  return last.version > have.version ? std::optional(last.version) : std::nullopt;
}

}  // namespace rekindle::worker
