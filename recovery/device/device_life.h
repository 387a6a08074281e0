#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "src/base/clock.h"
#include "src/base/result.h"

namespace rekindle::device {

struct DeviceInfo {
  std::string id;
  std::string name;
  std::uint64_t total_bytes = 0;
};

// The device process as its agent knows it: whether one runs and which GPUs it has, whether it
// hangs, and when the next one is started. It only decides; DeviceLink performs.
class DeviceLife {
 public:
  // kOff: no process is started any more. kRestarting: from the end of a connection until the next
  // process has said hello.
  enum class State { kOff, kStarting, kServing, kRestarting };

  struct Times {
    // Before a restart. Doubles with each restart, up to `longest_pause`.
    std::chrono::milliseconds first_pause{250};
    std::chrono::milliseconds longest_pause{30'000};
    // A process that served for so long resets the pause.
    std::chrono::milliseconds healthy{60'000};
    // Until the hello: many GPUs without a persistent driver take long.
    std::chrono::milliseconds hello{120'000};
    // Without an answer, after the hello. The process is asked every second.
    std::chrono::milliseconds silence{10'000};
  };

  explicit DeviceLife(const Times& times) : times_(times), pause_(times.first_pause) {}

  void turn_off(std::string why);
  void start() { state_ = State::kStarting; }
  void launching(TimePoint now);
  void launched(std::uint32_t pid) { pid_ = pid; }
  // An error ends the connection. kUnavailable: there is no GPU; if there never was one, kOff.
  Result<void> greeted(TimePoint now, std::vector<DeviceInfo> devices, const std::string& problem);
  void heard(TimePoint now) { heard_ = now; }
  // The agent itself did not run for a while, and could not hear the process.
  void excuse(TimePoint now) { heard_ = now; }

  struct Check {
    // Set: the process hangs, and its connection is to be closed with this error.
    std::optional<Error> hangs;
    bool ask = false;
  };
  Check check(TimePoint now);

  // The process may still run.
  void disconnected(const Error& why);
  // The process is gone. Returns the pause before the next start; nullopt: there is none.
  std::optional<std::chrono::milliseconds> ended(TimePoint now, const Error& why);
  void note_problem(std::string problem) { problem_ = std::move(problem); }

  // kUnavailable, kNotFound: why `device` cannot be used.
  Result<void> check_ready(const std::string& device) const;
  State state() const { return state_; }
  bool has_greeted() const { return greeted_.has_value(); }
  // Differs between two processes of one agent; "": none serves.
  std::string name() const;
  const std::vector<DeviceInfo>& devices() const { return devices_; }
  const std::string& problem() const { return problem_; }
  std::uint64_t restarts() const { return restarts_; }
  // 0: no process runs.
  std::uint32_t pid() const { return pid_; }
  Duration since_launch(TimePoint now) const { return now - launched_at_; }

 private:
  const Times times_;
  State state_ = State::kOff;
  std::chrono::milliseconds pause_;
  std::vector<DeviceInfo> devices_;
  std::string problem_;
  std::uint64_t restarts_ = 0;
  std::uint32_t pid_ = 0;
  TimePoint launched_at_{};
  std::optional<TimePoint> greeted_;
  TimePoint heard_{};
  TimePoint asked_{};
};

std::string_view to_string(DeviceLife::State state);

}  // namespace rekindle::device
