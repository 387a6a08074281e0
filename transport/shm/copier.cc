#include "transport/shm/copier.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <utility>

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "src/base/copy_bytes.h"
#include "src/base/units.h"
#include "src/base/worker_pool.h"
#include "transport/read_op.h"

namespace rekindle::transport::shm {
namespace {

constexpr std::uint64_t kPieceBytes = kMiB;
constexpr std::uint64_t kPieceRuns = 4096;  // short runs: the loop itself takes the time
// A lookup lasts only if the peer is frozen. The engine's progress deadline ends it by abort().
constexpr auto kLookupTime = std::chrono::hours(1);

void signal(int fd) {
  const std::uint64_t one = 1;
  (void)!::write(fd, &one, sizeof one);
}

// Whether there was anything to clear.
bool clear(int fd) {
  std::uint64_t value = 0;
  return ::read(fd, &value, sizeof value) == sizeof value;
}

}  // namespace

Copier::Copier(RegionClient& regions) : regions_(regions) {}

Result<void> Copier::start() {
  wake_fd_.reset(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  done_fd_.reset(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake_fd_ || !done_fd_) return fail_errno(errno, "start a copy thread: eventfd");
  thread_ = std::thread([this] {
    set_thread_name("rk-shm-copy");
    run();
  });
  return {};
}

Copier::~Copier() {
  if (!thread_.joinable()) return;
  stop_ = true;
  abort();
  thread_.join();
}

// The poller's thread may keep to the NUMA node of the destination.
void Copier::run_near_the_owner() {
  cpu_set_t cpus;
  if (::pthread_getaffinity_np(::pthread_self(), sizeof cpus, &cpus) != 0) return;
  (void)::pthread_setaffinity_np(thread_.native_handle(), sizeof cpus, &cpus);
}

void Copier::push(std::span<const ReadOp> ops) {
  if (!std::exchange(placed_, true)) run_near_the_owner();
  for (const ReadOp& op : ops) (void)work_.push(op);  // the owner counts: there is room
  if (sleeping_.load()) signal(wake_fd_.get());
}

std::size_t Copier::pop(std::span<Completion> out) {
  // A busy owner comes often, so this costs no system call while there is no news. The flag is
  // cleared before the look: later completions raise it again.
  if (signalled_ && clear(done_fd_.get())) signalled_ = false;
  std::size_t filled = 0;
  while (filled < out.size()) {
    const auto completion = done_.pop();
    if (!completion) return filled;
    out[filled++] = *completion;
  }
  if (!done_.empty()) notify();
  return filled;
}

void Copier::abort() {
  abort_ = true;
  regions_.interrupt();
  signal(wake_fd_.get());
}

void Copier::finish(const Completion& completion) {
  (void)done_.push(completion);
  notify();
}

// The flag is raised first and cleared only with the descriptor. So the owner never misses a
// readable descriptor.
void Copier::notify() {
  if (!signalled_.exchange(true)) signal(done_fd_.get());
}

void Copier::run() {
  while (true) {
    if (const auto op = work_.pop()) {
      const OpStatus status = stopped() ? OpStatus::kAborted : copy(*op);
      finish({op->wr_id, status});
      continue;
    }
    if (stop_) return;
    if (!stopped()) {
      if (!peer_gone_ && regions_.peer_gone()) peer_gone_.store(true, std::memory_order_release);
      // Nothing here reads the peer's memory any more. The peer may be waiting to hear that.
      if (peer_gone_) regions_.close();
    }
    sleep();
  }
}

void Copier::sleep() {
  sleeping_ = true;
  if (work_.empty() && !stop_) {
    std::array<pollfd, 2> fds{{{wake_fd_.get(), POLLIN, 0}, {regions_.socket_fd(), POLLIN, 0}}};
    // The socket of a vanished peer stays readable: only the wake-up counts then.
    const nfds_t count = peer_gone_ || stopped() ? 1 : 2;
    ::poll(fds.data(), count, -1);
    if ((fds[0].revents & POLLIN) != 0) (void)clear(wake_fd_.get());
  }
  sleeping_ = false;
}

OpStatus Copier::copy(const ReadOp& op) {
  if (regions_.peer_gone()) {
    peer_gone_.store(true, std::memory_order_release);
    return OpStatus::kPeerLost;
  }
  const auto found = regions_.find(op.remote, std::chrono::steady_clock::now() + kLookupTime);
  if (found.status != OpStatus::kOk) {
    return stopped() ? OpStatus::kAborted : found.status;
  }
  const StridedRange range{op.remote_offset, op.run_bytes, op.count, op.remote_stride};
  const auto source = found.mapping->bytes();
  if (!fits(range, source.size())) return OpStatus::kInvalid;
  if (op.run_bytes == 0 || op.count == 0) return OpStatus::kOk;
  return copy_pieces(op, source);
}

OpStatus Copier::copy_pieces(const ReadOp& op, std::span<const std::byte> source) {
  std::uint64_t run = 0;
  std::uint64_t skip = 0;  // bytes of that run that are copied
  while (run < op.count) {
    if (stopped()) return OpStatus::kAborted;
    if (regions_.peer_gone()) {
      peer_gone_.store(true, std::memory_order_release);
      return OpStatus::kPeerLost;
    }
    std::uint64_t moved = 0;
    const OpStatus status = guard_op(op, [&] {
      for (std::uint64_t runs = 0; run < op.count && moved < kPieceBytes && runs < kPieceRuns;
           ++runs) {
        const std::uint64_t size = std::min(op.run_bytes - skip, kPieceBytes - moved);
        copy_bytes(op.local + run * op.local_stride + skip,
                   source.data() + op.remote_offset + run * op.remote_stride + skip, size);
        moved += size;
        skip += size;
        if (skip == op.run_bytes) {
          skip = 0;
          ++run;
        }
      }
    });
    if (status != OpStatus::kOk) return status;
    bytes_landed_.fetch_add(moved, std::memory_order_relaxed);
  }
  return OpStatus::kOk;
}

}  // namespace rekindle::transport::shm
