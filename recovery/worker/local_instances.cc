#include "recovery/worker/local_instances.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "src/base/log.h"
#include "src/base/unique_fd.h"

namespace rekindle::worker {

namespace fs = std::filesystem;

namespace {

constexpr std::size_t kMostInstances = 4096;

}  // namespace

Result<ReadyFiles> ReadyFiles::open(const fs::path& directory) {
  if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    return fail_errno(errno, fmt::format("create {}", directory.string()));
  }
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(directory, error)) {
    std::error_code ignored;
    fs::remove(entry.path(), ignored);
    if (ignored) {
      return fail_errno(ignored.value(), fmt::format("remove {}", entry.path().string()));
    }
  }
  if (error) return fail_errno(error.value(), fmt::format("list {}", directory.string()));
  return ReadyFiles(directory);
}

Result<void> ReadyFiles::write(const std::string& instance, std::string_view line) const {
  const fs::path path = directory_ / instance;
  const fs::path aside = directory_ / ("." + instance + ".new");
  const UniqueFd fd(::open(aside.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!fd) return fail_errno(errno, fmt::format("create {}", aside.string()));
  const std::string text = std::string(line) + "\n";
  const auto written = ::write(fd.get(), text.data(), text.size());
  if (written != static_cast<ssize_t>(text.size())) {
    const int why = written < 0 ? errno : ENOSPC;
    ::unlink(aside.c_str());
    return fail_errno(why, fmt::format("write {}", aside.string()));
  }
  if (::rename(aside.c_str(), path.c_str()) != 0) {
    return fail_errno(errno, fmt::format("rename {}", aside.string()));
  }
  return {};
}

Result<void> ReadyFiles::remove(const std::string& instance) const {
  const fs::path path = directory_ / instance;
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) {
    return fail_errno(errno, fmt::format("remove {}", path.string()));
  }
  return {};
}

// Each name costs memory. Instances without a rank here make room, the least recently used first.
Result<void> LocalInstances::make_room() {
  if (entries_.size() < kMostInstances) return {};
  auto oldest = entries_.end();
  for (auto it = entries_.begin(); it != entries_.end(); ++it) {
    if (it->second->state.has_sessions()) continue;
    if (oldest == entries_.end() || it->second->last_use < oldest->second->last_use) oldest = it;
  }
  if (oldest == entries_.end()) {
    return fail(ErrorCode::kExhausted, "{} instances have workers here; no more are taken",
                kMostInstances);
  }
  board_.remove(oldest->first);
  entries_.erase(oldest);
  return {};
}

Result<LocalInstances::Entry*> LocalInstances::get(const std::string& name, SessionId session) {
  const bool named = !name.empty();
  // No worker can give this name: it is not valid.
  const std::string key = named ? name : fmt::format("(session {})", session);
  if (named) TRY_VOID(check_instance_name(name));
  auto found = entries_.find(key);
  if (found == entries_.end()) {
    TRY_VOID(make_room());
    found = entries_.emplace(key, std::make_unique<Entry>(Entry{Instance(key), named})).first;
  }
  found->second->last_use = ++uses_;
  return found->second.get();
}

LocalInstances::Entry* LocalInstances::find(const std::string& key) const {
  const auto found = entries_.find(key);
  return found == entries_.end() ? nullptr : found->second.get();
}

void LocalInstances::take_back(Entry& entry) {
  if (!entry.named) return;
  const std::string& name = entry.state.name();
  auto readiness = readiness_of(entry.state);
  if (readiness.ready()) return;
  if (std::exchange(entry.announced, false)) {
    if (auto removed = files_.remove(name); !removed) {
      log::error("instance.ready_file", "instance", name, "error", removed.error().message());
    }
    log::warn("instance.unfit", "instance", name, "why", readiness.why);
    note(entry, "unfit", readiness);
  }
  board_.set(name, std::move(readiness));
}

void LocalInstances::settle(Entry& entry) {
  const std::string name = entry.state.name();
  const bool absent = entry.state.state() == InstanceState::kAbsent;
  if (absent || (!entry.named && !entry.state.has_sessions())) {
    board_.remove(name);
    entries_.erase(name);
    return;
  }
  if (!entry.named) return;
  if (entry.state.has_sessions()) {
    entry.idle_since = TimePoint::max();
  } else if (entry.idle_since == TimePoint::max()) {
    entry.idle_since = steady_now();
  }
  auto readiness = readiness_of(entry.state);
  if (readiness.ready() && !std::exchange(entry.announced, true)) {
    if (auto written = files_.write(name, to_json_line(name, readiness)); !written) {
      log::error("instance.ready_file", "instance", name, "error", written.error().message());
    }
    log::info("instance.ready", "instance", name, "version",
              readiness.version ? readiness.version->to_string() : "?", "generation",
              readiness.generation, "ranks", readiness.world);
    note(entry, "ready", readiness);
  }
  board_.set(name, std::move(readiness));
}

void LocalInstances::forget_idle(TimePoint now, Duration after) {
  std::erase_if(entries_, [&](const auto& item) {
    const Entry& entry = *item.second;
    if (entry.idle_since == TimePoint::max() || now - entry.idle_since < after) return false;
    log::info("instance.forgotten", "instance", item.first, "why", entry.state.why());
    note(entry, "forgotten", readiness_of(entry.state));
    board_.remove(item.first);
    return true;
  });
}

bool LocalInstances::any_idle() const {
  return std::ranges::any_of(
      entries_, [](const auto& item) { return item.second->idle_since != TimePoint::max(); });
}

void LocalInstances::note(const Entry& entry, const char* kind, const Readiness& readiness) {
  Event event;
  event.kind = kind;
  event.instance = entry.state.name();
  event.version = readiness.version;
  event.why = readiness.why;
  events_.add(std::move(event));
}

}  // namespace rekindle::worker
