#include "recovery/worker/instances.h"

#include <algorithm>
#include <utility>

#include "src/base/log.h"

namespace rekindle::worker {

namespace {

constexpr std::size_t kMostInstances = 4096;

}  // namespace

// Names cost memory; those that nobody uses any more make room, the oldest first.
Result<void> Instances::make_room() {
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

Result<Instances::Entry*> Instances::get(const std::string& name, SessionId session) {
  const bool named = !name.empty();
  // A name that cannot be given by a worker.
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

void Instances::take_back(Entry& entry) {
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

void Instances::settle(Entry& entry) {
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
    entry.idle_since = SteadyClock().now();
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

void Instances::forget_idle(TimePoint now, Duration after) {
  std::erase_if(entries_, [&](const auto& item) {
    const Entry& entry = *item.second;
    if (entry.idle_since == TimePoint::max() || now - entry.idle_since < after) return false;
    log::info("instance.forgotten", "instance", item.first, "why", entry.state.why());
    note(entry, "forgotten", readiness_of(entry.state));
    board_.remove(item.first);
    return true;
  });
}

bool Instances::any_idle() const {
  return std::ranges::any_of(
      entries_, [](const auto& item) { return item.second->idle_since != TimePoint::max(); });
}

void Instances::note(const Entry& entry, const char* kind, const Readiness& readiness) {
  Event event;
  event.kind = kind;
  event.instance = entry.state.name();
  event.version = readiness.version;
  event.why = readiness.why;
  events_.add(std::move(event));
}

}  // namespace rekindle::worker
