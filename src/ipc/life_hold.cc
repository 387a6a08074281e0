#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <system_error>
#include <thread>

#include <linux/futex.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "src/ipc/life.h"

namespace rekindle::ipc {

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
    // Signals belong to the application, so this thread gets none.
    sigset_t all;
    sigset_t before;
    sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before);
    Result<void> started;
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& error) {
      started = fail(ErrorCode::kUnavailable, "start the thread that holds a life page: {}",
                     error.what());
    }
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    TRY_VOID(started);
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
