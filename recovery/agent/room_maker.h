#pragma once

#include <cstdint>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "recovery/agent/agent_parts.h"
#include "recovery/agent/core/room_choice.h"
#include "src/async/task.h"

namespace rekindle::agent {

// Makes room for a newer version on a host whose budget is too small for both. What unfinished
// pulls of older versions of the same model have left goes first. Then RoomChoice chooses older
// versions, and they are retired. Control thread only; must outlive its calls.
class RoomMaker {
 public:
  struct Hooks {
    // A pull of the version runs here.
    std::function<bool(const ModelVersion&)> is_being_filled;
    std::function<async::Task<Result<std::uint64_t>>(ModelVersion)> retire;
  };
  // How many bytes of the budget are still missing.
  using MissingBytes = std::function<std::uint64_t()>;

  RoomMaker(boost::asio::any_io_executor executor, AgentParts parts, Hooks hooks)
      : parts_(parts), hooks_(std::move(hooks)), turn_ended_(std::move(executor)) {}

  // Until nothing is missing. The error says why nothing was retired, with one clause for each
  // version that stays. One call works at a time, because two would retire twice as much.
  async::Task<Result<void>> make(ModelVersion wanted, MissingBytes missing);
  // The version was chosen: nobody is to find it here again.
  bool is_leaving(const ModelVersion& id) const { return leaving_.contains(id); }

 private:
  class Turn;
  class Leaving;
  std::vector<RoomChoice::Candidate> older_than(const ModelVersion& wanted) const;
  std::string why_needed_here(const ModelVersion& id) const;
  async::Task<Result<std::vector<RoomChoice::Candidate>>> choose(ModelVersion wanted,
                                                                 std::uint64_t missing_bytes) const;
  async::Task<Result<void>> make_alone(ModelVersion wanted, MissingBytes missing);

  const AgentParts parts_;
  const Hooks hooks_;
  std::set<ModelVersion> leaving_;
  bool has_turn_ = false;
  async::Notifier turn_ended_;
};

}  // namespace rekindle::agent
