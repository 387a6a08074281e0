#include "transport/verbs/device/fabric_monitor.h"

#include <algorithm>
#include <cerrno>

#include <fcntl.h>
#include <pthread.h>
#include <sys/eventfd.h>

namespace rekindle::transport::verbs {

namespace {

constexpr int kEventsPerTurn = 256;

Result<void> make_non_blocking(int fd) {
  const int flags = ::fcntl(fd, F_GETFL);
  if (flags < 0 || ::fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0) {
    return fail_errno(errno, "make the event descriptor of an RDMA device non-blocking");
  }
  return {};
}

std::string_view event_name(ibv_event_type type) {
  switch (type) {
    case IBV_EVENT_CQ_ERR:
      return "CQ_ERR";
    case IBV_EVENT_QP_FATAL:
      return "QP_FATAL";
    case IBV_EVENT_QP_REQ_ERR:
      return "QP_REQ_ERR";
    case IBV_EVENT_QP_ACCESS_ERR:
      return "QP_ACCESS_ERR";
    case IBV_EVENT_COMM_EST:
      return "COMM_EST";
    case IBV_EVENT_SQ_DRAINED:
      return "SQ_DRAINED";
    case IBV_EVENT_QP_LAST_WQE_REACHED:
      return "QP_LAST_WQE_REACHED";
    case IBV_EVENT_WQ_FATAL:
      return "WQ_FATAL";
    default:
      return "other";
  }
}

}  // namespace

FabricMonitor::FabricMonitor(Api& api, FabricEvents& events, UniqueFd wake)
    : api_(api), events_(events), wake_(std::move(wake)) {}

Result<std::unique_ptr<FabricMonitor>> FabricMonitor::start(Api& api,
                                                            std::span<ibv_context* const> contexts,
                                                            FabricEvents& events) {
  UniqueFd wake(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake) return fail_errno(errno, "watch the RDMA devices: eventfd");
  std::unique_ptr<FabricMonitor> monitor(new FabricMonitor(api, events, std::move(wake)));
  for (ibv_context* context : contexts) {
    TRY_VOID(make_non_blocking(context->async_fd));
    monitor->watched_.push_back({context});
    monitor->fds_.push_back({context->async_fd, POLLIN, 0});
  }
  monitor->fds_.push_back({monitor->wake_.get(), POLLIN, 0});
  monitor->next_look_ = std::chrono::steady_clock::now() + kLookEvery;
  monitor->thread_ = std::thread([raw = monitor.get()] { raw->run(); });
  return monitor;
}

FabricMonitor::~FabricMonitor() {
  stopping_.store(true);
  const std::uint64_t one = 1;
  if (::write(wake_.get(), &one, sizeof one) < 0) {  // cannot fail: the counter is at 0
    log::error("fabric.monitor", "errno", errno, "hint", "it stops within a second");
  }
  if (thread_.joinable()) thread_.join();
}

int FabricMonitor::timeout_ms(TimePoint now) const {
  TimePoint until = next_look_;
  for (const Watched& device : watched_) {
    if (device.asked && !device.lost) until = std::min(until, device.last_look + kLookSpacing);
  }
  // Rounded up: otherwise poll() would return too early and be called again at once.
  return until <= now ? 0 : static_cast<int>(milliseconds(until - now)) + 1;
}

void FabricMonitor::run() {
  ::pthread_setname_np(::pthread_self(), "rk-fabric");
  while (!stopping_.load()) {
    const int timeout = timeout_ms(std::chrono::steady_clock::now());
    if (::poll(fds_.data(), fds_.size(), timeout) < 0 && errno != EINTR) {
      log::error("fabric.monitor", "poll", errno);
      std::this_thread::sleep_for(kLookSpacing);
    }
    if (stopping_.load()) return;
    for (std::size_t i = 0; i < watched_.size(); ++i) {
      if (fds_[i].revents != 0) take_events(i, fds_[i].revents);
    }
    look(std::chrono::steady_clock::now());
  }
}

void FabricMonitor::take_events(std::size_t device, short revents) {
  int taken = 0;
  for (; taken < kEventsPerTurn && (revents & POLLIN) != 0; ++taken) {
    ibv_async_event event{};
    errno = 0;
    if (api_.get_async_event(watched_[device].context, &event) != 0) break;
    on_event(device, event);
    api_.ack_async_event(&event);
  }
  if (taken > 0) return;
  if ((revents & (POLLERR | POLLHUP | POLLNVAL)) != 0) {
    lose(device, "device removed");  // the kernel has closed its end
  } else if (errno != EAGAIN && errno != EINTR) {
    // The descriptor is readable, but reading fails. That would go on for ever.
    log::error("fabric.events", "device", device, "errno", errno, "hint",
               "changes of its ports are seen once a second only");
    fds_[device].fd = -1;
  }
}

void FabricMonitor::on_event(std::size_t device, const ibv_async_event& event) {
  Watched& watched = watched_[device];
  switch (event.event_type) {
    case IBV_EVENT_DEVICE_FATAL:
      lose(device, "device failed");
      return;
    case IBV_EVENT_PORT_ERR:
      events_.on_port_lost(device, event.element.port_num);
      watched.asked = true;
      return;
    case IBV_EVENT_PORT_ACTIVE:
    case IBV_EVENT_LID_CHANGE:
    case IBV_EVENT_GID_CHANGE:
    case IBV_EVENT_PKEY_CHANGE:
    case IBV_EVENT_SM_CHANGE:
    case IBV_EVENT_CLIENT_REREGISTER:
      watched.asked = true;
      return;
    default:
      break;
  }
  // Events of queue pairs and completion queues: their owners see the same in completions.
  const std::uint32_t bit = 1U << (static_cast<unsigned>(event.event_type) % 32U);
  if ((watched.logged & bit) != 0) return;
  watched.logged |= bit;
  log::info("fabric.event", "device", device, "event", event_name(event.event_type), "note",
            "further ones are not logged");
}

void FabricMonitor::lose(std::size_t device, std::string_view why) {
  fds_[device].fd = -1;
  if (watched_[device].lost) return;
  watched_[device].lost = true;
  events_.on_device_lost(device, why);
}

void FabricMonitor::look(TimePoint now) {
  const bool all = now >= next_look_;
  if (all) next_look_ = now + kLookEvery;
  for (std::size_t i = 0; i < watched_.size(); ++i) {
    Watched& device = watched_[i];
    const bool asked = device.asked && now >= device.last_look + kLookSpacing;
    if (device.lost || (!all && !asked)) continue;
    device.asked = false;
    device.last_look = now;
    events_.look_at(i);
  }
}

}  // namespace rekindle::transport::verbs
