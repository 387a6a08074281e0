#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <poll.h>

#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/ipc/standby.h"

namespace rekindle::cli {

// The socket at which one standby waits for its turn; src/ipc/standby.h describes the protocol.
// Non-blocking. One thread.
class StandbyDoor {
 public:
  static Result<std::unique_ptr<StandbyDoor>> open();

  // The value of REKINDLE_STANDBY for the process.
  const std::string& name() const { return name_; }
  // A process waits here: it has started up.
  bool has_waiter() const { return !waiters_.empty(); }
  // Adds what to poll for.
  void watch(std::vector<pollfd>& entries) const;
  // Accepts processes, and forgets those that have ended.
  void serve();
  // Lets those go that wait, and from now on every process that asks.
  void let_go(const ipc::Variables& variables);
  // Tells those that wait, and every process that asks, that no turn will come.
  void turn_away();

 private:
  StandbyDoor(std::string name, UniqueFd listener)
      : name_(std::move(name)), listener_(std::move(listener)) {}

  const std::string name_;
  const UniqueFd listener_;
  std::vector<UniqueFd> waiters_;
  // Empty: the standby was not chosen yet.
  std::string turn_;
  bool turns_away_ = false;
};

}  // namespace rekindle::cli
