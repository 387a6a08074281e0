#include "src/client/copy_threads.h"

#include <algorithm>
#include <utility>

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include "src/base/copy_bytes.h"
#include "src/base/units.h"
#include "src/base/worker_pool.h"

namespace rekindle::client {

namespace {

constexpr std::uint64_t kUnitBytes = 512 * kKiB;

std::size_t thread_count(std::size_t asked) {
  if (asked != 0) return asked;
  cpu_set_t cpus;
  if (::sched_getaffinity(0, sizeof cpus, &cpus) != 0) return 1;
  const auto count = static_cast<std::size_t>(CPU_COUNT(&cpus));
  return std::clamp<std::size_t>(count, 3, CopyThreads::kMostThreads + 2) - 2;
}

// Fills page tables with one call instead of a fault for each page. Where the kernel refuses
// (before Linux 5.14), the copy faults the pages in.
void populate(const Copy& copy) {
  static const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto target = reinterpret_cast<std::uintptr_t>(copy.target);
  const std::uintptr_t begin = target & ~(page - 1);
  // MADV_POPULATE_WRITE, which older headers lack.
  (void)::madvise(reinterpret_cast<void*>(begin), target + copy.bytes - begin, 23);
}

}  // namespace

void copy_to_memory(const Copy& copy) {
  if (copy.source == nullptr) return;
  if (copy.bytes == kUnitBytes) populate(copy);
  copy_bytes(copy.target, copy.source, copy.bytes);
}

CopyThreads::CopyThreads(std::size_t threads, std::function<void(const Copy&)> write)
    : most_threads_(thread_count(threads)), write_(std::move(write)) {}

Result<std::uint64_t> CopyThreads::put(std::span<const Copy> copies) {
  std::vector<Unit> units;
  std::uint64_t room = 0;
  for (Copy rest : copies) {
    while (rest.bytes > 0) {
      if (room == 0) {
        units.emplace_back();
        room = kUnitBytes;
      }
      const Copy part{rest.target, rest.source, std::min(rest.bytes, room)};
      units.back().copies.push_back(part);
      room -= part.bytes;
      rest.target += part.bytes;
      if (rest.source != nullptr) rest.source += part.bytes;
      rest.bytes -= part.bytes;
    }
  }
  const std::lock_guard lock(mutex_);
  if (closed_) return fail(ErrorCode::kStale, "the copies have ended");
  const std::uint64_t number = first_ + left_.size();
  left_.push_back(units.size());
  for (Unit& unit : units) {
    unit.number = number;
    units_.push_back(std::move(unit));
    if (idle_ > 0) has_unit_.notify_one();
  }
  const SignalsBlocked blocked;
  for (std::size_t i = 0; i < units.size() && threads_.size() < most_threads_; ++i) {
    threads_.emplace_back([this] { run(); });
  }
  finish(0);
  return number;
}

Result<void> CopyThreads::wait(std::uint64_t number, TimePoint deadline) {
  std::unique_lock lock(mutex_);
  if (done_.wait_until(lock, deadline, [&] { return number < first_ || closed_; })) {
    if (number < first_) return {};
    return fail(ErrorCode::kStale, "the copies have ended");
  }
  return fail(ErrorCode::kTimeout, "the copies are not done yet");
}

void CopyThreads::close() {
  const std::lock_guard joining(joining_);
  std::vector<std::thread> threads;
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    units_.clear();
    threads.swap(threads_);
    has_unit_.notify_all();
    done_.notify_all();
  }
  for (std::thread& thread : threads) thread.join();
}

void CopyThreads::run() {
  ::pthread_setname_np(::pthread_self(), "rk-copy");
  std::unique_lock lock(mutex_);
  while (true) {
    ++idle_;
    has_unit_.wait(lock, [&] { return closed_ || !units_.empty(); });
    --idle_;
    if (closed_) return;
    const Unit unit = std::move(units_.front());
    units_.pop_front();
    lock.unlock();
    for (const Copy& copy : unit.copies) write_(copy);
    lock.lock();
    finish(unit.number);
  }
}

// With the mutex held. 0: only looks for calls that had nothing to copy.
void CopyThreads::finish(std::uint64_t number) {
  if (number != 0) --left_[number - first_];
  const std::uint64_t before = first_;
  for (; !left_.empty() && left_.front() == 0; ++first_) left_.pop_front();
  if (first_ != before) done_.notify_all();
}

}  // namespace rekindle::client
