#include "recovery/worker/core/worker_session.h"

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
    case Rung::kResident:
      return "resident";
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

TileRuns TileAnnouncements::announce(const TileSet& verified) {
  TileSet news(pending_.size());
  const std::size_t words = std::min(pending_.words().size(), verified.words().size());
  for (std::size_t i = 0; i < words; ++i) {
    news.words()[i] = pending_.words()[i] & verified.words()[i];
    pending_.words()[i] &= ~verified.words()[i];
  }
  announced_ += news.count();
  return news.ranges();
}

TileRuns TileAnnouncements::announce_rest() {
  auto rest = pending_.ranges();
  announced_ = held_;
  pending_ = TileSet(pending_.size());
  return rest;
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
  tiles_.begin(std::move(offer.held));
  payload_bytes_ = offer.payload_bytes;
  phases_.enter(Phase::kWire, now);
  return {};
}

TileRuns WorkerSession::ready(const TileSet& verified) {
  if (state_ != SessionState::kServing || complete_) return {};
  return tiles_.announce(verified);
}

TileRuns WorkerSession::complete(TimePoint now) {
  if (ended() || state_ == SessionState::kResolving || complete_) return {};
  complete_ = true;
  if (state_ != SessionState::kServing) return {};  // it has heard of, and has loaded, all of it
  if (!was_given_all()) begin_install(now);
  return tiles_.announce_rest();
}

// The worker's time to load begins, or begins anew, when it has every byte.
void WorkerSession::begin_install(TimePoint now) {
  const bool has_bytes = was_given_all() || (complete_ && delivery_ != Delivery::kRound);
  if (state_ != SessionState::kServing || !has_bytes) return;
  load_by_ = now + times_.load;
  phases_.enter(Phase::kInstall, now);
}

void WorkerSession::enter_round() {
  if (delivery_ == Delivery::kHost) delivery_ = Delivery::kRound;
}

void WorkerSession::leave_round(TimePoint now, bool all) {
  if (was_given_all() || (!all && delivery_ != Delivery::kRound)) return;
  delivery_ = all ? Delivery::kFilled : Delivery::kRest;
  begin_install(now);
}

void WorkerSession::receive_broadcast(TimePoint now) {
  const bool news = !was_given_all();
  delivery_ = Delivery::kBroadcast;
  if (news) begin_install(now);
}

void WorkerSession::leave_device(TimePoint now, bool all) {
  if (delivery_ == Delivery::kHost) return;
  leave_round(now, all);
  if (!was_given_all()) delivery_ = Delivery::kHost;
}

bool WorkerSession::was_given_all() const {
  return delivery_ == Delivery::kFilled || delivery_ == Delivery::kBroadcast;
}

bool WorkerSession::has_all() const {
  if (state_ == SessionState::kLoaded || state_ == SessionState::kCommitted) return true;
  // All of it has verified, though the copy may not be committed yet.
  const bool all_announced = state_ == SessionState::kServing && tiles_.all();
  return complete_ || was_given_all() || all_announced;
}

// A device that got the first part of the bytes by a round does not wait for the commit of this
// host's copy: that copy may lack tiles that the worker needs no more.
WorkerSession::LoadedStep WorkerSession::next_for_loaded(CopyKnown copy) const {
  // Also where all bytes are here: the worker may detach after the answer, and a device that is
  // still in the round would count as one that has lost its worker.
  if (delivery_ == Delivery::kRound) return LoadedStep::kWait;
  if (!has_all()) {
    return delivery_ == Delivery::kRest ? LoadedStep::kWait : LoadedStep::kAccept;
  }
  if (delivery_ == Delivery::kBroadcast) return LoadedStep::kAccept;
  if (copy == CopyKnown::kChanged) return LoadedStep::kVerify;
  // Only the commit tells whether somebody wrote to the files while they arrived.
  const bool needs_commit = copy == CopyKnown::kArriving && !was_given_all();
  return needs_commit ? LoadedStep::kWait : LoadedStep::kAccept;
}

Result<void> WorkerSession::loaded(TimePoint now, std::uint64_t bytes) {
  if (ended()) return fail(*why_);
  if (state_ == SessionState::kLoaded || state_ == SessionState::kCommitted) return {};
  if (!has_all()) {
    return fail(ErrorCode::kInvalid,
                "session {} says that it has loaded, but only {} of {} tiles are here", id_,
                tiles_.announced(), tiles_.held());
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

std::uint64_t WorkerSession::announced_bytes() const {
  if (was_given_all()) return payload_bytes_;
  if (tiles_.announced() >= tiles_.held()) {
    return tiles_.held() > 0 || complete_ ? payload_bytes_ : 0;
  }
  return static_cast<std::uint64_t>(static_cast<double>(payload_bytes_) *
                                    static_cast<double>(tiles_.announced()) /
                                    static_cast<double>(tiles_.held()));
}

std::optional<TimePoint> WorkerSession::next_deadline() const {
  if (state_ == SessionState::kResolving) return resolve_by_;
  const bool loads = complete_ || was_given_all();
  if (state_ == SessionState::kServing && loads && delivery_ != Delivery::kRound) return load_by_;
  return std::nullopt;  // a pull has deadlines of its own
}

std::optional<Error> WorkerSession::overdue(TimePoint now) const {
  const auto deadline = next_deadline();
  if (!deadline || now < *deadline) return std::nullopt;
  if (state_ == SessionState::kResolving) {
    if (obstacle_) return Error(ErrorCode::kTimeout, obstacle_->message());
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
