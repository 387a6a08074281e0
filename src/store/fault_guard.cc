#include "src/store/fault_guard.h"

#include <cerrno>

#include <signal.h>

#include <setjmp.h>

// A SIGBUS inside a guarded body jumps back to the innermost guard of its thread. The kernel sends
// it to the thread that touched the page, and only for pages beyond the end of a file (or for bad
// memory), so a body that touches nothing but mappings can be left at that instruction.
namespace rekindle::store {

namespace {

struct Guard {
  sigjmp_buf jump;
  Guard* outer;
  const void* volatile address;  // whose access failed
};

// A plain pointer in static TLS: reading it is safe in a signal handler.
thread_local Guard* volatile t_guard = nullptr;

struct sigaction g_previous;  // written once, before the handler is installed

void forward(int signal_number, siginfo_t* info, void* context) {
  if ((g_previous.sa_flags & SA_SIGINFO) != 0) {
    g_previous.sa_sigaction(signal_number, info, context);
  } else if (g_previous.sa_handler == SIG_DFL) {
    // Back to the default; the instruction faults again and the process dies as it would have.
    struct sigaction action {};
    action.sa_handler = SIG_DFL;
    ::sigaction(signal_number, &action, nullptr);
    if (info->si_code <= 0) ::raise(signal_number);  // sent by a process: it will not fault again
  } else if (g_previous.sa_handler != SIG_IGN) {
    g_previous.sa_handler(signal_number);
  }
}

void on_sigbus(int signal_number, siginfo_t* info, void* context) {
  Guard* const guard = t_guard;
  const bool fault = info->si_code > 0;  // raised by an access, not by kill()
  if (guard == nullptr || !fault) {
    forward(signal_number, info, context);
    return;
  }
  t_guard = guard->outer;
  guard->address = info->si_addr;
  ::siglongjmp(guard->jump, 1);
}

int install_handler() {  // errno
  if (::sigaction(SIGBUS, nullptr, &g_previous) != 0) return errno;
  struct sigaction action {};
  action.sa_sigaction = on_sigbus;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  return ::sigaction(SIGBUS, &action, nullptr) != 0 ? errno : 0;
}

// In a function of its own, so that no local of the caller lives in a register across the jump.
__attribute__((noinline)) bool run_guarded(Guard& guard, const std::function<void()>& body) {
  if (::sigsetjmp(guard.jump, 1) != 0) return false;
  t_guard = &guard;
  body();
  t_guard = guard.outer;
  return true;
}

struct RestoreGuard {  // also when the body throws
  Guard* const outer;
  ~RestoreGuard() { t_guard = outer; }
};

}  // namespace

Result<const void*> find_mapping_fault(const std::function<void()>& body) {
  static const int install_error = install_handler();
  if (install_error != 0) return fail_errno(install_error, "install the SIGBUS handler");
  Guard guard{};
  guard.outer = t_guard;
  const RestoreGuard restore{guard.outer};
  return run_guarded(guard, body) ? nullptr : guard.address;
}

Result<void> guard_mapping_access(const char* what, const std::function<void()>& body) {
  TRY(const void* const fault, find_mapping_fault(body));
  if (fault == nullptr) return {};
  return fail(
      ErrorCode::kCorrupt,
      "{}: truncated while it was mapped (an access beyond the end of its file): some other "
      "process changed it; retire or publish it again",
      what);
}

}  // namespace rekindle::store
