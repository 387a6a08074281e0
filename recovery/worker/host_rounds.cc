#include "recovery/worker/host_rounds.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "recovery/rpc/convert.h"

namespace rekindle::worker {

namespace {

// In one report. Larger contents are not described.
constexpr std::size_t kMostPiecesDescribed = 200'000;
// Contents that are remembered as described. More are described again.
constexpr std::size_t kMostDescribed = 1024;

// Not below zero.
std::uint64_t us_of(Duration time) {
  const auto count = std::chrono::duration_cast<std::chrono::microseconds>(time).count();
  return static_cast<std::uint64_t>(std::max<std::int64_t>(count, 0));
}

void add_phase(proto::RoundMember& member, const char* name, Duration took, Duration ago) {
  auto& phase = *member.add_phases();
  phase.set_name(name);
  phase.set_elapsed_us(us_of(took));
  phase.set_ago_us(us_of(ago));
}

}  // namespace

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

RoundMember::RoundMember(Origin origin) : origin_(std::move(origin)) { id_.model = origin_.model; }

void RoundMember::choose(const ModelVersion& id, std::uint64_t round) {
  chosen_ = id;
  if (round != 0) round_ = round;
}

void RoundMember::join(const device::DeviceJoined& joined, Bytes here) {
  id_ = chosen_;
  state_ = proto::ROUND_JOINED;
  joined_ = joined;
  here_ = here;
}

bool RoundMember::progress(std::uint64_t bytes) {
  if (bytes <= spread_bytes_) return false;
  spread_bytes_ = bytes;
  return true;
}

void RoundMember::end_spread(const device::SpreadOver& over, TimePoint now) {
  kept_bytes_ = over.kept_bytes;
  spread_ended_ = now;
  meet_took_ = over.meet;
  spread_took_ = over.meet + over.elapsed;
  verify_took_ = over.verify;
  const bool given_all = !over.error && !over.worker_lost;
  spread_bytes_ =
      given_all && !over.more ? joined_.payload_bytes : std::max(spread_bytes_, over.bytes);
}

void RoundMember::fill(bool more) {
  if (state_ == proto::ROUND_SPREADING && !more) spread_bytes_ = joined_.payload_bytes;
  state_ = proto::ROUND_FILLED;
  become_ready();
}

void RoundMember::go_alone(const std::string& why) {
  state_ = proto::ROUND_ALONE;
  why_ = why;
  become_ready();
}

void RoundMember::lose_worker(const std::string& why) {
  state_ = proto::ROUND_FAILED;
  worker_lost_ = true;
  why_ = why;
}

void RoundMember::commit() {
  committed_ = true;
  if (round_ == 0) take_chosen();  // without a round; until now it served nothing
  become_ready();
}

void RoundMember::become_ready() {
  const bool over = state_ == proto::ROUND_ALONE || state_ == proto::ROUND_FILLED;
  if (committed_ && over) state_ = proto::ROUND_READY;
}

void RoundMember::leave_round() {
  // Bytes may still come from its host, and may fail to come.
  if (!committed_) id_.version = 0;
  round_ = 0;
  state_ = proto::ROUND_SERVING;
  worker_lost_ = false;
  why_.clear();
}

bool RoundMember::fail(const std::string& why) {
  ended_ = true;
  why_ = why;
  if (state_ == proto::ROUND_SPREADING) {
    worker_lost_ = true;
    return true;
  }
  if (round_ != 0) take_chosen();
  state_ = proto::ROUND_FAILED;
  return false;
}

bool RoundMember::end_discarding(bool device_failed) {
  if (!worker_lost_ || state_ != proto::ROUND_SPREADING) return false;
  worker_lost_ = !device_failed;
  state_ = proto::ROUND_FAILED;
  return true;
}

bool RoundMember::is_replaced_by(const Origin& newcomer) const {
  return ended_ && !worker_lost_ && !leaves_result() && origin_.instance == newcomer.instance &&
         origin_.rank == newcomer.rank;
}

proto::RoundMember RoundMember::report(SessionId session, std::uint64_t sequence, TimePoint now) {
  if (state_report_ == 0 || reported_state_ != state_) {
    reported_state_ = state_;
    state_report_ = sequence;
  }
  proto::RoundMember out;
  out.set_session(session);
  out.set_group(origin_.group);
  out.set_instance(origin_.instance);
  out.set_rank(origin_.rank);
  *out.mutable_id() = rpc::to_proto(id_);
  out.set_device(origin_.device);
  out.set_state(state_);
  // A member that gets the version by the round has not arrived before it has joined.
  if (state_ != proto::ROUND_SERVING) out.set_round(round_);
  *out.mutable_root() = rpc::to_proto(root_);
  *out.mutable_contents() = rpc::to_proto(joined_.contents);
  out.set_payload_bytes(joined_.payload_bytes);
  out.set_bucket_bytes(joined_.bucket_bytes);
  out.set_owner(owner());
  out.set_fetches(here_ == Bytes::kFetchable);
  out.set_takes_pieces(true);
  for (const auto& name : joined_.communicators) out.add_communicators(name);
  out.set_spread_bytes(spread_bytes_);
  out.set_kept_bytes(kept_bytes_);
  out.set_why(why_);
  out.set_worker_lost(worker_lost_);
  report_phases(out, now);
  return out;
}

void RoundMember::report_phases(proto::RoundMember& out, TimePoint now) const {
  const bool measured = spread_took_.count() > 0;
  for (const auto& phase : phases_) {
    // The device has measured these.
    if (measured && (phase.name() == "spread" || phase.name() == "verify")) continue;
    auto& added = *out.add_phases();
    added = phase;
    if (phase.has_ago_us()) added.set_ago_us(phase.ago_us() + us_of(now - phases_came_));
  }
  if (!measured) return;
  const Duration spread_ago = now - spread_ended_ + spread_took_;
  add_phase(out, "spread", spread_took_, spread_ago);
  // Buckets verify from the moment when the devices have met.
  add_phase(out, "verify", verify_took_, spread_ago - meet_took_);
}

namespace {

using Members = std::map<SessionId, RoundMember>;

RoundMember* find_member(Members& members, SessionId session) {
  const auto found = members.find(session);
  return found == members.end() ? nullptr : &found->second;
}

Result<device::SpreadOrder> spread_order(const Members& members, const proto::PartyOrder& party,
                                         const proto::PartyOrder::Place& own_place) {
  const SessionId session = own_place.session();
  const std::uint32_t rank = own_place.rank();
  device::SpreadOrder order;
  TRY(order.pieces, rpc::from_proto(own_place.pieces(), std::numeric_limits<std::uint32_t>::max()));
  order.session = session;
  order.communicator = party.communicator();
  order.id = party.id();
  order.rank = rank;
  order.ranks = party.ranks();
  order.bucket_bytes = party.bucket_bytes();
  order.owners.assign(party.owners().begin(), party.owners().end());
  order.owners_fetch = party.owners_fetch();
  order.ranks_here = static_cast<std::uint32_t>(party.members_size());
  const Digest& contents = members.at(session).contents();
  // The ranks here whose host lacks the version, and that want the same: they share one copy.
  std::vector<std::uint32_t> keepers;
  for (const auto& place : party.members()) {
    const auto keeper = members.find(place.session());
    if (keeper == members.end() || keeper->second.owner() || keeper->second.ended()) continue;
    if (keeper->second.contents() != contents) continue;
    keepers.push_back(place.rank());
  }
  std::ranges::sort(keepers);
  for (std::uint32_t share = 0; share < order.owners.size(); ++share) {
    if (std::ranges::binary_search(keepers, order.owners[share])) order.fetched.push_back(share);
  }
  if (const auto own = std::ranges::find(keepers, rank); own != keepers.end()) {
    order.keep_index = static_cast<std::uint32_t>(own - keepers.begin());
    order.keep_count = static_cast<std::uint32_t>(keepers.size());
  }
  return order;
}

}  // namespace

void HostRounds::attach(SessionId session, Origin origin) {
  if (origin.group.empty()) return;
  std::erase_if(members_, [&](const auto& item) { return item.second.is_replaced_by(origin); });
  members_.insert_or_assign(session, RoundMember(std::move(origin)));
  changed_ = true;
}

bool HostRounds::choose(SessionId session, const ModelVersion& id) {
  RoundMember* const member = find_member(members_, session);
  if (member == nullptr) return false;
  member->choose(id, known_.gathering(id, member->origin().group));
  changed_ = true;
  return broadcasts_ && member->round() != 0 && !member->origin().device.empty();
}

// A session that comes late is not waited for.
bool HostRounds::enters(SessionId session) {
  RoundMember* const member = find_member(members_, session);
  if (member == nullptr || member->round() == 0) return false;
  const auto* const round = known_.find(member->round());
  if (broadcasts_ && round != nullptr && round->gathering) return !member->origin().device.empty();
  member->leave_round();
  changed_ = true;
  return false;
}

void HostRounds::have_all(SessionId session, const ModelVersion& id) {
  RoundMember* const member = find_member(members_, session);
  if (member == nullptr) return;
  member->choose(id, 0);
  changed_ = true;
}

void HostRounds::want(SessionId session, const Digest& contents, std::uint64_t payload_bytes,
                      WantedPieces pieces) {
  RoundMember* const member = find_member(members_, session);
  if (member == nullptr) return;
  if (!described_.contains(contents)) undescribed_.try_emplace(contents);
  member->want(contents, payload_bytes, std::move(pieces));
}

// A session that waits for its party joins when it has its buckets.
void HostRounds::hand_over(SessionId session, const Digest& root,
                           std::optional<std::string> alone) {
  RoundMember* const member = find_member(members_, session);
  if (member == nullptr || member->round() == 0) return;
  member->hand_over(root);
  if (!alone) return;
  member->take_chosen();
  go_alone(session, *member, *alone);
}

void HostRounds::joined(const device::DeviceJoined& joined, RoundMember::Bytes here) {
  RoundMember* const member = find_member(members_, joined.session);
  if (member == nullptr || member->ended()) return;
  if (!member->waits_for_buckets()) {
    return effects_.stop_spread(joined.session, "its round is over");
  }
  member->join(joined, here);
  changed_ = true;
  leave_ended_rounds("the round was over before it had its buckets");
}

void HostRounds::progress(SessionId session, std::uint64_t bytes) {
  RoundMember* const member = find_member(members_, session);
  if (member != nullptr && member->progress(bytes)) progressed_ = true;
}

void HostRounds::go_alone(SessionId session, RoundMember& member, const std::string& why) {
  member.go_alone(why);
  changed_ = true;
  effects_.left_round(session, false, why);
}

void HostRounds::fill(SessionId session, RoundMember& member, bool more) {
  if (!member.is_in_party() && member.state() != proto::ROUND_ALONE) return;
  member.fill(more);
  changed_ = true;
  effects_.left_round(session, !more, more ? "the round has brought what others want, too" : "");
}

void HostRounds::spread_over(const device::SpreadOver& over, TimePoint now) {
  RoundMember* const member = find_member(members_, over.session);
  if (member == nullptr) return;
  member->end_spread(over, now);
  changed_ = true;
  if (member->ended()) return end_discarding(*member, over.error.has_value(), now);
  if (!over.error && !over.worker_lost) return fill(over.session, *member, over.more);
  if (!member->is_in_party()) return;
  if (over.error) return go_alone(over.session, *member, over.error->message());
  member->lose_worker(over.worker_lost->message());
  effects_.left_round(over.session, false, over.worker_lost->message());
}

void HostRounds::device_over(const device::DeviceOver& over, TimePoint now) {
  RoundMember* const member = find_member(members_, over.session);
  if (member == nullptr) return;
  if (member->ended()) return end_discarding(*member, over.error.has_value(), now);
  if (member->round() == 0) return;
  if (!over.error) return fill(over.session, *member, false);
  if (!member->waits_for_buckets() && !member->is_in_party()) return;
  member->take_chosen();
  go_alone(over.session, *member, over.error->message());
}

void HostRounds::end_discarding(RoundMember& member, bool device_failed, TimePoint now) {
  if (!member.end_discarding(device_failed)) return;
  member.forget_at(now + times_.remember);
  changed_ = true;
}

void HostRounds::commit(SessionId session) {
  RoundMember* const member = find_member(members_, session);
  if (member == nullptr) return;
  member->commit();
  changed_ = true;
}

void HostRounds::report_phases(SessionId session, const rpc::PhaseTimes& phases, TimePoint now) {
  RoundMember* const member = find_member(members_, session);
  if (member == nullptr) return;
  member->take_phases(phases, now);
  changed_ = true;
}

void HostRounds::fail(SessionId session, const std::string& why, TimePoint now) {
  RoundMember* const member = find_member(members_, session);
  if (member == nullptr || member->ended()) return;
  member->forget_at(now + (member->fail(why) ? times_.discard : times_.remember));
  changed_ = true;
}

// A worker that heard of an update detaches to attach to it. Its place is kept for that moment. The
// result of a round is kept until the coordinator has heard of it. Without it, the coordinator
// would count a committed worker as failed. It would also end the party of a device that is
// through.
void HostRounds::detach(SessionId session, TimePoint now) {
  RoundMember* const member = find_member(members_, session);
  if (member == nullptr || member->ended()) return;
  if (member->state() == proto::ROUND_SPREADING) return fail(session, "has detached", now);
  changed_ = true;
  const auto awaited = known_.gathers(member->id().model, member->origin().group);
  const bool returns = awaited && member->round() == 0 && *awaited != member->id().version;
  const bool has_news = member->is_through() && !is_heard(*member);
  if (!returns && !has_news) {
    members_.erase(session);
    return;
  }
  member->detach();
  member->forget_at(now + times_.remember);
}

std::optional<std::uint64_t> HostRounds::news_for(SessionId session,
                                                  const ModelVersion& have) const {
  const auto member = members_.find(session);
  if (member == members_.end()) return std::nullopt;
  const std::string& group = member->second.origin().group;
  // The round brings what it has not loaded yet.
  if (member->second.prepares(have) && known_.gathers(have.model, group) == have.version) {
    return have.version;
  }
  return known_.news_for(group, have);
}

std::string_view HostRounds::phase_of(SessionId session) const {
  const auto member = members_.find(session);
  if (member == members_.end() || !member->second.is_in_party()) return "";
  return member->second.state() == proto::ROUND_JOINED ? "joined" : "spreading";
}

void HostRounds::check(TimePoint now) {
  if (known_.is_silent(now, times_.coordinator)) {
    forget_orders();
    leave_ended_rounds("the coordinator does not answer");
  }
  const auto forgotten =
      std::erase_if(members_, [&](const auto& item) { return item.second.is_forgotten(now); });
  if (forgotten > 0) changed_ = true;
}

void HostRounds::forget_orders() {
  known_.forget();
  meetings_.clear();
}

std::optional<TimePoint> HostRounds::due() const {
  if (changed_) return TimePoint::min();
  if (progressed_) return reported_at_ + times_.progress;
  return std::nullopt;
}

proto::RoundReport HostRounds::report(const std::string& device_life,
                                      std::chrono::milliseconds wait, TimePoint now) {
  known_.asked(now);
  changed_ = progressed_ = false;
  reported_at_ = now;
  proto::RoundReport report;
  report.set_device_life(device_life);
  report.set_sequence(++sequence_);
  report.set_seen(known_.seen());
  report.set_wait_ms(members_.empty() ? 0 : static_cast<std::uint32_t>(wait.count()));
  for (auto& [session, member] : members_) {
    *report.add_members() = member.report(session, sequence_, now);
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
  describe(report);
  return report;
}

// Once, and again if a report was not answered: the coordinator may not have heard it.
void HostRounds::describe(proto::RoundReport& report) {
  std::erase_if(undescribed_, [&](const auto& item) {
    return std::ranges::none_of(
        members_, [&](const auto& each) { return each.second.contents() == item.first; });
  });
  std::size_t pieces = 0;
  for (const auto& [session, member] : members_) {
    const auto entry = undescribed_.find(member.contents());
    if (entry == undescribed_.end() || entry->second != 0 || member.pieces() == nullptr) continue;
    const auto& keys = *member.pieces();
    if (pieces + keys.size() > kMostPiecesDescribed) {
      // The next report has room for it, unless no report has.
      changed_ = changed_ || keys.size() <= kMostPiecesDescribed;
      continue;
    }
    pieces += keys.size();
    entry->second = sequence_;
    auto& contents = *report.add_described();
    *contents.mutable_contents() = rpc::to_proto(entry->first);
    for (const bucket::PieceKey& piece : keys) {
      contents.add_keys(piece.key);
      contents.add_bytes(piece.bytes);
    }
  }
}

void HostRounds::unanswered() {
  known_.unanswered();
  for (auto& [contents, report] : undescribed_) report = 0;
}

void HostRounds::meeting_id(std::uint64_t number, const Result<std::string>& id) {
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

void HostRounds::obey(const proto::RoundOrders& orders, std::uint64_t sequence, TimePoint now) {
  if (!known_.take(orders, sequence)) return;
  if (described_.size() > kMostDescribed) described_.clear();
  std::erase_if(undescribed_, [&](const auto& item) {
    const bool answered = item.second != 0 && known_.has_answered(item.second);
    if (answered) described_.insert(item.first);
    return answered;
  });
  for (const auto& asked : orders.describe()) {
    const Digest contents = rpc::from_proto(asked);
    described_.erase(contents);
    changed_ = undescribed_.try_emplace(contents).second || changed_;
  }
  std::set<PartyKey> meeting;
  std::set<SessionId> seated;
  for (const auto& order : orders.rounds()) {
    for (const auto& party : order.parties()) {
      if (party.state() == proto::PARTY_MEETING) meeting.emplace(order.round(), party.party());
      for (const auto& place : party.members()) seated.insert(place.session());
      obey_party(order.round(), party, now);
    }
  }
  std::erase_if(meetings_, [&](const auto& item) { return !meeting.contains(item.first); });
  leave_ended_rounds("the round is over");
  for (auto& [session, member] : members_) {
    if (member.state() != proto::ROUND_JOINED || seated.contains(session)) continue;
    const auto* const round = known_.find(member.round());
    if (round == nullptr || round->gathering || !is_heard(member)) continue;
    stop(session, member, "the round has begun without it", now);
  }
  const auto told = std::erase_if(members_, [&](const auto& item) {
    return item.second.leaves_result() && is_heard(item.second);
  });
  if (told > 0) changed_ = true;
}

bool HostRounds::is_heard(const RoundMember& member) const {
  const std::uint64_t report = member.state_report();
  return report != 0 && known_.has_answered(report);
}

void HostRounds::obey_party(std::uint64_t round, const proto::PartyOrder& party, TimePoint now) {
  if (party.make_id() && party.state() == proto::PARTY_MEETING) {
    Meeting& meeting = meetings_[{round, party.party()}];
    if (meeting.number == 0) {
      meeting.number = ++last_meeting_;
      effects_.make_meeting_id(meeting.number);
    }
  }
  for (const auto& place : party.members()) {
    RoundMember* const member = find_member(members_, place.session());
    if (member == nullptr || member->round() != round) continue;
    if (party.state() == proto::PARTY_SPREADING && member->state() == proto::ROUND_JOINED) {
      const auto order = spread_order(members_, party, place);
      if (!order) {
        stop(place.session(), *member, order.error().message(), now);
        continue;
      }
      member->spread();
      changed_ = true;
      effects_.spread(*order);
    } else if (party.state() == proto::PARTY_STOPPED) {
      stop(place.session(), *member, party.why(), now);
    }
  }
}

void HostRounds::stop(SessionId session, RoundMember& member, const std::string& why,
                      TimePoint now) {
  if (!member.is_in_party()) return;
  effects_.stop_spread(session, why);
  if (member.ended()) return end_discarding(member, true, now);
  go_alone(session, member, why);
}

// Releases members whose round is over, or is led by nobody any more. A spread under way goes on to
// its end.
void HostRounds::leave_ended_rounds(const std::string& why) {
  for (auto& [session, member] : members_) {
    if (member.round() == 0 || member.ended() || known_.find(member.round()) != nullptr) continue;
    if (member.state() == proto::ROUND_SPREADING || member.state() == proto::ROUND_SERVING) {
      continue;
    }
    if (member.state() == proto::ROUND_JOINED) {
      effects_.stop_spread(session, why);
      go_alone(session, member, why);
    }
    member.leave_round();
    changed_ = true;
  }
}

}  // namespace rekindle::worker
