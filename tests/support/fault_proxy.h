#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "src/base/unique_fd.h"

namespace rekindle::testing {

// A TCP proxy on 127.0.0.1 that does to the bytes what bad networks do. Faults concern the
// direction from the server to the client, where nothing else is said, and may be set at any time.
class FaultProxy {
 public:
  explicit FaultProxy(std::uint16_t server_port);
  ~FaultProxy();
  FaultProxy(const FaultProxy&) = delete;
  FaultProxy& operator=(const FaultProxy&) = delete;

  std::string address() const;  // "127.0.0.1:PORT"

  // Flips one bit `count` times, each after another `every_bytes` have passed.
  void flip_bits(int count, std::uint64_t every_bytes);
  void stall(bool on) { stalled_ = on; }                    // nothing passes, nothing is closed
  void stall_requests(bool on) { requests_stalled_ = on; }  // the same from client to server
  void limit(std::uint64_t bytes_per_second) { bytes_per_second_ = bytes_per_second; }  // 0 = none
  void cut();  // resets every connection
  std::uint64_t bytes_passed() const { return bytes_passed_; }
  int flipped() const { return flipped_; }

 private:
  struct Link;
  void accept_loop();
  void run_link(Link& link);
  bool forward(int from, int to, bool to_client);
  void corrupt(std::vector<char>& buffer, std::size_t size);

  UniqueFd listener_;
  std::uint16_t port_ = 0;
  const std::uint16_t server_port_;
  std::atomic<bool> stopping_ = false;
  std::atomic<bool> stalled_ = false;
  std::atomic<bool> requests_stalled_ = false;
  std::atomic<std::uint64_t> bytes_per_second_ = 0;
  std::atomic<std::uint64_t> bytes_passed_ = 0;
  std::atomic<int> flips_left_ = 0;
  std::atomic<int> flipped_ = 0;
  std::atomic<std::uint64_t> flip_every_ = 0;
  std::atomic<std::uint64_t> next_flip_ = 0;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Link>> links_;  // guarded by mutex_
  std::thread accepter_;
};

}  // namespace rekindle::testing
