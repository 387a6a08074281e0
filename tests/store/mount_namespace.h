#pragma once

#include <filesystem>
#include <fstream>
#include <string>

#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace rekindle::store {

inline constexpr int kCannotMount = 77;

inline bool write_text(const char* path, const std::string& text) {
  std::ofstream out(path);
  out << text;
  out.flush();
  return out.good();
}

inline bool mount_small_tmpfs(const std::filesystem::path& at) {
  const uid_t uid = ::getuid();
  const gid_t gid = ::getgid();
  if (::unshare(CLONE_NEWNS) != 0) {
    if (::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    if (!write_text("/proc/self/setgroups", "deny") ||
        !write_text("/proc/self/uid_map", fmt::format("{} {} 1", uid, uid)) ||
        !write_text("/proc/self/gid_map", fmt::format("{} {} 1", gid, gid))) {
      return false;
    }
  }
  return ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("tmpfs", at.c_str(), "tmpfs", 0, "size=20m,mode=0700") == 0;
}

// Runs in a child that has a tmpfs of 20 MiB at `small`.
template <typename Body>
void on_small_tmpfs(const std::filesystem::path& small, Body body) {
  std::filesystem::create_directory(small);
  const pid_t child = ::fork();
  if (child == 0) {
    if (!mount_small_tmpfs(small)) ::_exit(kCannotMount);
    body();
    ::_exit(::testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status)) << "signal " << WTERMSIG(status);
  if (WEXITSTATUS(status) == kCannotMount) GTEST_SKIP() << "mount namespaces are not allowed here";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace rekindle::store
