#include "recovery/agent/room_maker.h"

#include <map>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "proto/coordinator.pb.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/methods.h"
#include "src/async/offload.h"
#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::agent {

using async::Task;
namespace {

constexpr std::chrono::milliseconds kLetGoDeadline{3000};
// Mappings of the last readers free the memory on other threads, which cannot notify anybody here.
constexpr std::chrono::milliseconds kFreedMemoryDeadline{5000};
constexpr std::chrono::milliseconds kFreedMemoryInterval{20};

// The coordinator may be asked by a member of the fleet only. Its agreement ends with the
// connection: on the next one all copies are announced anew.
std::shared_ptr<rpc::RpcClient> coordinator_of(const AgentParts& parts) {
  return parts.link.is_member() ? parts.link.client() : nullptr;
}

Task<Result<void>> ask_to_let_go(AgentParts parts, ModelVersion id,
                                 std::shared_ptr<rpc::RpcClient> coordinator) {
  if (coordinator == nullptr) {
    co_return fail(ErrorCode::kDenied,
                   "{} must stay on {}: no coordinator says that others hold it; retire it by hand",
                   id.to_string(), parts.identity.node_id);
  }
  proto::LetGoRequest request;
  request.set_node_id(parts.identity.node_id);
  request.set_incarnation(parts.identity.incarnation.to_bytes());
  *request.mutable_id() = rpc::to_proto(id);
  const auto answer = co_await rpc::call<proto::COORDINATOR_LET_GO>(
      std::move(coordinator), std::move(request), kLetGoDeadline);
  if (!answer) co_return fail(answer.error());
  co_return Result<void>();
}

}  // namespace

// The right to make room, which ends also when the call throws.
class RoomMaker::Turn {
 public:
  explicit Turn(RoomMaker& maker) : maker_(maker) { maker_.has_turn_ = true; }
  ~Turn() {
    maker_.has_turn_ = false;
    maker_.turn_ended_.notify();
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  RoomMaker& maker_;
};

// Marks the chosen versions as leaving. A version that is still marked when the call ends stays
// after all.
class RoomMaker::Leaving {
 public:
  Leaving(std::set<ModelVersion>& all, const std::vector<RoomChoice::Candidate>& chosen)
      : all_(all) {
    for (const auto& version : chosen) all_.insert(version.id);
  }
  ~Leaving() { all_.clear(); }
  Leaving(const Leaving&) = delete;
  Leaving& operator=(const Leaving&) = delete;

 private:
  std::set<ModelVersion>& all_;
};

Task<Result<void>> RoomMaker::make(ModelVersion wanted, MissingBytes missing) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  while (has_turn_) {
    if (co_await async::is_cancelled()) co_return fail(ErrorCode::kUnavailable, "interrupted");
    co_await turn_ended_.wait_until(TimePoint::max());
  }
  const Turn turn(*this);
  co_return co_await make_alone(std::move(wanted), std::move(missing));
}

Task<Result<void>> RoomMaker::make_alone(ModelVersion wanted, MissingBytes missing) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  if (missing() == 0) co_return Result<void>();
  CO_TRY_VOID(co_await async::offload(
      parts_.blocking_pool, [&] { return parts_.store.discard_unfinished_before(wanted); }));
  const std::uint64_t missing_bytes = missing();
  if (missing_bytes == 0) co_return Result<void>();
  CO_TRY(const auto chosen, co_await choose(wanted, missing_bytes));
  // Since choose() confirmed the choice nothing else has run. Announcements are without these
  // versions from here on.
  const Leaving leaving(leaving_, chosen);
  for (const auto& version : chosen) parts_.served.remove(version.id);
  parts_.link.announce_soon();
  Result<void> result;
  for (const auto& version : chosen) {
    log::info("version.let_go", "version", version.id.to_string(), "for", wanted.to_string(),
              "bytes", version.bytes);
    auto freed = co_await hooks_.retire(version.id);
    leaving_.erase(version.id);
    // kNotFound: somebody else has retired it meanwhile.
    if (!freed && freed.error().code() != ErrorCode::kNotFound) {
      result = fail(std::move(freed).error());
    }
  }
  const TimePoint give_up = steady_now() + kFreedMemoryDeadline;
  while (result && missing() > 0 && steady_now() < give_up && !co_await async::is_cancelled()) {
    co_await async::sleep_for(kFreedMemoryInterval);
  }
  co_return result;
}

std::vector<RoomChoice::Candidate> RoomMaker::older_than(const ModelVersion& wanted) const {
  std::map<ModelVersion, std::uint64_t> bytes;
  for (const auto& stored : parts_.store.versions()) {
    const ModelVersion& id = stored->manifest.checkpoint->id;
    if (id.model != wanted.model || id.version >= wanted.version) continue;
    bytes[id] += stored->manifest.layout.segment_bytes();
  }
  std::vector<RoomChoice::Candidate> older;
  for (const auto& [id, total] : bytes) older.push_back({id, total, why_needed_here(id)});
  return older;
}

std::string RoomMaker::why_needed_here(const ModelVersion& id) const {
  const std::string& node = parts_.identity.node_id;
  if (const std::uint32_t workers = parts_.readers.workers(id); workers > 0) {
    return fmt::format("{} must stay on {}: {} worker session{} there {} it", id.to_string(), node,
                       workers, workers == 1 ? "" : "s", workers == 1 ? "uses" : "use");
  }
  if (!hooks_.is_being_filled(id)) return "";
  return fmt::format("{} must stay on {}: a pull of it runs there", id.to_string(), node);
}

Task<Result<std::vector<RoomChoice::Candidate>>> RoomMaker::choose(
    ModelVersion wanted, std::uint64_t missing_bytes) const {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  const auto coordinator = coordinator_of(parts_);
  RoomChoice choice(missing_bytes, older_than(wanted), steady_now());
  while (const auto id = choice.next_question()) {
    const auto agreed = co_await ask_to_let_go(parts_, *id, coordinator);
    if (agreed) {
      choice.agreed();
    } else {
      choice.refused(agreed.error().message());
    }
  }
  const std::string nothing_older =
      fmt::format("there is too little of older versions of {} on {} to make room", wanted.model,
                  parts_.identity.node_id);
  CO_TRY(auto chosen, choice.chosen(nothing_older));
  const bool same_connection = coordinator == coordinator_of(parts_);
  CO_TRY_VOID(choice.confirm(same_connection, steady_now(),
                             [this](const ModelVersion& id) { return why_needed_here(id); }));
  co_return chosen;
}

}  // namespace rekindle::agent
