#include "src/ipc/life.h"

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>

#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "src/base/worker_pool.h"

namespace rekindle::ipc {

namespace {

// Follows the word and names the format of the page.
constexpr std::uint32_t kLifePageFormat = 0x6c696665;

Result<void*> map_page(int fd) {
  void* const page = ::mmap(nullptr, kLifePageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) return fail_errno(errno, "map a life page");
  return page;
}

std::uint32_t* words(void* page) { return static_cast<std::uint32_t*>(page); }

}  // namespace

Result<std::unique_ptr<LifePage>> LifePage::create() {
  UniqueFd fd(::memfd_create("rekindle-life", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) return fail_errno(errno, "create a life page");
  if (::ftruncate(fd.get(), kLifePageBytes) != 0) return fail_errno(errno, "size a life page");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return fail_errno(errno, "seal a life page");
  }
  TRY(void* const page, map_page(fd.get()));
  words(page)[1] = kLifePageFormat;
  return std::unique_ptr<LifePage>(new LifePage(std::move(fd), page));
}

Result<std::unique_ptr<LifePage>> LifePage::open(UniqueFd fd) {
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  struct stat info {};
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(fd.get(), &info) != 0 ||
      info.st_size != static_cast<off_t>(kLifePageBytes)) {
    return fail(ErrorCode::kInvalid, "the descriptor is not a life page");
  }
  TRY(void* const page, map_page(fd.get()));
  std::unique_ptr<LifePage> opened(new LifePage(std::move(fd), page));
  if (words(page)[1] != kLifePageFormat) {
    return fail(ErrorCode::kInvalid, "a life page of an unknown format ({:#x})", words(page)[1]);
  }
  return opened;
}

LifePage::~LifePage() { ::munmap(page_, kLifePageBytes); }

std::uint32_t* LifePage::word() const { return words(page_); }

namespace {

// The thread's robust list has one entry, ours, which stays linked as long as the thread lives.
// When the thread ends in any way, the kernel walks the list and adds `futex_offset` to each entry
// to find its word. Our list replaces the C library's list of this thread, which locks no robust
// mutex.
class RobustHold final : public LifeHold {
 public:
  explicit RobustHold(std::unique_ptr<LifePage> page) : page_(std::move(page)) {
    head_.list.next = &head_.list;
    entry_.next = &head_.list;
    head_.futex_offset = static_cast<long>(reinterpret_cast<std::intptr_t>(page_->word()) -
                                           reinterpret_cast<std::intptr_t>(&entry_));
    head_.list_op_pending = nullptr;
  }

  ~RobustHold() override {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

  Result<void> begin() {
    try {
      const SignalsBlocked blocked;
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
      return fail(ErrorCode::kUnavailable, "start the thread that holds a life page: {}",
                  error.what());
    }
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return began_; });
    if (error_ != 0) {
      return fail(ErrorCode::kUnavailable, "hold a life page: {}",
                  std::system_category().message(error_));
    }
    return {};
  }

 private:
  void run() {
    ::pthread_setname_np(::pthread_self(), "rk-hold");
    const int error = hold();
    std::unique_lock lock(mutex_);
    began_ = true;
    error_ = error;
    changed_.notify_all();
    if (error != 0) return;
    changed_.wait(lock, [this] { return stop_; });
    let_go();
  }

  int hold() {
    if (::syscall(SYS_set_robust_list, &head_, sizeof head_) != 0) return errno;
    const auto self = static_cast<std::uint32_t>(::syscall(SYS_gettid));
    std::atomic_ref<std::uint32_t> word(*page_->word());
    std::uint32_t nobody = 0;
    head_.list_op_pending = &entry_;
    // The kernel reads this thread's memory.
    std::atomic_signal_fence(std::memory_order_seq_cst);
    if (!word.compare_exchange_strong(nobody, self)) {
      head_.list_op_pending = nullptr;
      return EBUSY;
    }
    head_.list.next = &entry_;
    std::atomic_signal_fence(std::memory_order_seq_cst);
    head_.list_op_pending = nullptr;
    return 0;
  }

  void let_go() {
    std::atomic_ref<std::uint32_t>(*page_->word()).store(0);
    head_.list.next = &head_.list;
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }

  const std::unique_ptr<LifePage> page_;
  robust_list_head head_{};
  robust_list entry_{};
  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_.
  bool began_ = false;
  bool stop_ = false;
  int error_ = 0;
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<LifeHold>> LifeHold::start(std::unique_ptr<LifePage> page) {
  auto hold = std::make_unique<RobustHold>(std::move(page));
  TRY_VOID(hold->begin());
  return std::unique_ptr<LifeHold>(std::move(hold));
}

}  // namespace rekindle::ipc
