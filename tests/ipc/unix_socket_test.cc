#include "src/ipc/unix_socket.h"

#include <filesystem>

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/ipc/socket_pair.h"
#include "tests/support/process.h"

namespace rekindle::ipc {
namespace {

using namespace rekindle::ipc::testing;  // NOLINT(google-build-using-namespace)
using rekindle::testing::TempDir;
using ::testing::HasSubstr;

class UnixSocket : public ::testing::Test {
 protected:
  UnixSocket() { ::chmod(directory_.path().c_str(), 0700); }
  std::string path() const { return directory_ / "agent.sock"; }
  TempDir directory_;
};

TEST_F(UnixSocket, ConnectsAndKnowsThePeer) {
  auto listener = listen_unix_socket(path());
  ASSERT_TRUE(listener) << listener.error().message();
  ASSERT_TRUE(check_unix_path(path()));
  auto client = connect_unix_socket(path(), soon());
  ASSERT_TRUE(client) << client.error().message();
  const UniqueFd accepted(::accept4(listener->get(), nullptr, nullptr, SOCK_CLOEXEC));
  ASSERT_TRUE(accepted);
  for (const int end : {client->get(), accepted.get()}) {
    auto peer = peer_of(end);
    ASSERT_TRUE(peer) << peer.error().message();
    EXPECT_EQ(peer->pid, ::getpid());
    EXPECT_EQ(peer->uid, ::geteuid());
    EXPECT_TRUE(peer->pidfd);
    EXPECT_TRUE(check_peer(*peer, {}, path()));
  }
}

TEST_F(UnixSocket, AnotherUidIsDeniedUnlessAllowed) {
  const uid_t other = ::geteuid() + 1;
  const Peer peer{42, other, {}};
  auto denied = check_peer(peer, {}, "worker.sock");
  ASSERT_FALSE(denied);
  EXPECT_EQ(denied.error().code(), ErrorCode::kDenied);
  EXPECT_THAT(denied.error().message(), HasSubstr("worker.sock"));
  EXPECT_TRUE(check_peer(peer, std::vector<uid_t>{other}, "worker.sock"));
}

TEST_F(UnixSocket, ADirectoryThatOthersCanReadOrWriteIsRefusedAtBothEnds) {
  auto listener = listen_unix_socket(path());
  ASSERT_TRUE(listener);
  for (const mode_t mode : {0755u, 0722u, 0750u, 0702u}) {
    ASSERT_EQ(::chmod(directory_.path().c_str(), mode), 0);
    EXPECT_EQ(check_unix_path(path()).error().code(), ErrorCode::kDenied) << mode;
    EXPECT_EQ(listen_unix_socket(path()).error().code(), ErrorCode::kDenied) << mode;
  }
}

TEST_F(UnixSocket, OnlyTheSocketThatIsOpenedCanBeConnectedToByOthers) {
  const std::string closed = directory_ / "closed.sock";
  auto other = listen_unix_socket(closed);
  auto listener = listen_unix_socket(path());
  ASSERT_TRUE(other && listener);
  const std::vector<std::string> directories{directory_.path().string()};
  const auto mode = [](const std::string& of) {
    struct stat info {};
    return ::stat(of.c_str(), &info) == 0 ? info.st_mode & 07777 : 0;
  };
  ASSERT_TRUE(open_to_others(path(), directories));
  EXPECT_EQ(mode(directories.front()), 0711u);
  EXPECT_EQ(mode(path()), 0666u);
  EXPECT_EQ(mode(closed), 0600u);
  EXPECT_TRUE(check_unix_path(path()));
  ASSERT_TRUE(close_to_others(directories));
  EXPECT_EQ(mode(directories.front()), 0700u);
}

TEST_F(UnixSocket, ALinkToADirectoryIsRefused) {
  const auto link = directory_ / "link";
  std::filesystem::create_directory(directory_ / "real");
  ::chmod((directory_ / "real").c_str(), 0700);
  std::filesystem::create_directory_symlink(directory_ / "real", link);
  EXPECT_EQ(listen_unix_socket((link / "agent.sock").string()).error().code(), ErrorCode::kDenied);
}

TEST_F(UnixSocket, ADeadSocketIsReplacedALiveOneIsNot) {
  {
    auto listener = listen_unix_socket(path());
    ASSERT_TRUE(listener);
    EXPECT_EQ(listen_unix_socket(path()).error().code(), ErrorCode::kUnavailable);
  }
  auto dead = connect_unix_socket(path(), soon());
  ASSERT_FALSE(dead);
  EXPECT_EQ(dead.error().code(), ErrorCode::kUnavailable);
  auto again = listen_unix_socket(path());
  ASSERT_TRUE(again) << again.error().message();
  EXPECT_TRUE(connect_unix_socket(path(), soon()));
}

TEST_F(UnixSocket, AFileInTheWayIsNotRemoved) {
  rekindle::testing::write_file(path(), "precious");
  EXPECT_EQ(listen_unix_socket(path()).error().code(), ErrorCode::kDenied);
  EXPECT_EQ(check_unix_path(path()).error().code(), ErrorCode::kDenied);
  EXPECT_EQ(rekindle::testing::read_file(path()), "precious");
}

TEST_F(UnixSocket, PathsThatDoNotFitAreInvalid) {
  EXPECT_EQ(unix_address("").error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(unix_address(std::string(108, 'x')).error().code(), ErrorCode::kInvalid);
  EXPECT_TRUE(unix_address(std::string(107, 'x')));
}

TEST_F(UnixSocket, NothingThereIsNotFound) {
  EXPECT_EQ(check_unix_path(path()).error().code(), ErrorCode::kNotFound);
  EXPECT_EQ(connect_unix_socket(path(), soon()).error().code(), ErrorCode::kUnavailable);
}

TEST_F(UnixSocket, AFullQueueEndsAtTheDeadline) {
  auto listener = listen_unix_socket(path());
  ASSERT_TRUE(listener);
  // Room for one connection.
  ASSERT_EQ(::listen(listener->get(), 0), 0);
  std::vector<UniqueFd> queued;
  Error last(ErrorCode::kInternal, "");
  for (int i = 0; i < 64; ++i) {
    auto fd = connect_unix_socket(path(), SteadyClock().now());
    if (!fd) {
      last = fd.error();
      break;
    }
    queued.push_back(std::move(*fd));
  }
  EXPECT_EQ(last.code(), ErrorCode::kTimeout) << last.message();
}

}  // namespace
}  // namespace rekindle::ipc
