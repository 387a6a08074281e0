// A worker for life_test: life_worker SOCKET MODE. It takes the life page, the first message on the
// socket, holds it (unless MODE is bare or scribble), prints "held" and waits for SIGUSR1.
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "src/ipc/channel.h"
#include "src/ipc/life.h"
#include "src/ipc/unix_socket.h"
#include "tests/support/must.h"

namespace {

using namespace rekindle;  // NOLINT(google-build-using-namespace)

void say(const std::string& line) {
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

void wait_for_signal() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  int number = 0;
  ::sigwait(&set, &number);
}

// Writes arbitrary values to the word, except one that means death.
[[noreturn]] void scribble(ipc::LifePage& page) {
  std::atomic_ref<std::uint32_t> word(*page.word());
  say("held");
  for (std::uint32_t i = 1;; ++i) {
    word.store(i & FUTEX_TID_MASK);
    ::syscall(SYS_futex, page.word(), FUTEX_WAKE, 1, nullptr, nullptr, 0);
  }
}

void touch_memory(std::size_t bytes) {
  void* const memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory != MAP_FAILED) std::memset(memory, 0x5a, bytes);
}

void leave_a_child() {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(60);
    while (true) ::pause();
  }
  say("child=" + std::to_string(child));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string mode = argv[2];
  ::alarm(120);
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGUSR1);
  ::pthread_sigmask(SIG_BLOCK, &set, nullptr);

  const TimePoint deadline = SteadyClock().now() + std::chrono::seconds(30);
  auto channel = must(ipc::Channel::adopt(must(ipc::connect_unix_socket(argv[1], deadline)), 1));
  auto frame = must(channel.receive(deadline));
  auto page = must(ipc::LifePage::open(std::move(frame.descriptors.at(0))));
  if (mode == "scribble") scribble(*page);
  std::unique_ptr<ipc::LifeHold> hold;
  if (mode != "bare") hold = must(ipc::LifeHold::start(std::move(page)));
  if (mode == "fork") leave_a_child();
  if (mode == "large") touch_memory(std::size_t{256} << 20);
  say("held");
  wait_for_signal();
  if (mode == "exec") ::execl("/bin/sleep", "sleep", "60", nullptr);
  if (mode == "release") {
    hold.reset();
    say("released");
    wait_for_signal();
  }
  if (mode == "return") return 0;
  ::_exit(0);
}
