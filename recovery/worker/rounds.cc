#include "recovery/worker/rounds.h"

#include <algorithm>
#include <utility>

namespace rekindle::worker {

namespace {

// It waits for its party, or is in it.
bool takes_part(proto::RoundMemberState state) {
  return state == proto::ROUND_JOINED || state == proto::ROUND_SPREADING;
}

}  // namespace

Rounds::Member* Rounds::find(SessionId session) {
  const auto found = members_.find(session);
  return found == members_.end() ? nullptr : &found->second;
}

// One that comes back is told of by its new session alone.
void Rounds::forget_predecessors_of(const Origin& origin) {
  std::erase_if(members_, [&](const auto& item) {
    const Member& old = item.second;
    return old.ended && !old.worker_lost && old.origin.instance == origin.instance &&
           old.origin.rank == origin.rank;
  });
}

void Rounds::attach(SessionId session, Origin origin) {
  if (origin.group.empty()) return;
  forget_predecessors_of(origin);
  Member member;
  member.id.model = origin.model;
  member.origin = std::move(origin);
  members_[session] = std::move(member);
  changed_ = true;
}

bool Rounds::choose(SessionId session, const ModelVersion& id) {
  Member* const member = find(session);
  if (member == nullptr) return false;
  member->chosen = id;
  for (const auto& [number, round] : rounds_) {
    const bool its = round.group.empty() || round.group == member->origin.group;
    if (round.gathering && its && round.id == id) member->round = number;
  }
  changed_ = true;
  return member->round != 0 && !member->origin.device.empty();
}

// One that comes late is not waited for.
bool Rounds::enters(SessionId session) {
  Member* const member = find(session);
  if (member == nullptr || member->round == 0) return false;
  const auto round = rounds_.find(member->round);
  if (round != rounds_.end() && round->second.gathering) return !member->origin.device.empty();
  member->round = 0;
  changed_ = true;
  return false;
}

void Rounds::hand_over(SessionId session, const Digest& root, std::optional<std::string> alone) {
  Member* const member = find(session);
  if (member == nullptr || member->round == 0) return;
  member->root = root;
  if (!alone) return;  // it joins when it has its buckets
  member->id = member->chosen;
  go_alone(session, *member, *alone);
}

void Rounds::joined(const device::DeviceJoined& joined, bool owner) {
  Member* const member = find(joined.session);
  if (member == nullptr || member->ended) return;
  const bool waits = member->round != 0 && member->state == proto::ROUND_SERVING;
  if (!waits) return effects_.stop_spread(joined.session, "its round is over");
  member->id = member->chosen;
  member->state = proto::ROUND_JOINED;
  member->joined = joined;
  member->owner = owner;
  changed_ = true;
  leave_ended_rounds("the round was over before it had its buckets");
}

void Rounds::progress(SessionId session, std::uint64_t bytes) {
  Member* const member = find(session);
  if (member == nullptr || bytes <= member->spread_bytes) return;
  member->spread_bytes = bytes;
  progressed_ = true;
}

void Rounds::go_alone(SessionId session, Member& member, const std::string& why) {
  member.state = proto::ROUND_ALONE;
  member.why = why;
  changed_ = true;
  become_ready(member);
  effects_.left_round(session, false, why);
}

void Rounds::fill(SessionId session, Member& member) {
  if (!takes_part(member.state) && member.state != proto::ROUND_ALONE) return;
  member.state = proto::ROUND_FILLED;
  changed_ = true;
  become_ready(member);
  effects_.left_round(session, true, "");
}

void Rounds::become_ready(Member& member) {
  const bool over = member.state == proto::ROUND_ALONE || member.state == proto::ROUND_FILLED;
  if (!member.committed || !over) return;
  member.state = proto::ROUND_READY;
  changed_ = true;
}

void Rounds::spread_over(const device::SpreadOver& over, TimePoint now) {
  Member* const member = find(over.session);
  if (member == nullptr) return;
  member->kept_bytes = over.kept_bytes;
  changed_ = true;
  const bool given_all = !over.error && !over.worker_lost;
  member->spread_bytes =
      given_all ? member->joined.payload_bytes : std::max(member->spread_bytes, over.bytes);
  if (member->ended) return end_discarding(*member, over.error, now);
  if (given_all) return fill(over.session, *member);
  if (!takes_part(member->state)) return;
  if (over.error) return go_alone(over.session, *member, over.error->message());
  lose_worker(over.session, *member, over.worker_lost->message());
}

// Its device has been through the round without it: its party is well, and it has not every byte.
void Rounds::lose_worker(SessionId session, Member& member, const std::string& why) {
  member.state = proto::ROUND_FAILED;
  member.worker_lost = true;
  member.why = why;
  changed_ = true;
  effects_.left_round(session, false, why);
}

void Rounds::device_over(const device::DeviceOver& over, TimePoint now) {
  Member* const member = find(over.session);
  if (member == nullptr) return;
  if (member->ended) return end_discarding(*member, over.error, now);
  if (member->round == 0) return;
  if (!over.error) {
    if (member->state == proto::ROUND_SPREADING) {
      member->spread_bytes = member->joined.payload_bytes;
    }
    return fill(over.session, *member);
  }
  const bool waits = member->state == proto::ROUND_SERVING;
  if (!waits && !takes_part(member->state)) return;
  member->id = member->chosen;
  go_alone(over.session, *member, over.error->message());
}

// A party that has lost only a worker is none that has failed.
void Rounds::end_discarding(Member& member, const std::optional<Error>& error, TimePoint now) {
  if (!member.worker_lost || member.state != proto::ROUND_SPREADING) return;
  member.worker_lost = !error;
  member.state = proto::ROUND_FAILED;
  member.forget_at = now + times_.remember;
  changed_ = true;
}

void Rounds::commit(SessionId session) {
  Member* const member = find(session);
  if (member == nullptr) return;
  member->committed = true;
  if (member->round == 0) {  // by itself: until now it served nothing
    member->id = member->chosen;
    changed_ = true;
  }
  become_ready(*member);
}

void Rounds::fail(SessionId session, const std::string& why, TimePoint now) {
  Member* const member = find(session);
  if (member == nullptr || member->ended) return;
  member->ended = true;
  member->why = why;
  changed_ = true;
  if (member->state == proto::ROUND_SPREADING) {
    member->worker_lost = true;
    member->forget_at = now + times_.discard;
    return;
  }
  if (member->round != 0) member->id = member->chosen;
  member->state = proto::ROUND_FAILED;
  member->forget_at = now + times_.remember;
}

// Who was told of an update detaches to attach to it: its place is kept for that moment.
void Rounds::detach(SessionId session, TimePoint now) {
  Member* const member = find(session);
  if (member == nullptr || member->ended) return;
  if (member->state == proto::ROUND_SPREADING) return fail(session, "has detached", now);
  changed_ = true;
  const auto awaited = gathers(member->id.model, member->origin.group);
  if (!awaited || member->round != 0 || *awaited == member->id.version) {
    members_.erase(session);
    return;
  }
  member->ended = true;
  member->forget_at = now + times_.remember;
}

std::optional<std::uint64_t> Rounds::gathers(const std::string& model,
                                             const std::string& group) const {
  std::optional<std::uint64_t> version;
  if (group.empty()) return version;
  for (const auto& [number, round] : rounds_) {  // the newest last
    const bool its = round.group.empty() || round.group == group;
    if (round.gathering && its && round.id.model == model) version = round.id.version;
  }
  return version;
}

std::optional<std::uint64_t> Rounds::news_for(SessionId session, const ModelVersion& have) const {
  const auto found = members_.find(session);
  if (found == members_.end()) return std::nullopt;
  const std::string& group = found->second.origin.group;
  if (const auto version = gathers(have.model, group)) {  // it may go back
    return *version != have.version ? version : std::nullopt;
  }
  Last last;
  for (const std::string& named : {group, std::string()}) {
    const auto known = last_.find({have.model, named});
    if (known != last_.end() && known->second.round > last.round) last = known->second;
  }
  return last.version > have.version ? std::optional(last.version) : std::nullopt;
}

std::string_view Rounds::phase_of(SessionId session) const {
  const auto found = members_.find(session);
  if (found == members_.end()) return "";
  if (found->second.state == proto::ROUND_JOINED) return "joined";
  return found->second.state == proto::ROUND_SPREADING ? "spreading" : "";
}

void Rounds::check(TimePoint now) {
  if (silent_since_ && now - *silent_since_ >= times_.coordinator) {
    forget_orders();
    leave_ended_rounds("the coordinator does not answer");
  }
  for (auto it = members_.begin(); it != members_.end();) {
    Member& member = it->second;
    if (now < member.forget_at) {
      ++it;
      continue;
    }
    changed_ = true;
    it = members_.erase(it);
  }
}

void Rounds::forget_orders() {
  rounds_.clear();
  meetings_.clear();
  seen_ = 0;
}

void Rounds::retired(const ModelVersion& id) {
  std::erase_if(last_, [&](const auto& item) {
    return item.first.first == id.model && item.second.version == id.version;
  });
}

std::optional<TimePoint> Rounds::due() const {
  if (changed_) return TimePoint::min();
  if (progressed_) return reported_at_ + times_.progress;
  return std::nullopt;
}

}  // namespace rekindle::worker
