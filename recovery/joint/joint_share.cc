#include "recovery/joint/joint_share.h"

#include <chrono>
#include <utility>
#include <vector>

#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/convert.h"
#include "src/async/offload.h"
#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::joint {

using async::Task;

namespace {

// How long a publication waits for a rank to come back when it has none at this agent. Before the
// roster is complete, no other agent relies on the ranks of this one.
constexpr std::chrono::seconds kDeserted{30};
constexpr std::chrono::seconds kNeverGathered{1};
// Other agents may ask how it ended.
constexpr std::chrono::seconds kLinger{12};
// Longer than any call and any offloaded step of a task.
constexpr std::chrono::seconds kCloseDeadline{60};
constexpr std::chrono::milliseconds kPiecesWait{5000};

Task<void> held([[maybe_unused]] std::shared_ptr<JointShare> share, Task<void> task) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  co_await std::move(task);
}

}  // namespace

JointShare::JointShare(boost::asio::any_io_executor executor, JointAgent& agent, ModelVersion id,
                       std::uint32_t world, JointMetrics* metrics)
    : agent_(agent),
      id_(std::move(id)),
      metrics_(metrics),
      course_(executor, id_),
      ranks_(id_, world),
      reports_(agent_, ranks_, course_),
      lead_(roster_, course_),
      trace_(agent_.tracer()),
      tasks_(std::move(executor)) {}

void JointShare::spawn(std::string_view name, Task<void> task) {
  tasks_.spawn(name, held(shared_from_this(), std::move(task)));
}

// --- the ranks of this agent

std::string JointShare::whom_it_lacks() const {
  if (roster_.number == 0) {
    return fmt::format("{}: not all ranks have declared; {}", id_.to_string(), reports_.missing());
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
  trace_.enter_phase(rank, "gather");
  course_.notify();
  const auto settled = [this, rank, owner] {
    return plan_ != nullptr || !ranks_.owns(rank, owner);
  };
  auto planned = co_await course_.wait_for(settled, give_up);
  if (planned && !*planned) planned = fail(ErrorCode::kTimeout, "{}", whom_it_lacks());
  if (planned && !ranks_.owns(rank, owner)) {
    co_return fail(ErrorCode::kStale, "{}: rank {} has left", id_.to_string(), rank);
  }
  if (!planned) {
    leave(rank, owner);
    co_return fail(std::move(planned).error());
  }
  const PackedLayout* packed = copy_->files_of(rank);
  if (packed == nullptr) {
    co_return fail(ErrorCode::kDenied, "{}: rank {} takes part on another host", id_.to_string(),
                   rank);
  }
  trace_.enter_phase(rank, "write");
  co_return RankPlaces{plan_->tensors(), *packed};
}

Task<Result<Digest>> JointShare::commit(std::uint32_t rank, std::uint64_t owner,
                                        store::FilledSegments filled, std::shared_ptr<void> files,
                                        TimePoint give_up) {
  CO_TRY_VOID(ranks_.fill(rank, owner, std::move(filled)));
  trace_.enter_phase(rank, "commit");
  copy_->keep(std::move(files));
  course_.notify();
  const auto complete = [this] { return course_.root().has_value(); };
  auto done = co_await course_.wait_for(complete, give_up);
  if (done && !*done) done = fail(ErrorCode::kTimeout, "{}", whom_it_lacks());
  if (!done) {
    leave(rank, owner);
    co_return fail(std::move(done).error());
  }
  co_return *course_.root();
}

void JointShare::leave(std::uint32_t rank, std::uint64_t owner) {
  if (ranks_.owns(rank, owner)) trace_.end_phase(rank);
  ranks_.leave(rank, owner);
  course_.notify();
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
    // The sender may have its plan before this agent.
    const TimePoint until = steady_now() + kPiecesWait;
    const auto planned = [this] { return shared_ != nullptr; };
    CO_TRY(const bool ready, co_await course_.wait_for(planned, until));
    proto::JointResponse answer;
    if (ready) {
      CO_TRY(const std::uint32_t taken,
             co_await shared_->take(from, std::move(*request.mutable_pieces()), until));
      answer.set_taken(taken);
    }
    co_return answer;
  }
  if (desk_ == nullptr) {
    co_return fail(ErrorCode::kInvalid, "this agent does not lead the publication of {}",
                   id_.to_string());
  }
  co_return co_await desk_->answer(from, std::move(request));
}

void JointShare::end(Error why) {
  course_.end(std::move(why));
  if (desk_ != nullptr && course_.error()) desk_->end(*course_.error());
}

// --- the steps

Task<void> JointShare::run() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const auto self = shared_from_this();
  spawn("joint.time", keep_time());
  Result<void> done;
  try {
    done = co_await take_steps();
  } catch (const std::exception& thrown) {
    done = fail(ErrorCode::kInternal, "{}: {}", id_.to_string(), thrown.what());
  }
  trace_.end(roster_, done);
  work_.phases = trace_.took();
  if (metrics_ != nullptr) metrics_->count(done, work_);
  if (!done) end(std::move(done).error());
  // Before the files go, which takes seconds: the ranks may begin anew at once.
  co_await say_goodbye();
  if (copy_ != nullptr) {
    auto dropped = copy_->drop(ranks_.take_rest());
    co_await std::move(dropped);
  }
  co_await async::sleep_for(kLinger);
  if (desk_ != nullptr) co_await desk_->close();
  const bool closed = co_await tasks_.close(kCloseDeadline);
  if (!closed) log::error("joint.task_hangs", "version", id_.to_string());
}

Task<void> JointShare::say_goodbye() {
  co_await reports_.leave();
  if (!course_.error() || roster_.number == 0 || roster_.leads()) co_return;
  auto said = lead_.give_up(*course_.error());
  co_await std::move(said);
}

Task<void> JointShare::keep_time() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  TimePoint last = steady_now();
  TimePoint inhabited = last;
  while (!co_await async::is_cancelled()) {
    co_await async::sleep_for(Course::kTick);
    const TimePoint now = steady_now();
    const Duration slept = now - last > 4 * Course::kTick ? now - last : Duration{};
    last = now;
    inhabited += slept;
    if (desk_ != nullptr) {
      if (course_.error()) desk_->end(*course_.error());
      desk_->advance(now, slept);
    }
    if (over()) continue;
    if (!ranks_.deserted()) inhabited = now;
    if (now - inhabited > (roster_.number == 0 ? Duration(kNeverGathered) : Duration(kDeserted))) {
      end({ErrorCode::kPeerLost, fmt::format("{}: all ranks at {} have left", id_.to_string(),
                                             agent_.identity().node_id)});
    }
  }
}

Task<Result<void>> JointShare::take_steps() {
  CO_TRY_VOID(agent_.check_not_retiring(id_));
  trace_.enter_phase("gather");
  CO_TRY_VOID(co_await gather());
  trace_.enter_phase("plan");
  log::info("joint.roster", "version", id_.to_string(), "hosts", roster_.hosts.size(), "ranks",
            ranks_.world(), "lead", roster_.lead().name());
  work_.ranks = roster_.ranks().size();
  spawn("joint.watch", lead_.watch());
  spawn("joint.roster", reports_.keep(roster_.ranks()));
  CO_TRY(auto declarations, ranks_.declarations(roster_.ranks()));
  std::string own = serialize_declarations({agent_.identity().node_id, std::move(declarations)});
  CO_TRY_VOID(co_await lead_.declare(std::move(own)));
  CO_TRY_VOID(co_await lead_.reach(proto::JOINT_WRITING));
  CO_TRY_VOID(co_await make_plan());
  const auto filled = [this] { return ranks_.unfilled(roster_.ranks()).empty(); };
  trace_.enter_phase("write");
  CO_TRY_VOID(co_await course_.wait_for(filled));
  trace_.enter_phase("digest");
  CO_TRY_VOID(co_await send_leaves());
  if (copy_->part() != nullptr) work_.bytes = copy_->part()->layout().payload_bytes();
  trace_.enter_phase("claim");
  CO_TRY_VOID(co_await lead_.reach(proto::JOINT_COMMITTING));
  trace_.enter_phase("commit");
  CO_TRY_VOID(co_await commit_copy());
  trace_.enter_phase("confirm");
  CO_TRY_VOID(co_await lead_.confirm());
  CO_TRY_VOID(co_await lead_.reach(proto::JOINT_COMPLETE));
  course_.complete(lead_.root());
  co_return Result<void>();
}

Task<Result<void>> JointShare::gather() {
  CO_TRY(roster_, co_await reports_.gather());
  ranks_.seal(roster_.ranks());
  if (roster_.leads()) {
    std::vector<JointLead::Host> hosts;
    for (const auto& host : roster_.hosts) hosts.push_back({host.node.node_id(), host.ranks});
    desk_ = std::make_shared<LeadDesk>(co_await boost::asio::this_coro::executor, agent_, id_,
                                       std::move(hosts));
  }
  course_.notify();
  co_return Result<void>();
}

Task<Result<void>> JointShare::make_plan() {
  struct Made {
    std::shared_ptr<const JointPlan> plan;
    std::unique_ptr<HostCopy> copy;
    std::vector<TileIndex> finished;
    std::vector<std::optional<Digest>> layouts;  // at the lead
  };
  CO_TRY(const auto table, co_await lead_.read_table());
  const auto make = [this, &table]() -> Result<std::shared_ptr<Made>> {
    std::vector<JointHost> hosts;
    for (std::size_t i = 0; i < table.size(); ++i) {
      TRY(auto host, parse_declarations(table[i]));
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
    TRY(made->copy, HostCopy::create(agent_, id_, made->plan, roster_.self));
    made->finished = made->plan->tiles_of(roster_.self).finished;
    for (std::uint32_t host = 0; desk_ != nullptr && host < made->plan->host_count(); ++host) {
      TRY(const auto layout, layout_of_host(*made->plan, host));
      made->layouts.push_back(layout ? std::optional(layout->digest()) : std::nullopt);
    }
    return made;
  };
  auto made = co_await async::offload(agent_.blocking_pool(), make);
  if (!made) co_return fail(std::move(made).error().with_context("publish " + id_.to_string()));
  plan_ = (*made)->plan;
  copy_ = std::move((*made)->copy);
  shared_ = std::make_unique<SharedTiles>(
      SharedTiles::Pools{agent_.blocking_pool(), agent_.digest_pool()}, roster_, course_, plan_,
      std::move((*made)->finished));
  if (desk_ != nullptr) desk_->set_plan(plan_, std::move((*made)->layouts));
  course_.notify();
  // Pieces take memory until they are digested, so this does not wait for the ranks here.
  spawn("joint.finish", finish_shared());
  co_return Result<void>();
}

Task<void> JointShare::finish_shared() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  while (!shared_finished_) {
    auto leaves = co_await shared_->next_leaves();
    if (!leaves) co_return end(std::move(leaves).error());
    auto put = co_await lead_.put_leaves(leaves->tiles, leaves->digests);
    if (!put) co_return end(std::move(put).error());
    shared_finished_ = leaves->tiles.empty();
  }
  course_.notify();
}

Task<Result<void>> JointShare::send_leaves() {
  std::vector<store::FilledSegments> filled;
  for (const std::uint32_t rank : roster_.ranks()) filled.push_back(ranks_.take(rank));
  CO_TRY_VOID(co_await copy_->stage(std::move(filled)));
  const PartReader* part = copy_->part();
  if (part != nullptr) {
    CO_TRY_VOID(co_await copy_->digest());
    CO_TRY_VOID(co_await lead_.put_leaves(part->tiles().whole, copy_->leaves()));
    CO_TRY_VOID(co_await shared_->send(*part));
  }
  // Other hosts may still send pieces of the tiles that this one finishes.
  trace_.enter_phase("finish");
  CO_TRY_VOID(co_await course_.wait_for([this] { return shared_finished_; }));
  std::optional<Digest> layout;
  if (part != nullptr) layout = part->layout().digest();
  co_return co_await lead_.put_layout(layout);
}

Task<Result<void>> JointShare::commit_copy() {
  if (copy_->part() == nullptr) co_return Result<void>();
  CO_TRY(auto leaves, co_await lead_.read_leaves(plan_->tiles().tile_count()));
  CO_TRY(auto layouts, co_await lead_.read_layouts());
  co_return co_await copy_->commit(std::move(leaves), std::move(layouts), lead_.root(),
                                   lead_.signatures());
}

}  // namespace rekindle::joint
