#pragma once

#include <cstdint>
#include <string>

#include <sys/types.h>

#include "src/base/unique_fd.h"
#include "src/bucket/device.h"

// A second process for tests of what two share: the test program itself, started anew with a
// socket.
namespace rekindle::bucket::testing {

class DeviceChild {
 public:
  // Throws when it cannot be started. `script`: below.
  explicit DeviceChild(const std::string& script);
  ~DeviceChild();  // SIGKILL, and reaped
  DeviceChild(const DeviceChild&) = delete;
  DeviceChild& operator=(const DeviceChild&) = delete;
  int socket() const { return socket_.get(); }
  void kill();

 private:
  UniqueFd socket_;
  pid_t pid_ = -1;
};

// Throw when the other end is gone.
void send_word(int socket, std::uint64_t word);
std::uint64_t receive_word(int socket);
void send_handle(int socket, const Handle& handle);
Handle receive_handle(int socket);

// Bytes that differ with the seed.
std::vector<std::byte> pattern(std::size_t bytes, std::uint64_t seed);

// For main(): the script that this process is to run, "" when it is the test itself.
std::string child_script(int argc, char** argv);
// "exchange": opens memory and an event of the parent's; each round, reads what was filled and
// writes pattern(round + kAnswer), both only ordered by events. Ends with the socket.
// "leave": makes a block with kLeftBytes of pattern(kLeft), and gives its size and its descriptor
// to the parent. Then it waits. "hang": gives the parent an event whose recording will never be
// done.
int run_child(const std::string& script, Device& device);
inline constexpr std::uint64_t kAnswer = 1'000;
inline constexpr std::uint64_t kLeft = 77;
inline constexpr std::uint64_t kLeftBytes = (3 << 20) + 5;

}  // namespace rekindle::bucket::testing
