#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "src/base/result.h"
#include "src/base/unique_fd.h"

namespace rekindle::device {

// The device process as its parent has it: started with one end of a socket, killed and reaped at
// the latest by the destructor.
class Child {
 public:
  // Runs `command`, a path and its arguments, with the socket as the descriptor kSocket; it is the
  // caller's to tell it so.
  static constexpr int kSocket = 3;
  static Result<std::unique_ptr<Child>> start(const std::vector<std::string>& command);
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  UniqueFd take_socket() { return std::move(socket_); }  // our end
  pid_t pid() const { return pid_; }
  void kill() const;
  // How it ended: "exited with code 70"; nullopt: it runs.
  std::optional<std::string> ended();

 private:
  Child(pid_t pid, UniqueFd socket) : pid_(pid), socket_(std::move(socket)) {}
  const pid_t pid_;
  UniqueFd socket_;
  std::optional<std::string> ended_;
};

}  // namespace rekindle::device
