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
#include "src/bucket/contents.h"
#include "src/client/connection.h"
#include "src/client/device_load.h"
#include "src/client/mapping.h"
#include "src/client/rekindle.h"

namespace rekindle::client {

// One attached version. Any thread; the connection's thread only fills the inbox, whose mutex
// guards the state here. Tensors stay mapped until the last shared_ptr goes.
class Session {
 public:
  // With a device, which `request` names, too, the weights come as buckets.
  static Result<std::shared_ptr<Session>> attach(std::shared_ptr<Connection> connection,
                                                 const AttachRequest& request,
                                                 std::chrono::milliseconds timeout,
                                                 std::optional<WorkerDevice> device = {});
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session();  // tells the agent, after the device has read and the tensors are unmapped

  // Each tensor once, in the order in which they become complete; empty: there are no more. The
  // arrays live as long as the session. Callers take turns.
  Result<std::span<const rk_tensor>> next(TimePoint deadline);
  // All, without their data, by piece. As long as the session.
  std::span<const rk_tensor> tensors();
  // Of the whole version, likewise.
  std::span<const rk_tensor> catalog();
  // With a device, instead of next(). Empty: there are no more. As long as the session; the bucket
  // itself is given back by the next call. Callers take turns.
  Result<std::span<const rk_part>> next_bucket(TimePoint deadline);
  Result<void> load_into(std::span<const rk_target> targets, std::chrono::milliseconds timeout);
  // Takes buckets into memory of their own until they have `bytes`, there are no more, another
  // call wants buckets, or the deadline.
  Result<void> prefetch(std::uint64_t bytes, TimePoint deadline);
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
          AttachedReply attached, bucket::Contents contents, std::vector<Mapping> segments);

  // All with the inbox's mutex held.
  void apply_messages();
  void apply(AgentMessage message);
  void apply_event(AgentMessage message);
  Result<void> check_alive() const;
  // Applies what comes until `done()`; false: the deadline has passed.
  template <typename Done>
  Result<bool> wait(Lock& lock, TimePoint deadline, Done done) {
    while (true) {
      apply_messages();
      TRY_VOID(check_alive());
      if (done()) return true;
      if (SteadyClock().now() >= deadline) return false;
      inbox_->changed.wait_until(lock, deadline);
    }
  }
  // What hands out is done by one thread at a time; with the mutex held at both ends.
  class Turn {
   public:
    explicit Turn(Session& session) : session_(session) { session_.handing_out_ = true; }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
    ~Turn() {
      session_.handing_out_ = false;
      session_.inbox_->changed.notify_all();
    }

   private:
    Session& session_;
  };
  class InLine {
   public:
    explicit InLine(Session& session) : session_(session) { ++session_.in_line_; }
    InLine(const InLine&) = delete;
    InLine& operator=(const InLine&) = delete;
    ~InLine() { --session_.in_line_; }

   private:
    Session& session_;
  };
  Result<void> wait_for_turn(Lock& lock, TimePoint deadline);
  Result<std::span<const rk_tensor>> hand_out(Lock& lock);
  std::span<const rk_part> hand_out(const FilledBucket& bucket);
  Result<void> check_has_device() const;
  Result<std::optional<FilledBucket>> take_bucket(Lock& lock, TimePoint deadline);
  Result<std::optional<FilledBucket>> look_for_bucket(Lock& lock);
  void wait_for_device(Lock& lock, TimePoint deadline,
                       void (DeviceLoad::*until)(int, TimePoint) const);
  Result<void> move_all(Lock& lock, std::chrono::milliseconds timeout);
  void ask_agent(Lock& lock, const Error& device_error);

  // Without it, by the one thread whose turn it is.
  Result<void> materialize(std::span<const std::size_t> pieces, std::span<rk_tensor> out);
  Result<rk_tensor> materialize(const bucket::Piece& piece);
  Result<void> begin_device(WorkerDevice device, DeviceLoad::Source source);

  const std::shared_ptr<Connection> connection_;
  const std::shared_ptr<Inbox> inbox_;
  const std::uint64_t id_;
  const ModelVersion version_;
  std::set<std::string> texts_;  // all so far: rk_info() hands out pointers to them
  const char* rung_;
  const char* device_path_ = "";
  bucket::Contents contents_;  // its pieces' texts and places may be read without the mutex
  std::vector<Mapping> segments_;
  std::vector<const std::byte*> segment_data_;
  std::deque<Mapping> gathered_;        // of the thread whose turn it is
  std::unique_ptr<DeviceLoad> device_;  // null: none; of the thread whose turn it is

  // Guarded by inbox_->mutex.
  std::optional<Error> ended_;
  std::vector<std::size_t> complete_;  // pieces that are here and were not handed out
  std::size_t handed_out_ = 0;
  bool handing_out_ = false;  // it is some thread's turn: it is in next() or the like
  std::size_t in_line_ = 0;   // threads that wait for theirs
  std::deque<std::vector<rk_tensor>> batches_;
  DeviceLoad::Tiles arrived_;  // with a device: that it was not told yet
  std::vector<rk_tensor> tensors_;
  std::vector<rk_tensor> catalog_;
  std::deque<std::vector<rk_part>> parts_;
  bool loaded_ = false;
  bool committed_ = false;
  std::uint64_t loaded_call_ = 0;  // that is open; 0: none
  std::optional<Error> commit_error_;
  std::uint64_t watch_call_ = 0;
  std::optional<Error> watch_error_;
  std::optional<std::uint64_t> newer_;
};

}  // namespace rekindle::client
