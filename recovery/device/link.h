#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <boost/asio/any_io_executor.hpp>

#include "proto/device.pb.h"
#include "recovery/device/child.h"
#include "recovery/device/options.h"
#include "recovery/device/order.h"
#include "src/async/task_group.h"
#include "src/bucket/contents.h"
#include "src/ipc/framed_socket.h"

namespace rekindle::device {

struct LinkOptions {
  GpuOptions gpu;
  std::string program = "/proc/self/exe";
  std::chrono::milliseconds release{600'000};  // of a bucket, by a worker that lives
  std::chrono::milliseconds first_pause{250};  // before a restart; doubles with each
  std::chrono::milliseconds longest_pause{30'000};
  std::chrono::milliseconds healthy{60'000};  // for so long: the next pause is the first again
  std::chrono::milliseconds hello{120'000};   // many GPUs without a persistent driver take long
  std::chrono::milliseconds silence{10'000};  // of one that has said hello: it is asked each second
  // From StopSpread to SpreadOver: longer than an abort and what is queued may take by themselves.
  std::chrono::milliseconds stop{60'000};
};

struct DeviceInfo {
  std::string id;
  std::string name;
  std::uint64_t total_bytes = 0;
};

struct LinkStatus {
  enum class State { kOff, kStarting, kServing, kRestarting };
  State state = State::kOff;
  std::vector<DeviceInfo> devices;
  std::uint64_t held_bytes = 0;  // that should be pinned
  std::uint64_t pinned_bytes = 0;
  std::size_t sessions = 0;
  std::uint64_t restarts = 0;
  std::uint32_t pid = 0;  // 0: none runs
  std::string problem;    // the last one; of kOff: why
};
std::string_view to_string(LinkStatus::State state);

// The agent's side of the device process: starts it, starts it again when it ends, and has it hold
// the copies that are here. Without GPUs it is there and says so. Control thread only.
class DeviceLink {
 public:
  DeviceLink(boost::asio::any_io_executor executor, LinkOptions options);
  void start();
  // The process is asked to end, then killed.
  async::Task<void> close(std::chrono::milliseconds deadline);
  // Whom the process' words are for; none: they are dropped.
  void tell_events(DeviceEvents* events) { events_ = events; }

  bool wants_copies() const { return status_.state != LinkStatus::State::kOff; }
  // The files, held until drop(), also by the processes to come.
  void hold(std::uint64_t copy, std::vector<UniqueFd> segments, std::vector<std::uint64_t> bytes);
  void drop(std::uint64_t copy);

  // The worker's end of the channel; kUnavailable or kNotFound: why there is none.
  Result<UniqueFd> serve(DeviceOrder order);
  void tell(std::uint64_t session, const bucket::TileRuns& runs, bool complete);
  // `gone`: the worker can read its buckets no more, they are freed at once.
  // One that spreads goes on with that, and discards, until it is stopped or done.
  void end(std::uint64_t session, bool gone);

  // Rounds: of sessions that were ordered `in_round`.
  void spread(const SpreadOrder& order);
  void stop_spread(std::uint64_t session, const std::string& why);
  // Answered by DeviceEvents::meeting_id, also when there is no process.
  void make_meeting_id(std::uint64_t number);
  // Names the process that runs now: another one, another name; "" when none serves.
  std::string life() const;

  LinkStatus status() const;

 private:
  struct Held {
    std::vector<UniqueFd> segments;
    std::vector<std::uint64_t> bytes;
  };
  async::Task<void> run();
  async::Task<Error> live();
  async::Task<std::string> reap(Child& child);
  async::Task<void> look();
  void look_once(TimePoint now);
  bool send(const proto::AgentToDevices& frame, std::vector<UniqueFd> descriptors = {});
  std::vector<std::string> command() const;
  Result<void> on_frame(const std::string& body);
  Result<void> on_hello(const proto::DevicesHello& hello);
  void on_held(const proto::SegmentsHeld& held);
  void on_served(const proto::DeviceServed& served);
  Result<void> on_joined(const proto::DeviceJoined& joined);
  void on_progress(const proto::SpreadProgress& progress);
  void on_spread_over(const proto::SpreadOver& over);
  void on_id_made(const proto::MeetingIdMade& made);
  void answer(std::function<void(DeviceEvents&)> words);
  void answer_spread(std::uint64_t session, Error why);
  void send_hold(std::uint64_t copy, const Held& held);
  void lose_sessions(const Error& why);
  Result<void> check_ready(const std::string& device) const;

  const boost::asio::any_io_executor executor_;
  const LinkOptions options_;
  DeviceEvents* events_ = nullptr;
  LinkStatus status_;
  std::map<std::uint64_t, Held> held_;
  std::set<std::uint64_t> sessions_;  // neither over nor ended
  // Also of sessions that were ended; all of them until a process that ends was reaped.
  std::map<std::uint64_t, std::shared_ptr<const void>> lent_;
  std::set<std::uint64_t> spreading_;  // that were ordered to, ended or not; SpreadOver comes
  std::map<std::uint64_t, TimePoint> stopping_;    // of spreading_: when they were told to stop
  std::set<std::uint64_t> ids_;                    // of meetings, that were asked for
  std::shared_ptr<ipc::FramedSocket> connection_;  // null: no process
  TimePoint life_began_{};
  std::optional<TimePoint> greeted_;  // in this life
  TimePoint heard_{};                 // of it
  TimePoint asked_{};
  bool had_devices_ = false;  // in some life
  bool none_here_ = false;
  bool running_ = false;
  bool closing_ = false;
  // What is posted and finds it gone does nothing.
  const std::shared_ptr<const bool> alive_ = std::make_shared<const bool>(true);
  async::TaskGroup tasks_;
};

}  // namespace rekindle::device
