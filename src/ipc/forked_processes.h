#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <sys/types.h>

#include "src/base/unique_fd.h"

// Processes that were forked and keep open what their parent had open, also after its death.
namespace rekindle::ipc {

// The kernel chooses these addresses at random for each exec(), and fork() copies them. So they
// tell forked processes of one program run.
struct Lineage {
  std::uint64_t stack = 0;
  std::uint64_t arguments = 0;
  std::uint64_t environment = 0;
  // In ticks since the boot.
  std::uint64_t started = 0;
};
// nullopt: the process has ended, or this one may not see its addresses.
std::optional<Lineage> lineage_of(pid_t pid);

// Names a file for as long as anybody has it open.
using FileId = std::pair<dev_t, ino_t>;
std::vector<FileId> ids_of(std::span<const UniqueFd> files);

// A living process of the same program run that started after `parent`, and has one of `files` or a
// file of NVIDIA's driver open. nullopt: there is none. `is_other`: whether a process does other
// work and does not count.
std::optional<pid_t> find_heir(const Lineage& parent, std::span<const FileId> files,
                               const std::function<bool(pid_t)>& is_other);

}  // namespace rekindle::ipc
