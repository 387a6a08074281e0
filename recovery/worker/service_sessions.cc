// Sessions of workers and the instances that they make up.
#include <algorithm>
#include <utility>

#include <fcntl.h>

#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/convert.h"
#include "recovery/worker/service.h"
#include "src/async/task.h"
#include "src/base/clock.h"
#include "src/base/log.h"

namespace rekindle::worker {

namespace asio = boost::asio;

namespace {

constexpr std::chrono::milliseconds kDefaultAttach{10'000};
constexpr std::chrono::milliseconds kLongestAttach{3'600'000};
constexpr std::chrono::milliseconds kTick{20};

TimePoint attach_deadline(const proto::WorkerFrame& frame) {
  const std::chrono::milliseconds asked(frame.deadline_ms());
  return steady_now() + std::min(asked.count() > 0 ? asked : kDefaultAttach, kLongestAttach);
}

}  // namespace

Result<WorkerService::SessionPtr> WorkerService::session_of(const ClientPtr& client,
                                                            const proto::WorkerFrame& frame) const {
  const auto found = sessions_.find(frame.session());
  if (found == sessions_.end() || found->second->client != client) {
    return fail(ErrorCode::kStale, "session {} has ended; attach again", frame.session());
  }
  return found->second;
}

Instances::Entry* WorkerService::entry_of(const Session& session) const {
  const auto found = instances_.all().find(session.instance);
  return found == instances_.all().end() ? nullptr : found->second.get();
}

Result<void> WorkerService::begin_attach(const ClientPtr& client, const proto::WorkerFrame& frame) {
  TRY(auto order, from_proto(frame.attach()));
  const SessionId id = ++last_number_;
  TRY(auto* const entry, instances_.get(order.instance, id));
  auto joined = entry->state.attach(order.rank, id);
  if (!joined) {
    Error why = std::move(joined).error();
    instances_.settle(*entry);
    return fail(std::move(why));
  }
  auto session = std::make_shared<Session>(
      WorkerSession(id, steady_now(), attach_deadline(frame), options_.session_times), client);
  session->instance = entry->state.name();
  session->rank = order.rank.rank;
  session->wanted.model = order.wanted.id.model;
  session->attach_call = frame.call();
  session->group = order.group;
  session->device = order.device;
  session->bucket_bytes = order.bucket_bytes;
  sessions_[id] = session;
  ++client->sessions;
  log::info("worker.attach", "session", id, "pid", client->pid(), "instance", session->instance,
            "rank", session->rank, "model", order.wanted.id.model);
  if (const auto seen = entry->detections.extract(session->rank)) {
    session->state.phases().set(Phase::kDetect, seen.mapped());
  }
  if (!entry->state.version()) entry->version.reset();  // an older generation's
  note(*session, "attach");
  ranks_changed(*entry);
  const auto origin = origin_of(*session, *entry);
  apply(*entry, *joined);
  rounds_.attach(id, origin);  // behind the end of the one that it replaces
  rounds_changed();
  tasks_.spawn("worker.attach", attach(session, std::move(order)));
  return {};
}

async::Task<void> WorkerService::attach(SessionPtr session, AttachOrder order) {
  co_await asio::this_coro::throw_if_cancelled(false);
  auto id = co_await choose_version(session, order);
  Result<void> served = id ? host_.may_attach(*id) : Result<void>();
  if (id && served) {
    order.wanted.id = *id;
    session->wanted = *id;
    const auto supply = supplies_.get(order.wanted);
    take_supply(*session, supply);
    served = co_await follow(session, supply);
  } else if (!id) {
    served = fail(std::move(id).error());
  }
  if (!served && !session->state.ended()) fail_session(session, served.error());
}

// One version for all ranks of the generation: given, or chosen by the first that comes.
async::Task<Result<ModelVersion>> WorkerService::choose_version(SessionPtr session,
                                                                AttachOrder order) {
  while (!session->state.ended()) {
    if (co_await async::is_cancelled()) co_return fail(ErrorCode::kPeerLost, "the agent stops");
    auto* entry = entry_of(*session);
    if (entry == nullptr) co_return fail(ErrorCode::kStale, "the instance is gone");
    CO_TRY(const auto choice, entry->state.choose(session->state.id(), order.version));
    if (choice == Instance::Choice::kGiven) {
      entry->version = order.version;  // no sooner: one that is refused speaks for nobody else
      ranks_changed(*entry);
      changed_.notify();
      co_return *entry->state.version();
    }
    if (choice == Instance::Choice::kWait) {
      co_await changed_.wait_until(steady_now() + kTick);
      continue;
    }
    if (const auto gathers = rounds_.gathers(session->wanted.model, session->group)) {
      const ModelVersion id{session->wanted.model, *gathers};
      CO_TRY_VOID(entry->state.chosen(session->state.id(), id));
      entry->version = *gathers;  // as if it was asked for: another host may know a newer one
      ranks_changed(*entry);
      changed_.notify();
      continue;
    }
    auto newest = co_await newest_for(session);
    entry = entry_of(*session);  // it may have ended meanwhile
    if (entry == nullptr || session->state.ended()) break;
    if (!newest) {
      entry->state.choice_failed(session->state.id());
      changed_.notify();
      co_return fail(std::move(newest).error());
    }
    CO_TRY_VOID(entry->state.chosen(session->state.id(), *newest));
  }
  co_return fail(ErrorCode::kStale, "the session has ended");
}

// Hands over what the supply has, as it comes, until all is there or one of both has ended.
async::Task<Result<void>> WorkerService::follow(SessionPtr session,
                                                std::shared_ptr<Supply> supply) {
  const auto interest = supply->interest();
  while (!session->state.ended() && !co_await async::is_cancelled()) {
    session->held_up = supply->held_up();
    session->state.enter(supply->phase(), steady_now());
    if (supply->view() != nullptr && !session->attached) {
      CO_TRY_VOID(hand_over(*session, *supply));
    }
    note_phase(*session);
    if (supply->failed()) {
      if (session->state.given_all()) co_return Result<void>();  // it needs no bytes of this host
      co_return fail(*supply->failed());
    }
    if (session->attached) {
      session->state.fall_to(supply->view()->rung);
      if (supply->complete()) {
        watch_copy(*session, *supply->view());
        tell_ready(*session, session->state.complete(steady_now()));
        note_phase(*session);
        co_return Result<void>();
      }
      const auto runs = session->state.ready(supply->verified());
      if (!runs.empty()) tell_ready(*session, runs);
    }
    co_await supply->changed.wait_until(steady_now() + kTick);
  }
  co_return Result<void>();
}

// Of one that has arrived just now: its files are those that were recorded at its commit. With
// none recorded the worker is not told that it has loaded.
void WorkerService::watch_copy(Session& session, const Supply::View& view) {
  if (session.copy != nullptr || view.stored == nullptr) return;
  session.copy = view.stored;
  if (auto record = view.stored->verification->record()) session.files = std::move(record->files);
}

// What a round may bring is not fetched beside it.
void WorkerService::take_supply(Session& session, const std::shared_ptr<Supply>& supply) {
  if (session.state.ended()) return;
  if (!rounds_.choose(session.state.id(), session.wanted)) return supply->want_now();
  session.held = supply;
  session.hold = supply->hold();
  rounds_changed();
}

Result<void> WorkerService::hand_over(Session& session, Supply& supply) {
  const Supply::View& view = *supply.view();
  std::vector<UniqueFd> descriptors;
  for (const auto& segment : view.segments) {
    // An open file of its own: read-only, with its own offset.
    UniqueFd fd(
        ::open(fmt::format("/proc/self/fd/{}", segment.get()).c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) return fail_errno(errno, "open a segment for a worker");
    descriptors.push_back(std::move(fd));
  }
  WorkerSession::Offer offer;
  offer.id = view.checkpoint->id;
  offer.rung = view.rung;
  offer.held = view.portion->held;
  offer.payload_bytes = view.portion->payload_bytes;
  TRY_VOID(session.state.serve(steady_now(), std::move(offer)));
  session.attached = true;
  session.lent = view.files;
  if (view.stored != nullptr) {
    session.copy = view.stored;
    if (auto files = view.stored->verification->stamp()) session.files = std::move(*files);
  }
  session.in_round = rounds_.enters(session.state.id());
  if (session.in_round) {
    session.state.enter_round();
  } else {
    supply.want_now();
    session.hold.reset();
    session.held.reset();
  }
  std::optional<std::string> alone;
  if (session.device.empty()) alone = "it wants its weights on no device";
  const std::string& words = view.portion->words;
  AttachedTo own{session.attach_call, session.state.id(), view.rung, descriptors.size()};
  if (!session.device.empty()) {
    if (auto channel = give_device(session, view, attached_frame(own, words))) {
      descriptors.push_back(std::move(*channel));
      own.descriptors = descriptors.size();
      own.device_channel = true;
    } else {
      own.no_device_channel = channel.error().message();
      log::info("worker.no_device", "session", session.state.id(), "device", session.device, "why",
                channel.error().message());
      alone = channel.error().message();
    }
  }
  session.client->send_encoded(attached_frame(own, words), std::move(descriptors));
  rounds_.hand_over(session.state.id(), view.checkpoint->root, std::move(alone));
  rounds_changed();
  return {};
}

void WorkerService::tell_ready(Session& session, const TileRuns& runs) {
  proto::AgentFrame frame;
  frame.set_session(session.state.id());
  auto& ready = *frame.mutable_ready();
  *ready.mutable_ready() = rpc::to_proto(runs);
  ready.set_bytes_done(bytes_told(session.state));
  ready.set_bytes_total(session.state.payload_bytes());
  ready.set_complete(session.state.is_complete());
  ready.set_rung(std::string(to_string(session.state.rung())));
  session.client->send(frame);
  if (session.on_device) {
    host_.tell_device(session.state.id(), runs, session.state.is_complete());
  }
  retry_loaded(session);
}

Result<void> WorkerService::loaded(const ClientPtr& client, const proto::WorkerFrame& frame) {
  TRY(const auto session, session_of(client, frame));
  if (is_loaded_early(*session)) {
    loaded_early(*session, frame);
    return {};
  }
  if (session->state.has_all() && !is_as_handed_over(*session)) {
    tasks_.spawn("worker.loaded", loaded_once_verified(session, frame));
    return {};
  }
  return take_loaded(session, frame);
}

// The worker's word comes before the device process', or before the commit of the copy that it
// reads: only the commit says whether somebody has written to the files while they arrived. A
// device that got the first part of the bytes by a round waits for no commit: the copy may lack
// tiles that its worker does not need any more.
bool WorkerService::is_loaded_early(const Session& session) {
  if (!session.state.has_all()) return session.in_round && session.on_device;
  return session.copy == nullptr && !session.state.given_all();
}

// What it has read are the bytes that were verified.
bool WorkerService::is_as_handed_over(const Session& session) {
  if (session.copy == nullptr || session.brought_by_round) return true;
  auto& verification = *session.copy->verification;
  const auto record = verification.record();
  return verification.state() == store::CopyState::kVerified && record &&
         record->files == session.files;
}

// The copy is still being verified, or was changed while the worker read it.
async::Task<void> WorkerService::loaded_once_verified(SessionPtr session,
                                                      proto::WorkerFrame frame) {
  co_await asio::this_coro::throw_if_cancelled(false);
  Result<void> good = co_await host_.verifier().require(session->copy, options_.session_times.load);
  if (session->state.ended()) co_return;
  if (!good && good.error().code() == ErrorCode::kUnavailable) {
    // The session ends. UNAVAILABLE would tell the worker to ask it again.
    good = fail(ErrorCode::kStale, "{}; attach again", good.error().message());
  }
  if (good && !is_as_handed_over(*session)) {
    good = fail(ErrorCode::kStale, "a file of {} was changed while it was read; attach again",
                session->wanted.to_string());
  }
  if (!good) {
    refuse(session->client, frame.call(), session->state.id(), good.error());
    co_return fail_session(session, good.error());
  }
  if (auto taken = take_loaded(session, frame); !taken) {
    refuse(session->client, frame.call(), session->state.id(), taken.error());
  }
}

Result<void> WorkerService::take_loaded(const SessionPtr& session,
                                        const proto::WorkerFrame& frame) {
  const ClientPtr& client = session->client;
  TRY_VOID(session->state.loaded(steady_now(), frame.loaded().bytes()));
  note_phase(*session);
  auto* const entry = entry_of(*session);
  if (entry == nullptr) return fail(ErrorCode::kStale, "the instance is gone; attach again");
  if (session->state.state() == SessionState::kCommitted) {
    client->send(
        committed_frame(frame.call(), session->state, entry->state.generation(), steady_now()));
    return {};
  }
  if (session->waiting) answer_waiting(*session, Error(ErrorCode::kStale, "was asked again"));
  // Without a deadline the worker waits in pieces of its own, and its session's end is the end.
  const std::chrono::milliseconds asked(frame.deadline_ms());
  session->waiting =
      Session::Waiting{frame.call(), asked.count() > 0 ? steady_now() + asked : TimePoint::max()};
  const auto change = entry->state.loaded(session->state.id());
  ranks_changed(*entry);
  apply(*entry, change);
  return {};
}

void WorkerService::time_out_waiting(Session& session, TimePoint now) {
  if (!session.waiting || now < session.waiting->deadline) return;
  const auto* const entry = entry_of(session);
  const bool unfit = entry != nullptr && entry->state.state() == InstanceState::kUnfit;
  answer_waiting(session, Error(unfit ? ErrorCode::kUnavailable : ErrorCode::kTimeout,
                                fmt::format("instance {} is not ready: {}", session.instance,
                                            entry != nullptr ? entry->state.why() : "gone")));
}

void WorkerService::answer_waiting(Session& session, const Error& error) {
  if (const auto early = std::exchange(session.early_loaded, std::nullopt)) {
    refuse(session.client, early->call(), session.state.id(), error);
  }
  if (!session.waiting) return;
  refuse(session.client, session.waiting->call, session.state.id(), error);
  session.waiting.reset();
}

Result<void> WorkerService::detach(const ClientPtr& client, const proto::WorkerFrame& frame) {
  TRY(const auto session, session_of(client, frame));
  auto* const entry = entry_of(*session);
  Instance::Change change;
  if (entry != nullptr) {
    change = entry->state.left(session->state.id());
    if (spans(*entry)) {
      // Said apart from the others': with the last one the instance is forgotten.
      const Instance::RankView gone{session->rank, false, false, true, "has detached"};
      tasks_.spawn("worker.report", report_once(word_of(*entry, gone)));
    }
    ranks_changed(*entry);
  }
  session->state.end(steady_now(), Error(ErrorCode::kStale, "has detached"));
  leave_device(*session);
  rounds_.detach(session->state.id(), steady_now());
  rounds_changed();
  sessions_.erase(session->state.id());
  --client->sessions;
  forget_watch(session->state.id());
  note(*session, "detached");
  log::info("worker.detach", "session", session->state.id(), "pid", client->pid());
  if (entry != nullptr) apply(*entry, change);
  proto::AgentFrame answer;
  answer.set_call(frame.call());
  answer.set_session(frame.session());
  answer.mutable_done();
  client->send(answer);
  changed_.notify();
  return {};
}

// Its rank is not fit any more; the other ranks keep what they have.
void WorkerService::fail_session(const SessionPtr& session, const Error& why, const char* kind) {
  if (session->state.ended()) return;
  auto* const entry = entry_of(*session);
  Instance::Change change;
  if (entry != nullptr) {
    change = entry->state.failed(session->state.id(), why.message());
    ranks_changed(*entry);
  }
  log::warn("worker.session_failed", "session", session->state.id(), "pid", session->client->pid(),
            "instance", session->instance, "rank", session->rank, "why", why.message());
  note(*session, kind, why.message());
  if (entry == nullptr) return end(session, why);
  change.ended.emplace_back(session->state.id(), why);
  apply(*entry, change);
}

void WorkerService::apply(Instances::Entry& entry, const Instance::Change& change) {
  instances_.take_back(entry);
  const auto find = [this](SessionId id) {
    const auto found = sessions_.find(id);
    return found == sessions_.end() ? nullptr : found->second;
  };
  for (const auto& [id, why] : change.refuse) {
    if (const auto session = find(id)) answer_waiting(*session, why);
  }
  for (const auto& [id, why] : change.ended) {
    if (const auto session = find(id)) end(session, why);
  }
  for (const SessionId id : change.commit) {
    const auto session = find(id);
    if (session == nullptr) continue;
    session->state.commit(steady_now());
    rounds_.commit(id);
    rounds_changed();
    note(*session, "committed");
    log::info("worker.committed", "session", id, "pid", session->client->pid(), "instance",
              session->instance, "rank", session->rank, "version",
              session->state.version().to_string());
    if (!session->waiting) continue;
    session->client->send(committed_frame(session->waiting->call, session->state,
                                          entry.state.generation(), steady_now()));
    session->waiting.reset();
  }
  instances_.settle(entry);
}

// Tells the worker, as the answer of what it waits for or as an event.
void WorkerService::end(const SessionPtr& session, const Error& why) {
  if (session->state.ended()) return;
  const SessionId id = session->state.id();
  session->state.end(steady_now(), why);
  leave_device(*session);
  // It has not detached: unless it is dead, it may read what it has mapped for as long as it likes.
  if (!session->client->dead) {
    for (const auto& segment : session->lent) host_.store().never_reuse(*segment);
  }
  rounds_.fail(id, why.message(), steady_now());
  rounds_changed();
  answer_waiting(*session, why);
  refuse(session->client, session->attached ? 0 : session->attach_call, id, why);
  sessions_.erase(id);
  --session->client->sessions;
  forget_watch(id);
  changed_.notify();
}

async::Task<void> WorkerService::before_retire(ModelVersion id) {
  rounds_.retired(id);
  const auto users = [this, &id] {
    std::vector<SessionPtr> found;
    for (const auto& [number, session] : sessions_) {
      if (session->wanted == id) found.push_back(session);
    }
    return found;
  };
  const auto give_up = steady_now() + options_.retire_wait;
  while (!users().empty() && steady_now() < give_up) co_await changed_.wait_until(give_up);
  for (const auto& session : users()) {
    fail_session(session, Error(ErrorCode::kStale,
                                fmt::format("holds {}, which is retired here; attach again",
                                            id.to_string())));
  }
}

}  // namespace rekindle::worker
