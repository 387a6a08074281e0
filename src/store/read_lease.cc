#include "src/store/read_lease.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <future>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "src/base/failpoint.h"
#include "src/base/unique_fd.h"
#include "src/base/worker_pool.h"

namespace rekindle::store {

namespace {

constexpr unsigned long kXfsMagic = 0x58465342;

// On these file systems EAGAIN means that a process may write. Network file systems give the same
// answer if the server has not delegated the file.
bool is_local(int fd) {
  constexpr std::array<unsigned long, 6> kLocal = {
      TMPFS_MAGIC, RAMFS_MAGIC, EXT4_SUPER_MAGIC, kXfsMagic, BTRFS_SUPER_MAGIC, F2FS_SUPER_MAGIC};
  struct statfs status {};
  if (::fstatfs(fd, &status) != 0) return false;
  return std::ranges::find(kLocal, static_cast<unsigned long>(status.f_type)) != kLocal.end();
}

std::uint64_t next_number() {
  static std::atomic<std::uint64_t> last = 0;
  return ++last;
}

// The kernel sends this signal to the holder of a lease when a process waits for its end. It goes
// to a thread that only waits for it, so that no other thread is interrupted.
int break_signal() { return SIGRTMIN + 6; }

}  // namespace

// All leases of this process. Never destroyed: its thread runs until the process ends.
class LeaseWatch {
 public:
  // Of this process: a child that was forked has none of its parent's threads.
  static LeaseWatch& of_process() {
    static std::mutex mutex;
    static LeaseWatch* watch = nullptr;
    const std::lock_guard lock(mutex);
    if (watch == nullptr || watch->process_ != ::getpid()) watch = new LeaseWatch;
    return *watch;
  }

  Result<void> add(ReadLease& lease) {
    const std::lock_guard lock(mutex_);
    TRY_VOID(start());
    const struct f_owner_ex owner { F_OWNER_TID, thread_ };
    if (::fcntl(lease.fd_, F_SETOWN_EX, &owner) != 0 ||
        ::fcntl(lease.fd_, F_SETSIG, break_signal()) != 0 ||
        ::fcntl(lease.fd_, F_SETLEASE, F_RDLCK) != 0) {
      const int error = errno;
      if (error == EAGAIN && is_local(lease.fd_)) {
        return fail(ErrorCode::kUnavailable, "a process has it open or mapped for writing");
      }
      return fail(ErrorCode::kInvalid, "{}", errno_error(error, "lease").message());
    }
    leases_.insert(&lease);
    return {};
  }

  void remove(ReadLease& lease) {
    const std::lock_guard lock(mutex_);
    if (leases_.erase(&lease) > 0) ::fcntl(lease.fd_, F_SETLEASE, F_UNLCK);
  }

 private:
  LeaseWatch() : process_(::getpid()) {}

  Result<void> start() {
    if (thread_ != 0) return {};
    const SignalsBlocked blocked;
    std::promise<pid_t> number;
    try {
      std::thread([this, &number] { run(number); }).detach();
      thread_ = number.get_future().get();
    } catch (const std::system_error& error) {
      return fail(ErrorCode::kInvalid, "start a thread: {}", error.what());
    }
    return {};
  }

  void run(std::promise<pid_t>& number) {
    ::pthread_setname_np(::pthread_self(), "rk-lease");
    number.set_value(::gettid());
    sigset_t breaks;
    ::sigemptyset(&breaks);
    ::sigaddset(&breaks, break_signal());
    ::sigaddset(&breaks, SIGIO);  // the kernel sends it if the queue of signals is full
    for (;;) {
      int which = 0;
      if (::sigwait(&breaks, &which) == 0) end_broken();
    }
  }

  void end_broken() {
    const std::lock_guard lock(mutex_);
    std::erase_if(leases_, [](ReadLease* lease) {
      if (::fcntl(lease->fd_, F_GETLEASE) == F_RDLCK) return false;
      lease->broken_ = true;
      ::fcntl(lease->fd_, F_SETLEASE, F_UNLCK);
      return true;
    });
  }

  const pid_t process_;
  std::mutex mutex_;  // guards all below
  pid_t thread_ = 0;
  std::set<ReadLease*> leases_;  // held and not broken
};

ReadLease::ReadLease(int fd) : fd_(fd), number_(next_number()) {}

Result<std::unique_ptr<ReadLease>> ReadLease::take(int fd) {
  if (auto can = failpoint("store.lease"); !can) {
    return fail(ErrorCode::kInvalid, "{}", can.error().message());
  }
  std::unique_ptr<ReadLease> lease(new ReadLease(fd));
  TRY_VOID(LeaseWatch::of_process().add(*lease));
  return lease;
}

ReadLease::~ReadLease() { LeaseWatch::of_process().remove(*this); }

bool ReadLease::held() const { return !broken_ && ::fcntl(fd_, F_GETLEASE) == F_RDLCK; }

Result<void> check_read_leases(const std::filesystem::path& directory) {
  UniqueFd reader;
  {
    const UniqueFd file(::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
    if (!file) return fail_errno(errno, "create a file");
    const std::string opened = fmt::format("/proc/self/fd/{}", file.get());
    reader = UniqueFd(::open(opened.c_str(), O_RDONLY | O_CLOEXEC));
    if (!reader) return fail_errno(errno, "open a file for reading");
  }
  if (!is_local(reader.get())) {
    return fail(ErrorCode::kInvalid, "its file system has no leases that can be relied on");
  }
  TRY(const auto lease, ReadLease::take(reader.get()));
  return {};
}

}  // namespace rekindle::store
