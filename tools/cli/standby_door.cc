#include "tools/cli/standby_door.h"

#include <cerrno>
#include <utility>

#include <sys/socket.h>
#include <unistd.h>

#include "src/base/ids.h"
#include "src/ipc/unix_socket.h"

namespace rekindle::cli {
namespace {

// A worker program may have a process for each GPU, and each of them may wait.
constexpr std::size_t kMostWaiters = 256;
constexpr int kDoorBacklog = 128;

// The text is far smaller than the buffer of a socket.
void hand_over(const UniqueFd& waiter, const std::string& turn) {
  (void)::send(waiter.get(), turn.data(), turn.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
}

bool has_gone(const UniqueFd& waiter) {
  char byte;
  const ssize_t got = ::recv(waiter.get(), &byte, 1, MSG_DONTWAIT);
  return got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR);
}

}  // namespace

Result<std::unique_ptr<StandbyDoor>> StandbyDoor::open() {
  std::uint64_t number = 0;
  fill_random(&number, sizeof number);
  const std::string name = fmt::format("rekindle-standby-{}-{:016x}", ::getpid(), number);
  TRY(const auto address, ipc::abstract_address(name));
  UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener) return fail_errno(errno, "create the socket of a standby");
  if (::bind(listener.get(), address.generic(), address.size) != 0 ||
      ::listen(listener.get(), kDoorBacklog) != 0) {
    return fail_errno(errno, "listen for a standby");
  }
  return std::unique_ptr<StandbyDoor>(new StandbyDoor(name, std::move(listener)));
}

void StandbyDoor::watch(std::vector<pollfd>& entries) const {
  entries.push_back({listener_.get(), POLLIN, 0});
  for (const UniqueFd& waiter : waiters_) entries.push_back({waiter.get(), POLLIN, 0});
}

void StandbyDoor::serve() {
  std::erase_if(waiters_, has_gone);
  while (true) {
    UniqueFd waiter(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!waiter) return;
    // Every user of the host can reach an abstract socket.
    const auto peer = ipc::peer_of(waiter.get());
    if (!peer || !ipc::check_peer(*peer, {}, name_)) continue;
    // The end of the stream says it.
    if (turns_away_) continue;
    if (!turn_.empty()) {
      hand_over(waiter, turn_);
    } else if (waiters_.size() < kMostWaiters) {
      waiters_.push_back(std::move(waiter));
    }
  }
}

void StandbyDoor::turn_away() {
  turns_away_ = true;
  waiters_.clear();
}

void StandbyDoor::let_go(const ipc::Variables& variables) {
  turn_ = ipc::turn_text(variables);
  serve();
  for (const UniqueFd& waiter : waiters_) hand_over(waiter, turn_);
  waiters_.clear();
}

}  // namespace rekindle::cli
