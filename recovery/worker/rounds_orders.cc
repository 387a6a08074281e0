// Rounds: what the coordinator is told, and what it orders.
#include <algorithm>
#include <set>
#include <utility>

#include "recovery/rpc/convert.h"
#include "recovery/worker/rounds.h"

namespace rekindle::worker {

proto::RoundMember Rounds::to_proto(SessionId session, const Member& member) const {
  proto::RoundMember out;
  out.set_session(session);
  out.set_group(member.origin.group);
  out.set_instance(member.origin.instance);
  out.set_rank(member.origin.rank);
  *out.mutable_id() = rpc::to_proto(member.id);
  out.set_device(member.origin.device);
  out.set_state(member.state);
  // One that gets the version by the round, and has not joined it yet, has not arrived.
  if (member.state != proto::ROUND_SERVING) out.set_round(member.round);
  *out.mutable_root() = rpc::to_proto(member.root);
  *out.mutable_contents() = rpc::to_proto(member.joined.contents);
  out.set_payload_bytes(member.joined.payload_bytes);
  out.set_bucket_bytes(member.joined.bucket_bytes);
  out.set_owner(member.owner);
  for (const auto& name : member.joined.communicators) out.add_communicators(name);
  out.set_spread_bytes(member.spread_bytes);
  out.set_kept_bytes(member.kept_bytes);
  out.set_why(member.why);
  out.set_worker_lost(member.worker_lost);
  return out;
}

proto::RoundReport Rounds::report(const std::string& device_life, std::chrono::milliseconds wait,
                                  TimePoint now) {
  if (!silent_since_) silent_since_ = now;
  changed_ = progressed_ = false;
  reported_at_ = now;
  proto::RoundReport report;
  report.set_device_life(device_life);
  report.set_sequence(++sequence_);
  report.set_seen(seen_);
  report.set_wait_ms(members_.empty() ? 0 : static_cast<std::uint32_t>(wait.count()));
  for (auto& [session, member] : members_) {
    if (member.state == proto::ROUND_JOINED && member.reported_in == 0) {
      member.reported_in = sequence_;
    }
    *report.add_members() = to_proto(session, member);
  }
  for (const auto& [key, meeting] : meetings_) {
    if (!meeting.id) continue;
    auto& id = *report.add_ids();
    id.set_round(key.first);
    id.set_party(key.second);
    if (*meeting.id) {
      id.set_id(**meeting.id);
    } else {
      id.set_problem(meeting.id->error().message());
    }
  }
  return report;
}

void Rounds::meeting_id(std::uint64_t number, const Result<std::string>& id) {
  for (auto& [key, meeting] : meetings_) {
    if (meeting.number != number || meeting.id) continue;
    if (id) {
      meeting.id = Result<std::string>(*id);
    } else {
      meeting.id = Result<std::string>(rekindle::fail(id.error()));
    }
    changed_ = true;
  }
}

void Rounds::remember(std::uint64_t round, const Known& known) {
  Last& last = last_[{known.id.model, known.group}];
  if (round >= last.round) last = {round, known.id.version};
}

void Rounds::obey(const proto::RoundOrders& orders, std::uint64_t sequence, TimePoint now) {
  // Of two questions under way the older may be answered last; another coordinator counts anew.
  if (orders.revision() < seen_ && sequence < answered_) return;
  seen_ = orders.revision();
  answered_ = std::max(answered_, sequence);
  silent_since_.reset();
  rounds_.clear();
  for (const auto& order : orders.rounds()) {
    const auto id = rpc::from_proto(order.id());
    if (!id || order.round() == 0) continue;
    const Known known{*id, order.group(), order.gathering()};
    rounds_[order.round()] = known;
    remember(order.round(), known);
  }
  std::set<PartyKey> meet;
  std::set<SessionId> seated;
  for (const auto& order : orders.rounds()) {
    for (const auto& party : order.parties()) {
      if (party.state() == proto::PARTY_MEETING) meet.emplace(order.round(), party.party());
      for (const auto& place : party.members()) seated.insert(place.session());
      obey_party(order.round(), party, now);
    }
  }
  std::erase_if(meetings_, [&](const auto& item) { return !meet.contains(item.first); });
  leave_ended_rounds("the round is over");
  for (auto& [session, member] : members_) {
    if (member.state != proto::ROUND_JOINED || seated.contains(session)) continue;
    const auto round = rounds_.find(member.round);
    const bool heard = member.reported_in != 0 && answered_ >= member.reported_in;
    if (round == rounds_.end() || round->second.gathering || !heard) continue;
    stop(session, member, "the round has begun without it", now);
  }
}

void Rounds::obey_party(std::uint64_t round, const proto::PartyOrder& party, TimePoint now) {
  if (party.make_id() && party.state() == proto::PARTY_MEETING) {
    Meeting& meeting = meetings_[{round, party.party()}];
    if (meeting.number == 0) {
      meeting.number = ++last_meeting_;
      effects_.make_meeting_id(meeting.number);
    }
  }
  for (const auto& place : party.members()) {
    Member* const member = find(place.session());
    if (member == nullptr || member->round != round) continue;
    if (party.state() == proto::PARTY_SPREADING && member->state == proto::ROUND_JOINED) {
      spread(place.session(), *member, party, place.rank());
    } else if (party.state() == proto::PARTY_STOPPED) {
      stop(place.session(), *member, party.why(), now);
    }
  }
}

// The ranks here whose host has not all of it: they want the same, and share one copy.
std::vector<std::uint32_t> Rounds::keepers_of(const proto::PartyOrder& party) const {
  std::vector<std::uint32_t> ranks;
  for (const auto& place : party.members()) {
    const auto found = members_.find(place.session());
    if (found == members_.end() || found->second.owner || found->second.ended) continue;
    ranks.push_back(place.rank());
  }
  std::ranges::sort(ranks);
  return ranks;
}

void Rounds::spread(SessionId session, Member& member, const proto::PartyOrder& party,
                    std::uint32_t rank) {
  device::SpreadOrder order;
  order.session = session;
  order.communicator = party.communicator();
  order.id = party.id();
  order.rank = rank;
  order.ranks = party.ranks();
  order.bucket_bytes = party.bucket_bytes();
  order.owners.assign(party.owners().begin(), party.owners().end());
  const auto keepers = keepers_of(party);
  if (const auto own = std::ranges::find(keepers, rank); own != keepers.end()) {
    order.keep_index = static_cast<std::uint32_t>(own - keepers.begin());
    order.keep_count = static_cast<std::uint32_t>(keepers.size());
  }
  member.state = proto::ROUND_SPREADING;
  changed_ = true;
  effects_.spread(order);
}

void Rounds::stop(SessionId session, Member& member, const std::string& why, TimePoint now) {
  if (member.state != proto::ROUND_JOINED && member.state != proto::ROUND_SPREADING) return;
  effects_.stop_spread(session, why);
  if (member.ended) {
    return end_discarding(member, Error(ErrorCode::kStale, why), now);
  }
  go_alone(session, member, why);
}

// Members whose round is over, or that nobody leads any more. What spreads goes on and ends.
void Rounds::leave_ended_rounds(const std::string& why) {
  for (auto& [session, member] : members_) {
    if (member.round == 0 || member.ended || rounds_.contains(member.round)) continue;
    if (member.state == proto::ROUND_SPREADING || member.state == proto::ROUND_SERVING) continue;
    if (member.state == proto::ROUND_JOINED) {
      effects_.stop_spread(session, why);
      go_alone(session, member, why);
    }
    member.round = 0;
    member.state = proto::ROUND_SERVING;
    member.worker_lost = false;
    member.why.clear();
    changed_ = true;
  }
}

}  // namespace rekindle::worker
