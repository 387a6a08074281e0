#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "recovery/rpc/rpc.h"
#include "src/store/segment_store.h"

namespace rekindle::agent {

// Room for a newer version on a host whose budget is too small for both: what unfinished pulls of
// older versions of the same model have left goes first; then older versions are let go of, where
// no worker here uses them and the coordinator says that the fleet keeps them: all that is needed,
// or nothing. Control thread only; must outlive its calls.
class RoomMaker {
 public:
  struct Hooks {
    std::function<std::uint32_t(const ModelVersion&)> workers;  // sessions that use it here
    std::function<bool(const ModelVersion&)> being_filled;      // a pull of it runs here
    // On which the coordinator is asked as a member; null: it is not there, or none is configured.
    // Its word ends with the connection: on the next one all is announced anew.
    std::function<std::shared_ptr<rpc::RpcClient>()> coordinator;
    std::function<void(const ModelVersion&)> hide;  // announced and served no more
    std::function<async::Task<Result<std::uint64_t>>(ModelVersion)> retire;
    // SegmentStore::discard_unfinished_before().
    std::function<async::Task<Result<std::uint64_t>>(ModelVersion)> discard_unfinished_before;
  };
  using MissingBytes = std::function<std::uint64_t()>;

  RoomMaker(const rpc::Identity& identity, store::SegmentStore& store, Hooks hooks)
      : identity_(identity), store_(store), hooks_(std::move(hooks)) {}

  // Until `missing` of the budget says 0, oldest first. The error is why nothing was let go of, one
  // clause for each version that stays.
  async::Task<Result<void>> make(ModelVersion wanted, MissingBytes missing);
  // It is on its way out: nobody is to find it here again.
  bool leaving(const ModelVersion& id) const { return leaving_.contains(id); }

 private:
  struct Old {
    ModelVersion id;
    std::uint64_t bytes = 0;  // of the budget, all its copies
  };
  class Leaving;
  std::vector<Old> older_than(const ModelVersion& wanted) const;  // the oldest first
  std::string why_needed_here(const ModelVersion& id) const;      // "": it is not
  // Those to let go of; nothing is done yet.
  async::Task<Result<std::vector<Old>>> choose(ModelVersion wanted, std::uint64_t missing_bytes,
                                               std::shared_ptr<rpc::RpcClient> coordinator) const;
  async::Task<Result<void>> ask(ModelVersion id, std::shared_ptr<rpc::RpcClient> coordinator) const;
  // The word still counts and nobody has come to use one of them.
  Result<void> check_again(const std::vector<Old>& chosen, const rpc::RpcClient& coordinator,
                           std::chrono::steady_clock::time_point asked) const;
  async::Task<Result<void>> make_alone(ModelVersion wanted, MissingBytes missing);

  const rpc::Identity& identity_;
  store::SegmentStore& store_;
  const Hooks hooks_;
  std::set<ModelVersion> leaving_;
  bool busy_ = false;  // one at a time: two would let go of twice as much
};

}  // namespace rekindle::agent
