#include "src/ipc/standby.h"

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <optional>

#include <poll.h>
#include <unistd.h>

#include "src/base/unique_fd.h"
#include "src/ipc/channel.h"
#include "src/ipc/unix_socket.h"

namespace rekindle::ipc {

namespace {

constexpr std::string_view kGo = "go\n";
constexpr std::size_t kLongestTurn = std::size_t{64} << 10;
// `rekindle run` of root may start a process as another user.
constexpr std::array<uid_t, 1> kRoot{0};

Failure run_has_ended() {
  return fail(ErrorCode::kUnavailable,
              "this process is a standby, and the `rekindle run` that started it has ended");
}

// nullopt: the text is not complete yet.
std::optional<Variables> parse_turn(std::string_view text) {
  Variables variables;
  for (std::size_t end; (end = text.find('\n')) != std::string_view::npos;
       text.remove_prefix(end + 1)) {
    if (text.substr(0, end + 1) == kGo) return variables;
    const std::string_view line = text.substr(0, end);
    const std::size_t equals = line.find('=');
    if (equals == std::string_view::npos) continue;
    variables.emplace_back(line.substr(0, equals), line.substr(equals + 1));
  }
  return std::nullopt;
}

Result<UniqueFd> connect_to_run(const std::string& name) {
  TRY(const AbstractAddress address, abstract_address(name));
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return fail_errno(errno, "create a unix socket");
  while (::connect(fd.get(), address.generic(), address.size) != 0) {
    if (errno == ECONNREFUSED) return run_has_ended();
    if (errno != EINTR) return fail_errno(errno, fmt::format("connect to {}", name));
  }
  TRY(const Peer peer, peer_of(fd.get()));
  TRY_VOID(check_peer(peer, kRoot, fmt::format("{}={}", kStandbyVariable, name)));
  return fd;
}

}  // namespace

Result<AbstractAddress> abstract_address(std::string_view name) {
  AbstractAddress made;
  if (name.empty() || name.size() >= sizeof made.address.sun_path) {
    return fail(ErrorCode::kInvalid, "{}: '{}' has {} bytes, 1 to {} are allowed", kStandbyVariable,
                name, name.size(), sizeof made.address.sun_path - 1);
  }
  made.address.sun_family = AF_UNIX;
  // A first byte of 0 makes the address abstract.
  std::memcpy(made.address.sun_path + 1, name.data(), name.size());
  made.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return made;
}

std::string turn_text(const Variables& variables) {
  std::string text;
  for (const auto& [name, value] : variables) text += name + "=" + value + "\n";
  return text.append(kGo);
}

Result<Variables> wait_for_turn(const std::string& name, TimePoint deadline) {
  TRY(const UniqueFd fd, connect_to_run(name));
  std::string text;
  while (text.size() < kLongestTurn) {
    const TimePoint now = steady_now();
    pollfd entry{fd.get(), POLLIN, 0};
    const int ready = ::poll(&entry, 1, poll_timeout_ms(now, deadline));
    if (ready < 0 && errno != EINTR) return fail_errno(errno, "wait as a standby");
    if (ready == 0 && steady_now() >= deadline) {
      return fail(ErrorCode::kTimeout, "this standby was not chosen yet");
    }
    if (ready <= 0) continue;
    std::array<char, 4096> part;
    const ssize_t got = ::read(fd.get(), part.data(), part.size());
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return run_has_ended();
    text.append(part.data(), static_cast<std::size_t>(got));
    if (auto variables = parse_turn(text)) return std::move(*variables);
  }
  return fail(ErrorCode::kInvalid, "the answer of {}={} does not end", kStandbyVariable, name);
}

}  // namespace rekindle::ipc
