#include "transport/verbs/staged/stage_service.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <deque>
#include <system_error>
#include <utility>

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "src/base/log.h"
#include "src/base/units.h"
#include "src/base/worker_pool.h"
#include "transport/verbs/link/verbs_connection.h"
#include "transport/verbs/memory/registration_limit.h"

namespace rekindle::transport::verbs {
namespace {

constexpr std::uint64_t kWakeId = 0;  // no link's
constexpr std::uint64_t kShareOfLockLimit = 4;

// Under a small limit most of it is left to the segments.
std::uint64_t window_bytes(const StageOptions& options, std::size_t devices) {
  const LockLimit lock = read_lock_limit();
  if (lock.may_lock_any || devices == 0) return options.bytes_per_device;
  return std::min(options.bytes_per_device, lock.limit_bytes / kShareOfLockLimit / devices);
}

int watch(int epoll, int fd, std::uint64_t id) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = id;
  return ::epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0 ? 0 : errno;
}

}  // namespace

class StageService::Link final : public SourceLink {
 public:
  Link(StageService& service, std::shared_ptr<StageEnd> end, std::uint64_t id,
       std::uint32_t puller_rail)
      : service_(service), end_(std::move(end)), id_(id), puller_rail_(puller_rail) {}
  ~Link() override { revoke(); }
  const LinkResponse& response() const override { return end_->response(); }
  std::uint32_t source_rail() const override { return end_->rail().index(); }
  std::uint32_t puller_rail() const override { return puller_rail_; }
  // Each request looks its region up, so a removed region ends no link.
  bool over(const ServedRegions&) const override { return end_->over(); }

 private:
  bool begin_revoke() override {
    service_.remove(id_);
    return end_->begin_revoke();
  }
  void post_invalidations(TimePoint) override { end_->post_invalidations(); }
  void stop(TimePoint deadline) override { end_->stop(deadline); }
  void release(TimePoint deadline) override { end_->release(deadline); }

  StageService& service_;
  const std::shared_ptr<StageEnd> end_;
  const std::uint64_t id_;
  const std::uint32_t puller_rail_;
};

StageService::StageService(Fabric& fabric, const SegmentRegistry& registry,
                           const StageOptions& options)
    : registry_(registry),
      options_(options),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  const int error = !epoll_ || !wake_ ? errno : watch(epoll_.get(), wake_.get(), kWakeId);
  if (error != 0) throw std::system_error(error, std::generic_category(), "start staged serving");
  const std::uint64_t bytes = window_bytes(options, fabric.devices().size());
  pools_.resize(fabric.devices().size());
  run_together(pools_.size(), [&](std::size_t i) {
    pools_[i] = std::make_unique<StagePool>(*fabric.devices()[i], bytes);
  });
  thread_ = std::thread([this] {
    set_thread_name("rk-verbs-stage");
    run();
  });
}

StageService::~StageService() {
  (void)::eventfd_write(wake_.get(), 1);
  thread_.join();
}

bool StageService::has_window() const {
  return std::any_of(pools_.begin(), pools_.end(),
                     [](const auto& pool) { return pool->size() > 0; });
}

Result<std::unique_ptr<SourceLink>> StageService::open(Rail& rail, const LinkRequest& request,
                                                       const Session& session,
                                                       const ServedRegions& regions) {
  StagePool& pool = *pools_[rail.device().index()];
  auto end = StageEnd::create(rail, request, session, registry_, pool);
  if (!end) {
    if (end.error().code() == ErrorCode::kExhausted) end_idle_links(rail, session, request);
    return fail(std::move(end).error());
  }
  for (const auto& [key, memory] : regions) {
    if (memory->bytes().empty()) continue;
    (*end)->response().stage->regions.push_back({key, memory->bytes().size()});
  }
  TRY(const std::uint64_t id, add(*end));
  return std::make_unique<Link>(*this, std::move(*end), id, request.puller_rail.index);
}

Result<std::uint64_t> StageService::add(std::shared_ptr<StageEnd> end) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t id = next_id_++;
  const int error = watch(epoll_.get(), end->event_fd(), id);
  if (error != 0) return fail_errno(error, "staged link: epoll_ctl");
  ends_.emplace(id, std::move(end));
  return id;
}

// The service takes no more events of this link. Its owner revokes it.
void StageService::remove(std::uint64_t id) {
  const std::lock_guard lock(mutex_);
  const auto found = ends_.find(id);
  if (found == ends_.end()) return;
  (void)::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, found->second->event_fd(), nullptr);
  ends_.erase(found);
}

std::shared_ptr<StageEnd> StageService::find(std::uint64_t id) const {
  const std::lock_guard lock(mutex_);
  const auto found = ends_.find(id);
  return found == ends_.end() ? nullptr : found->second;
}

// A puller that is still there connects again when it needs the link.
void StageService::end_idle_links(const Rail& rail, const Session& session,
                                  const LinkRequest& request) {
  std::vector<std::shared_ptr<StageEnd>> idle;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [id, end] : ends_) {
      const bool unused =
          end->idle() > options_.idle_limit || end->replaced_by(session, rail, request);
      if (&end->rail().device() == &rail.device() && unused) idle.push_back(end);
    }
  }
  for (const auto& end : idle) end->end("idle, or replaced, while others want its blocks");
  if (!idle.empty() && options_.on_over) options_.on_over();
}

void StageService::run() {
  std::deque<std::pair<std::uint64_t, std::shared_ptr<StageEnd>>> ready;
  std::array<epoll_event, 64> events;
  while (true) {
    const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                   ready.empty() ? -1 : 0);
    if (count < 0 && errno != EINTR) {
      log::error("verbs.stage", "epoll_wait", errno, "hint",
                 "staged links are not served any more");
      return;
    }
    for (int i = 0; i < count; ++i) {
      const std::uint64_t id = events[static_cast<std::size_t>(i)].data.u64;
      if (id == kWakeId) return;
      const bool queued = std::any_of(ready.begin(), ready.end(),
                                      [&](const auto& entry) { return entry.first == id; });
      if (queued) continue;
      if (auto end = find(id)) ready.emplace_back(id, std::move(end));
    }
    if (ready.empty()) continue;
    auto [id, end] = std::move(ready.front());
    ready.pop_front();
    switch (end->turn()) {
      case StageEnd::Turn::kIdle:
        break;
      case StageEnd::Turn::kMore:
        ready.emplace_back(id, std::move(end));
        break;
      case StageEnd::Turn::kOver:
        remove(id);
        if (options_.on_over) options_.on_over();
        break;
    }
  }
}

}  // namespace rekindle::transport::verbs
