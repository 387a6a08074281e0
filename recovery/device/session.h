#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "recovery/device/mailbox.h"
#include "recovery/device/serving.h"

namespace rekindle::device {

// A session of a worker on a device, on a thread of its own.
class Session {
 public:
  using OnOver = std::function<void(SessionEnd)>;  // the thread's last act, once

  static Result<std::unique_ptr<Session>> start(SessionOrder order, OnOver on_over);
  ~Session();  // ends it, and waits for as long as the device needs to drain
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // Tiles that have verified since. Any thread.
  void tell(const bucket::TileRuns& runs, bool complete) { mailbox_.tell(runs, complete); }
  // `gone`: nobody can read its buckets any more.
  // One that spreads goes on with that until it is done, or stopped.
  void end(Error why, bool gone) { mailbox_.end(std::move(why), gone); }
  // Of one that is in a round.
  void spread(SpreadOrder order) { mailbox_.spread(std::move(order)); }
  void stop(std::string why) { mailbox_.stop(std::move(why)); }

 private:
  explicit Session(Bell bell) : mailbox_(std::move(bell)) {}
  void run(SessionOrder order, const OnOver& on_over);

  Mailbox mailbox_;
  std::thread thread_;
};

}  // namespace rekindle::device
