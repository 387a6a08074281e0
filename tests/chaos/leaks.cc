#include "tests/chaos/leaks.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <sstream>

#include <unistd.h>

#include "tests/support/process.h"

namespace rekindle::testing::chaos {

namespace fs = std::filesystem;

namespace {

int entries_of(const fs::path& directory) {
  std::error_code gone;
  int count = 0;
  for (fs::directory_iterator item(directory, gone), end; !gone && item != end;
       item.increment(gone)) {
    ++count;
  }
  return count;
}

}  // namespace

Holdings holdings_of(pid_t pid) {
  const fs::path process = "/proc/" + std::to_string(pid);
  Holdings all;
  all.descriptors = entries_of(process / "fd");
  all.threads = entries_of(process / "task");
  std::ifstream maps(process / "maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream fields(line);
    std::string range, rights, offset, device;
    std::uint64_t inode = 0;
    fields >> range >> rights >> offset >> device >> inode;
    if (inode != 0) ++all.mappings;
  }
  return all;
}

std::vector<std::string> unfinished_files(const fs::path& store) {
  std::vector<std::string> found;
  std::error_code gone;
  for (fs::recursive_directory_iterator item(store, gone), end; !gone && item != end;
       item.increment(gone)) {
    const fs::path relative = item->path().lexically_relative(store);
    const bool staged = relative.begin() != relative.end() && *relative.begin() == "staging" &&
                        relative != "staging";
    if (staged || relative.extension() == ".partial" || relative.filename() == "rekindle.resume") {
      found.push_back(relative.string());
    }
  }
  return found;
}

std::vector<std::string> processes_that_name(const fs::path& path) {
  std::vector<std::string> found;
  std::error_code gone;
  for (fs::directory_iterator item("/proc", gone), end; !gone && item != end;
       item.increment(gone)) {
    const std::string pid = item->path().filename().string();
    if (pid.find_first_not_of("0123456789") != std::string::npos) continue;
    if (pid == std::to_string(::getpid())) continue;
    std::ifstream file(item->path() / "cmdline", std::ios::binary);
    std::string line((std::istreambuf_iterator<char>(file)), {});
    std::replace(line.begin(), line.end(), '\0', ' ');
    if (line.find(path.string()) != std::string::npos) found.push_back(pid + " " + line);
  }
  return found;
}

}  // namespace rekindle::testing::chaos
