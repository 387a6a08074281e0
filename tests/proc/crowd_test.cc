// Rows 45 and 46: many peers that say nothing, too little or nonsense, while others want to work.
#include <fstream>
#include <random>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "src/base/units.h"
#include "tests/proc/shm_socket.h"
#include "tests/support/descriptors.h"
#include "tests/support/fleet.h"

namespace rekindle::testing {
namespace {

namespace fs = std::filesystem;

using Sockets = std::vector<UniqueFd>;

UniqueFd connect_to(const std::string& address) {
  const auto colon = address.rfind(':');
  sockaddr_in target{};
  target.sin_family = AF_INET;
  target.sin_port = htons(static_cast<std::uint16_t>(std::stoi(address.substr(colon + 1))));
  ::inet_pton(AF_INET, address.substr(0, colon).c_str(), &target.sin_addr);
  UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&target), sizeof target) != 0) {
    fd.reset();
  }
  return fd;
}

void say(const UniqueFd& fd, std::string_view bytes) {
  (void)!::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

// Every second one begins a frame, or a hello, and never ends it.
Sockets idle_sockets(const std::string& address, int count) {
  Sockets sockets;
  for (int i = 0; i < count; ++i) {
    UniqueFd fd = connect_to(address);
    EXPECT_TRUE(fd) << i;
    if (i % 2 == 0) say(fd, std::string_view("\0\0", 2));
    sockets.push_back(std::move(fd));
  }
  return sockets;
}

bool closed_by_peer(const UniqueFd& fd) {
  char sink[4096];
  for (;;) {
    const ssize_t got = ::recv(fd.get(), sink, sizeof sink, MSG_DONTWAIT);
    if (got == 0) return true;
    if (got < 0) return errno != EAGAIN && errno != EWOULDBLOCK;
  }
}

// Address space at its largest: also what was asked for and never touched.
std::uint64_t peak_memory(pid_t pid) {
  std::ifstream status(fmt::format("/proc/{}/status", pid));
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmPeak:")) return std::stoull(line.substr(7)) * kKiB;
  }
  return 0;
}

class Crowd : public ::testing::Test {
 protected:
  void SetUp() override {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = limit.rlim_max;
    ::setrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_cur < 4096) GTEST_SKIP() << "needs 4096 descriptors (ulimit -Hn)";
    fleet_.start_coordinator();
    make_checkpoint(fleet_.dir("model"), 2, 1024, 5);
    fleet_.start_agent("a");
    fleet_.publish("a", "m@1", fleet_.dir("model"));
  }

  // A whole new pull, through the coordinator.
  void expect_a_pull(const std::string& to, const std::string& transport = "tcp") {
    const auto answer = fleet_.run_command(
        {"pull", "m@1", "--to", fleet_.dir(to).string(), "--transport", transport});
    ASSERT_EQ(answer.exit_code, 0) << answer.err;
    EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir(to)), "");
  }
  pid_t agent() { return fleet_.agent("a").process->pid(); }
  std::vector<std::string> ports() {
    return {fleet_.agent("a").control, fleet_.agent("a").data, fleet_.coordinator_address()};
  }

  Fleet fleet_;
};

TEST_F(Crowd, Row46AThousandIdleSocketsOnEachPortHinderNoPullAndAreClosed) {
  const std::size_t before = open_descriptors(agent());
  Sockets idle;
  for (const auto& port : ports()) {
    for (auto& fd : idle_sockets(port, 1000)) idle.push_back(std::move(fd));
  }
  expect_a_pull("during");
  for (const auto& fd : idle) {
    ASSERT_TRUE(eventually([&] { return closed_by_peer(fd); }));
  }
  EXPECT_TRUE(eventually([&] { return open_descriptors(agent()) <= before; }));
  expect_a_pull("after");
}

TEST_F(Crowd, WithoutDescriptorsForAllOfThemTheIdleOnesGo) {
  const rlimit few{256, 256};
  ASSERT_EQ(prlimit(agent(), RLIMIT_NOFILE, &few, nullptr), 0);
  ASSERT_EQ(prlimit(fleet_.coordinator().pid(), RLIMIT_NOFILE, &few, nullptr), 0);
  Sockets idle;
  for (const auto& port : ports()) {
    for (auto& fd : idle_sockets(port, 400)) idle.push_back(std::move(fd));
  }
  // Nobody has to go away first: the frame deadline makes room.
  EXPECT_TRUE(eventually([&] {
    return fleet_.run_command({"pull", "m@1", "--to", fleet_.dir("out").string()}).exit_code == 0;
  }));
  EXPECT_EQ(compare_checkpoints(fleet_.dir("model"), fleet_.dir("out")), "");
  for (const auto& fd : idle) {
    ASSERT_TRUE(eventually([&] { return closed_by_peer(fd); }));
  }
}

// Sizes are refused as they are read, long before anything is allocated for them.
TEST_F(Crowd, Row45FramesThatPromiseGigabytesCostNothing) {
  const std::uint64_t before = peak_memory(agent());
  Sockets liars;
  for (const auto& port : ports()) {
    for (int i = 0; i < 300; ++i) {
      UniqueFd fd = connect_to(port);
      ASSERT_TRUE(fd);
      say(fd, std::string_view("\x7f\xff\xff\xff", 4));
      liars.push_back(std::move(fd));
    }
  }
  for (const auto& fd : liars) {
    ASSERT_TRUE(eventually([&] { return closed_by_peer(fd); }));
  }
  EXPECT_LT(peak_memory(agent()), before + kGiB) << "each promised two";
  expect_a_pull("out");
}

TEST_F(Crowd, GarbageEndsItsConnectionOnly) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  Sockets peers;
  for (const auto& port : ports()) {
    for (int i = 0; i < 200; ++i) {
      UniqueFd fd = connect_to(port);
      ASSERT_TRUE(fd);
      std::string bytes(1 + random() % 250, '\0');
      for (char& c : bytes) c = static_cast<char>(random());
      if (i % 3 == 1) bytes = std::string("\0\0\0", 3) + static_cast<char>(bytes.size()) + bytes;
      if (i % 3 == 2) bytes = "GET / HTTP/1.1\r\nHost: x\r\n\r\n";
      say(fd, bytes);
      ::shutdown(fd.get(), SHUT_WR);
      peers.push_back(std::move(fd));
    }
  }
  for (const auto& fd : peers) {
    ASSERT_TRUE(eventually([&] { return closed_by_peer(fd); }));
  }
  EXPECT_TRUE(fleet_.coordinator().running());
  expect_a_pull("out");
}

// The abstract socket of the shm transport: when it is crowded, a pull takes tcp.
TEST_F(Crowd, Row46AThousandIdleNeighboursHinderNoPullThroughSharedMemory) {
  const AbstractAddress address = shm_socket_of(agent());
  ASSERT_GT(address.length, 0u) << "no abstract socket found";
  Sockets idle;
  for (int i = 0; i < 1100; ++i) {
    UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::connect(fd.get(), address.get(), address.length), 0);
    idle.push_back(std::move(fd));
  }
  const auto answer = fleet_.run_command({"pull", "m@1", "--to", fleet_.dir("during").string()});
  EXPECT_EQ(answer.exit_code, 0) << answer.err;
  for (const auto& fd : idle) {
    ASSERT_TRUE(eventually([&] { return closed_by_peer(fd); }));
  }
  expect_a_pull("after", "shm");
}

}  // namespace
}  // namespace rekindle::testing
