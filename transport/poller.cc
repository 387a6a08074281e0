#include "transport/poller.h"

#include <algorithm>
#include <array>
#include <cassert>
#include <chrono>
#include <stdexcept>
#include <utility>

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "src/base/log.h"
#include "src/base/numa_nodes.h"
#include "src/base/worker_pool.h"

namespace rekindle::transport {

namespace {

constexpr std::size_t kRingSlots = 4096;
constexpr std::size_t kCompletionsPerPoll = 64;
// The thread sleeps after this many turns without news. Paths without a descriptor are polled for
// longer, then once a millisecond.
constexpr int kSpins = 64;
constexpr int kPolledSpins = 4096;
// The longest sleep while ops are in flight: the cost of a lost wake-up.
constexpr int kSleepMs = 100;
constexpr std::uint64_t kSlotShift = 32;

}  // namespace

// A path and the slices in flight on it. wr_id = (generation << 16 | slot) << 32 | index of the op.
struct Poller::Owned {
  std::shared_ptr<PathHandle> handle;
  std::unique_ptr<Path> path;
  struct Slot {
    SliceWork* work = nullptr;
    std::uint16_t generation = 0;
  };
  std::vector<Slot> slots;
  std::vector<std::uint16_t> free_slots;
  // Slices with ops that are not posted yet, in order.
  SliceWork* pending_head = nullptr;
  SliceWork* pending_tail = nullptr;
  std::size_t slices = 0;
  bool aborting = false;
  bool broken = false;
  // The descriptor moved while nothing was in flight. True at first: the path is probed once.
  bool idle_event = true;
  std::uint32_t watched = 0;  // epoll events
  int watched_fd = -1;
};

Poller::Poller(std::string name, std::vector<int> cpus, std::function<void()> wake_engine)
    : wake_engine_(std::move(wake_engine)),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      work_(kRingSlots),
      events_(kRingSlots) {
  epoll_event interest{};
  interest.events = EPOLLIN;
  if (!epoll_ || !event_ || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, event_.get(), &interest) != 0) {
    throw std::runtime_error("poller: no descriptors left for epoll");
  }
  thread_ = std::thread([this, name = std::move(name), cpus = std::move(cpus)] {
    keep_thread_to(cpus);
    run(name);
  });
}

Poller::~Poller() {
  stopping_ = true;
  wake();
  thread_.join();
}

void Poller::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(event_.get(), &one, sizeof one);
}

void Poller::add_path(std::shared_ptr<PathHandle> handle, std::unique_ptr<Path> path) {
  path_count_.fetch_add(1, std::memory_order_relaxed);
  {
    const std::lock_guard lock(mutex_);
    commands_.push_back({std::move(handle), std::move(path)});
  }
  has_commands_ = true;
  wake();
}

void Poller::abort_path(std::shared_ptr<PathHandle> handle) {
  {
    const std::lock_guard lock(mutex_);
    commands_.push_back({std::move(handle), nullptr});
  }
  has_commands_ = true;
  wake();
}

bool Poller::post(SliceWork* work) {
  if (!work_.push(work)) return false;
  wake();
  return true;
}

void Poller::run(const std::string& name) {
  set_thread_name(name);
  int idle_turns = 0;
  unsigned turns = 0;
  while (!stopping_ || !paths_.empty()) {
    bool moved = take_commands();
    moved = take_work() || moved;
    bool busy = false;
    for (auto it = paths_.begin(); it != paths_.end();) {
      Owned& owned = *it->second;
      if (stopping_) end_path(owned, false);
      moved = drive(owned) || moved;
      if (owned.aborting && owned.slices == 0 && owned.path->in_flight() == 0) {
        if (owned.watched != 0) {
          epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, owned.watched_fd, nullptr);
        }
        // The path is destroyed before the engine hears of it, as its peer may end right after.
        const auto handle = owned.handle;
        it = paths_.erase(it);
        emit({PollerEvent::Kind::kPathClosed, nullptr, handle.get()});
        path_count_.fetch_sub(1, std::memory_order_relaxed);
        moved = true;
        continue;
      }
      busy = busy || owned.slices > 0 || owned.aborting;
      ++it;
    }
    flush_events();
    idle_turns = moved ? 0 : idle_turns + 1;
    if (idle_turns < kSpins && busy) {
      // A busy thread, too, looks at the descriptors of idle paths now and then.
      if (++turns % kSpins == 0) wait_events(0);
      continue;
    }
    if (!stopping_) sleep(busy, idle_turns);
  }
}

bool Poller::take_commands() {
  if (!has_commands_.exchange(false)) return false;
  std::vector<Command> commands;
  {
    const std::lock_guard lock(mutex_);
    commands.swap(commands_);
  }
  for (auto& command : commands) {
    if (command.path != nullptr) {
      auto owned = std::make_unique<Owned>();
      owned->handle = command.handle;
      owned->path = std::move(command.path);
      paths_.emplace(command.handle.get(), std::move(owned));
      continue;
    }
    const auto found = paths_.find(command.handle.get());
    if (found != paths_.end()) end_path(*found->second, false);
  }
  return !commands.empty();
}

bool Poller::take_work() {
  bool any = false;
  SliceWork* work = nullptr;
  while (work_.pop(work)) {
    any = true;
    work->posted = 0;
    work->open = work->ops.size();
    work->worst = OpStatus::kOk;
    auto found = paths_.find(work->path.get());
    // The command that added this path may have come after take_commands().
    if (found == paths_.end() && take_commands()) found = paths_.find(work->path.get());
    if (found == paths_.end() || found->second->aborting || work->ops.empty()) {
      if (!work->ops.empty()) work->worst = OpStatus::kAborted;
      emit({PollerEvent::Kind::kSliceDone, work, work->path.get()});
      continue;
    }
    Owned& owned = *found->second;
    if (owned.free_slots.empty()) {
      owned.free_slots.push_back(static_cast<std::uint16_t>(owned.slots.size()));
      owned.slots.emplace_back();
    }
    const std::uint16_t slot = owned.free_slots.back();
    owned.free_slots.pop_back();
    owned.slots[slot].work = work;
    work->slot = slot;
    work->next_pending = nullptr;
    const std::uint64_t high = std::uint64_t{owned.slots[slot].generation} << 16 | slot;
    for (std::size_t i = 0; i < work->ops.size(); ++i) work->ops[i].wr_id = high << kSlotShift | i;
    (owned.pending_head == nullptr ? owned.pending_head : owned.pending_tail->next_pending) = work;
    owned.pending_tail = work;
    ++owned.slices;
  }
  return any;
}

void Poller::post_pending(Owned& owned) {
  while (owned.pending_head != nullptr && !owned.aborting) {
    SliceWork& work = *owned.pending_head;
    const auto rest = std::span<const ReadOp>(work.ops).subspan(work.posted);
    const auto taken = owned.path->post(rest);
    if (!taken) {
      end_path(owned, true);
      return;
    }
    work.posted += *taken;
    if (*taken == 0) return;
    if (work.posted == work.ops.size()) owned.pending_head = work.next_pending;
  }
}

// Aborts a path. It stays until it has drained.
void Poller::end_path(Owned& owned, bool broke) {
  if (owned.aborting) return;
  owned.aborting = true;
  owned.broken = broke;
  if (broke) {
    owned.handle->why_broken = owned.path->why_broken();
    owned.handle->broken.store(true, std::memory_order_release);
  }
  owned.path->abort();
  fail_unposted(owned);
}

// Ops that never reached the path end here. The path itself reports the others.
void Poller::fail_unposted(Owned& owned) {
  while (owned.pending_head != nullptr) {
    SliceWork& work = *owned.pending_head;
    owned.pending_head = work.next_pending;
    work.open -= work.ops.size() - work.posted;
    work.posted = work.ops.size();
    if (work.worst == OpStatus::kOk) {
      work.worst = owned.broken ? OpStatus::kPeerLost : OpStatus::kAborted;
    }
    if (work.open == 0) finish_work(owned, work.slot);
  }
}

// Finds out that an idle peer has died before the next slice does: a dead source must not take work
// from a slow one that is alive.
void Poller::probe_idle(Owned& owned) {
  owned.idle_event = false;
  std::array<Completion, 1> none;
  [[maybe_unused]] const std::size_t count = owned.path->poll(none);
  if (!owned.path->post({})) end_path(owned, true);
}

bool Poller::drive(Owned& owned) {
  post_pending(owned);
  if (owned.slices == 0 && !owned.aborting) {
    if (owned.idle_event) probe_idle(owned);
    watch(owned);
    return owned.aborting;
  }
  std::array<Completion, kCompletionsPerPoll> completions;
  const std::size_t count = owned.path->poll(completions);
  for (std::size_t i = 0; i < count; ++i) complete(owned, completions[i]);
  const std::uint64_t landed = owned.path->bytes_landed();
  const bool moved =
      count > 0 || landed != owned.handle->bytes_landed.load(std::memory_order_relaxed);
  owned.handle->bytes_landed.store(landed, std::memory_order_relaxed);
  watch(owned);
  return moved;
}

void Poller::complete(Owned& owned, const Completion& completion) {
  const std::uint64_t high = completion.wr_id >> kSlotShift;
  const auto slot = static_cast<std::uint16_t>(high);
  const auto generation = static_cast<std::uint16_t>(high >> 16);
  if (slot >= owned.slots.size() || owned.slots[slot].generation != generation ||
      owned.slots[slot].work == nullptr) {
    log::error("poller.stray_completion", "path", owned.path->describe(), "wr_id",
               completion.wr_id);
    return;
  }
  SliceWork& work = *owned.slots[slot].work;
  if (completion.status != OpStatus::kOk &&
      (work.worst == OpStatus::kOk || work.worst == OpStatus::kAborted)) {
    work.worst = completion.status;
  }
  if (completion.status == OpStatus::kPeerLost) end_path(owned, true);
  if (owned.slots[slot].work == &work && --work.open == 0) finish_work(owned, slot);
}

void Poller::finish_work(Owned& owned, std::uint32_t slot) {
  Owned::Slot& state = owned.slots[slot];
  SliceWork* work = std::exchange(state.work, nullptr);
  ++state.generation;
  owned.free_slots.push_back(static_cast<std::uint16_t>(slot));
  --owned.slices;
  emit({PollerEvent::Kind::kSliceDone, work, owned.handle.get()});
}

// An idle path is watched edge-triggered, since a closed peer is readable for ever.
void Poller::watch(Owned& owned) {
  const int fd = owned.path->wait_fd();
  std::uint32_t wanted = 0;
  if (fd >= 0) {
    const bool idle = owned.slices == 0 && !owned.aborting;
    wanted = idle ? EPOLLIN | EPOLLRDHUP | EPOLLET : EPOLLIN;
    if (!idle && owned.path->wants_write()) wanted |= EPOLLOUT;
  }
  if (wanted == owned.watched && fd == owned.watched_fd) return;
  epoll_event interest{};
  interest.events = wanted;
  interest.data.ptr = &owned;
  if (owned.watched != 0 && wanted != 0 && fd == owned.watched_fd) {
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &interest);
    owned.watched = wanted;
    return;
  }
  if (owned.watched != 0) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, owned.watched_fd, nullptr);
  owned.watched = 0;
  owned.watched_fd = -1;
  if (wanted == 0 || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &interest) != 0) return;
  owned.watched = wanted;
  owned.watched_fd = fd;
}

void Poller::emit(const PollerEvent& event) {
  emitted_ = true;
  if (!overflow_.empty() || !events_.push(event)) overflow_.push_back(event);
}

void Poller::flush_events() {
  while (!overflow_.empty() && events_.push(overflow_.front())) {
    overflow_.pop_front();
    emitted_ = true;
  }
  if (std::exchange(emitted_, false)) wake_engine_();
}

int Poller::longest_sleep_ms(bool busy, int idle_turns) {
  int longest = busy || !overflow_.empty() ? kSleepMs : -1;
  for (const auto& [handle, owned] : paths_) {
    if (owned->slices == 0 && !owned->aborting) continue;
    if (owned->path->wait_fd() < 0) longest = idle_turns < kPolledSpins ? 0 : 1;
    if (!owned->path->arm()) return 0;
    if (const auto at = owned->path->wake_at()) {
      const auto left =
          std::chrono::ceil<std::chrono::milliseconds>(*at - std::chrono::steady_clock::now());
      longest =
          std::min(longest, static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, kSleepMs)));
    }
  }
  return longest;
}

void Poller::sleep(bool busy, int idle_turns) { wait_events(longest_sleep_ms(busy, idle_turns)); }

void Poller::wait_events(int timeout_ms) {
  std::array<epoll_event, 16> ready;
  const int count =
      epoll_wait(epoll_.get(), ready.data(), static_cast<int>(ready.size()), timeout_ms);
  for (int i = 0; i < count; ++i) {
    auto* owned = static_cast<Owned*>(ready[static_cast<std::size_t>(i)].data.ptr);
    if (owned != nullptr) {
      owned->idle_event = true;
      continue;
    }
    std::uint64_t drained = 0;
    [[maybe_unused]] const ssize_t got = ::read(event_.get(), &drained, sizeof drained);
  }
}

}  // namespace rekindle::transport
