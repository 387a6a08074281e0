#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "proto/device.pb.h"
#include "recovery/device/process/serving.h"
#include "recovery/device/process/session_mailbox.h"

namespace rekindle::device {

// A worker's session on a device, on a thread of its own.
class Session {
 public:
  // The thread calls it once, at its end.
  using OnOver = std::function<void(SessionEnd)>;

  static Result<std::unique_ptr<Session>> start(SessionOrder order, OnOver on_over);
  // Ends the session, and waits as long as the device needs to drain.
  ~Session();
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Any thread: tiles that have verified since, and orders.
  void tell(const TileRuns& runs, bool complete) { mailbox_.tell(runs, complete); }
  // `gone`: nobody can read its buckets any more. A session that spreads goes on spreading until it
  // is done or stopped.
  void end(Error why, bool gone) { mailbox_.end(std::move(why), gone); }
  void spread(SpreadOrder order) { mailbox_.spread(std::move(order)); }
  void stop(std::string why) { mailbox_.stop(std::move(why)); }
  void landed(std::uint64_t bucket) { mailbox_.landed(bucket); }
  void reads_over(std::string why) { mailbox_.reads_over(std::move(why)); }

 private:
  explicit Session(Bell bell) : mailbox_(std::move(bell)) {}
  void run(SessionOrder order, const OnOver& on_over);

  Mailbox mailbox_;
  std::thread thread_;
};

// The sessions of a device process, and their threads' messages to the agent. Control thread only,
// except post().
class Sessions {
 public:
  explicit Sessions(const Bell& bell) : bell_(bell) {}

  // Any thread: queues a frame for the agent, and rings the bell.
  void post(proto::DevicesToAgent frame);

  bool contains(std::uint64_t number) const { return sessions_.contains(number); }
  Result<void> begin(SessionOrder order);
  void tell(std::uint64_t number, const TileRuns& runs, bool complete);
  void end(std::uint64_t number, bool gone);
  // SpreadOver always answers it, also when the session does not spread.
  void spread(const proto::BeginSpread& order);
  void stop(std::uint64_t number, std::string why);
  void landed(std::uint64_t number, std::uint64_t bucket);
  void reads_over(std::uint64_t number, std::string why);

  struct Outgoing {
    proto::DevicesToAgent frame;
    std::vector<UniqueFd> descriptors = {};
  };
  struct Ended {
    std::uint64_t number = 0;
    SessionEnd end;
  };
  struct News {
    std::vector<Outgoing> frames;
    // Happened after the frames.
    std::vector<Ended> ended;
  };
  News take();
  void bury(std::uint64_t number);
  // Waits for all sessions. Returns the reason if a device is lost.
  std::optional<Error> end_all(const Error& why);

 private:
  struct One {
    std::unique_ptr<Session> session;
    enum class Round { kNone, kAwaitsOrder, kOrdered } round = Round::kNone;
  };
  void say(SessionNews news);
  void refuse(std::uint64_t number, Error why);

  const Bell& bell_;
  std::map<std::uint64_t, One> sessions_;
  std::mutex mutex_;
  // The rest is guarded by mutex_.
  std::vector<Outgoing> frames_;
  std::vector<Ended> ended_;
  // Sessions whose SpreadOver has not come.
  std::set<std::uint64_t> spreading_;
};

}  // namespace rekindle::device
