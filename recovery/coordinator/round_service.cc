#include "recovery/coordinator/round_service.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "recovery/coordinator/coordinator_wire.h"
#include "recovery/coordinator/round_wire.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/update_phases.h"
#include "src/base/log.h"

namespace rekindle::coordinator {

namespace {

bool by_broadcast(const RoundPlace& place) {
  return place.ready() && place.last && place.last->payload_bytes > 0 &&
         place.last->spread_bytes >= place.last->payload_bytes;
}

// A worker's last phase ends just after its instance is ready.
constexpr Duration kPhasesWait = std::chrono::seconds(1);

// The round is over, and its ready members that report phases have reported the last one.
bool is_told(const Round& round, TimePoint now) {
  if (!round.over() || now - round.phase_began() >= kPhasesWait) return round.over();
  return std::ranges::all_of(round.places(), [](const RoundPlace& place) {
    const bool reports = place.ready() && place.last && !place.last->phases.empty();
    return !reports || std::ranges::find(place.last->phases, rpc::kUpdatePhases.back(),
                                         &PhaseTime::name) != place.last->phases.end();
  });
}

constexpr std::chrono::milliseconds kLongestWait{5000};
constexpr std::chrono::milliseconds kLongestGather{600'000};
// For callers that do not say how long they wait.
constexpr Duration kGraceWait = std::chrono::milliseconds(2500);

Duration wait_of(std::uint32_t wait_ms) {
  return std::min<Duration>(std::chrono::milliseconds(wait_ms), kLongestWait);
}

}  // namespace

void RoundLog::look(const Rounds& rounds) {
  for (const auto& [number, round] : rounds.all()) {
    const auto [entry, fresh] = said_.try_emplace(number);
    if (fresh) {
      log::info("round.begun", "round", number, "version", round.id().to_string(), "group",
                round.group().empty() ? "*" : round.group(), "members", round.places().size());
    }
    look(round, entry->second);
  }
  std::erase_if(said_, [&](const auto& entry) { return rounds.find(entry.first) == nullptr; });
}

void RoundLog::look(const Round& round, Said& said) {
  for (; said.parties < round.parties().size(); ++said.parties) {
    const Party& party = round.parties()[said.parties];
    log::info("round.party", "round", round.number(), "party", party.number, "members",
              party.ranks.size(), "owners", party.owners.size(), "bytes", party.bytes, "bucket",
              party.bucket_bytes, "communicator", party.communicator, "reused", party.reuses);
  }
  for (const Party& party : round.parties()) {
    if (party.state != PartyState::kStopped || !said.stopped.insert(party.number).second) continue;
    log::warn("round.stopped", "round", round.number(), "party", party.number, "why", party.why);
  }
  if (!round.over() || said.over) return;
  said.over = true;
  Duration elapsed{};
  for (const auto& [phase, duration] : round.took()) elapsed += duration;
  log::info("round.over", "round", round.number(), "version", round.id().to_string(), "ready",
            std::ranges::count_if(round.places(), &RoundPlace::ready), "members",
            round.places().size(), "by_broadcast",
            std::ranges::count_if(round.places(), by_broadcast), "ms", milliseconds(elapsed));
}

void RoundTraces::look(const Rounds& rounds, TimePoint now) {
  if (tracer_ == nullptr) return;
  for (const auto& [number, round] : rounds.all()) {
    if (is_told(round, now) && recorded_.insert(number).second) record(round, now);
  }
  const auto forgotten = [&](RoundId number) { return rounds.find(number) == nullptr; };
  std::erase_if(recorded_, forgotten);
  std::erase_if(parents_, [&](const auto& entry) { return forgotten(entry.first); });
}

void RoundTraces::record(const Round& round, TimePoint now) {
  Duration elapsed{};
  for (const auto& [phase, took] : round.took()) elapsed += took;
  const TimePoint ended = round.phase_began();
  const TimePoint began = ended - elapsed;
  const auto span =
      tracer_->record("update", parents_[round.number()], began, ended,
                      {{std::string(trace::kOperation), std::string("update")},
                       {std::string(trace::kSubject), round.id().to_string()},
                       {"rekindle.group", round.group()},
                       {"rekindle.ranks", static_cast<std::int64_t>(round.places().size())}});
  TimePoint at = began;
  for (const auto& [phase, took] : round.took()) {
    tracer_->record(std::string(to_string(phase)), span, at, at + took);
    at += took;
  }
  for (const RoundPlace& place : round.places()) record_rank(span, place, {began, ended}, now);
}

void RoundTraces::record_rank(const trace::Context& update, const RoundPlace& place,
                              const Extent& round, TimePoint now) {
  const std::vector<PhaseTime> none;
  const auto& phases = place.last ? place.last->phases : none;
  const bool known =
      std::ranges::all_of(phases, [](const PhaseTime& phase) { return phase.began.has_value(); });
  std::vector<Extent> extents;
  TimePoint at = round.began;
  for (const PhaseTime& phase : phases) {
    if (known) at = *phase.began;
    extents.push_back({at, at + std::chrono::microseconds(phase.elapsed_us)});
    at = extents.back().ended;
  }
  Extent whole = round;
  if (!extents.empty()) {
    whole.began = std::ranges::min(extents, {}, &Extent::began).began;
    // Its last phase may end a moment after the round.
    whole.ended = std::min(now, std::ranges::max(extents, {}, &Extent::ended).ended);
  }
  std::vector<trace::Attribute> attributes{
      {std::string(trace::kRank), place.to_string()},
      {"rekindle.device", place.device},
      {"rekindle.state", std::string(place.state_name())},
      {"rekindle.bytes", static_cast<std::int64_t>(place.last ? place.last->payload_bytes : 0)},
      {"rekindle.spread_bytes",
       static_cast<std::int64_t>(place.last ? place.last->spread_bytes : 0)}};
  if (!known) attributes.push_back({std::string(trace::kPhaseStarts), std::string("unknown")});
  const auto rank =
      tracer_->record("rank", update, whole.began, whole.ended, std::move(attributes), place.why);
  for (std::size_t i = 0; i < phases.size(); ++i) {
    tracer_->record(phases[i].name, rank, extents[i].began, extents[i].ended);
  }
}

RoundService::RoundService(boost::asio::any_io_executor executor, Core& core,
                           std::function<Result<void>()> may_answer, trace::Tracer* tracer,
                           const AccessControl* access)
    : core_(core),
      gate_(std::move(may_answer)),
      access_(access),
      changed_(std::move(executor)),
      traces_(tracer) {}

void RoundService::attach(rpc::RpcServer& server) {
  gate_.serve(server, proto::COORDINATOR_ROUND, [this](rpc::Peer peer, std::string body) {
    return report_round(std::move(peer), std::move(body));
  });
  gate_.serve(server, proto::COORDINATOR_BEGIN_UPDATE, [this](rpc::Peer peer, std::string body) {
    return begin_update(std::move(peer), std::move(body));
  });
  gate_.serve(server, proto::COORDINATOR_PLAN_UPDATE,
              [this](const rpc::Peer&, std::string body) { return plan_update(std::move(body)); });
  gate_.serve(server, proto::COORDINATOR_UPDATE_STATUS, [this](rpc::Peer peer, std::string body) {
    return update_status(std::move(peer), std::move(body));
  });
}

void RoundService::wake_waiters() {
  traces_.look(core_.rounds(), steady_now());
  const std::uint64_t revision = core_.rounds().revision();
  if (std::exchange(seen_revision_, revision) == revision) return;
  log_.look(core_.rounds());
  changed_.notify();
}

proto::RoundOrders RoundService::orders_of(const std::string& node_id) const {
  proto::RoundOrders orders = to_proto(core_.rounds().orders_for(node_id));
  for (const Digest& contents : core_.rounds().undescribed_of(node_id)) {
    *orders.add_describe() = rpc::to_proto(contents);
  }
  return orders;
}

async::Task<Result<std::string>> RoundService::report_round(rpc::Peer peer, std::string body) {
  CO_TRY(const auto request, rpc::parse_body<proto::RoundReport>(body));
  CO_TRY_VOID(check_speaker(peer, request.node_id(), request.incarnation()));
  for (const auto& member : request.members()) {
    if (access_ == nullptr || access_->may_read(peer, member.id().model())) continue;
    co_return fail(ErrorCode::kDenied,
                   "an update needs the right `read`: {} has a rank of {}, which it may not read",
                   request.node_id(), cut(member.id().model()));
  }
  CO_TRY(RoundReport report, from_proto(request, steady_now()));
  report.wait = wait_of(request.wait_ms());
  const TimePoint until = steady_now() + report.wait;
  const bool heard_all = core_.rounds().revision() == request.seen();
  const bool waits = request.wait_ms() > 0;
  const std::string before = waits ? orders_of(report.node_id).SerializeAsString() : std::string();
  CO_TRY_VOID(core_.report_round(report, steady_now()));
  wake_waiters();
  proto::RoundOrders orders = orders_of(report.node_id);
  // Only a change of the orders for this node is a reason to answer it.
  while (waits && heard_all && steady_now() < until && orders.SerializeAsString() == before) {
    co_await changed_.wait_until(until);
    orders = orders_of(report.node_id);
  }
  orders.set_revision(core_.rounds().revision());
  co_return orders.SerializeAsString();
}

// Before the end of the grace, members have yet to report.
async::Task<void> RoundService::await_members(Duration wait) {
  const TimePoint until = steady_now() + wait;
  while (core_.fleet().grace.active(steady_now()) && steady_now() < until) {
    co_await changed_.wait_until(std::min(until, core_.fleet().grace.until()));
  }
}

async::Task<Result<std::string>> RoundService::begin_update(rpc::Peer peer, std::string body) {
  CO_TRY(const auto request, rpc::parse_body<proto::BeginUpdateRequest>(body));
  CO_TRY(const ModelVersion id, rpc::from_proto(request.id()));
  CO_TRY_VOID(check_text("a group", request.group()));
  const std::chrono::milliseconds gather(request.gather_ms());
  if (gather > kLongestGather) {
    co_return fail(ErrorCode::kInvalid, "update {}: gathering for {} ms; at most {} ms are allowed",
                   id.to_string(), gather.count(), kLongestGather.count());
  }
  co_await await_members(request.wait_ms() == 0 ? kGraceWait : wait_of(request.wait_ms()));
  CO_TRY(const RoundId round,
         core_.begin_update(id, request.group(),
                            {gather.count() == 0 ? std::nullopt : std::optional<Duration>(gather),
                             request.members()},
                            steady_now()));
  traces_.begin(round, peer.trace);
  wake_waiters();
  proto::BeginUpdateResponse response;
  response.set_round(round);
  co_return response.SerializeAsString();
}

async::Task<Result<std::string>> RoundService::plan_update(std::string body) {
  CO_TRY(const auto request, rpc::parse_body<proto::PlanUpdateRequest>(body));
  CO_TRY(const ModelVersion id, rpc::from_proto(request.id()));
  CO_TRY_VOID(check_text("a group", request.group()));
  co_await await_members(kGraceWait);
  CO_TRY(const UpdatePlan plan, core_.plan_update(id, request.group(), steady_now()));
  co_return to_proto(plan).SerializeAsString();
}

async::Task<Result<std::string>> RoundService::update_status(rpc::Peer peer, std::string body) {
  CO_TRY(const auto request, rpc::parse_body<proto::UpdateStatusRequest>(body));
  const TimePoint until = steady_now() + wait_of(request.wait_ms());
  for (;;) {
    const Round* round = core_.rounds().find(request.round());
    const bool hidden =
        round != nullptr && access_ != nullptr && !access_->may_read(peer, round->id().model);
    if (round == nullptr || hidden) {
      co_return fail(ErrorCode::kNotFound,
                     "round {} is not known here: the coordinator has started since, the round was "
                     "over long ago, or its model is not yours to read",
                     request.round());
    }
    const TimePoint at = steady_now();
    if (is_told(*round, at) || at >= until) co_return to_proto(*round, at).SerializeAsString();
    const TimePoint next = round->over() ? round->phase_began() + kPhasesWait : until;
    co_await changed_.wait_until(std::min(until, next));
  }
}

}  // namespace rekindle::coordinator
