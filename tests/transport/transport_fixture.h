#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "src/base/ids.h"
#include "src/base/unique_fd.h"
#include "transport/path.h"
#include "transport/registry.h"

// Helpers for the tests of backends: segments, reads, waits.
namespace rekindle::transport::testing {

using namespace std::chrono_literals;
inline constexpr auto kTestDeadline = 20s;

inline TimePoint test_deadline() { return std::chrono::steady_clock::now() + kTestDeadline; }

// A file in memory, mapped, whose bytes tell their offset: any 8 aligned bytes are unique.
class TestSegment {
 public:
  explicit TestSegment(std::size_t size, std::uint64_t salt = 0)
      : size_(size), fd_(::memfd_create("test-segment", MFD_CLOEXEC)) {
    if (::ftruncate(fd_.get(), static_cast<off_t>(size)) != 0) std::abort();
    void* address = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
    if (address == MAP_FAILED) std::abort();
    data_ = static_cast<std::byte*>(address);
    for (std::size_t i = 0; i + 8 <= size; i += 8) {
      const std::uint64_t word = (i + salt * 0x9e3779b97f4a7c15) * 0xd6e8feb86659fd93;
      std::memcpy(data_ + i, &word, sizeof word);
    }
  }
  ~TestSegment() { ::munmap(data_, size_); }
  TestSegment(const TestSegment&) = delete;
  TestSegment& operator=(const TestSegment&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }
  int fd() const { return fd_.get(); }
  void truncate(std::size_t size) {
    if (::ftruncate(fd_.get(), static_cast<off_t>(size)) != 0) std::abort();
  }

 private:
  std::size_t size_;
  UniqueFd fd_;
  std::byte* data_ = nullptr;
};

// Polls until every op in flight is reported, but only when wait_fd() says that there is something
// to do: a lost readiness hangs here. The deadline only ends tests that hang.
inline std::vector<Completion> drain(Path& path, TimePoint deadline = test_deadline()) {
  std::vector<Completion> all;
  std::vector<Completion> some(64);
  while (path.in_flight() != 0) {
    const std::size_t count = path.poll(some);
    all.insert(all.end(), some.begin(), some.begin() + static_cast<std::ptrdiff_t>(count));
    if (count != 0 || path.in_flight() == 0) continue;
    if (std::chrono::steady_clock::now() > deadline) {
      ADD_FAILURE() << path.describe() << ": " << path.in_flight() << " ops never completed";
      path.abort();
    }
    if (path.wait_fd() < 0 || !path.arm()) continue;
    pollfd entry{path.wait_fd(), static_cast<short>(POLLIN | (path.wants_write() ? POLLOUT : 0)),
                 0};
    auto patience = std::chrono::ceil<std::chrono::milliseconds>(kTestDeadline);
    if (const auto at = path.wake_at()) {
      patience =
          std::chrono::ceil<std::chrono::milliseconds>(*at - std::chrono::steady_clock::now());
    }
    ::poll(&entry, 1, static_cast<int>(std::max<std::int64_t>(patience.count(), 0)));
  }
  return all;
}

// Posts all of `ops`, polling when the path is full. Every op is in the result once.
inline std::vector<Completion> read_all(Path& path, std::vector<ReadOp> ops) {
  std::vector<Completion> all;
  std::vector<Completion> some(64);
  std::size_t posted = 0;
  const TimePoint deadline = test_deadline();
  while (posted < ops.size() && std::chrono::steady_clock::now() < deadline) {
    const auto taken = path.post(std::span(ops).subspan(posted));
    if (!taken) break;
    posted += *taken;
    const std::size_t count = path.poll(some);
    all.insert(all.end(), some.begin(), some.begin() + static_cast<std::ptrdiff_t>(count));
    if (*taken == 0 && count == 0 && path.arm()) {
      pollfd entry{path.wait_fd(), POLLIN, 0};
      ::poll(&entry, 1, 100);
    }
  }
  const auto rest = drain(path);
  all.insert(all.end(), rest.begin(), rest.end());
  return all;
}

inline OpStatus read_one(Path& path, ReadOp op) {
  const auto completions = read_all(path, {op});
  if (completions.size() != 1) {
    ADD_FAILURE() << "one op gave " << completions.size() << " completions";
    return OpStatus::kAborted;
  }
  EXPECT_EQ(completions[0].wr_id, op.wr_id);
  return completions[0].status;
}

// Waits until `condition` holds. False: it did not by the deadline.
inline bool eventually(const std::function<bool()>& condition) {
  const TimePoint deadline = test_deadline();
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    ::usleep(2000);
  }
  return true;
}

// The ids of completions, to check "exactly once".
inline std::vector<std::uint64_t> sorted_ids(const std::vector<Completion>& completions) {
  std::vector<std::uint64_t> ids;
  for (const auto& completion : completions) ids.push_back(completion.wr_id);
  std::sort(ids.begin(), ids.end());
  return ids;
}

inline std::vector<std::uint64_t> first_ids(std::size_t count) {
  std::vector<std::uint64_t> ids(count);
  for (std::size_t i = 0; i < count; ++i) ids[i] = i;
  return ids;
}

}  // namespace rekindle::transport::testing
