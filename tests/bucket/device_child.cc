#include "tests/bucket/device_child.h"

#include <array>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <vector>

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <spawn.h>

namespace rekindle::bucket::testing {

namespace {

constexpr int kChildSocket = 3;
constexpr const char* kFlag = "--device-child";

void check(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(what);
}

template <typename T>
T value(Result<T> result) {
  if (!result) throw std::runtime_error(result.error().message());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

void receive_bytes(int socket, void* to, std::size_t bytes) {
  check(::recv(socket, to, bytes, MSG_WAITALL) == static_cast<ssize_t>(bytes),
        "the other process is gone");
}

int exchange(Device& device) {
  const std::uint64_t bytes = receive_word(kChildSocket);
  const auto memory = value(device.open_memory(receive_handle(kChildSocket), bytes));
  const auto filled = value(device.open_event(receive_handle(kChildSocket)));
  const auto released = value(device.make_event());
  send_handle(kChildSocket, value(device.share(*released)));
  const auto stream = value(device.make_stream());
  std::vector<std::byte> seen(bytes);
  std::vector<std::byte> answer;
  while (true) {
    const std::uint64_t round = receive_word(kChildSocket);
    if (round == 0) return 0;
    value(stream->wait(*filled));
    const Download download{.from = memory->address(), .to = seen.data(), .bytes = bytes};
    value(stream->download({&download, 1}));
    value(stream->finish(TimePoint::max()));
    check(seen == pattern(bytes, round), "what was filled is not here");
    answer = pattern(bytes, round + kAnswer);
    const Upload upload{.from = answer.data(), .to = memory->address(), .run_bytes = bytes};
    value(stream->upload({&upload, 1}));
    value(stream->record(*released));
    send_word(kChildSocket, round);
  }
}

int hang(Device& device) {
  const auto memory = value(device.allocate(64));
  const auto event = value(device.make_event());
  const auto stream = value(device.make_stream());
  const std::array<std::byte, 64> from{};
  const Upload endless{
      .from = from.data(), .to = memory->address(), .run_bytes = 64, .rows = 1ull << 60};
  value(stream->upload({&endless, 1}));
  value(stream->record(*event));
  send_handle(kChildSocket, value(device.share(*event)));
  receive_word(kChildSocket);
  return 0;
}

int leave(Device& device) {
  const auto block = value(device.allocate_block(kLeftBytes));
  const auto stream = value(device.make_stream());
  const auto left = pattern(kLeftBytes, kLeft);
  const Upload upload{.from = left.data(), .to = block->address(), .run_bytes = left.size()};
  value(stream->upload({&upload, 1}));
  value(stream->finish(TimePoint::max()));
  send_word(kChildSocket, block->bytes());
  send_handle(kChildSocket, {"block", value(block->export_descriptor())});
  receive_word(kChildSocket);
  return 0;
}

}  // namespace

DeviceChild::DeviceChild(const std::string& script) {
  std::array<int, 2> fds{};
  check(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds.data()) == 0, "socketpair");
  socket_.reset(fds[0]);
  const UniqueFd theirs(fds[1]);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, theirs.get(), kChildSocket);
  std::string program = "/proc/self/exe";
  std::string flag = kFlag;
  std::string what = script;
  const std::array<char*, 4> argv{program.data(), flag.data(), what.data(), nullptr};
  const int error = ::posix_spawn(&pid_, program.c_str(), &actions, nullptr, argv.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  check(error == 0, "posix_spawn");
}

DeviceChild::~DeviceChild() { kill(); }

void DeviceChild::kill() {
  if (pid_ < 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = -1;
}

void send_word(int socket, std::uint64_t word) {
  check(::send(socket, &word, sizeof(word), MSG_NOSIGNAL) == sizeof(word),
        "the other process is gone");
}

std::uint64_t receive_word(int socket) {
  std::uint64_t word = 0;
  receive_bytes(socket, &word, sizeof(word));
  return word;
}

void send_handle(int socket, const Handle& handle) {
  send_word(socket, handle.bytes.size());
  iovec part{const_cast<char*>(handle.bytes.data()), handle.bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  if (const int fd = handle.fd.get(); fd >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(int));
  }
  check(::sendmsg(socket, &message, MSG_NOSIGNAL) == static_cast<ssize_t>(handle.bytes.size()),
        "the other process is gone");
}

Handle receive_handle(int socket) {
  Handle handle;
  handle.bytes.resize(receive_word(socket));
  iovec part{handle.bytes.data(), handle.bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  check(::recvmsg(socket, &message, MSG_WAITALL | MSG_CMSG_CLOEXEC) ==
            static_cast<ssize_t>(handle.bytes.size()),
        "the other process is gone");
  if (const cmsghdr* const header = CMSG_FIRSTHDR(&message); header != nullptr) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof(int));
    handle.fd.reset(fd);
  }
  return handle;
}

std::vector<std::byte> pattern(std::size_t bytes, std::uint64_t seed) {
  std::vector<std::byte> out(bytes);
  std::uint64_t state = seed * 0x9e3779b97f4a7c15ull + 1;
  for (std::byte& byte : out) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    byte = static_cast<std::byte>(state >> 56);
  }
  return out;
}

std::string child_script(int argc, char** argv) {
  return argc == 3 && std::strcmp(argv[1], kFlag) == 0 ? argv[2] : "";
}

int run_child(const std::string& script, Device& device) {
  try {
    if (script == "hang") return hang(device);
    return script == "leave" ? leave(device) : exchange(device);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "device child: %s\n", error.what());
    return 1;
  }
}

}  // namespace rekindle::bucket::testing
