#include "recovery/coordinator/round_wire.h"

#include <algorithm>
#include <map>
#include <utility>

#include "recovery/coordinator/coordinator_wire.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/message_fields.h"
#include "recovery/rpc/update_phases.h"
#include "src/base/text.h"

namespace rekindle::coordinator {

namespace {

constexpr int kMaxMembersPerReport = 4096;
constexpr int kMaxCommunicatorsPerMember = 64;
constexpr int kMaxIdsPerReport = 4096;
constexpr std::size_t kMaxIdBytes = 4096;
constexpr std::size_t kMaxReasonBytes = 512;
// So that a sum over all members of a round is still a number of 64 bits.
constexpr std::uint64_t kMaxContentsBytes = std::uint64_t{1} << 46;

constexpr WireEnum<RoundMemberState, proto::RoundMemberState, 7> kMemberStates{{
    {RoundMemberState::kServing, proto::ROUND_SERVING},
    {RoundMemberState::kJoined, proto::ROUND_JOINED},
    {RoundMemberState::kSpreading, proto::ROUND_SPREADING},
    {RoundMemberState::kAlone, proto::ROUND_ALONE},
    {RoundMemberState::kFilled, proto::ROUND_FILLED},
    {RoundMemberState::kReady, proto::ROUND_READY},
    {RoundMemberState::kFailed, proto::ROUND_FAILED},
}};
constexpr WireEnum<PartyState, proto::PartyState, 3> kPartyStates{{
    {PartyState::kMeeting, proto::PARTY_MEETING},
    {PartyState::kSpreading, proto::PARTY_SPREADING},
    {PartyState::kStopped, proto::PARTY_STOPPED},
}};

constexpr rpc::Fields kMember{
    WIRE_FIELD(session),       WIRE_FIELD(group),        WIRE_FIELD(instance),
    WIRE_FIELD(rank),          WIRE_FIELD(id),           WIRE_FIELD(device),
    WIRE_FIELD(round),         WIRE_FIELD(root),         WIRE_FIELD(contents),
    WIRE_FIELD(payload_bytes), WIRE_FIELD(bucket_bytes), WIRE_FIELD(owner),
    WIRE_FIELD(fetches),       WIRE_FIELD(takes_pieces), WIRE_FIELD(communicators),
    WIRE_FIELD(spread_bytes),  WIRE_FIELD(kept_bytes),   WIRE_FIELD(worker_lost)};
constexpr rpc::Fields kReport{WIRE_FIELD(node_id), WIRE_FIELD(incarnation), WIRE_FIELD(device_life),
                              WIRE_FIELD(sequence)};
constexpr rpc::Fields kOrder{WIRE_FIELD(round), WIRE_FIELD(id), WIRE_FIELD(group),
                             WIRE_FIELD(gathering)};
constexpr rpc::Fields kPartyOrder{
    WIRE_FIELD(party),  WIRE_FIELD(make_id),      WIRE_FIELD(communicator),
    WIRE_FIELD(id),     WIRE_FIELD(bucket_bytes), WIRE_FIELD(ranks),
    WIRE_FIELD(owners), WIRE_FIELD(owners_fetch), WIRE_FIELD(why)};
constexpr rpc::Fields kPartyPlace{WIRE_FIELD(session), WIRE_FIELD(rank)};
constexpr rpc::Fields kPlaceStatus{WIRE_FIELD(node_id), WIRE_FIELD(instance), WIRE_FIELD(rank),
                                   WIRE_FIELD(device), WIRE_FIELD(party)};
constexpr rpc::Fields kSpreadStatus{WIRE_FIELD(spread_bytes), WIRE_FIELD(kept_bytes)};

constexpr rpc::Fields kPlan{WIRE_FIELD(ready), WIRE_FIELD(unknown)};
constexpr rpc::Fields kPlannedParty{WIRE_FIELD(bytes), WIRE_FIELD(owners_fetch)};
constexpr rpc::Fields kPlannedRank{WIRE_FIELD(node_id), WIRE_FIELD(instance), WIRE_FIELD(rank),
                                   WIRE_FIELD(device),  WIRE_FIELD(owner),    WIRE_FIELD(uploads),
                                   WIRE_FIELD(rest)};
constexpr rpc::Fields kPlannedHost{WIRE_FIELD(node_id),  WIRE_FIELD(fetches),
                                   WIRE_FIELD(receives), WIRE_FIELD(sends),
                                   WIRE_FIELD(gives),    WIRE_FIELD(busiest_upload)};

Result<RoundMember> from_proto(const proto::RoundMember& message, TimePoint now) {
  TRY_VOID(check_text("a group", message.group()));
  TRY_VOID(check_text("an instance's name", message.instance()));
  TRY_VOID(check_text("a device", message.device()));
  if (message.communicators_size() > kMaxCommunicatorsPerMember) {
    return fail(ErrorCode::kInvalid, "a round's member with {} communicators; {} are allowed",
                message.communicators_size(), kMaxCommunicatorsPerMember);
  }
  for (const auto& name : message.communicators()) {
    TRY_VOID(check_text("a communicator's name", name));
  }
  RoundMember member;
  TRY_VOID(kMember.read(message, member));
  const auto state = kMemberStates.from_wire(message.state());
  if (!state) {
    return fail(ErrorCode::kInvalid, "a round's member in state {}: not known",
                static_cast<int>(message.state()));
  }
  member.state = *state;
  // Phases that this build does not know are no reason to hear nothing of the agent's members.
  if (rpc::check_phases(message.phases())) {
    for (const auto& phase : message.phases()) {
      PhaseTime& time = member.phases.emplace_back(PhaseTime{phase.name(), phase.elapsed_us()});
      if (phase.has_ago_us()) time.began = now - std::chrono::microseconds(phase.ago_us());
    }
  }
  member.why = cut_text(message.why(), kMaxReasonBytes);
  return member;
}

Result<DescribedContents> from_proto(const proto::DescribedContents& message) {
  if (message.keys_size() != message.bytes_size()) {
    return fail(ErrorCode::kInvalid, "contents of {} pieces with {} sizes", message.keys_size(),
                message.bytes_size());
  }
  DescribedContents described{rpc::from_proto(message.contents()), {}};
  described.pieces.reserve(static_cast<std::size_t>(message.keys_size()));
  std::uint64_t together = 0;
  for (int i = 0; i < message.keys_size(); ++i) {
    if (message.bytes(i) > kMaxContentsBytes - together) {
      return fail(ErrorCode::kInvalid, "contents of more than {} bytes", kMaxContentsBytes);
    }
    together += message.bytes(i);
    described.pieces.push_back({message.keys(i), message.bytes(i)});
  }
  return described;
}

proto::PartyOrder to_proto(const PartyOrder& party) {
  proto::PartyOrder message;
  kPartyOrder.write(party, message);
  message.set_state(kPartyStates.to_wire(party.state));
  for (const auto& place : party.members) {
    auto& out = *message.add_members();
    kPartyPlace.write(place, out);
    if (!place.pieces.empty()) *out.mutable_pieces() = rpc::to_proto(place.pieces);
  }
  return message;
}

// The reason why a place is not ready, or why the broadcast did not bring it everything.
std::string why_of(const Round& round, const RoundPlace& place) {
  if (!place.why.empty()) return place.why;
  if (!place.last) return {};
  if (place.last->round != round.number()) return place.ready() ? "it has it already" : "";
  if (!place.last->why.empty()) return place.last->why;
  if (place.party == 0) return place.aside;
  const Party& party = round.parties()[place.party - 1];
  if (party.state == PartyState::kStopped && !place.filled()) return party.why;
  const bool lacks = place.filled() && place.last->spread_bytes < place.last->payload_bytes;
  return lacks && !place.pieces.empty() ? "its host brings the pieces that its party does not" : "";
}

std::uint64_t clamped_ms(Duration duration) {
  return static_cast<std::uint64_t>(std::max<std::int64_t>(milliseconds(duration), 0));
}

}  // namespace

Result<RoundReport> from_proto(const proto::RoundReport& message, TimePoint now) {
  TRY_VOID(check_text("a node id", message.node_id()));
  TRY_VOID(check_text("a device process's life", message.device_life()));
  if (message.members_size() > kMaxMembersPerReport || message.ids_size() > kMaxIdsPerReport) {
    return fail(ErrorCode::kInvalid,
                "a round's report with {} members and {} ids; {} and {} are allowed",
                message.members_size(), message.ids_size(), kMaxMembersPerReport, kMaxIdsPerReport);
  }
  RoundReport report;
  TRY_VOID(kReport.read(message, report));
  for (const auto& entry : message.members()) {
    TRY(RoundMember member, from_proto(entry, now));
    report.members.push_back(std::move(member));
  }
  for (const auto& entry : message.ids()) {
    if (entry.id().size() > kMaxIdBytes) {
      return fail(ErrorCode::kInvalid, "a communicator's id of {} bytes; {} are allowed",
                  entry.id().size(), kMaxIdBytes);
    }
    report.ids.push_back({entry.round(), entry.party(), entry.id(),
                          std::string(cut_text(entry.problem(), kMaxReasonBytes))});
  }
  for (const auto& entry : message.described()) {
    TRY(DescribedContents described, from_proto(entry));
    report.described.push_back(std::move(described));
  }
  return report;
}

proto::RoundOrders to_proto(const std::vector<RoundOrder>& orders) {
  proto::RoundOrders message;
  for (const RoundOrder& order : orders) {
    auto& round = *message.add_rounds();
    kOrder.write(order, round);
    for (const PartyOrder& party : order.parties) *round.add_parties() = to_proto(party);
  }
  return message;
}

proto::RoundStatus to_proto(const Round& round, TimePoint now) {
  proto::RoundStatus status;
  status.set_round(round.number());
  *status.mutable_id() = rpc::to_proto(round.id());
  status.set_group(round.group());
  status.set_phase(std::string(to_string(round.phase())));
  std::map<RoundPhase, Duration> took = round.took();
  if (!round.over()) took[round.phase()] += now - round.phase_began();
  Duration elapsed{};
  for (const auto& [phase, duration] : took) elapsed += duration;
  status.set_elapsed_ms(clamped_ms(elapsed));
  status.set_gather_ms(clamped_ms(took[RoundPhase::kGathering]));
  status.set_meet_ms(clamped_ms(took[RoundPhase::kMeeting]));
  status.set_spread_ms(clamped_ms(took[RoundPhase::kSpreading]));
  status.set_load_ms(clamped_ms(took[RoundPhase::kLoading]));
  for (const RoundPlace& place : round.places()) {
    auto& member = *status.add_members();
    kPlaceStatus.write(place, member);
    member.set_state(std::string(place.state_name()));
    member.set_why(why_of(round, place));
    if (!place.last || place.last->round != round.number()) continue;
    member.set_bytes(place.last->payload_bytes);
    kSpreadStatus.write(*place.last, member);
    for (const PhaseTime& phase : place.last->phases) {
      auto& time = *member.add_phases();
      time.set_name(phase.name);
      time.set_elapsed_us(phase.elapsed_us);
    }
  }
  return status;
}

proto::UpdatePlan to_proto(const UpdatePlan& plan) {
  proto::UpdatePlan message;
  kPlan.write(plan, message);
  for (const auto& party : plan.parties) {
    auto& out = *message.add_parties();
    kPlannedParty.write(party, out);
    for (const auto& rank : party.ranks) kPlannedRank.write(rank, *out.add_ranks());
  }
  for (const auto& host : plan.hosts) kPlannedHost.write(host, *message.add_hosts());
  return message;
}

std::vector<const Round*> rounds_to_show(const Rounds& rounds) {
  std::map<std::pair<std::string, std::string>, RoundId> last;
  for (const auto& [number, round] : rounds.all()) last[{round.id().model, round.group()}] = number;
  std::vector<const Round*> shown;
  for (const auto& [number, round] : rounds.all()) {
    if (!round.over() || last.at({round.id().model, round.group()}) == number)
      shown.push_back(&round);
  }
  return shown;
}

}  // namespace rekindle::coordinator
