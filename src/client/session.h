#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/client/connection.h"
#include "src/client/contents.h"
#include "src/client/mapping.h"
#include "src/client/rekindle.h"

namespace rekindle::client {

// One attached version. Any thread; the connection's thread only fills the inbox, whose mutex
// guards the state here. Tensors stay mapped until the last shared_ptr goes.
class Session {
 public:
  static Result<std::shared_ptr<Session>> attach(std::shared_ptr<Connection> connection,
                                                 const AttachRequest& request,
                                                 std::chrono::milliseconds timeout);
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session();  // tells the agent, after the tensors are unmapped

  // Each tensor once, in the order in which they become complete; empty: there are no more. The
  // arrays live as long as the session. Callers take turns.
  Result<std::span<const rk_tensor>> next(TimePoint deadline);
  Result<void> loaded();
  Result<void> wait_commit(TimePoint deadline);
  Result<std::uint64_t> wait_update(TimePoint deadline);
  void fill(rk_session_info& info);
  // Calls of other threads return kStale from now on.
  void end();

  const Connection& connection() const { return *connection_; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  Session(std::shared_ptr<Connection> connection, std::shared_ptr<Inbox> inbox, std::uint64_t id,
          AttachedReply attached, Contents contents, std::vector<Mapping> segments);

  // All with the inbox's mutex held.
  void apply_messages();
  void apply(AgentMessage message);
  void apply_event(AgentMessage message);
  Result<void> check_alive() const;
  // Applies what comes until `done()`; false: the deadline has passed.
  template <typename Done>
  Result<bool> wait(Lock& lock, TimePoint deadline, Done done);
  Result<std::span<const rk_tensor>> hand_out(Lock& lock);

  // Without it, by the one thread that is in next().
  Result<void> materialize(std::span<const std::size_t> pieces, std::span<rk_tensor> out);
  Result<rk_tensor> materialize(const Piece& piece);

  const std::shared_ptr<Connection> connection_;
  const std::shared_ptr<Inbox> inbox_;
  const std::uint64_t id_;
  const ModelVersion version_;
  std::set<std::string> rungs_;  // all so far: rk_info() hands out pointers to them
  const char* rung_;
  Contents contents_;  // its pieces' texts and places may be read without the mutex
  std::vector<Mapping> segments_;
  std::vector<const std::byte*> segment_data_;
  std::deque<Mapping> gathered_;  // of the thread that is in next()

  // Guarded by inbox_->mutex.
  std::optional<Error> ended_;
  std::vector<std::size_t> complete_;  // pieces that are here and were not handed out
  std::size_t handed_out_ = 0;
  bool handing_out_ = false;  // a thread is in next()
  std::deque<std::vector<rk_tensor>> batches_;
  bool loaded_ = false;
  bool committed_ = false;
  std::uint64_t loaded_call_ = 0;  // that is open; 0: none
  std::optional<Error> commit_error_;
  std::uint64_t watch_call_ = 0;
  std::optional<Error> watch_error_;
  std::optional<std::uint64_t> newer_;
};

}  // namespace rekindle::client
