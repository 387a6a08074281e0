#include "src/base/way.h"

#include <cstdint>
#include <deque>
#include <fstream>
#include <optional>
#include <system_error>
#include <utility>

#include <unistd.h>

namespace rekindle {

namespace {

namespace fs = std::filesystem;

// As many as the kernel follows.
constexpr int kMostLinks = 40;

// nullopt: this process is in no user namespace, where this user is one like others.
std::optional<uid_t> unknown_user() {
  std::uint64_t inside = 0, outside = 0, count = 0;
  std::ifstream("/proc/self/uid_map") >> inside >> outside >> count;
  constexpr std::uint64_t kAllUsers = 0xffffffff;
  if (inside == 0 && outside == 0 && count == kAllUsers) return std::nullopt;
  constexpr uid_t kUsual = 65534;
  uid_t uid = kUsual;
  std::ifstream("/proc/sys/kernel/overflowuid") >> uid;
  return uid;
}

void put_before(std::deque<fs::path>& rest, const fs::path& path) {
  std::deque<fs::path> parts;
  for (const fs::path& part : path) {
    if (!part.empty() && part != ".") parts.push_back(part);
  }
  rest.insert(rest.begin(), parts.begin(), parts.end());
}

}  // namespace

bool is_foreign(const struct stat& status) {
  if (status.st_uid == 0 || status.st_uid == ::geteuid()) return false;
  return unknown_user() != status.st_uid;
}

Result<void> check_way(const fs::path& path, const WayCheck& check) {
  std::error_code error;
  std::deque<fs::path> rest;
  put_before(rest, fs::absolute(path, error));
  fs::path at = "/";
  struct stat root {};
  if (::lstat(at.c_str(), &root) == 0) TRY_VOID(check(at, root));
  int links = 0;
  while (!rest.empty()) {
    const fs::path part = std::exchange(rest.front(), {});
    rest.pop_front();
    const fs::path next = part == ".." ? at.parent_path() : at / part;
    struct stat status {};
    if (::lstat(next.c_str(), &status) != 0) return {};
    const bool is_link = S_ISLNK(status.st_mode);
    if (is_link || !rest.empty()) TRY_VOID(check(next, status));
    if (!is_link) {
      at = next;
      continue;
    }
    if (++links > kMostLinks) {
      return fail(ErrorCode::kInvalid, "{}: too many symbolic links", path.string());
    }
    put_before(rest, fs::read_symlink(next, error));
    if (error) return {};
  }
  return {};
}

}  // namespace rekindle
