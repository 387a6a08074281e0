#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "src/base/clock.h"
#include "src/client/connection.h"
#include "src/client/device_load.h"
#include "src/client/host_tensors.h"
#include "src/client/rekindle.h"
#include "src/client/resident.h"
#include "src/client/session_state.h"

namespace rekindle::client {

// One attached version. Any thread. The inbox's mutex guards its state; the connection's thread
// only fills the inbox. Tensors stay mapped until the last shared_ptr goes.
class Session {
 public:
  // With a device, which `request` also names, the weights come as buckets.
  static Result<std::shared_ptr<Session>> attach(std::shared_ptr<Connection> connection,
                                                 const AttachRequest& request,
                                                 std::chrono::milliseconds timeout,
                                                 std::optional<WorkerDevice> device = {});
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  // Tells the agent, after the device has finished reading and the tensors are unmapped.
  ~Session();

  // Each tensor once, in the order of completion. Empty: there are no more. The arrays live as long
  // as the session.
  Result<std::span<const rk_tensor>> next(TimePoint deadline);
  // The number of pieces. Does not wait for the list of the tensors.
  std::size_t tensor_count() const { return count_; }
  // All pieces, without data, by index. The arrays live as long as the session.
  Result<std::span<const rk_tensor>> tensors();
  // The tensors of the whole version, likewise.
  Result<std::span<const rk_tensor>> catalog();
  // With a device, instead of next(). Empty: there are no more. The array lives as long as the
  // session; the next call gives the bucket itself back.
  Result<std::span<const rk_part>> next_bucket(TimePoint deadline);
  Result<void> load_into(std::span<const rk_target> targets, std::chrono::milliseconds timeout);
  // Copies buckets to memory of their own, up to `bytes`. Ends early when there are no more, when
  // another call wants buckets, and at the deadline.
  Result<void> prefetch(std::uint64_t bytes, TimePoint deadline);
  // Copies every bucket to separate memory on the device, and leaves `reserve` bytes free there.
  Result<void> stage(std::uint64_t reserve, std::chrono::milliseconds timeout);
  Result<void> begin_switch(std::chrono::milliseconds timeout);
  Result<void> report_phases(PhasesReport report);
  // --- resident copies
  // A block of the session's device.
  Result<WorkerBlock> allocate_block(std::uint64_t bytes);
  // kNotFound: the session has no resident copy.
  Result<const ResidentCopy*> resident() const;
  // Maps the blocks of resident(). kInvalid: they were opened before.
  Result<std::vector<WorkerBlock>> open_resident();
  // Gives the parameters of this committed session to the agent's keeper.
  Result<void> seal_resident(std::string key, std::string description,
                             std::span<WorkerBlock* const> blocks,
                             std::chrono::milliseconds timeout);

  Result<void> loaded();
  Result<void> wait_commit(TimePoint deadline);
  Result<std::uint64_t> wait_update(TimePoint deadline);
  // The strings live until the next call.
  Result<rk_order> watch_order(TimePoint deadline);
  // Also of a session that has ended meanwhile. No `error`: the order is carried out.
  Result<void> order_done(std::uint64_t number, std::optional<Error> error,
                          std::vector<PhaseTime> phases);
  // `only_version`: fills no field after the version, and does not read the list of the tensors.
  Result<void> fill(rk_session_info& info, bool only_version);
  // Calls of other threads return kStale from now on.
  void end();

  const Connection& connection() const { return *connection_; }

 private:
  using Lock = std::unique_lock<std::mutex>;
  // The part of the agent's answer that describes the tensors. With tens of thousands of them,
  // reading it takes most of the time of an attach. A session with a device process reads it at the
  // first use, because the copies of the first buckets do not need it.
  struct Unread {
    // `tensor_set` and `layout` are parts of it.
    std::unique_ptr<const std::string> frame;
    std::string_view tensor_set;
    std::string_view layout;
    std::vector<WantedBox> wanted;
    std::vector<std::uint64_t> segment_bytes;

    Result<std::size_t> count() const;
    Result<bucket::Contents> read() const;
  };
  Session(std::shared_ptr<Connection> connection, std::shared_ptr<Inbox> inbox, std::uint64_t id,
          SessionState state, std::vector<Mapping> segments, Unread unread, std::size_t count);
  Result<std::shared_ptr<bucket::Device>> block_device();

  // Describes the state at the first call; other threads wait for that. kInternal: the agent's
  // answer does not fit together; the session has then ended. Called without the inbox's mutex.
  Result<const bucket::Contents*> contents();

  // All of these run with the inbox's mutex held; those that take the lock release it meanwhile.
  void apply_messages();
  // Applies messages until `done()`. False: the deadline has passed.
  template <typename Done>
  Result<bool> wait(Lock& lock, TimePoint deadline, Done done) {
    while (true) {
      apply_messages();
      TRY_VOID(state_.check_alive());
      if (done()) return true;
      if (steady_now() >= deadline) return false;
      inbox_->changed.wait_until(lock, deadline);
    }
  }
  Result<void> wait_for_turn(Lock& lock, TimePoint deadline);
  Result<void> check_room(Lock& lock, std::uint64_t reserve);
  Result<void> tell(const Request& request, std::chrono::milliseconds timeout,
                    std::vector<UniqueFd> descriptors = {});
  Result<void> ask_commit();
  Result<std::span<const rk_tensor>> hand_out(Lock& lock);
  std::span<const rk_part> hand_out(const FilledBucket& bucket);
  Result<std::optional<FilledBucket>> take_bucket(Lock& lock, TimePoint deadline);
  template <typename Call>
  auto on_device(Lock& lock, Call call) -> decltype(call());
  void wait_for_device(Lock& lock, TimePoint deadline,
                       void (DeviceLoad::*until)(int, TimePoint) const);
  Result<void> move_all(Lock& lock, std::chrono::milliseconds timeout);
  void ask_agent(Lock& lock, const Error& device_error);

  Result<void> begin_device(WorkerDevice device, DeviceLoad::Source source);
  Result<void> check_has_device() const;

  const std::shared_ptr<Connection> connection_;
  const std::shared_ptr<Inbox> inbox_;
  const std::uint64_t id_;
  // Number of pieces.
  const std::size_t count_;

  // The name of the session's device; "": host memory.
  std::string device_name_;
  // Guards the two below it.
  mutable std::mutex blocks_;
  std::shared_ptr<bucket::Device> block_device_;
  ResidentCopy resident_;

  // Taken before the inbox's mutex. Guards `unread_`, which is empty when it was read.
  std::mutex reading_;
  std::optional<Unread> unread_;

  // The thread whose turn it is uses these without the mutex. `device_` is null without a device.
  std::optional<HostTensors> host_;
  std::unique_ptr<DeviceLoad> device_;

  // The inbox's mutex guards the rest.
  SessionState state_;
  // The last order, and its strings for the caller.
  OrderReply order_;
  std::string order_version_;
  std::vector<const char*> order_tensors_;
  Turns turns_;
  std::size_t handed_out_ = 0;
  const char* device_path_ = "";
  std::deque<std::vector<rk_tensor>> batches_;
  std::deque<std::vector<rk_part>> parts_;
  std::vector<rk_tensor> tensors_;
  std::vector<rk_tensor> catalog_;
};

}  // namespace rekindle::client
