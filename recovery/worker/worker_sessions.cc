#include "recovery/worker/worker_sessions.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <boost/asio/this_coro.hpp>

#include "recovery/rpc/update_phases.h"
#include "recovery/worker/residents.h"
#include "recovery/worker/worker_traces.h"
#include "src/base/log.h"
#include "src/ipc/process_age.h"
#include "src/tensor/tensor_set.h"

namespace rekindle::worker {

namespace asio = boost::asio;

namespace {

constexpr std::ptrdiff_t kMostSessions = 256;  // of one client
constexpr std::chrono::milliseconds kDefaultAttach{10'000};
constexpr std::chrono::milliseconds kLongestAttach{3'600'000};
constexpr std::chrono::milliseconds kOrderAgain{500};

TimePoint attach_deadline(const proto::WorkerFrame& frame) {
  const std::chrono::milliseconds asked(frame.deadline_ms());
  return steady_now() + std::min(asked.count() > 0 ? asked : kDefaultAttach, kLongestAttach);
}

// A worker may write what it attaches to over what it has. A staged session writes from its switch
// on. A session of the smallest tensor reads only the list of the tensors, and a session of files
// only the files.
bool may_write_soon(const AttachOrder& order) {
  const auto& boxes = order.wanted.boxes;
  const bool only_reads = !boxes.empty() && std::ranges::all_of(boxes, [](const auto& box) {
    return box.tensor.empty() || is_file_tensor(box.tensor);
  });
  return !order.staged && !only_reads;
}

}  // namespace

WorkerSessions::WorkerSessions(SessionServing::Parts parts, VersionWatch& watch, OrderDesk& orders,
                               async::TaskGroup& tasks, asio::any_io_executor executor,
                               Options options)
    : parts_(parts),
      watch_(watch),
      orders_(orders),
      tasks_(tasks),
      options_(options),
      serving_(parts, *this, std::move(executor), options.verify_uploads) {}

SessionPtr WorkerSessions::find(SessionId session) const {
  const auto found = sessions_.find(session);
  return found == sessions_.end() ? nullptr : found->second;
}

Result<SessionPtr> WorkerSessions::find(const ClientPtr& client,
                                        const proto::WorkerFrame& frame) const {
  auto session = find(frame.session());
  if (session == nullptr || session->client != client) {
    return fail(ErrorCode::kStale, "session {} has ended; attach again", frame.session());
  }
  return session;
}

// A worker without a named instance attaches anew in a round. Its process and device tell who it
// is. A staged session is that rank in a round, although it has not taken its place yet.
HostRounds::Origin WorkerSessions::origin_of(const Session& session) {
  const AttachOrder& order = session.order;
  std::string instance = order.instance;
  if (instance.empty()) {
    instance = fmt::format("{}-{}", session.client->process, order.device);
    std::ranges::replace(instance, ':', '-');
  }
  return {order.group, std::move(instance), session.rank(), order.wanted.id.model, order.device};
}

Result<void> WorkerSessions::attach(const ClientPtr& client, const proto::WorkerFrame& frame,
                                    SessionId id) {
  const auto others = std::ranges::count_if(
      sessions_, [&](const auto& item) { return item.second->client == client; });
  if (others >= kMostSessions) {
    return fail(ErrorCode::kExhausted, "this worker has {} sessions", others);
  }
  TRY(auto order, from_proto(frame.attach()));
  // Such a session is an instance by itself, until it takes its rank. Without a resident copy it
  // never does.
  const bool apart = order.staged || !order.resident_key.empty();
  TRY(auto* const entry, parts_.instances.get(apart ? "" : order.instance, id));
  const Instance::Rank alone{0, 1, 0, order.rank.model};
  auto joined = entry->state.attach(apart ? alone : order.rank, id);
  if (!joined) {
    Error why = std::move(joined).error();
    parts_.instances.settle(*entry);
    return fail(std::move(why));
  }
  const auto session = std::make_shared<Session>(
      WorkerSession(id, steady_now(), attach_deadline(frame), options_.times), client,
      std::move(order));
  session->instance = entry->state.name();
  if (!session->order.resident_key.empty()) follow_ranks(session->order);
  session->attach_call = frame.call();
  sessions_[id] = session;
  log::info("worker.attach", "session", id, "pid", client->pid(), "instance", session->instance,
            "rank", session->rank(), "model", session->wanted().model);
  const trace::Context& parent = session->order.trace;
  session->trace.span = {parent.valid() ? parent.trace : trace::TraceId::random(),
                         trace::SpanId::random()};
  session->trace.parent = parent.span;
  if (!apart) find_predecessor(*session, *entry);
  if (may_write_soon(session->order)) {
    parts_.residents.before_write(*client, session->order.rank.model, session->order.device);
  }
  // The version that was asked for belonged to an older generation.
  if (!entry->state.version()) entry->fleet.ask_for(std::nullopt);
  note(parts_.events, *session, "attach");
  parts_.fleet.ranks_changed(*entry);
  auto origin = origin_of(*session);
  apply(*entry, *joined);
  // After the end of the session that this one replaces.
  parts_.rounds.attach(id, std::move(origin));
  tasks_.spawn("worker.attach", serving_.serve(session));
  return {};
}

// A rank that looks for a resident copy looks for the version of the ranks that remain.
void WorkerSessions::follow_ranks(AttachOrder& order) const {
  const auto* const named =
      order.instance.empty() ? nullptr : parts_.instances.find(order.instance);
  if (order.version || named == nullptr || !named->state.version()) return;
  if (named->state.generation() != order.rank.generation) return;
  if (named->state.others_live(order.rank.rank)) {
    order.version = named->state.version()->version;
  }
}

// The recovery begins with the last sign of life of the rank's last worker.
void WorkerSessions::find_predecessor(Session& session, LocalInstances::Entry& entry) {
  const auto death = entry.detections.extract(session.rank());
  if (!death) return;
  // Both at the attach, which may be a while ago.
  const Duration since = steady_now() - session.attached_at;
  const Duration gone = std::max(session.attached_at - death.mapped().seen, Duration::zero());
  auto age = ipc::age_of_process(static_cast<pid_t>(session.client->pid()));
  if (age) *age = std::max(*age - since, Duration::zero());
  if (was_wanted(gone, age)) {
    session.state.phases().set(Phase::kDetect, death.mapped().took);
    session.trace.restart = gone;
  } else {
    session.trace.restart = *age;
  }
}

Result<void> WorkerSessions::begin_switch(const ClientPtr& client,
                                          const proto::WorkerFrame& frame) {
  TRY(const auto session, find(client, frame));
  if (session->order.staged) TRY_VOID(take_rank(session));
  parts_.residents.before_write(*client, session->wanted().model, session->order.device);
  client->send(done_frame(frame.call(), frame.session()));
  return {};
}

Result<void> WorkerSessions::take_rank(const SessionPtr& session) {
  const AttachOrder& order = session->order;
  if (session->state.state() != SessionState::kServing) {
    return fail(ErrorCode::kInvalid, "session {} does not know its version yet", session->id());
  }
  const std::string before = session->instance;
  if (order.instance.empty()) {
    session->order.staged = false;
    return {};
  }
  TRY(auto* const entry, parts_.instances.get(order.instance, session->id()));
  const auto& others = entry->state.version();
  if (entry->state.generation() == order.rank.generation && others &&
      *others != session->wanted() && entry->state.others_live(order.rank.rank)) {
    return fail(ErrorCode::kInvalid,
                "instance {} generation {} is at {}, rank {} switches to {}: give all ranks the "
                "same, or a new generation",
                order.instance, order.rank.generation, others->to_string(), session->rank(),
                session->wanted().to_string());
  }
  auto joined = entry->state.attach(order.rank, session->id());
  if (!joined) {
    Error why = std::move(joined).error();
    parts_.instances.settle(*entry);
    return fail(std::move(why));
  }
  TRY_VOID(entry->state.choose(session->id(), session->wanted().version));
  if (!session->order.staged) find_predecessor(*session, *entry);
  session->order.staged = false;
  session->instance = order.instance;
  if (auto* const own = parts_.instances.find(before)) {
    (void)own->state.left(session->id());
    parts_.instances.settle(*own);
  }
  log::info("worker.switch", "session", session->id(), "pid", session->client->pid(), "instance",
            session->instance, "rank", session->rank(), "version", session->wanted().to_string());
  note(parts_.events, *session, "switch");
  entry->fleet.ask_for(session->wanted().version);
  parts_.fleet.ranks_changed(*entry);
  apply(*entry, *joined);
  return {};
}

Result<void> WorkerSessions::report_phases(const ClientPtr& client,
                                           const proto::WorkerFrame& frame) {
  TRY(const auto session, find(client, frame));
  TRY(const rpc::PhaseTimes phases, rpc::phases_of(frame.phases()));
  parts_.rounds.report_phases(session->id(), phases);
  client->send(done_frame(frame.call(), frame.session()));
  return {};
}

Result<void> WorkerSessions::loaded(const ClientPtr& client, const proto::WorkerFrame& frame) {
  using Stage = Session::LoadedCall::Stage;
  TRY(const auto session, find(client, frame));
  if (session->order.staged) {
    return fail(ErrorCode::kInvalid,
                "a staged session has not begun to switch: call rk_begin_switch before its "
                "version is written over what serves");
  }
  const bool verifying =
      session->loaded_call && session->loaded_call->stage == Stage::kVerification;
  refuse_loaded(*session, Error(ErrorCode::kStale, "was asked again"));
  session->loaded_call = {frame.call(), frame.loaded().bytes(),
                          std::chrono::milliseconds(frame.deadline_ms()), TimePoint::max(),
                          verifying ? Stage::kVerification : Stage::kBytes};
  proceed_loaded(session);
  return {};
}

void WorkerSessions::proceed_loaded(const SessionPtr& session) {
  using Stage = Session::LoadedCall::Stage;
  if (!session->loaded_call || session->loaded_call->stage != Stage::kBytes) return;
  switch (session->state.next_for_loaded(session->copy.known())) {
    case WorkerSession::LoadedStep::kWait:
      return;
    case WorkerSession::LoadedStep::kVerify:
      session->loaded_call->stage = Stage::kVerification;
      return tasks_.spawn("worker.loaded", verify_loaded(session));
    case WorkerSession::LoadedStep::kAccept:
      return accept_loaded(*session);
  }
}

// The copy is still being verified, or was changed while the worker read it.
async::Task<void> WorkerSessions::verify_loaded(SessionPtr session) {
  co_await asio::this_coro::throw_if_cancelled(false);
  Result<void> good =
      co_await parts_.copies.verifier().require(session->copy.stored(), options_.times.load);
  if (session->state.ended()) co_return;
  if (!good && good.error().code() == ErrorCode::kUnavailable) {
    // The session ends. UNAVAILABLE would tell the worker to ask it again.
    good = fail(ErrorCode::kStale, "{}; attach again", good.error().message());
  }
  const auto step = session->state.next_for_loaded(session->copy.known());
  if (good && step == WorkerSession::LoadedStep::kVerify) {
    good = fail(ErrorCode::kStale, "a file of {} was changed while it was read; attach again",
                session->wanted().to_string());
  }
  if (!good) co_return fail_session(session, good.error());
  if (session->loaded_call) accept_loaded(*session);
}

void WorkerSessions::accept_loaded(Session& session) {
  const auto now = steady_now();
  if (auto taken = session.state.loaded(now, session.loaded_call->bytes); !taken) {
    return refuse_loaded(session, taken.error());
  }
  note_phase(parts_.events, session);
  auto* const entry = parts_.instances.find(session.instance);
  if (entry == nullptr) {
    return refuse_loaded(session, Error(ErrorCode::kStale, "the instance is gone; attach again"));
  }
  if (session.state.state() == SessionState::kCommitted) {
    session.client->send(
        committed_frame(session.loaded_call->call, session.state, entry->state.generation(), now));
    session.loaded_call.reset();
    return;
  }
  session.loaded_call->stage = Session::LoadedCall::Stage::kInstance;
  // A worker without a deadline waits in pieces of its own, until the session ends.
  const auto patience = session.loaded_call->patience;
  if (patience.count() > 0) session.loaded_call->deadline = now + patience;
  const auto change = entry->state.loaded(session.id());
  parts_.fleet.ranks_changed(*entry);
  apply(*entry, change);
}

void WorkerSessions::refuse_loaded(Session& session, const Error& why) {
  const auto call = std::exchange(session.loaded_call, std::nullopt);
  if (call) session.client->send(error_frame(call->call, session.id(), why));
}

Result<void> WorkerSessions::seal_resident(const ClientPtr& client, proto::WorkerFrame frame,
                                           std::vector<UniqueFd> blocks) {
  TRY(const auto session, find(client, frame));
  tasks_.spawn("worker.seal", seal(session, std::move(frame), std::move(blocks)));
  return {};
}

async::Task<void> WorkerSessions::seal(SessionPtr session, proto::WorkerFrame frame,
                                       std::vector<UniqueFd> blocks) {
  co_await asio::this_coro::throw_if_cancelled(false);
  auto sealing =
      parts_.residents.seal(session, std::move(*frame.mutable_seal_resident()), std::move(blocks));
  const auto sealed = co_await std::move(sealing);
  session->client->send(sealed ? done_frame(frame.call(), session->id())
                               : error_frame(frame.call(), session->id(), sealed.error()));
}

Result<void> WorkerSessions::mend_resident(const ClientPtr& client,
                                           const proto::WorkerFrame& frame) {
  TRY(const auto session, find(client, frame));
  tasks_.spawn("worker.mend", mend(session, frame.call()));
  return {};
}

async::Task<void> WorkerSessions::mend(SessionPtr session, std::uint64_t call) {
  co_await asio::this_coro::throw_if_cancelled(false);
  auto mending = parts_.residents.mend(session);
  const auto mended = co_await std::move(mending);
  session->client->send(mended ? done_frame(call, session->id())
                               : error_frame(call, session->id(), mended.error()));
}

async::Task<Result<void>> WorkerSessions::order_mend(SessionId id, std::vector<std::string> tensors,
                                                     TimePoint give_up) {
  proto::Order order;
  for (std::string& name : tensors) order.mutable_damaged()->add_tensors(std::move(name));
  for (;;) {
    const auto session = find(id);
    if (session == nullptr) co_return fail(ErrorCode::kStale, "its session has ended");
    if (!orders_.watched(id)) {
      co_return fail(ErrorCode::kUnavailable, "its worker watches for no orders");
    }
    auto giving = orders_.give({session}, order, give_up);
    auto given = co_await std::move(giving);
    if (given && !given->front()) co_return fail(std::move(given->front()).error());
    if (given) co_return Result<void>();
    // It carries out another order.
    const bool busy = given.error().code() == ErrorCode::kExhausted;
    const bool cancelled = co_await async::is_cancelled();
    if (!busy || cancelled || steady_now() >= give_up) co_return fail(std::move(given).error());
    co_await async::sleep_for(kOrderAgain);
  }
}

// The supervisor starts the worker again, and it loads from this host's copy.
void WorkerSessions::resident_is_wrong(SessionId id, const Error& why) {
  const auto session = find(id);
  // A worker that waits for the copy hears it as the answer to its attach.
  if (session != nullptr && !session->resident.empty()) fail_rank(id, why);
}

Result<void> WorkerSessions::detach(const ClientPtr& client, const proto::WorkerFrame& frame) {
  TRY(const auto session, find(client, frame));
  const SessionId id = session->id();
  auto* const entry = parts_.instances.find(session->instance);
  Instance::Change change;
  if (entry != nullptr) {
    change = entry->state.left(id);
    parts_.fleet.rank_detached(*entry, session->rank());
    parts_.fleet.ranks_changed(*entry);
  }
  session->state.end(steady_now(), Error(ErrorCode::kStale, "has detached"));
  serving_.leave_device(*session);
  parts_.rounds.detach(id);
  sessions_.erase(id);
  watch_.forget(id);
  orders_.session_ended(id, Error(ErrorCode::kStale, "has detached"));
  parts_.residents.session_ended(*session, true);
  note(parts_.events, *session, "detached");
  log::info("worker.detach", "session", id, "pid", client->pid());
  if (entry != nullptr) apply(*entry, change);
  client->send(done_frame(frame.call(), frame.session()));
  serving_.changed().notify();
  return {};
}

std::vector<SessionPtr> WorkerSessions::of_instance(const std::string& instance) const {
  std::vector<SessionPtr> found;
  for (const auto& [id, session] : sessions_) {
    if (session->instance == instance) found.push_back(session);
  }
  std::ranges::sort(found, {}, [](const SessionPtr& session) { return session->rank(); });
  return found;
}

void WorkerSessions::client_gone(const ClientPtr& client, const Departure& departure) {
  std::vector<SessionPtr> ended;
  for (const auto& [id, session] : sessions_) {
    if (session->client == client) ended.push_back(session);
  }
  for (const auto& session : ended) {
    session->worker = departure.died ? Session::WorkerLife::kDead : Session::WorkerLife::kGone;
    // The first phase of the session that takes the rank's place, also if this one had not taken
    // it.
    const bool early = !session->order.resident_key.empty() && !session->order.instance.empty();
    auto* const entry = parts_.instances.find(early ? session->order.instance : session->instance);
    if (entry != nullptr && departure.unseen) {
      entry->detections[session->rank()] = {*departure.unseen, steady_now()};
    }
  }
  for (const auto& session : ended) {
    fail_session(session, departure.why, departure.died ? "died" : "failed");
  }
  orders_.client_gone(client, departure.why);
}

// The worker hears of it on its own channel, and may fill its buckets itself.
void WorkerSessions::device_over(const device::DeviceOver& over) {
  const SessionPtr session = find(over.session);
  if (session != nullptr) session->with_device = false;
  parts_.rounds.device_over(over);
  parts_.direct.device_over(over.session);
  if (session == nullptr) return;
  session->state.leave_device(steady_now(), !over.error);
  proceed_loaded(session);
  const std::string& device = session->order.device;
  if (!over.error) {
    const bool verified =
        options_.verify_uploads || session->state.delivery() == Delivery::kBroadcast;
    log::info("worker.device_done", "session", over.session, "device", device, "buckets",
              over.buckets, "bytes", over.bytes, "us", over.elapsed.count(), "verified", verified,
              "refilled", over.refilled);
    return;
  }
  log::warn("worker.device_failed", "session", over.session, "pid", session->client->pid(),
            "device", device, "buckets", over.buckets, "refilled", over.refilled, "why",
            over.error->message());
  note(parts_.events, *session, "device_failed", over.error->message());
  const auto& copy = session->copy.stored();
  if (over.error->code() == ErrorCode::kCorrupt && copy != nullptr) {
    // The copy itself may be wrong, although nothing has touched its files. Nobody gets it before
    // it has been read again.
    copy->verification->doubt();
    (void)parts_.copies.verifier().check(copy);
  }
}

void WorkerSessions::check(TimePoint now) {
  std::vector<std::pair<SessionPtr, Error>> overdue;
  for (const auto& [id, session] : sessions_) {
    if (auto why = session->state.overdue(now)) overdue.emplace_back(session, std::move(*why));
  }
  for (const auto& [session, why] : overdue) {
    const bool unserved = session->state.state() == SessionState::kResolving;
    unserved ? serving_failed(session, why) : fail_session(session, why);
  }
  for (const auto& [id, session] : sessions_) {
    if (!session->loaded_call || now < session->loaded_call->deadline) continue;
    const auto* const entry = parts_.instances.find(session->instance);
    const bool unfit = entry != nullptr && entry->state.state() == InstanceState::kUnfit;
    refuse_loaded(*session, Error(unfit ? ErrorCode::kUnavailable : ErrorCode::kTimeout,
                                  fmt::format("instance {} is not ready: {}", session->instance,
                                              entry != nullptr ? entry->state.why() : "gone")));
  }
}

void WorkerSessions::excuse(Duration pause) {
  for (const auto& [id, session] : sessions_) session->state.excuse(pause);
}

void WorkerSessions::serving_failed(const SessionPtr& session, const Error& why) {
  if (session->order.resident_key.empty()) return fail_session(session, why);
  // One code for everything that the worker gets round by a load. It has no rank to fail yet.
  const bool absent = why.code() == ErrorCode::kNotFound;
  fail_session(session, absent ? why : Error(ErrorCode::kUnavailable, why.message()),
               "no_resident");
}

void WorkerSessions::bytes_announced(const SessionPtr& session) { proceed_loaded(session); }

void WorkerSessions::fail_rank(SessionId id, const Error& why) {
  if (const auto session = find(id)) fail_session(session, why);
}

void WorkerSessions::fail_session(const SessionPtr& session, const Error& why, const char* kind) {
  if (session->state.ended()) return;
  auto* const entry = parts_.instances.find(session->instance);
  Instance::Change change;
  if (entry != nullptr) {
    change = entry->state.failed(session->id(), why.message());
    parts_.fleet.ranks_changed(*entry);
  }
  log::warn("worker.session_failed", "session", session->id(), "pid", session->client->pid(),
            "instance", session->instance, "rank", session->rank(), "why", why.message());
  note(parts_.events, *session, kind, why.message());
  if (entry == nullptr) return end(session, why);
  change.ended.emplace_back(session->id(), why);
  apply(*entry, change);
}

void WorkerSessions::apply(LocalInstances::Entry& entry, const Instance::Change& change) {
  parts_.instances.take_back(entry);
  for (const auto& [id, why] : change.refuse) {
    if (const auto session = find(id)) refuse_loaded(*session, why);
  }
  for (const auto& [id, why] : change.ended) {
    if (const auto session = find(id)) end(session, why);
  }
  const auto now = steady_now();
  for (const SessionId id : change.commit) {
    const auto session = find(id);
    if (session == nullptr) continue;
    session->state.commit(now);
    session->committed = now;
    parts_.rounds.commit(id);
    note(parts_.events, *session, "committed");
    session->trace.span = {};
    log::info("worker.committed", "session", id, "pid", session->client->pid(), "instance",
              session->instance, "rank", session->rank(), "version",
              session->state.version().to_string());
    if (!session->loaded_call) continue;
    session->client->send(
        committed_frame(session->loaded_call->call, session->state, entry.state.generation(), now));
    session->loaded_call.reset();
  }
  parts_.instances.settle(entry);
}

// The worker hears of it as the answer to its call, or as an event.
void WorkerSessions::end(const SessionPtr& session, const Error& why) {
  if (session->state.ended()) return;
  const SessionId id = session->id();
  session->state.end(steady_now(), why);
  serving_.leave_device(*session);
  // It has not detached. Unless it is dead, it may read its mapped files for as long as it likes.
  if (session->worker != Session::WorkerLife::kDead) {
    for (const auto& segment : session->lent) parts_.copies.store().never_reuse(*segment);
  }
  parts_.residents.session_ended(*session, false);
  parts_.rounds.fail(id, why.message());
  refuse_loaded(*session, why);
  session->client->send(error_frame(session->attach_call, id, why));
  sessions_.erase(id);
  watch_.forget(id);
  orders_.session_ended(id, why);
  serving_.changed().notify();
}

async::Task<void> WorkerSessions::before_retire(ModelVersion id) {
  parts_.rounds.retired(id);
  (void)parts_.residents.release(id.model, id.version, "", "its version is retired");
  const auto give_up = steady_now() + options_.retire_wait;
  while (readers_of(id) > 0 && steady_now() < give_up) {
    co_await serving_.changed().wait_until(give_up);
  }
  std::vector<SessionPtr> users;
  for (const auto& [number, session] : sessions_) {
    if (session->wanted() == id) users.push_back(session);
  }
  for (const auto& session : users) {
    fail_session(session, Error(ErrorCode::kStale,
                                fmt::format("holds {}, which is retired here; attach again",
                                            id.to_string())));
  }
}

std::uint32_t WorkerSessions::readers_of(const ModelVersion& id) const {
  return static_cast<std::uint32_t>(std::ranges::count_if(
      sessions_, [&id](const auto& item) { return item.second->wanted() == id; }));
}

bool WorkerSessions::has_complete_copy(SessionId id) const {
  const auto session = find(id);
  return session != nullptr && session->state.is_complete();
}

void WorkerSessions::note_round_event(SessionId id, const char* kind) {
  if (const auto session = find(id)) note(parts_.events, *session, kind);
}

void WorkerSessions::receive_broadcast(SessionId id) {
  if (const auto session = find(id)) session->state.receive_broadcast(steady_now());
}

void WorkerSessions::leave_round(SessionId id, bool all, const std::string& why) {
  const auto session = find(id);
  if (session == nullptr) return;
  session->state.leave_round(steady_now(), all);
  note(parts_.events, *session, all ? "spread" : "alone", why);
  note_phase(parts_.events, *session);
  log::info("worker.left_round", "session", id, "instance", session->instance, "rank",
            session->rank(), "all", all, "why", why);
  proceed_loaded(session);
}

void WorkerSessions::left_direct(SessionId id, bool all, const std::string& why) {
  const auto session = find(id);
  if (session == nullptr) return;
  if (all) {
    session->state.receive_broadcast(steady_now());
  } else {
    session->state.leave_round(steady_now(), false);
  }
  note(parts_.events, *session, all ? "direct" : "not_direct", why);
  note_phase(parts_.events, *session);
  proceed_loaded(session);
}

Result<std::uint32_t> WorkerSessions::kill(const std::string& instance, std::uint32_t rank,
                                           bool dry_run) const {
  for (const auto& [id, session] : sessions_) {
    if (session->instance != instance || session->rank() != rank) continue;
    if (!dry_run) TRY_VOID(session->client->kill());
    return session->client->pid();
  }
  return fail(ErrorCode::kNotFound,
              "rank {} of instance '{}' has no worker on this host; `rekindle status` lists them",
              rank, instance);
}

void WorkerSessions::add_status(proto::AgentStatusResponse& status) const {
  const auto now = steady_now();
  for (const auto& [name, entry] : parts_.instances.all()) {
    auto& instance = *status.add_instances();
    instance.set_name(name);
    instance.set_named(entry->named);
    instance.set_state(std::string(to_string(entry->state.state())));
    instance.set_generation(entry->state.generation());
    instance.set_world(entry->state.world());
    if (const auto& id = entry->state.version()) {
      instance.mutable_id()->set_model(id->model);
      instance.mutable_id()->set_version(id->version);
    }
    instance.set_why(entry->state.why());
    for (const auto& [id, session] : sessions_) {
      if (session->instance != name) continue;
      auto& shown = *instance.add_sessions();
      shown = status_of(session->state, session->rank(), session->client->pid(), now);
      shown.set_group(session->order.group);
      const auto in_round = parts_.rounds.rounds().phase_of(id);
      if (session->state.state() == SessionState::kServing && !in_round.empty()) {
        shown.set_state(std::string(in_round));
      }
    }
  }
}

}  // namespace rekindle::worker
