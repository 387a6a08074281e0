#include "recovery/joint/lead_desk.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/joint/joint_peer.h"
#include "recovery/rpc/convert.h"
#include "src/async/offload.h"
#include "src/base/log.h"
#include "src/base/units.h"
#include "src/tensor/signature_wire.h"

namespace rekindle::joint {

namespace {

constexpr std::chrono::milliseconds kLongestWait{5000};
// The coordinator may be away for this long when the root is claimed.
constexpr std::chrono::seconds kClaimPatience{60};
constexpr std::chrono::milliseconds kClaimAgain{250};
constexpr std::chrono::seconds kClaimClose{60};

proto::JointPhase to_proto(Phase phase) {
  switch (phase) {
    case Phase::kDeclaring:
      return proto::JOINT_DECLARING;
    case Phase::kWriting:
    case Phase::kClaiming:
      return proto::JOINT_WRITING;
    case Phase::kCommitting:
      return proto::JOINT_COMMITTING;
    case Phase::kComplete:
      return proto::JOINT_COMPLETE;
    case Phase::kEnded:
      return proto::JOINT_ENDED;
  }
  return proto::JOINT_UNKNOWN;
}

Result<void> cut_page(std::string_view blob, std::uint64_t offset, proto::JointResponse& answer) {
  if (offset > blob.size()) {
    return fail(ErrorCode::kInvalid, "offset {} of {} bytes", offset, blob.size());
  }
  const std::uint64_t bytes = std::min<std::uint64_t>(kPageBytes, blob.size() - offset);
  answer.set_total_bytes(blob.size());
  answer.set_data(blob.data() + offset, bytes);
  return {};
}

}  // namespace

LeadDesk::LeadDesk(boost::asio::any_io_executor executor, JointAgent& agent, ModelVersion id,
                   std::vector<JointLead::Host> hosts)
    : agent_(agent),
      id_(id),
      lead_(std::move(id), std::move(hosts), steady_now()),
      changed_(executor),
      tasks_(executor) {}

void LeadDesk::look() {
  if (lead_.phase() == Phase::kClaiming && !claiming_) {
    claiming_ = true;
    tasks_.spawn("joint.claim", claim());
  }
  changed_.notify();
}

void LeadDesk::set_plan(std::shared_ptr<const JointPlan> plan,
                        std::vector<std::optional<Digest>> layouts) {
  plan_ = plan;
  lead_.set_plan(std::move(plan), std::move(layouts));
}

void LeadDesk::advance(TimePoint now, Duration slept) {
  lead_.forgive(slept);
  const Phase before = lead_.phase();
  lead_.advance(now);
  if (lead_.phase() != before) look();
}

void LeadDesk::end(Error why) {
  lead_.end(std::move(why));
  look();
}

async::Task<void> LeadDesk::close() {
  const bool closed = co_await tasks_.close(kClaimClose);
  if (!closed) log::error("joint.claim_hangs", "version", id_.to_string());
}

proto::JointState LeadDesk::state() const {
  proto::JointState state;
  state.set_phase(to_proto(lead_.phase()));
  if (state.phase() == proto::JOINT_COMMITTING || state.phase() == proto::JOINT_COMPLETE) {
    *state.mutable_root() = rpc::to_proto(lead_.root());
    *state.mutable_signatures() = to_proto(signatures_);
  }
  if (lead_.why()) *state.mutable_why() = rpc::to_status(*lead_.why());
  return state;
}

async::Task<Result<proto::JointResponse>> LeadDesk::answer(std::uint32_t from,
                                                           proto::JointRequest request) {
  lead_.heard(from, steady_now());
  const auto step = request.step_case();
  if (lead_.why() && step != proto::JointRequest::kWatch && step != proto::JointRequest::kGiveUp) {
    co_return fail(*lead_.why());
  }
  proto::JointResponse answer;
  Result<void> done;
  switch (step) {
    case proto::JointRequest::kWatch:
      done = co_await watch(request.watch());
      break;
    case proto::JointRequest::kDeclare: {
      const auto& declare = request.declare();
      done = lead_.put_declarations(from, declare.offset(), declare.total_bytes(), declare.data());
      break;
    }
    case proto::JointRequest::kRead:
      done = read(request.read(), answer);
      break;
    case proto::JointRequest::kLeaves:
      done = take_leaves(from, request.leaves());
      break;
    case proto::JointRequest::kConfirm:
      done = lead_.confirm(from);
      break;
    case proto::JointRequest::kGiveUp: {
      auto why = rpc::from_status(request.give_up().why());
      lead_.end(why ? Error(ErrorCode::kInternal, "an agent gave up") : std::move(why).error());
      break;
    }
    default:
      done = fail(ErrorCode::kInvalid, "a step that the lead does not know");
  }
  if (step != proto::JointRequest::kWatch) look();
  if (!done) co_return fail(std::move(done).error());
  *answer.mutable_state() = state();
  co_return answer;
}

async::Task<Result<void>> LeadDesk::watch(proto::JointWatch watch) {
  const TimePoint until =
      steady_now() + std::min(kLongestWait, std::chrono::milliseconds(watch.wait_ms()));
  while (static_cast<std::uint32_t>(to_proto(lead_.phase())) == watch.seen() &&
         steady_now() < until && !co_await async::is_cancelled()) {
    co_await changed_.wait_until(until);
  }
  co_return Result<void>();
}

Result<void> LeadDesk::take_leaves(std::uint32_t from, const proto::JointLeaves& leaves) {
  if (plan_ == nullptr) return fail(ErrorCode::kUnavailable, "{} has no plan yet", id_.to_string());
  TRY(const auto tiles, rpc::from_proto(leaves.tiles(), plan_->tiles().tile_count()));
  TRY(const auto digests, parse_digests(leaves.digests()));
  TRY_VOID(lead_.put_leaves(from, tiles, digests));
  if (leaves.last()) {
    std::optional<Digest> layout;
    if (leaves.has_layout()) layout = rpc::from_proto(leaves.layout());
    TRY_VOID(lead_.put_layout(from, layout));
  }
  return {};
}

Result<void> LeadDesk::read(const proto::JointRead& read, proto::JointResponse& answer) const {
  const Phase phase = lead_.phase();
  const bool has_root = phase == Phase::kCommitting || phase == Phase::kComplete;
  if (read.kind() == proto::JointRead::LEAVES && has_root) {
    return cut_page(digest_bytes(lead_.leaves()), read.offset(), answer);
  }
  if (read.kind() == proto::JointRead::LAYOUTS && has_root) {
    const std::vector<Digest> layouts = lead_.layouts();
    return cut_page(digest_bytes(layouts), read.offset(), answer);
  }
  if (read.kind() == proto::JointRead::DECLARATIONS && phase != Phase::kDeclaring &&
      read.of_host() < lead_.host_count()) {
    return cut_page(lead_.declarations(read.of_host()), read.offset(), answer);
  }
  return fail(ErrorCode::kInvalid, "{}: nothing to read in this phase", id_.to_string());
}

// The root is that of a publication of whole tensors, so the pool computes it from all leaves.
async::Task<void> LeadDesk::claim() {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const auto self = shared_from_this();
  const auto leaves = lead_.leaves();
  const auto make = [this, leaves]() -> Result<std::shared_ptr<const Checkpoint>> {
    const Digest root = checkpoint_root(id_, plan_->tensors(), plan_->tiles(), leaves);
    return Checkpoint::create(id_, plan_->tensors(), {leaves.begin(), leaves.end()}, root,
                              agent_.sign(id_, root));
  };
  const auto checkpoint = co_await async::offload(agent_.blocking_pool(), make);
  Result<void> claimed;
  if (checkpoint) {
    claimed = co_await ask_coordinator(*checkpoint);
  } else {
    claimed = fail(checkpoint.error());
  }
  if (lead_.phase() != Phase::kClaiming) co_return;
  if (claimed) {
    signatures_ = (*checkpoint)->signatures;
    lead_.claimed((*checkpoint)->root);
    log::info("joint.claimed", "version", id_.to_string(), "root", (*checkpoint)->root.hex(),
              "hosts", lead_.host_count());
  } else {
    lead_.end(std::move(claimed).error().with_context("publish " + id_.to_string()));
  }
  look();
}

// Asks again for a minute, since another coordinator may take over.
async::Task<Result<void>> LeadDesk::ask_coordinator(std::shared_ptr<const Checkpoint> checkpoint) {
  CO_TRY_VOID(agent_.check_not_retiring(id_));
  const TimePoint give_up = steady_now() + kClaimPatience;
  while (true) {
    auto layouts = lead_.layouts();
    auto asked = agent_.claim(checkpoint, std::move(layouts));
    auto claimed = co_await std::move(asked);
    if (claimed || !may_pass(claimed.error()) || steady_now() >= give_up) co_return claimed;
    if (lead_.phase() != Phase::kClaiming || co_await async::is_cancelled()) co_return claimed;
    co_await async::sleep_for(kClaimAgain);
  }
}

}  // namespace rekindle::joint
