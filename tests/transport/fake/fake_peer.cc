#include <algorithm>
#include <cerrno>
#include <utility>

#include <sys/timerfd.h>

#include "tests/transport/fake/fake_path.h"

namespace rekindle::transport::fake {

namespace {

template <typename Visit>
void for_each_run(const ReadOp& op, Visit visit) {
  for (std::uint64_t run = 0; run < op.count && op.run_bytes > 0; ++run) {
    const auto begin = reinterpret_cast<std::uintptr_t>(op.local) + run * op.local_stride;
    visit(begin, begin + op.run_bytes);
  }
}

}  // namespace

void WriterLedger::enter(const ReadOp& op) {
  const std::lock_guard lock(mutex_);
  for_each_run(op, [this](std::uintptr_t begin, std::uintptr_t end) {
    const auto after = writers_.lower_bound(begin);
    const bool overlaps_next = after != writers_.end() && after->first < end;
    const bool overlaps_previous = after != writers_.begin() && std::prev(after)->second > begin;
    if (overlaps_next || overlaps_previous) ++conflicts_;
    writers_.emplace(begin, end);
  });
}

void WriterLedger::leave(const ReadOp& op) {
  const std::lock_guard lock(mutex_);
  for_each_run(op, [this](std::uintptr_t begin, std::uintptr_t) { writers_.erase(begin); });
}

std::uint64_t WriterLedger::conflicts() const {
  const std::lock_guard lock(mutex_);
  return conflicts_;
}

FakePeer::FakePeer(std::string name) : name_(std::move(name)) {}
FakePeer::~FakePeer() { kill(); }

RegionKey FakePeer::add_region(std::span<const std::byte> bytes) {
  return registry_.add(bytes, -1, 0, {}, nullptr);
}

SessionToken FakePeer::admit(std::vector<RegionKey> regions) {
  Session session;
  session.token = SessionToken::random();
  session.puller = "test";
  session.regions = std::move(regions);
  const SessionToken token = session.token;
  registry_.admit(std::move(session));
  return token;
}

void FakePeer::revoke(const SessionToken& token) {
  registry_.revoke(token);
  ring_all();
}

Result<std::unique_ptr<Path>> FakePeer::connect(const SessionToken& token, const Script& script,
                                                WriterLedger* ledger) {
  if (dead()) return fail(ErrorCode::kPeerLost, "fake -> {}: connection refused", name_);
  if (!registry_.find_session(token)) {
    return fail(ErrorCode::kDenied, "fake -> {}: unknown session", name_);
  }
  UniqueFd timer(::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  if (!timer) return fail_errno(errno, "timerfd");
  {
    const std::lock_guard lock(mutex_);
    timers_.push_back(timer.get());
  }
  return std::make_unique<FakePath>(*this, token, script, ledger, std::move(timer));
}

void FakePeer::kill() {
  dead_.store(true, std::memory_order_release);
  ring_all();
}

void FakePeer::freeze(bool frozen) {
  frozen_.store(frozen, std::memory_order_release);
  ring_all();
}

void FakePeer::ring_all() {
  const std::lock_guard lock(mutex_);
  for (const int timer : timers_) {
    itimerspec now{};
    now.it_value.tv_nsec = 1;
    ::timerfd_settime(timer, 0, &now, nullptr);
  }
}

}  // namespace rekindle::transport::fake
