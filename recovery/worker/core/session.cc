#include "recovery/worker/core/session.h"

#include <algorithm>
#include <utility>

namespace rekindle::worker {

std::string_view to_string(Phase phase) {
  switch (phase) {
    case Phase::kDetect:
      return "detect";
    case Phase::kPlan:
      return "plan";
    case Phase::kRegister:
      return "register";
    case Phase::kWire:
      return "wire";
    case Phase::kInstall:
      return "install";
    case Phase::kReady:
      return "ready";
  }
  return "?";
}

std::string_view to_string(Rung rung) {
  switch (rung) {
    case Rung::kLocal:
      return "local";
    case Rung::kAdopted:
      return "adopted";
    case Rung::kPeers:
      return "peers";
    case Rung::kFallback:
      return "fallback";
  }
  return "?";
}

std::string_view to_string(SessionState state) {
  switch (state) {
    case SessionState::kResolving:
      return "resolving";
    case SessionState::kServing:
      return "serving";
    case SessionState::kLoaded:
      return "loaded";
    case SessionState::kCommitted:
      return "committed";
    case SessionState::kEnded:
      return "ended";
  }
  return "?";
}

WorkerSession::WorkerSession(SessionId id, TimePoint now, TimePoint resolve_by, SessionTimes times)
    : id_(id), times_(times), resolve_by_(resolve_by) {
  phases_.begin(Phase::kPlan, now);
}

Result<void> WorkerSession::serve(TimePoint now, Offer offer) {
  if (ended()) return fail(*why_);
  if (state_ != SessionState::kResolving) {
    return fail(ErrorCode::kInternal, "session {} is served twice", id_);
  }
  state_ = SessionState::kServing;
  version_ = std::move(offer.id);
  rung_ = offer.rung;
  held_count_ = offer.held.count();
  untold_ = std::move(offer.held);
  payload_bytes_ = offer.payload_bytes;
  phases_.enter(Phase::kWire, now);
  return {};
}

TileRuns WorkerSession::ready(const TileSet& verified) {
  if (state_ != SessionState::kServing || complete_) return {};
  TileSet news(untold_.size());
  const std::size_t words = std::min(untold_.words().size(), verified.words().size());
  for (std::size_t i = 0; i < words; ++i) {
    news.words()[i] = untold_.words()[i] & verified.words()[i];
    untold_.words()[i] &= ~verified.words()[i];
  }
  told_count_ += news.count();
  return news.ranges();
}

TileRuns WorkerSession::complete(TimePoint now) {
  if (ended() || state_ == SessionState::kResolving || complete_) return {};
  complete_ = true;
  if (state_ != SessionState::kServing) return {};  // it has been told, and has loaded, all of it
  if (!in_round_ && !given_all_) begin_install(now);
  auto rest = untold_.ranges();
  told_count_ = held_count_;
  untold_ = TileSet(untold_.size());
  return rest;
}

void WorkerSession::begin_install(TimePoint now) {
  load_by_ = now + times_.load;
  phases_.enter(Phase::kInstall, now);
}

void WorkerSession::leave_round(TimePoint now, bool all) {
  const bool news = std::exchange(in_round_, false) || (all && !given_all_);
  given_all_ = given_all_ || all;
  const bool all_here = complete_ || given_all_;
  if (state_ == SessionState::kServing && all_here && news) begin_install(now);
}

bool WorkerSession::has_all() const {
  // All of it has verified, though the copy may not be committed yet.
  const bool all_told = state_ == SessionState::kServing && told_count_ == held_count_;
  return complete_ || given_all_ || all_told;
}

Result<void> WorkerSession::loaded(TimePoint now, std::uint64_t bytes) {
  if (ended()) return fail(*why_);
  if (state_ == SessionState::kLoaded || state_ == SessionState::kCommitted) return {};
  if (!has_all()) {
    return fail(ErrorCode::kInvalid,
                "session {} says that it has loaded, but only {} of {} tiles are here", id_,
                told_count_, held_count_);
  }
  if (bytes != payload_bytes_) {
    return fail(ErrorCode::kInvalid, "session {} has loaded {} bytes of {}: take in every tensor",
                id_, bytes, payload_bytes_);
  }
  state_ = SessionState::kLoaded;
  phases_.enter(Phase::kReady, now);
  return {};
}

void WorkerSession::commit(TimePoint now) {
  if (state_ != SessionState::kLoaded) return;
  state_ = SessionState::kCommitted;
  phases_.end(now);
}

void WorkerSession::end(TimePoint now, Error why) {
  if (ended()) return;
  state_ = SessionState::kEnded;
  why_ = std::move(why);
  phases_.end(now);
}

std::optional<TimePoint> WorkerSession::next_deadline() const {
  if (state_ == SessionState::kResolving) return resolve_by_;
  const bool all_here = (complete_ || given_all_) && !in_round_;
  if (state_ == SessionState::kServing && all_here) return load_by_;
  return std::nullopt;  // a pull has deadlines of its own
}

std::optional<Error> WorkerSession::overdue(TimePoint now) const {
  const auto deadline = next_deadline();
  if (!deadline || now < *deadline) return std::nullopt;
  if (state_ == SessionState::kResolving) {
    return Error(ErrorCode::kTimeout,
                 "got no version, or no source of it, by its deadline; see `rekindle status`, or "
                 "attach with more time");
  }
  return Error(ErrorCode::kTimeout,
               fmt::format("did not load {} within {} s of its last byte: it hangs, or "
                           "needs a longer --load-timeout",
                           version_.to_string(),
                           std::chrono::duration_cast<std::chrono::seconds>(times_.load).count()));
}

}  // namespace rekindle::worker
