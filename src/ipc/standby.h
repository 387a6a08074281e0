#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sys/socket.h>
#include <sys/un.h>

#include "src/base/clock.h"
#include "src/base/result.h"

// A standby of `rekindle run` is a process that has started up and waits to take over from a worker
// that fails. `run` listens at an abstract unix socket; REKINDLE_STANDBY in the environment of the
// process is its name. The process connects and waits. When it is chosen, `run` sends lines
// NAME=VALUE, which are new values of variables of its environment, and then the line "go". An end
// of the stream before "go" means that `run` is gone. Any number of processes below the standby may
// wait, each by a separate connection. A process may ask again later: the answer stays the same.
namespace rekindle::ipc {

inline constexpr const char* kStandbyVariable = "REKINDLE_STANDBY";

using Variables = std::vector<std::pair<std::string, std::string>>;

struct AbstractAddress {
  sockaddr_un address{};
  socklen_t size = 0;
  const sockaddr* generic() const { return reinterpret_cast<const sockaddr*>(&address); }
};
// kInvalid: the name is empty or too long.
Result<AbstractAddress> abstract_address(std::string_view name);

// The text that `run` sends to a process that is chosen.
std::string turn_text(const Variables& variables);

// Waits until this process, a standby at the socket `name`, is chosen. kTimeout: not yet.
// kUnavailable: `run` has ended. kDenied: another user listens at the socket.
Result<Variables> wait_for_turn(const std::string& name, TimePoint deadline);

}  // namespace rekindle::ipc
