#include "recovery/coordinator/core/fleet_watch.h"

#include <algorithm>
#include <array>
#include <utility>

#include <fmt/format.h>

namespace rekindle::coordinator {

namespace {

// Whether a version is covered is a question to every node.
constexpr Duration kCoverageEvery = std::chrono::seconds(1);

std::uint64_t microseconds(Duration duration) {
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(duration).count();
  return static_cast<std::uint64_t>(std::max<std::int64_t>(us, 0));
}

std::string outcome_of(const Round& round) {
  std::size_t ready = 0;
  std::size_t failed = 0;
  for (const RoundPlace& place : round.places()) {
    if (place.state == PlaceState::kReady) ++ready;
    if (place.state == PlaceState::kFailed) ++failed;
  }
  return failed == 0 ? fmt::format("{} ready", ready)
                     : fmt::format("{} ready, {} failed", ready, failed);
}

}  // namespace

void FleetWatch::add(std::string kind, WallTime at, FleetEvent event) {
  event.kind = std::move(kind);
  event.at = at;
  log_.add(std::move(event));
}

void FleetWatch::look(const Core& core, TimePoint now, WallTime at) {
  if (!begun_) {
    add("coordinator_leads", at, {.why = fmt::format("epoch {}", core.fleet().epoch())});
    for (const ModelVersion& id : core.fleet().catalog.live()) {
      versions_[id] = {core.readiness().state_of(id), core.fleet().catalog.find(id)->ready};
    }
    begun_ = true;
  }
  look_at_nodes(core, now, at);
  look_at_versions(core, now, at);
  look_at_retiring(core, at);
  look_at_pulls(core, now, at);
  look_at_rounds(core, at);
}

void FleetWatch::look_at_nodes(const Core& core, TimePoint now, WallTime at) {
  const auto& members = core.fleet().members.all();
  for (auto it = nodes_.begin(); it != nodes_.end();) {
    if (members.contains(it->first)) {
      ++it;
      continue;
    }
    told_.erase(it->first);
    it = nodes_.erase(it);
  }
  for (const auto& [node_id, member] : members) {
    look_at_node(member, state_name(member, now), core.fleet().drained(node_id), at);
  }
}

void FleetWatch::look_at_node(const Member& member, std::string_view state, bool drained,
                              WallTime at) {
  const auto [found, is_new] =
      nodes_.try_emplace(member.info.node_id, SeenNode{member.info.incarnation, state, drained});
  SeenNode& seen = found->second;
  const FleetEvent about{.node_id = member.info.node_id};
  if (is_new) {
    FleetEvent joined = about;
    joined.why = member.info.control_endpoint;
    add("node_joined", at, std::move(joined));
  } else if (seen.incarnation != member.info.incarnation) {
    FleetEvent back = about;
    back.why = "another process";
    seen = {member.info.incarnation, "alive", seen.drained};
    add("node_back", at, std::move(back));
  }
  if (const std::string_view before = std::exchange(seen.state, state); before != state) {
    add(state == "alive" ? "node_back" : fmt::format("node_{}", state), at, about);
  }
  if (std::exchange(seen.drained, drained) != drained) {
    add(drained ? "node_drained" : "node_undrained", at, about);
  }
}

void FleetWatch::look_at_versions(const Core& core, TimePoint now, WallTime at) {
  const auto& live = core.fleet().catalog.live();
  for (auto it = versions_.begin(); it != versions_.end();) {
    if (live.contains(it->first)) {
      ++it;
      continue;
    }
    add("version_retiring", at, {.id = it->first});
    retiring_.push_back(it->first);
    it = versions_.erase(it);
  }
  const bool look_at_coverage = now >= next_coverage_;
  if (look_at_coverage) next_coverage_ = now + kCoverageEvery;
  for (const ModelVersion& id : live) {
    const DurableVersion& version = *core.fleet().catalog.find(id);
    const auto [found, is_new] = versions_.try_emplace(id);
    SeenVersion& seen = found->second;
    if (is_new) {
      std::erase(retiring_, id);
      add("version_published", at, {.id = id, .bytes = version.checkpoint_bytes});
    }
    const bool was_marked = std::exchange(seen.marked_ready, version.ready);
    if (!look_at_coverage && !is_new && was_marked == version.ready) continue;
    const VersionState state = core.readiness().state_of(id);
    if (std::exchange(seen.state, state) == state) continue;
    add(state == VersionState::kReady ? "version_ready" : "version_not_ready", at, {.id = id});
  }
}

void FleetWatch::look_at_retiring(const Core& core, WallTime at) {
  if (retiring_.empty()) return;
  ModelVersion id = std::move(retiring_.front());
  retiring_.pop_front();
  const bool held = std::ranges::any_of(core.fleet().members.all(), [&](const auto& entry) {
    return entry.second.holdings.holds(id);
  });
  if (held) {
    retiring_.push_back(std::move(id));
  } else {
    add("version_retired", at, {.id = std::move(id)});
  }
}

void FleetWatch::open(const PullId& id, const Pull& pull, WallTime at) {
  pulls_[id] = {pull.puller.node_id, pull.id, pull.opened, pull.bytes_done};
  add("pull_opened", at,
      {.node_id = pull.puller.node_id, .id = pull.id, .pull_id = id, .why = pull.shard});
}

void FleetWatch::end(const PullId& id, const SeenPull& pull, std::string kind, std::string why,
                     TimePoint now, WallTime at) {
  add(std::move(kind), at,
      {.node_id = pull.puller,
       .id = pull.id,
       .pull_id = id,
       .why = std::move(why),
       .bytes = pull.bytes_done,
       .elapsed_us = microseconds(now - pull.opened)});
}

void FleetWatch::look_at_pulls(const Core& core, TimePoint now, WallTime at) {
  const auto& open_pulls = core.pulls().table().all();
  for (auto it = pulls_.begin(); it != pulls_.end();) {
    if (open_pulls.contains(it->first)) {
      ++it;
      continue;
    }
    end(it->first, it->second, "pull_lost", "its puller reports no more", now, at);
    it = pulls_.erase(it);
  }
  for (const auto& [id, pull] : open_pulls) {
    const auto seen = pulls_.find(id);
    if (seen == pulls_.end()) {
      open(id, pull, at);
    } else {
      seen->second.bytes_done = pull.bytes_done;
    }
  }
}

void FleetWatch::pull_closes(const Core& core, const PullId& id, const Incarnation& puller,
                             const std::string& why, TimePoint now, WallTime at) {
  const auto& open_pulls = core.pulls().table().all();
  const auto pull = open_pulls.find(id);
  if (pull == open_pulls.end() || pull->second.puller.incarnation != puller) return;
  if (!pulls_.contains(id)) open(id, pull->second, at);
  SeenPull seen = pulls_.extract(id).mapped();
  seen.bytes_done = pull->second.bytes_done;
  // The last report of a pull that succeeded may be older than its last bytes.
  if (why.empty()) seen.bytes_done = std::max(seen.bytes_done, pull->second.bytes_total);
  end(id, seen, why.empty() ? "pull_done" : "pull_failed", why, now, at);
}

void FleetWatch::look_at_rounds(const Core& core, WallTime at) {
  const auto& rounds = core.rounds().all();
  std::erase_if(rounds_, [&](const auto& seen) { return !rounds.contains(seen.first); });
  for (const auto& [number, round] : rounds) {
    const FleetEvent about{.id = round.id(), .round = number, .instance = round.group()};
    const auto [seen, is_new] = rounds_.try_emplace(number, false);
    if (is_new) add("round_begun", at, about);
    if (!round.over() || std::exchange(seen->second, true)) continue;
    FleetEvent over = about;
    over.why = outcome_of(round);
    Duration took{};
    for (const auto& [phase, duration] : round.took()) {
      took += duration;
      over.phases.push_back({std::string(to_string(phase)), microseconds(duration)});
    }
    over.elapsed_us = microseconds(took);
    add("round_over", at, std::move(over));
  }
}

bool FleetWatch::is_kind_of_coordinator(std::string_view kind) {
  constexpr std::array<std::string_view, 5> kPrefixes{"coordinator_", "node_", "pull_", "round_",
                                                      "version_"};
  return std::ranges::any_of(kPrefixes,
                             [&](std::string_view prefix) { return kind.starts_with(prefix); });
}

void FleetWatch::told(const std::string& node_id, const Incarnation& incarnation,
                      std::vector<FleetEvent> events) {
  Told& before = told_[node_id];
  if (before.incarnation != incarnation) before = {incarnation, 0};
  for (FleetEvent& event : events) {
    if (event.number <= before.number) continue;
    before.number = event.number;
    event.node_id = node_id;
    log_.add(std::move(event));
  }
}

}  // namespace rekindle::coordinator
