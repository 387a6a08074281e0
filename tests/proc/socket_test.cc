// Row 44: who may speak to an agent over its unix sockets, and how a command knows that it speaks
// to the agent of its own user. Tests with a second user need root.
#include <cstring>
#include <functional>

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <grp.h>
#include <gtest/gtest.h>

#include "tests/proc/shm_socket.h"
#include "tests/support/fleet.h"
#include "transport/shm/shm_protocol.h"

namespace rekindle::testing {
namespace {

namespace fs = std::filesystem;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uid_t kNobody = 65534;

mode_t mode_of(const fs::path& path) {
  struct stat info {};
  EXPECT_EQ(::lstat(path.c_str(), &info), 0) << path;
  return info.st_mode & 07777;
}

bool become_nobody() {
  return ::setgroups(0, nullptr) == 0 && ::setresgid(kNobody, kNobody, kNobody) == 0 &&
         ::setresuid(kNobody, kNobody, kNobody) == 0;
}

// Everything that the other end of a connected socket says until it closes.
std::string read_to_end(int fd) {
  std::string text;
  char chunk[4096];
  for (;;) {
    pollfd entry{fd, POLLIN, 0};
    if (::poll(&entry, 1, 20'000) != 1) return text + "(still open)";
    const ssize_t got = ::recv(fd, chunk, sizeof chunk, 0);
    if (got <= 0) return text;
    text.append(chunk, static_cast<std::size_t>(got));
  }
}

// Runs `body` as another user in a child; what it returns.
std::string as_nobody(const std::function<std::string()>& body) {
  int pipe[2];
  if (::pipe2(pipe, O_CLOEXEC) != 0) return "no pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    const std::string text = become_nobody() ? body() : "cannot become nobody";
    (void)!::write(pipe[1], text.data(), text.size());
    ::_exit(0);
  }
  ::close(pipe[1]);
  std::string text;
  char chunk[4096];
  for (ssize_t got; (got = ::read(pipe[0], chunk, sizeof chunk)) > 0;) {
    text.append(chunk, static_cast<std::size_t>(got));
  }
  ::close(pipe[0]);
  ::waitpid(child, nullptr, 0);
  return text;
}

sockaddr_un path_address(const fs::path& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.string().copy(address.sun_path, sizeof address.sun_path - 1);
  return address;
}

class AgentSocket : public ::testing::Test {
 protected:
  void SetUp() override { fleet_.start_agent("a"); }
  const fs::path& store() { return fleet_.agent("a").store; }
  fs::path directory() { return store() / "agent"; }
  fs::path socket() { return directory() / "agent.sock"; }

  Finished status() const {
    return run({REKINDLE_BINARY, "status", "--store", fleet_.dir("store-a").string()});
  }
  Finished publish() {
    make_checkpoint(fleet_.dir("model"), 1, 64, 1);
    return run({REKINDLE_BINARY, "publish", "m@1", fleet_.dir("model").string(), "--store",
                store().string()});
  }
  // All that the file modes keep out is let in, so that the checks behind them decide.
  void open_all_doors() {
    for (const fs::path& path : {store().parent_path(), store(), directory(), socket()}) {
      fs::permissions(path, fs::perms(0777));
    }
  }
  Fleet fleet_;
};

TEST_F(AgentSocket, Row44OnlyItsUserMayReachIt) {
  EXPECT_EQ(mode_of(directory()), 0700u);
  EXPECT_EQ(mode_of(socket()), 0600u);
  EXPECT_EQ(status().exit.code, 0);
}

TEST_F(AgentSocket, AnAgentDoesNotListenInADirectoryOpenToOthers) {
  fleet_.agent("a").process->kill();
  fs::permissions(directory(), fs::perms(0755));
  const auto refused =
      run({REKINDLE_BINARY, "agent", "--listen", "127.0.0.1:0", "--store", store().string()});
  EXPECT_FALSE(refused.timed_out);
  EXPECT_EQ(refused.exit.code, 7) << refused.err;
  EXPECT_THAT(refused.err, AllOf(HasSubstr(directory().string()), HasSubstr("chmod 700")));
}

TEST_F(AgentSocket, ACommandDoesNotTrustASocketInADirectoryOpenToOthers) {
  fs::permissions(directory(), fs::perms(0755));
  EXPECT_EQ(status().exit.code, 7) << status().err;
  const auto refused = publish();
  EXPECT_EQ(refused.exit.code, 7) << refused.err;
  EXPECT_THAT(refused.err, AllOf(HasSubstr(directory().string()), HasSubstr("chmod 700")));
}

TEST_F(AgentSocket, WhatIsNoSocketIsNotTakenForOne) {
  fleet_.agent("a").process->kill();
  fs::remove(socket());
  write_file(socket(), "");
  EXPECT_EQ(publish().exit.code, 7);
  const auto agent =
      run({REKINDLE_BINARY, "agent", "--listen", "127.0.0.1:0", "--store", store().string()});
  EXPECT_EQ(agent.exit.code, 7) << agent.err;
  EXPECT_THAT(agent.err, HasSubstr("is not a socket"));
  EXPECT_TRUE(fs::is_regular_file(socket())) << "what is not ours stays";
}

class OtherUser : public AgentSocket {
 protected:
  void SetUp() override {
    if (::geteuid() != 0) GTEST_SKIP() << "needs root, to be another user";
    AgentSocket::SetUp();
  }
};

TEST_F(OtherUser, FileModesKeepItOut) {
  const auto address = path_address(socket());
  EXPECT_EQ(as_nobody([&] {
              const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM, 0));
              return ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address),
                               sizeof address) == 0
                         ? std::string("connected")
                         : std::string(std::strerror(errno));
            }),
            "Permission denied");
}

TEST_F(OtherUser, Row44TheAgentTurnsItAwayByItsCredentials) {
  open_all_doors();
  const auto address = path_address(socket());
  const std::string said = as_nobody([&] {
    const UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM, 0));
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0) {
      return std::string(std::strerror(errno));
    }
    return read_to_end(fd.get());
  });
  EXPECT_THAT(said, AllOf(HasSubstr("runs as uid 65534"), HasSubstr("we are uid 0")));
  EXPECT_TRUE(fleet_.agent("a").process->wait_for_err("rpc.refused"));
}

TEST_F(OtherUser, ItsCommandRefusesTheAgentOfAnotherUser) {
  open_all_doors();
  const fs::path binary = fleet_.dir("rekindle");  // where nobody may run it
  fs::copy_file(REKINDLE_BINARY, binary);
  fs::permissions(binary, fs::perms(0755));
  const auto ask = [&] {
    return run({"setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", binary.string(),
                "status", "--store", store().string()});
  };
  const auto refused = ask();
  EXPECT_EQ(refused.exit.code, 7) << refused.err;
  EXPECT_THAT(refused.err, AllOf(HasSubstr("uid 0"), HasSubstr("uid 65534")));
  fs::permissions(directory(), fs::perms(0700));
  const auto locked_out = ask();
  EXPECT_EQ(locked_out.exit.code, 7) << locked_out.err;
  EXPECT_THAT(locked_out.err, AllOf(HasSubstr(socket().string()), HasSubstr("Permission denied")));
}

// Its file and directory are ours, but somebody else listens.
TEST_F(OtherUser, Row44AThiefOnTheSocketIsRecognised) {
  fleet_.agent("a").process->kill();
  fs::remove(socket());
  const auto address = path_address(socket());
  UniqueFd listener(::socket(AF_UNIX, SOCK_STREAM, 0));
  ASSERT_EQ(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  int ready[2];
  ASSERT_EQ(::pipe2(ready, O_CLOEXEC), 0);
  const pid_t thief = ::fork();
  if (thief == 0) {
    // The credentials that a caller sees are those of the process that called listen().
    const bool ok = become_nobody() && ::listen(listener.get(), 8) == 0;
    (void)!::write(ready[1], ok ? "1" : "0", 1);
    ::pause();
  }
  char ok = 0;
  ASSERT_EQ(::read(ready[0], &ok, 1), 1);
  EXPECT_EQ(ok, '1');
  const auto told = status();
  const auto published = publish();
  ::kill(thief, SIGKILL);
  ::waitpid(thief, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
  EXPECT_EQ(told.exit.code, 7) << told.err;
  EXPECT_THAT(told.err, HasSubstr("runs as uid 65534"));
  EXPECT_EQ(published.exit.code, 7) << published.err;
  EXPECT_THAT(published.err, HasSubstr("runs as uid 65534"));
}

// The shm transport's socket has no file that could protect it.
TEST_F(OtherUser, TheShmSocketGivesItNothing) {
  const AbstractAddress address = shm_socket_of(fleet_.agent("a").process->pid());
  ASSERT_GT(address.length, 0u) << "no abstract socket found";
  const auto talk = [&]() -> std::string {
    const UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET, 0));
    if (::connect(fd.get(), address.get(), address.length) != 0) {
      return std::strerror(errno);
    }
    // Of another life: the answer is a refusal, but an answer.
    const transport::shm::ClientHello hello{.token = {}, .incarnation = {}};
    (void)!::send(fd.get(), &hello, sizeof hello, MSG_NOSIGNAL);
    return std::to_string(read_to_end(fd.get()).size()) + " bytes";
  };
  EXPECT_EQ(as_nobody(talk), "0 bytes");
  EXPECT_EQ(talk(), std::to_string(sizeof(transport::shm::ServerHello)) + " bytes");
}

}  // namespace
}  // namespace rekindle::testing
