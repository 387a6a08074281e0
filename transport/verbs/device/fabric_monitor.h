#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <span>
#include <thread>
#include <vector>

#include <poll.h>

#include "src/base/clock.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "transport/verbs/device/verbs_api.h"

namespace rekindle::transport::verbs {

// The monitor's news. Its own thread calls these.
class FabricEvents {
 public:
  virtual ~FabricEvents() = default;
  virtual void on_port_lost(std::size_t device, int port) = 0;
  virtual void on_device_lost(std::size_t device, std::string_view why) = 0;
  // Look at the ports of this device again.
  virtual void look_at(std::size_t device) = 0;
};

// The thread that takes the devices' async events. A storm of them costs no memory and delays
// nothing else: events are taken in bounded turns, and a device is looked at no more than ten times
// a second. Without events it is looked at once a second.
class FabricMonitor {
 public:
  static constexpr std::chrono::milliseconds kLookEvery{1000};
  static constexpr std::chrono::milliseconds kLookSpacing{100};

  // Makes the descriptors non-blocking. `contexts` and `events` outlive it.
  static Result<std::unique_ptr<FabricMonitor>> start(Api& api,
                                                      std::span<ibv_context* const> contexts,
                                                      FabricEvents& events);
  ~FabricMonitor();  // joins
  FabricMonitor(const FabricMonitor&) = delete;
  FabricMonitor& operator=(const FabricMonitor&) = delete;

 private:
  struct Watched {
    ibv_context* context = nullptr;
    bool asked = false;  // a look is due
    bool lost = false;
    TimePoint last_look{};
    std::uint32_t logged = 0;  // event types of queue pairs and the like, one bit each
  };

  FabricMonitor(Api& api, FabricEvents& events, UniqueFd wake);
  void run();
  int timeout_ms(TimePoint now) const;
  void take_events(std::size_t device, short revents);
  void on_event(std::size_t device, const ibv_async_event& event);
  void lose(std::size_t device, std::string_view why);
  void look(TimePoint now);

  Api& api_;
  FabricEvents& events_;
  const UniqueFd wake_;
  std::atomic<bool> stopping_ = false;
  // Used by the thread alone, once it runs.
  std::vector<Watched> watched_;
  std::vector<pollfd> fds_;  // of watched_, then wake_; -1: no longer
  TimePoint next_look_{};
  std::thread thread_;
};

}  // namespace rekindle::transport::verbs
