#include "recovery/coordinator/core/instances.h"

#include <algorithm>
#include <utility>

namespace rekindle::coordinator {

namespace {

constexpr std::size_t kMaxNameBytes = 200;
constexpr Duration kInstancesLookEvery = std::chrono::milliseconds(100);

bool is_lost(RankState state) { return state == RankState::kFailed || state == RankState::kGone; }

std::string describe(std::uint32_t rank, const Instance::Rank& state) {
  return fmt::format("rank {} on {}: {}", rank, state.node_id,
                     state.why.empty() ? "it failed" : state.why);
}

}  // namespace

Result<void> Instances::check(const RankReport& report) const {
  if (report.instance.empty() || report.instance.size() > kMaxNameBytes) {
    return fail(ErrorCode::kInvalid, "an instance's name has 1 to {} bytes, this one {}",
                kMaxNameBytes, report.instance.size());
  }
  if (report.world == 0 || report.world > limits_.max_world || report.rank >= report.world) {
    return fail(ErrorCode::kInvalid,
                "instance '{}': rank {} of {}; ranks are 0 to world-1, at most {}", report.instance,
                report.rank, report.world, limits_.max_world);
  }
  return {};
}

Result<void> Instances::check_same(const Instance& instance, const RankReport& report) {
  if (report.world != instance.world) {
    return fail(
        ErrorCode::kDenied,
        "instance '{}' generation {} has {} ranks; rank {} says {}: start all with the same "
        "world",
        report.instance, instance.generation, instance.world, report.rank, report.world);
  }
  const ModelVersion wanted{report.model, report.version.value_or(instance.id.version)};
  if (wanted != instance.id) {
    return fail(ErrorCode::kDenied,
                "instance '{}' generation {} serves {}; rank {} wants {}: use a new generation",
                report.instance, instance.generation, instance.id.to_string(), report.rank,
                wanted.to_string());
  }
  return {};
}

Result<Instance*> Instances::find_or_begin(const RankReport& report, const Resolve& resolve,
                                           bool grace, TimePoint now) {
  const auto found = instances_.find(report.instance);
  if (found != instances_.end()) {
    Instance& instance = found->second;
    if (report.generation < instance.generation) {
      return fail(ErrorCode::kStale,
                  "instance '{}' is at generation {}; rank {} of generation {} is of the past",
                  report.instance, instance.generation, report.rank, report.generation);
    }
    if (report.generation == instance.generation) return &instance;
  }
  if (is_lost(report.state)) {
    return fail(ErrorCode::kNotFound, "instance '{}' generation {} is not known", report.instance,
                report.generation);
  }
  Instance fresh;
  if (report.has) {
    // An earlier life of this coordinator resolved it.
    fresh.id = *report.has;
  } else if (grace && !report.version) {
    return fail(
        ErrorCode::kUnavailable,
        "instance '{}' generation {}: the coordinator has just started, other ranks may know "
        "the version; retry",
        report.instance, report.generation);
  } else {
    TRY(fresh.id, resolve());
  }
  fresh.generation = report.generation;
  fresh.world = report.world;
  fresh.last_heard = now;
  // A report that contradicts itself neither begins an instance nor ends the generation before.
  TRY_VOID(check_same(fresh, report));
  fresh.home = report.node_id;
  TRY_VOID(enter(fresh.home));
  if (found != instances_.end()) leave(found->second.home);
  Instance& instance = instances_[report.instance];
  instance = std::move(fresh);
  return &instance;
}

Result<void> Instances::enter(const std::string& home) {
  const std::size_t limit =
      home.empty() ? limits_.max_spanning_instances : limits_.max_instances_per_node;
  const auto found = counts_.find(home);
  if (found != counts_.end() && found->second >= limit) {
    if (home.empty()) {
      return fail(ErrorCode::kExhausted, "the coordinator has its {} instances that span nodes",
                  limit);
    }
    return fail(ErrorCode::kExhausted, "the coordinator has its {} instances of node '{}'", limit,
                home);
  }
  ++counts_[home];
  return {};
}

void Instances::leave(const std::string& home) {
  const auto found = counts_.find(home);
  if (found != counts_.end() && --found->second == 0) counts_.erase(found);
}

Result<InstanceAnswer> Instances::report(const RankReport& report, const Resolve& resolve,
                                         Membership& members, bool grace, TimePoint now) {
  TRY_VOID(check(report));
  TRY(Instance * instance, find_or_begin(report, resolve, grace, now));
  TRY_VOID(check_same(*instance, report));
  const auto found = instance->ranks.find(report.rank);
  if (found != instance->ranks.end()) {
    const Instance::Rank& before = found->second;
    const bool same = before.incarnation == report.incarnation && before.node_id == report.node_id;
    const bool outdated = same && report.sequence < before.sequence;
    // A rank that has moved to another node is not lost with its earlier one.
    const bool moved = !same && is_lost(report.state);
    if (outdated || moved) return answer(*instance);
    const Member* holder = members.find(before.node_id, before.incarnation);
    const bool holder_lives = holder != nullptr && !holder->is_dead();
    if (!same && holder_lives && !is_lost(before.state)) {
      return fail(ErrorCode::kDenied, "rank {} of instance '{}' generation {} is attached on {}",
                  report.rank, report.instance, instance->generation, before.node_id);
    }
  } else if (is_lost(report.state)) {
    return answer(*instance);
  }
  if (!instance->home.empty() && instance->home != report.node_id) {
    TRY_VOID(enter(""));
    leave(std::exchange(instance->home, ""));
  }
  Instance::Rank& rank = instance->ranks[report.rank];
  rank = {report.node_id, report.incarnation, report.state, report.sequence, now, report.why};
  if (report.has && *report.has != instance->id) {
    rank.state = RankState::kFailed;
    rank.why = fmt::format("it has {}, the instance {}; attach it again", report.has->to_string(),
                           instance->id.to_string());
  } else if (report.state == RankState::kLoaded && !report.has) {
    rank.state = RankState::kFailed;
    rank.why = "it has loaded what it does not name";
  }
  instance->last_heard = now;
  judge(*instance);
  return answer(*instance);
}

void Instances::judge(Instance& instance) {
  std::uint32_t loaded = 0;
  instance.unfit_rank.reset();
  for (const auto& [number, rank] : instance.ranks) {
    if (rank.state == RankState::kLoaded) ++loaded;
    if (is_lost(rank.state) && !instance.unfit_rank) instance.unfit_rank = number;
  }
  instance.state = instance.unfit_rank        ? InstanceState::kUnfit
                   : loaded == instance.world ? InstanceState::kCommitted
                                              : InstanceState::kLoading;
}

InstanceAnswer Instances::answer(const Instance& instance) {
  InstanceAnswer answer{instance.id, instance.state, 0, instance.world, ""};
  for (const auto& [number, rank] : instance.ranks) {
    if (rank.state == RankState::kLoaded) ++answer.loaded;
  }
  if (instance.unfit_rank) {
    answer.why = describe(*instance.unfit_rank, instance.ranks.at(*instance.unfit_rank));
  }
  return answer;
}

void Instances::advance(Membership& members, TimePoint now) {
  if (now < next_look_) return;
  next_look_ = now + kInstancesLookEvery;
  for (auto& [name, instance] : instances_) {
    bool changed = false;
    for (auto& [number, rank] : instance.ranks) {
      if (is_lost(rank.state)) continue;
      const Member* member = members.find(rank.node_id, rank.incarnation);
      const bool dead = member == nullptr || member->is_dead();
      if (!dead && now - rank.last_heard < timing_.rank_silence) continue;
      rank.state = RankState::kGone;
      rank.why = dead ? "the node died" : "its agent says nothing of it";
      changed = true;
    }
    if (changed) judge(instance);
  }
  std::erase_if(instances_, [&](const auto& entry) {
    const bool lost = std::ranges::all_of(
        entry.second.ranks, [](const auto& rank) { return is_lost(rank.second.state); });
    const bool forget = lost && now - entry.second.last_heard >= timing_.forget_instance;
    if (forget) leave(entry.second.home);
    return forget;
  });
}

void Instances::shift(Duration by) {
  for (auto& [name, instance] : instances_) {
    instance.last_heard += by;
    for (auto& [number, rank] : instance.ranks) rank.last_heard += by;
  }
}

std::string_view state_name(InstanceState state) {
  switch (state) {
    case InstanceState::kLoading:
      return "loading";
    case InstanceState::kCommitted:
      return "committed";
    case InstanceState::kUnfit:
      return "unfit";
  }
  return "unknown";
}

}  // namespace rekindle::coordinator
