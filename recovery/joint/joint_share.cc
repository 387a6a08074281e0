#include "recovery/joint/joint_share.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <boost/asio/this_coro.hpp>
#include <fmt/ranges.h>

#include "recovery/rpc/convert.h"
#include "src/async/offload.h"
#include "src/base/clock.h"
#include "src/base/log.h"
#include "src/base/units.h"

namespace rekindle::joint {

using async::Task;

namespace {

constexpr std::chrono::milliseconds kReportWait{2000};
constexpr std::chrono::milliseconds kReportAgain{250};
// The coordinator drops reports after 15 s.
constexpr std::chrono::seconds kReportEvery{5};
constexpr std::chrono::milliseconds kWatchWait{2000};
constexpr std::chrono::milliseconds kTick{500};
// How long a publication waits for a rank to come back when it has none at this agent.
constexpr std::chrono::seconds kDeserted{30};
// Other agents may ask how it ended.
constexpr std::chrono::seconds kLinger{12};
constexpr std::chrono::seconds kCloseDeadline{5};
constexpr std::chrono::milliseconds kPiecesWait{5000};
// Of shared tiles whose pieces are sent at once. The pieces of a tile have at most its bytes, and
// usually a hundredth.
constexpr std::size_t kLeastRound = 8;
constexpr std::size_t kMostRound = 4096;
constexpr std::uint64_t kRoundBytes = 4 * kMiB;

// pack_layout() gives the files of every rank the same names. In the copy of their host they need
// different ones.
Result<PackedLayout> pack_rank(const JointPlan& plan, std::uint32_t rank) {
  const auto writes = plan.writes(rank);
  std::uint64_t bytes = 0;
  for (const TensorBox& one : writes) {
    bytes += one.box.elements() * dtype_size_bytes(plan.tensors()[one.tensor].dtype);
  }
  TRY(PackedLayout packed,
      pack_layout(plan.tensors(), writes, store::published_segment_bytes(bytes)));
  const auto segments = packed.layout.segments();
  std::vector<SegmentSpec> named(segments.begin(), segments.end());
  for (SegmentSpec& segment : named)
    segment.name = fmt::format("rank-{:05}-{}", rank, segment.name);
  const auto entries = packed.layout.entries();
  TRY(packed.layout,
      Layout::create(plan.tensors(), std::move(named), {entries.begin(), entries.end()}));
  return packed;
}

// The files of all ranks of a host as one copy.
Result<store::FilledSegments> join(const TensorSet& tensors,
                                   std::vector<store::FilledSegments> ranks) {
  std::vector<SegmentSpec> specs;
  std::vector<LayoutEntry> entries;
  std::vector<std::string> headers;
  std::vector<std::shared_ptr<store::MappedSegment>> segments;
  std::vector<std::shared_ptr<const store::SealedSegment>> sealed;
  for (store::FilledSegments& rank : ranks) {
    const auto first = static_cast<std::uint32_t>(specs.size());
    for (const SegmentSpec& spec : rank.packed.layout.segments()) specs.push_back(spec);
    for (LayoutEntry entry : rank.packed.layout.entries()) {
      entry.segment += first;
      entries.push_back(entry);
    }
    std::ranges::move(rank.packed.headers, std::back_inserter(headers));
    rank.sealed.resize(rank.segments.size());
    std::ranges::move(rank.sealed, std::back_inserter(sealed));
    std::ranges::move(rank.segments, std::back_inserter(segments));
  }
  std::ranges::sort(entries, {},
                    [](const LayoutEntry& entry) { return std::pair(entry.tensor, entry.box); });
  TRY(Layout layout, Layout::create(tensors, std::move(specs), std::move(entries)));
  return store::FilledSegments{
      tensors, {std::move(layout), std::move(headers)}, std::move(segments), std::move(sealed)};
}

// Never 0, which stands for a report without one.
std::uint64_t new_attempt() {
  std::uint64_t attempt = 0;
  fill_random(&attempt, sizeof attempt);
  return attempt | 1;
}

rpc::TileRuns runs_of(std::span<const TileIndex> tiles) {
  rpc::TileRuns runs;
  for (const TileIndex tile : tiles) {
    if (!runs.empty() && runs.back().second == tile) {
      ++runs.back().second;
    } else {
      runs.emplace_back(tile, tile + 1);
    }
  }
  return runs;
}

std::string digest_bytes(std::span<const Digest> digests) {
  const auto bytes = std::as_bytes(digests);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

Result<Roster> Roster::from_proto(const proto::JointRoster& from, const rpc::Identity& identity,
                                  std::function<bool()> over) {
  Roster roster;
  roster.number = from.number();
  std::optional<std::uint32_t> self;
  for (const auto& host : from.hosts()) {
    if (host.node().incarnation() == identity.incarnation.to_bytes())
      self = static_cast<std::uint32_t>(roster.hosts.size());
    roster.hosts.push_back({host.node(),
                            {host.ranks().begin(), host.ranks().end()},
                            std::make_unique<JointPeer>(host.node(), identity, over)});
  }
  if (!self) return fail(ErrorCode::kInvalid, "the roster does not have this agent");
  roster.self = *self;
  return roster;
}

JointShare::JointShare(boost::asio::any_io_executor executor, JointAgent& agent, ModelVersion id,
                       std::uint32_t world)
    : agent_(agent),
      id_(id),
      attempt_(new_attempt()),
      ranks_(std::move(id), world),
      changed_(executor),
      tasks_(executor) {}

template <typename Condition>
Task<Result<void>> JointShare::wait_for(Condition holds, TimePoint give_up) {
  while (!holds()) {
    if (error_) co_return fail(*error_);
    if (co_await async::is_cancelled()) {
      co_return fail(ErrorCode::kUnavailable, "this agent stops");
    }
    const TimePoint now = steady_now();
    if (now >= give_up) co_return fail(ErrorCode::kTimeout, "{}", whom_it_lacks());
    co_await changed_.wait_until(std::min(give_up, now + kTick));
  }
  co_return Result<void>();
}

// --- the ranks of this agent

std::string JointShare::whom_it_lacks() const {
  if (roster_.number == 0) {
    return fmt::format("{}: not all ranks have declared; missing: {}", id_.to_string(),
                       undeclared_.empty() ? "unknown" : undeclared_);
  }
  const auto unfilled = ranks_.unfilled(roster_.ranks());
  if (plan_ != nullptr && !unfilled.empty()) {
    return fmt::format("{}: {} of this host have not committed", id_.to_string(),
                       name_ranks(unfilled));
  }
  return fmt::format("{}: other hosts have not committed", id_.to_string());
}

Task<Result<RankPlaces>> JointShare::declare(std::uint32_t world, Declaration declaration,
                                             std::uint64_t owner, TimePoint give_up) {
  const std::uint32_t rank = declaration.rank;
  CO_TRY_VOID(ranks_.declare(world, std::move(declaration), owner));
  changed_.notify();
  const auto settled = [this, rank, owner] {
    return plan_ != nullptr || !ranks_.owns(rank, owner);
  };
  auto planned = co_await wait_for(settled, give_up);
  if (planned && !ranks_.owns(rank, owner)) {
    co_return fail(ErrorCode::kStale, "{}: rank {} has left", id_.to_string(), rank);
  }
  if (!planned) {
    leave(rank, owner);
    co_return fail(std::move(planned).error());
  }
  const auto packed = packed_.find(rank);
  if (packed == packed_.end()) {
    co_return fail(ErrorCode::kDenied, "{}: rank {} takes part on another host", id_.to_string(),
                   rank);
  }
  co_return RankPlaces{plan_->tensors(), packed->second};
}

Task<Result<Digest>> JointShare::commit(std::uint32_t rank, std::uint64_t owner,
                                        store::FilledSegments filled, std::shared_ptr<void> files,
                                        TimePoint give_up) {
  CO_TRY_VOID(ranks_.fill(rank, owner, std::move(filled)));
  files_.push_back(std::move(files));
  changed_.notify();
  auto complete = co_await wait_for([this] { return root_.has_value(); }, give_up);
  if (!complete) {
    leave(rank, owner);
    co_return fail(std::move(complete).error());
  }
  co_return *root_;
}

void JointShare::leave(std::uint32_t rank, std::uint64_t owner) {
  ranks_.leave(rank, owner);
  changed_.notify();
}

// --- other agents

Task<Result<proto::JointResponse>> JointShare::answer(rpc::Peer peer, proto::JointRequest request) {
  const auto self = shared_from_this();
  const std::uint32_t from = request.host();
  if (from >= roster_.hosts.size() ||
      roster_.hosts[from].node.incarnation() != peer.incarnation.to_bytes()) {
    co_return fail(ErrorCode::kDenied, "{} is not the host {} of the publication of {}",
                   peer.node_id, from, id_.to_string());
  }
  if (request.step_case() == proto::JointRequest::kPieces) {
    proto::JointResponse answer;
    CO_TRY(const std::uint32_t taken,
           co_await take_pieces(from, std::move(*request.mutable_pieces())));
    answer.set_taken(taken);
    co_return answer;
  }
  if (lead_ == nullptr) {
    co_return fail(ErrorCode::kInvalid, "this agent does not lead the publication of {}",
                   id_.to_string());
  }
  co_return co_await lead_->answer(from, std::move(request));
}

// Returns how many of them were taken.
Task<Result<std::uint32_t>> JointShare::take_pieces(std::uint32_t from, proto::JointPieces pieces) {
  const TimePoint until = steady_now() + kPiecesWait;
  std::uint32_t taken = 0;
  for (const auto& piece : pieces.pieces()) {
    while (!error_ && (finisher_ == nullptr || !finisher_->has_room_for(piece.tile()))) {
      if (taken > 0 || steady_now() >= until) co_return taken;
      co_await changed_.wait_until(until);
    }
    if (error_) co_return fail(*error_);
    if (auto added = finisher_->add(from, piece.tile(), piece.data()); !added) {
      end(added.error());
      co_return fail(std::move(added).error());
    }
    ++taken;
    changed_.notify();
  }
  co_return taken;
}

void JointShare::end(Error why) {
  if (over()) return;
  log::warn("joint.end", "version", id_.to_string(), "error", why);
  error_ = std::move(why);
  if (lead_ != nullptr) lead_->end(*error_);
  changed_.notify();
}

// --- the steps

Task<void> JointShare::run() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const auto self = shared_from_this();
  tasks_.spawn("joint.time", keep_time());
  Result<void> done;
  try {
    done = co_await take_steps();
  } catch (const std::exception& thrown) {
    done = fail(ErrorCode::kInternal, "{}: {}", id_.to_string(), thrown.what());
  }
  if (!done) end(std::move(done).error());
  // Before the files go, which takes seconds: the ranks may begin anew at once.
  co_await say_goodbye();
  co_await drop_files();
  co_await async::sleep_for(kLinger);
  if (lead_ != nullptr) co_await lead_->close();
  bool closed = false;
  while (!closed) closed = co_await tasks_.close(kCloseDeadline);
}

// Frees what the version did not get, on the pool.
Task<void> JointShare::drop_files() {
  auto drop =
      [part = std::shared_ptr<PartReader>(std::move(part_)), staged = std::move(staged_),
       files = std::move(files_),
       rest = std::make_shared<std::vector<store::FilledSegments>>(ranks_.take_rest())]() mutable {
        part.reset();
        staged.reset();
        rest.reset();
        files.clear();
        return true;
      };
  auto dropped = async::offload(agent_.blocking_pool(), std::move(drop));
  co_await std::move(dropped);
}

proto::JointReport JointShare::report_on(std::span<const std::uint32_t> ranks) const {
  proto::JointReport report;
  *report.mutable_id() = rpc::to_proto(id_);
  report.set_world(ranks_.world());
  report.set_attempt(attempt_);
  report.mutable_ranks()->Add(ranks.begin(), ranks.end());
  report.set_leave(ranks.empty());
  return report;
}

Task<void> JointShare::say_goodbye() {
  proto::JointReport report = report_on({});
  auto said = agent_.report_ranks(std::move(report));
  (void)co_await std::move(said);
  if (!error_ || roster_.number == 0 || roster_.leads()) co_return;
  proto::JointRequest request = this->request();
  *request.mutable_give_up()->mutable_why() = rpc::to_status(*error_);
  (void)co_await roster_.lead().try_once(std::move(request));
}

// The coordinator forgets a roster that nobody reports. While it knows the roster, it refuses the
// same ranks at other agents.
Task<void> JointShare::keep_roster() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  bool cancelled = false;
  while (!over() && !cancelled) {
    proto::JointReport report = report_on(roster_.ranks());
    auto asked = agent_.report_ranks(std::move(report));
    (void)co_await std::move(asked);
    co_await async::sleep_for(kReportEvery);
    cancelled = co_await async::is_cancelled();
  }
}

Task<Result<void>> JointShare::take_steps() {
  CO_TRY_VOID(agent_.check_not_retiring(id_));
  CO_TRY_VOID(co_await gather());
  log::info("joint.roster", "version", id_.to_string(), "hosts", roster_.hosts.size(), "ranks",
            ranks_.world(), "lead", roster_.lead().name());
  tasks_.spawn("joint.watch", watch_lead());
  tasks_.spawn("joint.roster", keep_roster());
  CO_TRY_VOID(co_await exchange_declarations());
  CO_TRY_VOID(co_await wait_for([this] { return ranks_.unfilled(roster_.ranks()).empty(); }));
  CO_TRY_VOID(co_await stage());
  CO_TRY_VOID(co_await send_leaves());
  CO_TRY_VOID(co_await wait_for([this] { return lead_state_.phase() == proto::JOINT_COMMITTING; }));
  CO_TRY_VOID(co_await commit_copy());
  proto::JointRequest confirm = request();
  confirm.mutable_confirm();
  CO_TRY_VOID(co_await roster_.lead().call(std::move(confirm)));
  CO_TRY_VOID(co_await wait_for([this] { return lead_state_.phase() == proto::JOINT_COMPLETE; }));
  root_ = rpc::from_proto(lead_state_.root());
  changed_.notify();
  co_return Result<void>();
}

void JointShare::note_undeclared(const Result<proto::JointRoster>& roster) {
  if (!roster) {
    undeclared_ = "unknown, " + roster.error().message();
    return;
  }
  const std::vector<std::uint32_t> missing(roster->missing().begin(), roster->missing().end());
  undeclared_ = missing.empty() ? "" : name_ranks(missing);
  if (roster->missing_total() > missing.size()) {
    undeclared_ += fmt::format(" and {} more", roster->missing_total() - missing.size());
  }
}

Task<Result<void>> JointShare::gather() {
  // The first answer comes at once, so that a rank that gives up soon hears who is missing.
  auto wait = std::chrono::milliseconds(0);
  while (true) {
    if (error_) co_return fail(*error_);
    if (co_await async::is_cancelled()) co_return fail(ErrorCode::kUnavailable, "this agent stops");
    const auto present = ranks_.present();
    proto::JointReport report = report_on(present);
    if (!present.empty()) {
      report.set_wait_ms(static_cast<std::uint32_t>(std::exchange(wait, kReportWait).count()));
    }
    const TimePoint asked = steady_now();
    auto roster = co_await agent_.report_ranks(std::move(report));
    if (!roster && !may_pass(roster.error())) co_return fail(std::move(roster).error());
    if (roster && roster->number() != 0) {
      CO_TRY(roster_,
             Roster::from_proto(*roster, agent_.identity(), [this] { return error_.has_value(); }));
      break;
    }
    note_undeclared(roster);
    // A rank that came meanwhile is reported at once.
    if (present != ranks_.present()) continue;
    co_await changed_.wait_until(asked + kReportAgain);
  }
  ranks_.seal(roster_.ranks());
  if (roster_.leads()) {
    std::vector<JointLead::Host> hosts;
    for (const auto& host : roster_.hosts) hosts.push_back({host.node.node_id(), host.ranks});
    lead_ = std::make_unique<LeadDesk>(co_await boost::asio::this_coro::executor, agent_, id_,
                                       std::move(hosts));
  }
  changed_.notify();
  co_return Result<void>();
}

proto::JointRequest JointShare::request() const {
  proto::JointRequest request;
  *request.mutable_id() = rpc::to_proto(id_);
  request.set_roster(roster_.number);
  request.set_host(roster_.self);
  return request;
}

Task<void> JointShare::watch_lead() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  while (!over() && !co_await async::is_cancelled()) {
    proto::JointRequest request = this->request();
    request.mutable_watch()->set_seen(static_cast<std::uint32_t>(lead_state_.phase()));
    request.mutable_watch()->set_wait_ms(kWatchWait.count());
    auto answer = co_await roster_.lead().call(std::move(request));
    if (over()) co_return;
    if (!answer) {
      co_return end(std::move(answer).error().with_context(id_.to_string() + ": its lead"));
    }
    lead_state_ = answer->state();
    if (lead_state_.phase() == proto::JOINT_ENDED) {
      auto why = rpc::from_status(lead_state_.why());
      co_return end(why ? Error(ErrorCode::kInternal, "ended") : std::move(why).error());
    }
    changed_.notify();
    if (lead_state_.phase() == proto::JOINT_COMPLETE) co_return;
  }
}

Task<void> JointShare::keep_time() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  TimePoint last = steady_now();
  TimePoint inhabited = last;
  while (!co_await async::is_cancelled()) {
    co_await async::sleep_for(kTick);
    const TimePoint now = steady_now();
    const Duration slept = now - last > 4 * kTick ? now - last : Duration{};
    last = now;
    inhabited += slept;
    if (lead_ != nullptr) lead_->advance(now, slept);
    if (over()) continue;
    if (!ranks_.deserted()) inhabited = now;
    // Before the roster is complete, no other agent relies on the ranks of this one.
    if (now - inhabited > (roster_.number == 0 ? Duration(2 * kTick) : Duration(kDeserted))) {
      end({ErrorCode::kPeerLost, fmt::format("{}: all ranks at {} have left", id_.to_string(),
                                             agent_.identity().node_id)});
    }
  }
}

Task<Result<void>> JointShare::exchange_declarations() {
  CO_TRY(auto declarations, ranks_.declarations(roster_.ranks()));
  const std::string own =
      serialize_declarations({agent_.identity().node_id, std::move(declarations)});
  for (std::uint64_t offset = 0; offset < own.size(); offset += kPageBytes) {
    proto::JointRequest request = this->request();
    auto& page = *request.mutable_declare();
    page.set_offset(offset);
    page.set_total_bytes(own.size());
    page.set_data(own.substr(offset, kPageBytes));
    CO_TRY_VOID(co_await roster_.lead().call(std::move(request)));
  }
  CO_TRY_VOID(co_await wait_for([this] { return lead_state_.phase() >= proto::JOINT_WRITING; }));
  std::vector<std::string> all;
  for (std::uint32_t host = 0; host < roster_.hosts.size(); ++host) {
    proto::JointRead read;
    read.set_kind(proto::JointRead::DECLARATIONS);
    read.set_of_host(host);
    CO_TRY(std::string blob, co_await read_from_lead(std::move(read)));
    all.push_back(std::move(blob));
  }
  co_return co_await make_plan(std::move(all));
}

Task<Result<std::string>> JointShare::read_from_lead(proto::JointRead read) {
  std::string blob;
  while (true) {
    read.set_offset(blob.size());
    proto::JointRequest request = this->request();
    *request.mutable_read() = read;
    CO_TRY(const auto answer, co_await roster_.lead().call(std::move(request)));
    blob += answer.data();
    if (blob.size() >= answer.total_bytes()) co_return blob;
    if (answer.data().empty()) {
      co_return fail(ErrorCode::kCorrupt, "{}: the lead sent an empty page", id_.to_string());
    }
  }
}

Task<Result<void>> JointShare::make_plan(std::vector<std::string> declarations) {
  struct Made {
    std::shared_ptr<const JointPlan> plan;
    std::map<std::uint32_t, PackedLayout> packed;
    std::vector<TileIndex> finished;
  };
  const auto ranks = roster_.ranks();
  const auto make = [this, ranks, &declarations]() -> Result<std::shared_ptr<Made>> {
    std::vector<JointHost> hosts;
    for (std::size_t i = 0; i < declarations.size(); ++i) {
      TRY(auto host, parse_declarations(declarations[i]));
      const auto has = [](const Declaration& declaration) { return declaration.rank; };
      if (!std::ranges::equal(host.ranks, roster_.hosts[i].ranks, {}, has)) {
        return fail(ErrorCode::kInvalid, "{} declared other ranks than the roster has",
                    roster_.hosts[i].node.node_id());
      }
      hosts.push_back(std::move(host));
    }
    auto made = std::make_shared<Made>();
    TRY(JointPlan plan, JointPlan::create(std::move(hosts)));
    made->plan = std::make_shared<const JointPlan>(std::move(plan));
    for (const std::uint32_t rank : ranks) {
      TRY(auto packed, pack_rank(*made->plan, rank));
      made->packed.emplace(rank, std::move(packed));
    }
    made->finished = made->plan->tiles_of(roster_.self).finished;
    return made;
  };
  auto made = co_await async::offload(agent_.blocking_pool(), make);
  if (!made) co_return fail(std::move(made).error().with_context("publish " + id_.to_string()));
  plan_ = (*made)->plan;
  packed_ = std::move((*made)->packed);
  finisher_ = std::make_unique<TileFinisher>(id_, plan_, std::move((*made)->finished));
  if (lead_ != nullptr) lead_->set_plan(plan_);
  changed_.notify();
  co_return Result<void>();
}

Task<Result<void>> JointShare::stage() {
  std::vector<store::FilledSegments> filled;
  for (const std::uint32_t rank : roster_.ranks()) filled.push_back(ranks_.take(rank));
  CO_TRY(auto joined, join(plan_->tensors(), std::move(filled)));
  if (joined.packed.layout.entries().empty()) co_return Result<void>();
  const Layout layout = joined.packed.layout;
  const auto work = [this, &joined, &layout]() -> Result<void> {
    TRY(staged_, agent_.store().stage_part(id_, std::move(joined)));
    part_ = std::make_unique<PartReader>(agent_.store(), agent_.digest_pool(), id_, plan_,
                                         roster_.self, staged_, layout);
    return {};
  };
  co_return co_await async::offload(agent_.blocking_pool(), work);
}

Task<Result<void>> JointShare::put_leaves(std::span<const TileIndex> tiles,
                                          std::span<const Digest> leaves, bool last) {
  proto::JointRequest request = this->request();
  auto& body = *request.mutable_leaves();
  *body.mutable_tiles() = rpc::to_proto(runs_of(tiles));
  body.set_digests(digest_bytes(leaves));
  body.set_last(last);
  if (last && part_ != nullptr) *body.mutable_layout() = rpc::to_proto(part_->layout().digest());
  CO_TRY_VOID(co_await roster_.lead().call(std::move(request)));
  co_return Result<void>();
}

// In pages. `last`: of this host.
Task<Result<void>> JointShare::put_all_leaves(std::span<const TileIndex> tiles,
                                              std::span<const Digest> leaves, bool last) {
  constexpr std::size_t kLeaves = kPageBytes / sizeof(Digest);
  do {
    const std::size_t count = std::min(kLeaves, tiles.size());
    CO_TRY_VOID(co_await put_leaves(tiles.first(count), leaves.first(count),
                                    last && count == tiles.size()));
    if (error_) co_return fail(*error_);
    tiles = tiles.subspan(count);
    leaves = leaves.subspan(count);
  } while (!tiles.empty());
  co_return Result<void>();
}

Task<Result<void>> JointShare::send_leaves() {
  if (part_ != nullptr) {
    CO_TRY(leaves_,
           co_await async::offload(agent_.blocking_pool(), [this] { return part_->leaves(); }));
    if (!leaves_.empty())
      CO_TRY_VOID(co_await put_all_leaves(part_->tiles().whole, leaves_, false));
    CO_TRY_VOID(co_await send_pieces());
  }
  co_return co_await finish_tiles();
}

// Sends tiles in ascending order, and those of one round to all finishers at once. So a finisher
// always gets the pieces of its lowest incomplete tile, for which it has room, and no host waits
// for a host that waits for it.
Task<Result<void>> JointShare::send_pieces() {
  const std::span<const TileIndex> shared = part_->tiles().shared;
  std::size_t round = kLeastRound;
  for (std::size_t i = 0; i < shared.size();) {
    const auto tiles = shared.subspan(i, std::min(round, shared.size() - i));
    CO_TRY(auto pieces, co_await async::offload(agent_.blocking_pool(),
                                                [this, tiles] { return part_->pieces(tiles); }));
    i += tiles.size();
    std::uint64_t bytes = 1;
    for (const std::string& piece : pieces) bytes += piece.size();
    round = std::clamp<std::size_t>(tiles.size() * kRoundBytes / bytes, kLeastRound,
                                    std::min(kMostRound, 2 * round));
    std::map<std::uint32_t, proto::JointPieces> by_finisher;
    for (std::size_t k = 0; k < tiles.size(); ++k) {
      auto& piece = *by_finisher[plan_->finisher(tiles[k])].add_pieces();
      piece.set_tile(tiles[k]);
      piece.set_data(std::move(pieces[k]));
    }
    std::vector<Task<void>> sending;
    std::optional<Error> failed;
    for (auto& [to, its_pieces] : by_finisher) {
      sending.push_back(send_round(to, std::move(its_pieces), failed));
    }
    co_await async::run_all(std::move(sending));
    if (failed) co_return fail(*std::move(failed));
  }
  co_return Result<void>();
}

// Sends until the finisher has taken all pieces, or the publication ends. The finisher may have to
// wait for hosts whose ranks still write.
Task<void> JointShare::send_round(std::uint32_t to, proto::JointPieces pieces,
                                  std::optional<Error>& failed) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  while (pieces.pieces_size() > 0 && !failed) {
    proto::JointRequest request = this->request();
    *request.mutable_pieces() = pieces;
    auto answer = co_await roster_.hosts[to].peer->call(std::move(request));
    if (answer && error_) answer = fail(*error_);
    if (!answer) {
      failed = std::move(answer).error();
      co_return;
    }
    const int taken = std::min(static_cast<int>(answer->taken()), pieces.pieces_size());
    pieces.mutable_pieces()->DeleteSubrange(0, taken);
  }
}

Task<Result<void>> JointShare::finish_tiles() {
  while (true) {
    const bool last = finisher_->complete();
    std::vector<TileIndex> tiles;
    std::vector<Digest> leaves;
    for (const auto& [tile, leaf] : finisher_->take_leaves()) {
      tiles.push_back(tile);
      leaves.push_back(leaf);
    }
    if (last || !tiles.empty()) CO_TRY_VOID(co_await put_all_leaves(tiles, leaves, last));
    if (last) co_return Result<void>();
    if (error_) co_return fail(*error_);
    if (co_await async::is_cancelled()) co_return fail(ErrorCode::kUnavailable, "this agent stops");
    co_await changed_.wait_until(steady_now() + kTick);
  }
}

// This agent has digested these tiles itself, so it need not believe the lead.
Result<void> JointShare::check_own_leaves(const Checkpoint& checkpoint) const {
  const std::span<const TileIndex> whole = part_->tiles().whole;
  for (std::size_t i = 0; i < whole.size(); ++i) {
    if (checkpoint.tile_digests[whole[i]] == leaves_[i]) continue;
    const TensorIndex tensor = plan_->tiles().tensor_of(whole[i]);
    return fail(ErrorCode::kCorrupt, "{}: {} has another digest of '{}' {} than this host",
                id_.to_string(), roster_.lead().name(), plan_->tensors()[tensor].name,
                plan_->tiles().tile_box(whole[i]).to_string());
  }
  return {};
}

Task<Result<void>> JointShare::commit_copy() {
  if (error_) co_return fail(*error_);
  if (part_ == nullptr) co_return Result<void>();
  proto::JointRead read;
  read.set_kind(proto::JointRead::LEAVES);
  CO_TRY(const std::string bytes, co_await read_from_lead(std::move(read)));
  if (error_) co_return fail(*error_);
  const Digest root = rpc::from_proto(lead_state_.root());
  const auto commit = [this, &bytes,
                       &root]() -> Result<std::shared_ptr<const store::StoredVersion>> {
    TRY(auto leaves, parse_digests(bytes));
    TRY(auto checkpoint, Checkpoint::create(id_, plan_->tensors(), std::move(leaves), root));
    TRY_VOID(check_own_leaves(*checkpoint));
    TRY(auto parts, part_->part_digests());
    TRY(auto staged, agent_.store().finish_part(staged_, std::move(checkpoint), std::move(parts)));
    return agent_.store().commit_staged(std::move(staged));
  };
  CO_TRY(auto stored, co_await async::offload(agent_.blocking_pool(), commit));
  co_return co_await agent_.serve(std::move(stored));
}

}  // namespace rekindle::joint
