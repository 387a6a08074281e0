#include "recovery/agent/room_maker.h"

#include <algorithm>
#include <map>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "proto/coordinator.pb.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/methods.h"
#include "src/async/task.h"
#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::agent {

using async::Task;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kAskDeadline{3000};
constexpr std::chrono::seconds kWordCounts{30};  // the coordinator keeps it for a minute
constexpr milliseconds kMemoryGoes{5000};        // after the last reader was told
constexpr milliseconds kLook{20};

class Busy {
 public:
  explicit Busy(bool& busy) : busy_(busy) { busy_ = true; }
  ~Busy() { busy_ = false; }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  bool& busy_;
};

}  // namespace

// Marks the chosen versions as leaving. What is still marked when the call ends, also by an
// exception, stays after all.
class RoomMaker::Leaving {
 public:
  Leaving(std::set<ModelVersion>& all, const std::vector<Old>& chosen) : all_(all) {
    for (const Old& old : chosen) all_.insert(old.id);
  }
  ~Leaving() { all_.clear(); }  // one call at a time
  Leaving(const Leaving&) = delete;
  Leaving& operator=(const Leaving&) = delete;

 private:
  std::set<ModelVersion>& all_;
};

Task<Result<void>> RoomMaker::make(ModelVersion wanted, MissingBytes missing) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  while (busy_) {
    if (co_await async::is_cancelled()) co_return fail(ErrorCode::kUnavailable, "interrupted");
    co_await async::sleep_for(kLook);
  }
  const Busy turn(busy_);  // ends it also when what follows throws
  co_return co_await make_alone(std::move(wanted), std::move(missing));
}

Task<Result<void>> RoomMaker::make_alone(ModelVersion wanted, MissingBytes missing) {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  if (missing() == 0) co_return Result<void>();
  CO_TRY_VOID(co_await hooks_.discard_unfinished_before(wanted));
  const std::uint64_t missing_bytes = missing();
  if (missing_bytes == 0) co_return Result<void>();
  const auto coordinator = hooks_.coordinator();
  const auto asked = steady_now();
  CO_TRY(const auto chosen, co_await choose(wanted, missing_bytes, coordinator));
  CO_TRY_VOID(check_again(chosen, *coordinator, asked));
  // From the check to here nothing else runs: what is announced from now on is without them.
  const Leaving leaving(leaving_, chosen);
  for (const Old& old : chosen) hooks_.hide(old.id);
  Result<void> result;
  for (const Old& old : chosen) {
    log::info("version.let_go", "version", old.id.to_string(), "for", wanted.to_string(), "bytes",
              old.bytes);
    auto freed = co_await hooks_.retire(old.id);
    leaving_.erase(old.id);
    // Not found: somebody else has retired it meanwhile.
    if (!freed && freed.error().code() != ErrorCode::kNotFound) {
      result = fail(std::move(freed).error());
    }
  }
  const auto give_up = steady_now() + kMemoryGoes;
  while (result && missing() > 0 && steady_now() < give_up && !co_await async::is_cancelled()) {
    co_await async::sleep_for(kLook);
  }
  co_return result;
}

std::vector<RoomMaker::Old> RoomMaker::older_than(const ModelVersion& wanted) const {
  std::map<ModelVersion, std::uint64_t> bytes;
  for (const auto& stored : store_.versions()) {
    const ModelVersion& id = stored->manifest.checkpoint->id;
    if (id.model != wanted.model || id.version >= wanted.version) continue;
    bytes[id] += stored->manifest.layout.segment_bytes();
  }
  std::vector<Old> result;
  for (const auto& [id, total] : bytes) result.push_back({id, total});
  return result;
}

std::string RoomMaker::why_needed_here(const ModelVersion& id) const {
  if (const std::uint32_t workers = hooks_.workers(id); workers > 0) {
    return fmt::format("{} must stay on {}: {} worker session{} there {} it", id.to_string(),
                       identity_.node_id, workers, workers == 1 ? "" : "s",
                       workers == 1 ? "uses" : "use");
  }
  if (!hooks_.being_filled(id)) return "";
  return fmt::format("{} must stay on {}: a pull of it runs there", id.to_string(),
                     identity_.node_id);
}

Task<Result<std::vector<RoomMaker::Old>>> RoomMaker::choose(
    ModelVersion wanted, std::uint64_t missing_bytes,
    std::shared_ptr<rpc::RpcClient> coordinator) const {
  co_await boost::asio::this_coro::throw_if_cancelled(false);
  std::string stays;
  const auto note = [&stays](const std::string& why) {
    stays += (stays.empty() ? "" : "; ") + why;
  };
  std::vector<Old> unused;
  std::uint64_t unused_bytes = 0;
  for (const Old& old : older_than(wanted)) {
    if (const std::string why = why_needed_here(old.id); !why.empty()) {
      note(why);
      continue;
    }
    unused.push_back(old);
    unused_bytes += old.bytes;
  }
  if (unused_bytes < missing_bytes) {
    if (stays.empty()) {
      note(fmt::format("there is too little of older versions of {} on {} to make room",
                       wanted.model, identity_.node_id));
    }
    co_return fail(ErrorCode::kExhausted, "{}", stays);
  }
  std::vector<Old> chosen;
  std::uint64_t bytes = 0;
  for (const Old& old : unused) {
    if (bytes >= missing_bytes) break;
    if (auto allowed = co_await ask(old.id, coordinator); !allowed) {
      note(allowed.error().message());
      continue;
    }
    chosen.push_back(old);
    bytes += old.bytes;
  }
  if (bytes < missing_bytes) co_return fail(ErrorCode::kExhausted, "{}", stays);
  co_return chosen;
}

Task<Result<void>> RoomMaker::ask(ModelVersion id,
                                  std::shared_ptr<rpc::RpcClient> coordinator) const {
  if (coordinator == nullptr) {
    co_return fail(ErrorCode::kDenied,
                   "{} must stay on {}: no coordinator says that others hold it; retire it by hand",
                   id.to_string(), identity_.node_id);
  }
  proto::LetGoRequest request;
  request.set_node_id(identity_.node_id);
  request.set_incarnation(identity_.incarnation.to_bytes());
  *request.mutable_id() = rpc::to_proto(id);
  CO_TRY(const auto response, co_await rpc::call<proto::COORDINATOR_LET_GO>(
                                  coordinator, std::move(request), kAskDeadline));
  (void)response;
  co_return Result<void>();
}

Result<void> RoomMaker::check_again(const std::vector<Old>& chosen,
                                    const rpc::RpcClient& coordinator,
                                    std::chrono::steady_clock::time_point asked) const {
  if (hooks_.coordinator().get() != &coordinator || steady_now() - asked > kWordCounts) {
    return fail(ErrorCode::kUnavailable,
                "nothing was let go of: the coordinator was lost after it agreed; try again");
  }
  for (const Old& old : chosen) {
    if (const std::string why = why_needed_here(old.id); !why.empty()) {
      return fail(ErrorCode::kExhausted, "{}", why);
    }
  }
  return {};
}

}  // namespace rekindle::agent
