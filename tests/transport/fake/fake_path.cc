#include "tests/transport/fake/fake_path.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <utility>

#include <sys/timerfd.h>
#include <unistd.h>

#include "transport/read_op.h"

namespace rekindle::transport::fake {

namespace {

constexpr Duration kSlowestTurn = std::chrono::milliseconds(5);  // of a path with a speed

}  // namespace

FakePath::FakePath(FakePeer& peer, const SessionToken& token, const Script& script,
                   WriterLedger* ledger, UniqueFd timer)
    : peer_(peer), token_(token), script_(script), ledger_(ledger), timer_(std::move(timer)) {}

FakePath::~FakePath() {
  assert(ops_.empty());
  const std::lock_guard lock(peer_.mutex_);
  std::erase(peer_.timers_, timer_.get());
}

Result<std::size_t> FakePath::post(std::span<const ReadOp> ops) {
  if (peer_.dead()) broken_ = true;
  if (broken_ || aborted_) return fail(ErrorCode::kPeerLost, "{}: connection lost", describe());
  const TimePoint now = std::chrono::steady_clock::now();
  std::size_t taken = 0;
  const std::size_t most = std::min(ops.size(), script_.ops_per_post);
  if (ops_.empty()) moved_at_ = now;
  while (taken < most && ops_.size() < script_.queue_depth) {
    Op op;
    op.read = ops[taken++];
    op.number = taken_++;
    op.posted = now;
    if (op.number == script_.break_at) broken_ = true;
    if (ledger_ != nullptr) ledger_->enter(op.read);
    ops_.push_back(std::move(op));
  }
  if (taken > 0) arm_timer(now);
  return taken;
}

OpStatus FakePath::begin(Op& op) const {
  if (op.number == script_.fail_at) return script_.fail_status;
  auto region = peer_.registry_.lookup(token_, op.read.remote);
  if (!region) {
    return region.error().code() == ErrorCode::kStale ? OpStatus::kStale : OpStatus::kDenied;
  }
  const StridedRange range{op.read.remote_offset, op.read.run_bytes, op.read.count,
                           op.read.remote_stride};
  if (!fits(range, (*region)->bytes.size())) return OpStatus::kInvalid;
  op.region = std::move(*region);
  return OpStatus::kOk;
}

void FakePath::copy(Op& op, std::uint64_t bytes) {
  const ReadOp& read = op.read;
  const std::uint64_t begin = op.landed;
  while (bytes > 0) {
    const std::uint64_t run = op.landed / read.run_bytes;
    const std::uint64_t at = op.landed % read.run_bytes;
    const std::uint64_t part = std::min(bytes, read.run_bytes - at);
    const OpStatus status = guard_op(read, [&] {
      std::memcpy(read.local + run * read.local_stride + at,
                  op.region->bytes.data() + read.remote_offset + run * read.remote_stride + at,
                  part);
    });
    if (status != OpStatus::kOk) {
      op.status = status;
      break;
    }
    op.landed += part;
    bytes -= part;
  }
  const bool corrupt = op.number >= script_.corrupt_from && op.number < script_.corrupt_to;
  if (corrupt && begin == 0 && op.landed > 0) read.local[0] ^= std::byte{0x40};
  landed_ += op.landed - begin;
  peer_.bytes_served_.fetch_add(op.landed - begin, std::memory_order_relaxed);
}

void FakePath::move_bytes(TimePoint now) {
  if (peer_.frozen()) {
    moved_at_ = now;
    return;
  }
  std::uint64_t budget = kNever;
  if (script_.bytes_per_second > 0) {
    budget = static_cast<std::uint64_t>(seconds(now - moved_at_) *
                                        static_cast<double>(script_.bytes_per_second));
    if (budget == 0) return;
  }
  moved_at_ = now;
  for (auto& op : ops_) {
    if (op.number >= script_.lose_from) return;
    if (!op.begun) {
      op.begun = true;
      op.status = begin(op);
    }
    if (op.status != OpStatus::kOk) continue;
    const std::uint64_t part = std::min(op.read.total_bytes() - op.landed, budget);
    copy(op, part);
    budget -= script_.bytes_per_second > 0 ? part : 0;
    if (op.status == OpStatus::kOk && op.landed < op.read.total_bytes()) return;
  }
}

bool FakePath::finished(const Op& op, TimePoint now) const {
  if (aborted_) return now >= drained_at_;
  if (broken_) return true;
  if (peer_.frozen() || op.number >= script_.lose_from || !op.begun) return false;
  if (op.status == OpStatus::kOk && op.landed < op.read.total_bytes()) return false;
  return now >= op.posted + script_.delay;
}

void FakePath::scribble(const Op& op) const {
  for (std::uint64_t run = 0; run < op.read.count; ++run) {
    std::memset(op.read.local + run * op.read.local_stride, 0xdb, op.read.run_bytes);
  }
}

std::size_t FakePath::poll(std::span<Completion> out) {
  std::uint64_t expirations = 0;
  [[maybe_unused]] const ssize_t got = ::read(timer_.get(), &expirations, sizeof expirations);
  if (peer_.dead()) broken_ = true;
  const TimePoint now = std::chrono::steady_clock::now();
  if (!broken_ && !aborted_) move_bytes(now);
  std::size_t count = 0;
  while (count < out.size() && !ops_.empty() && finished(ops_.front(), now)) {
    Op& op = ops_.front();
    OpStatus status = op.status;
    if (aborted_ || broken_) {
      if (script_.drain_delay.count() > 0) scribble(op);
      status = aborted_ ? OpStatus::kAborted : OpStatus::kPeerLost;
    }
    if (ledger_ != nullptr) ledger_->leave(op.read);
    out[count++] = {op.read.wr_id, status};
    ops_.pop_front();
  }
  arm_timer(now);
  return count;
}

void FakePath::abort() {
  if (std::exchange(aborted_, true)) return;
  const TimePoint now = std::chrono::steady_clock::now();
  drained_at_ = now + script_.drain_delay;
  arm_timer(now);
}

// Sets the timer to the time at which poll() has something to do next.
void FakePath::arm_timer(TimePoint now) {
  if (ops_.empty() && !broken_) return;
  Duration wait = std::chrono::nanoseconds(1);
  const Op* front = ops_.empty() ? nullptr : &ops_.front();
  if (aborted_) {
    wait = drained_at_ - now;
  } else if (!broken_) {
    if (peer_.frozen() || front->number >= script_.lose_from) return;
    const bool moving = front->status == OpStatus::kOk && front->landed < front->read.total_bytes();
    if (!moving && front->begun) wait = front->posted + script_.delay - now;
    if (moving && script_.bytes_per_second > 0) {
      const double left = static_cast<double>(front->read.total_bytes() - front->landed);
      const std::chrono::duration<double> time(left /
                                               static_cast<double>(script_.bytes_per_second));
      wait = time < kSlowestTurn ? std::chrono::duration_cast<Duration>(time) : kSlowestTurn;
    }
  }
  const std::int64_t ns = std::max<std::int64_t>(wait.count(), 1);
  itimerspec due{};
  due.it_value.tv_sec = ns / 1'000'000'000;
  due.it_value.tv_nsec = ns % 1'000'000'000;
  ::timerfd_settime(timer_.get(), 0, &due, nullptr);
  if (!broken_ && peer_.dead()) {  // kill() may have set the timer just before
    due = {};
    due.it_value.tv_nsec = 1;
    ::timerfd_settime(timer_.get(), 0, &due, nullptr);
  }
}

}  // namespace rekindle::transport::fake
