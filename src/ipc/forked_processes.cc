#include "src/ipc/forked_processes.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include <sys/stat.h>

#include <fmt/format.h>

namespace rekindle::ipc {

namespace {

std::optional<FileId> id_of(const char* path) {
  struct stat info {};
  if (::stat(path, &info) != 0) return std::nullopt;
  return FileId{info.st_dev, info.st_ino};
}

bool has_open(pid_t pid, std::span<const FileId> files) {
  std::error_code error;
  const std::filesystem::directory_iterator open(fmt::format("/proc/{}/fd", pid), error);
  for (auto at = begin(open); !error && at != end(open); at.increment(error)) {
    std::error_code closed;
    const std::string target = std::filesystem::read_symlink(at->path(), closed).string();
    if (target.starts_with("/dev/nvidia")) return true;
    const auto id = id_of(at->path().c_str());
    if (id && std::ranges::find(files, *id) != files.end()) return true;
  }
  return false;
}

}  // namespace

std::optional<Lineage> lineage_of(pid_t pid) {
  std::ifstream file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  if (!std::getline(file, text)) return std::nullopt;
  // The words after the name of the program are the fields from the third on: proc(5).
  const std::size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return std::nullopt;
  std::istringstream words(text.substr(name_end + 1));
  std::string state;
  words >> state;
  if (state == "Z" || state == "X") return std::nullopt;
  Lineage found;
  std::string word;
  for (int number = 4; number <= 50 && words >> word; ++number) {
    std::uint64_t* const wanted = number == 22   ? &found.started
                                  : number == 28 ? &found.stack
                                  : number == 48 ? &found.arguments
                                  : number == 50 ? &found.environment
                                                 : nullptr;
    if (wanted != nullptr) (void)std::from_chars(word.data(), word.data() + word.size(), *wanted);
  }
  if (found.stack == 0 || found.arguments == 0 || found.environment == 0) return std::nullopt;
  return found;
}

std::vector<FileId> ids_of(std::span<const UniqueFd> files) {
  std::vector<FileId> ids;
  for (const UniqueFd& file : files) {
    if (const auto id = id_of(fmt::format("/proc/self/fd/{}", file.get()).c_str())) {
      ids.push_back(*id);
    }
  }
  return ids;
}

std::optional<pid_t> find_heir(const Lineage& parent, std::span<const FileId> files,
                               const std::function<bool(pid_t)>& is_other) {
  std::error_code error;
  const std::filesystem::directory_iterator processes("/proc", error);
  for (auto at = begin(processes); !error && at != end(processes); at.increment(error)) {
    const std::string name = at->path().filename().string();
    pid_t pid = 0;
    const auto parsed = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (parsed.ec != std::errc() || parsed.ptr != name.data() + name.size()) continue;
    const auto lineage = lineage_of(pid);
    const bool related =
        lineage && lineage->stack == parent.stack && lineage->arguments == parent.arguments &&
        lineage->environment == parent.environment && lineage->started >= parent.started;
    if (related && has_open(pid, files) && !is_other(pid)) return pid;
  }
  return std::nullopt;
}

}  // namespace rekindle::ipc
