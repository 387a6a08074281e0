#include "recovery/worker/core/instance.h"

#include <algorithm>

namespace rekindle::worker {

namespace {

constexpr std::size_t kMaxNameBytes = 128;
// As the coordinator allows (coordinator::Limits::max_world).
constexpr std::uint32_t kMaxWorld = 4096;

bool is_name_byte(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '.' ||
         c == '_' || c == '-';
}

}  // namespace

std::string_view to_string(InstanceState state) {
  switch (state) {
    case InstanceState::kAbsent:
      return "ABSENT";
    case InstanceState::kLoading:
      return "LOADING";
    case InstanceState::kCommitted:
      return "COMMITTED";
    case InstanceState::kUnfit:
      return "UNFIT";
  }
  return "?";
}

Result<void> check_instance_name(std::string_view name) {
  if (name.empty() || name.size() > kMaxNameBytes || name.front() == '.' ||
      !std::ranges::all_of(name, is_name_byte)) {
    return fail(ErrorCode::kInvalid,
                "instance names are 1 to {} of [A-Za-z0-9._-] and begin with no dot; this one has "
                "{} bytes",
                kMaxNameBytes, name.size());
  }
  return {};
}

bool Instance::has_sessions() const {
  return std::ranges::any_of(slots_, [](const auto& slot) { return slot.second.session != 0; });
}

std::optional<std::uint32_t> Instance::rank_of(SessionId session) const {
  if (session == 0) return std::nullopt;
  for (const auto& [rank, slot] : slots_) {
    if (slot.session == session) return rank;
  }
  return std::nullopt;
}

bool Instance::others_live(std::uint32_t rank) const {
  if (others_ == Others::kLoaded || others_ == Others::kLoading) return true;
  return std::ranges::any_of(
      slots_, [rank](const auto& slot) { return slot.first != rank && slot.second.session != 0; });
}

bool Instance::all_loaded() const {
  if (others_ == Others::kFailed) return false;
  if (slots_.empty() || (slots_.size() != world_ && others_ != Others::kLoaded)) return false;
  return std::ranges::all_of(slots_, [](const auto& slot) { return slot.second.loaded; });
}

// The instance was started again. Nothing is left of its old ranks.
void Instance::start_anew(const Rank& rank, Change& change) {
  for (const auto& [old, slot] : slots_) {
    if (slot.session == 0) continue;
    change.ended.emplace_back(
        slot.session,
        Error(ErrorCode::kStale, fmt::format("instance {} moved on to generation {}; attach again",
                                             name_, rank.generation)));
  }
  slots_.clear();
  generation_ = rank.generation;
  world_ = rank.world;
  model_ = rank.model;
}

Result<Instance::Change> Instance::attach(const Rank& rank, SessionId session) {
  if (rank.world == 0 || rank.world > kMaxWorld || rank.rank >= rank.world) {
    return fail(ErrorCode::kInvalid, "instance {}: there is no rank {} of {}", name_, rank.rank,
                rank.world);
  }
  // Without other ranks nothing binds the newcomer.
  const bool alone = !others_live(rank.rank);
  if (!alone && rank.generation < generation_) {
    return fail(ErrorCode::kStale,
                "instance {} is at generation {}, rank {} comes with {}: start it with the others'",
                name_, generation_, rank.rank, rank.generation);
  }
  const bool same = rank.generation == generation_ && rank.world == world_ && rank.model == model_;
  if (!alone && !same && rank.generation == generation_) {
    return fail(ErrorCode::kInvalid,
                "instance {} generation {} serves {} with {} ranks, rank {} comes with {} of {}: "
                "give all the same, or a new generation",
                name_, generation_, model_, world_, rank.rank, rank.model, rank.world);
  }
  Change change;
  if (!same) start_anew(rank, change);
  if (!same || alone) {
    version_.reset();
    choosing_ = 0;
  }
  Slot& slot = slots_[rank.rank];
  if (slot.session != 0) {
    change.ended.emplace_back(
        slot.session,
        Error(ErrorCode::kStale,
              fmt::format("rank {} of instance {} was attached anew", rank.rank, name_)));
    if (choosing_ == slot.session) choosing_ = 0;
  }
  slot.session = session;
  slot.loaded = slot.committed = slot.left = false;
  others_ = Others::kUnknown;
  return change;
}

Result<Instance::Choice> Instance::choose(SessionId session, std::optional<std::uint64_t> wanted) {
  const auto rank = rank_of(session);
  if (!rank) return fail(ErrorCode::kStale, "the session is no longer of instance {}", name_);
  if (version_) {
    if (wanted && *wanted != version_->version) {
      return fail(ErrorCode::kInvalid,
                  "instance {} generation {} is at {}, rank {} wants {}@{}: give all ranks the "
                  "same, or a new generation",
                  name_, generation_, version_->to_string(), *rank, model_, *wanted);
    }
    return Choice::kGiven;
  }
  if (wanted) {
    version_ = ModelVersion{model_, *wanted};
    choosing_ = 0;
    return Choice::kGiven;
  }
  if (choosing_ != 0 && choosing_ != session) return Choice::kWait;
  choosing_ = session;
  return Choice::kChoose;
}

Result<void> Instance::chosen(SessionId session, const ModelVersion& id) {
  if (!rank_of(session)) {
    return fail(ErrorCode::kStale, "the session is no longer of instance {}", name_);
  }
  if (version_ && *version_ != id) {
    return fail(ErrorCode::kStale, "instance {} generation {} is at {}, not {}: attach again",
                name_, generation_, version_->to_string(), id.to_string());
  }
  if (!version_ && id.model != model_) {
    return fail(ErrorCode::kInternal, "instance {}: {} was resolved to {}", name_, model_,
                id.to_string());
  }
  version_ = id;
  choosing_ = 0;
  return {};
}

void Instance::choice_failed(SessionId session) {
  if (choosing_ == session) choosing_ = 0;
}

Instance::Change Instance::commit_if_all_loaded() {
  Change change;
  if (!all_loaded()) return change;
  for (auto& [rank, slot] : slots_) {
    if (!slot.committed && slot.session != 0) change.commit.push_back(slot.session);
    slot.committed = true;
    slot.failed = false;
    slot.why.clear();
  }
  return change;
}

Instance::Change Instance::loaded(SessionId session) {
  const auto rank = rank_of(session);
  if (!rank) return {};
  slots_[*rank].loaded = true;
  return commit_if_all_loaded();
}

Instance::Change Instance::fail_rank(std::uint32_t rank, std::string why) {
  Change change;
  Slot& slot = slots_[rank];
  if (choosing_ != 0 && choosing_ == slot.session) choosing_ = 0;
  slot = Slot{};
  others_ = Others::kUnknown;  // the ranks elsewhere may have changed meanwhile
  slot.failed = true;
  slot.why = std::move(why);
  for (const auto& [other, waiting] : slots_) {
    if (waiting.session == 0 || !waiting.loaded || waiting.committed) continue;
    change.refuse.emplace_back(
        waiting.session,
        Error(ErrorCode::kUnavailable,
              fmt::format("instance {} is unfit: rank {} {}; wait again for its return", name_,
                          rank, slot.why)));
  }
  return change;
}

Instance::Change Instance::failed(SessionId session, std::string why) {
  const auto rank = rank_of(session);
  if (!rank) return {};
  return fail_rank(*rank, std::move(why));
}

Instance::Change Instance::left(SessionId session) {
  const auto rank = rank_of(session);
  if (!rank) return {};
  auto change = fail_rank(*rank, "has detached");
  slots_[*rank].left = true;
  // The last rank has detached.
  if (std::ranges::all_of(slots_, [](const auto& slot) { return slot.second.left; })) {
    slots_.clear();
  }
  return change;
}

Instance::Change Instance::others_loaded() {
  if (!has_sessions()) return {};
  // A rank that failed here has loaded elsewhere.
  std::erase_if(slots_, [](const auto& slot) { return slot.second.session == 0; });
  others_ = Others::kLoaded;
  return commit_if_all_loaded();
}

// The ranks here stay loaded, as after others_failed().
Instance::Change Instance::others_loading() {
  if (others_ == Others::kLoaded) others_ = Others::kLoading;
  return {};
}

Instance::Change Instance::others_failed(std::string why) {
  Change change;
  const auto here =
      std::ranges::count_if(slots_, [](const auto& s) { return s.second.session != 0; });
  if (static_cast<std::size_t>(here) == world_) return change;  // there are no others
  const bool news = others_ != Others::kFailed;
  others_ = Others::kFailed;
  others_why_ = std::move(why);
  for (const auto& [rank, waiting] : slots_) {
    if (!news || waiting.session == 0 || !waiting.loaded || waiting.committed) continue;
    change.refuse.emplace_back(
        waiting.session,
        Error(ErrorCode::kUnavailable, fmt::format("instance {} is unfit: {}; wait again for its "
                                                   "return",
                                                   name_, others_why_)));
  }
  return change;
}

std::vector<Instance::RankView> Instance::ranks() const {
  std::vector<RankView> ranks;
  for (const auto& [rank, slot] : slots_) {
    ranks.push_back({rank, slot.session, slot.loaded, slot.left, slot.why});
  }
  return ranks;
}

std::optional<std::uint32_t> Instance::unfit_rank() const {
  if (all_loaded()) return std::nullopt;
  for (const auto& [rank, slot] : slots_) {
    if (slot.failed && !slot.loaded) return rank;
  }
  return std::nullopt;
}

InstanceState Instance::state() const {
  if (all_loaded()) return InstanceState::kCommitted;
  if (unfit_rank() || others_ == Others::kFailed) return InstanceState::kUnfit;
  return slots_.empty() ? InstanceState::kAbsent : InstanceState::kLoading;
}

std::string Instance::why() const {
  if (all_loaded()) return {};
  if (const auto rank = unfit_rank()) {
    const Slot& slot = slots_.at(*rank);
    return fmt::format("rank {} {}{}", *rank, slot.why,
                       slot.session != 0 ? "; it has attached again and loads" : "");
  }
  if (others_ == Others::kFailed) return others_why_;
  if (slots_.empty()) return "no rank has attached";
  if (others_ == Others::kLoading) return "a rank on another host has not loaded";
  for (std::uint32_t rank = 0; rank < world_; ++rank) {
    const auto slot = slots_.find(rank);
    if (slot == slots_.end()) return fmt::format("rank {} of {} has not attached", rank, world_);
    if (!slot->second.loaded) return fmt::format("rank {} of {} has not loaded", rank, world_);
  }
  return {};
}

}  // namespace rekindle::worker
