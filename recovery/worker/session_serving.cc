#include "recovery/worker/session_serving.h"

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <fcntl.h>

#include <boost/asio/this_coro.hpp>

#include "recovery/worker/residents.h"
#include "src/async/task.h"
#include "src/base/duplicate_fd.h"
#include "src/base/log.h"
#include "src/ipc/frame.h"
#include "src/ipc/process_age.h"

namespace rekindle::worker {

void ReadCopy::hand_over(std::shared_ptr<const store::StoredVersion> stored) {
  if (stored == nullptr) return;
  stored_ = std::move(stored);
  if (auto files = stored_->verification->stamp()) files_ = std::move(*files);
}

void ReadCopy::commit(std::shared_ptr<const store::StoredVersion> stored) {
  if (stored_ != nullptr || stored == nullptr) return;
  stored_ = std::move(stored);
  if (auto record = stored_->verification->record()) files_ = std::move(record->files);
}

WorkerSession::CopyKnown ReadCopy::known() const {
  using Known = WorkerSession::CopyKnown;
  if (resident_) return Known::kUnchanged;
  if (stored_ == nullptr) return Known::kArriving;
  auto& verification = *stored_->verification;
  const auto record = verification.record();
  const bool same =
      verification.state() == store::CopyState::kVerified && record && record->files == files_;
  return same ? Known::kUnchanged : Known::kChanged;
}

void note(EventLog& events, const Session& session, std::string kind, std::string why) {
  Event event;
  event.kind = std::move(kind);
  event.why = std::move(why);
  // A session that wants a resident copy belongs to its instance before it takes its rank.
  const bool early = !session.order.resident_key.empty() && !session.order.instance.empty();
  event.instance = early ? session.order.instance : session.instance;
  event.rank = session.rank();
  event.session = session.id();
  event.pid = session.client->pid();
  if (session.wanted().version != 0) event.version = session.wanted();
  if (session.attach_call == 0) event.rung = std::string(to_string(session.state.rung()));
  event.phases = session.state.phases().at(steady_now());
  event.trace = session.trace;
  if (event.kind == "attach") event.start = ipc::age_of_process(static_cast<pid_t>(event.pid));
  events.add(std::move(event));
}

void note_phase(EventLog& events, Session& session) {
  const auto phase = session.state.phases().to_report();
  if (!phase) return;
  note(events, session, *phase == Phase::kReady ? "loaded" : std::string(to_string(*phase)));
}

namespace asio = boost::asio;

namespace {

constexpr std::chrono::milliseconds kNewestRetry{200};
constexpr std::chrono::milliseconds kChoiceWait{1000};
// Tiles verify without a notification of each.
constexpr std::chrono::milliseconds kTilesInterval{20};

// The digests that the device process compares a device's bytes with.
Result<void> add_leaves(const Checkpoint& checkpoint, device::DeviceOrder& order) {
  const std::string_view bytes = digest_bytes(checkpoint.tile_digests);
  if (bytes.empty()) return {};
  TRY(order.leaves, ipc::sealed_memfd(bytes));
  order.leaves_bytes = bytes.size();
  return {};
}

// Each worker gets open files of its own: read-only, with offsets of its own.
Result<std::vector<UniqueFd>> open_for_reading(const std::vector<UniqueFd>& segments) {
  std::vector<UniqueFd> opened;
  for (const auto& segment : segments) {
    UniqueFd fd(
        ::open(fmt::format("/proc/self/fd/{}", segment.get()).c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd) return fail_errno(errno, "open a segment for a worker");
    opened.push_back(std::move(fd));
  }
  return opened;
}

}  // namespace

SessionServing::SessionServing(Parts parts, ServingEffects& effects, asio::any_io_executor executor,
                               bool verify_uploads)
    : parts_(parts),
      effects_(effects),
      verify_uploads_(verify_uploads),
      changed_(std::move(executor)) {}

async::Task<void> SessionServing::serve(SessionPtr session) {
  co_await asio::this_coro::throw_if_cancelled(false);
  auto id = co_await choose_version(session);
  Result<void> served = id ? parts_.copies.may_attach(*id) : Result<void>();
  if (!id) {
    served = fail(std::move(id).error());
  } else if (served) {
    session->order.wanted.id = *id;
    auto serving = find_bytes(session, *id);
    served = co_await std::move(serving);
  }
  if (served || session->state.ended()) co_return;
  if (!session->order.resident_key.empty()) parts_.residents.make_room(*session);
  effects_.serving_failed(session, served.error());
}

async::Task<Result<void>> SessionServing::find_bytes(SessionPtr session, ModelVersion id) {
  if (!session->order.resident_key.empty()) {
    auto taking = parts_.residents.take(session, id);
    CO_TRY(auto taken, co_await std::move(taking));
    co_return hand_over_resident(session, std::move(taken.record), std::move(taken.blocks));
  }
  const auto feed =
      parts_.feeds.get(session->order.wanted, session->order.device, session->trace.span);
  session->trace.puller = feed->trace();
  if (!session->state.ended()) parts_.rounds.choose(session->id(), id, feed);
  if (!session->state.ended()) choose_direct(*session, *feed);
  auto following = follow(session, feed);
  co_return co_await std::move(following);
}

// The worker has every byte with this answer.
Result<void> SessionServing::hand_over_resident(const SessionPtr& session,
                                                proto::ResidentRecord record,
                                                std::vector<UniqueFd> blocks) {
  WorkerSession::Offer offer;
  offer.id = session->wanted();
  offer.rung = Rung::kResident;
  TRY_VOID(session->state.serve(steady_now(), std::move(offer)));
  TRY_VOID(effects_.take_rank(session));
  session->copy.hand_over_resident();
  parts_.rounds.have_all(session->id(), session->wanted());
  session->client->send(
      resident_frame(std::exchange(session->attach_call, 0), session->id(), std::move(record)),
      std::move(blocks));
  announce(session, session->state.complete(steady_now()));
  note_phase(parts_.events, *session);
  return {};
}

// Before the feed looks for its bytes. If they are here, nothing is read.
void SessionServing::choose_direct(Session& session, VersionFeed& feed) {
  if (session.order.device.empty() || !session.order.group.empty()) return;
  auto reads = parts_.direct.begin(session.id(), session.order.device);
  if (reads == nullptr) return;
  if (!feed.read_directly(reads)) {
    reads->finish("another session waits for the same bytes");
    return;
  }
  session.direct = std::move(reads);
}

// All ranks of a generation get one version. The first rank names or chooses it.
async::Task<Result<ModelVersion>> SessionServing::choose_version(SessionPtr session) {
  const std::optional<std::uint64_t> wanted = session->order.version;
  while (!session->state.ended()) {
    if (co_await async::is_cancelled()) co_return fail(ErrorCode::kPeerLost, "the agent stops");
    auto* entry = parts_.instances.find(session->instance);
    if (entry == nullptr) co_return fail(ErrorCode::kStale, "the instance is gone");
    CO_TRY(const auto choice, entry->state.choose(session->id(), wanted));
    if (choice == Instance::Choice::kGiven) {
      // Not earlier: a rank that is refused does not speak for the others.
      entry->fleet.ask_for(wanted);
      parts_.fleet.ranks_changed(*entry);
      changed_.notify();
      co_return *entry->state.version();
    }
    if (choice == Instance::Choice::kWait) {
      co_await changed_.wait_until(steady_now() + kChoiceWait);
      continue;
    }
    const std::string& model = session->wanted().model;
    if (const auto gathers = parts_.rounds.rounds().known().gathers(model, session->order.group)) {
      CO_TRY_VOID(entry->state.chosen(session->id(), {model, *gathers}));
      // As if the rank had asked for it: another host may know a newer one.
      entry->fleet.ask_for(*gathers);
      parts_.fleet.ranks_changed(*entry);
      changed_.notify();
      continue;
    }
    auto newest = co_await newest_for(session);
    entry = parts_.instances.find(session->instance);  // it may have gone meanwhile
    if (entry == nullptr || session->state.ended()) break;
    if (!newest) {
      entry->state.choice_failed(session->id());
      changed_.notify();
      co_return fail(std::move(newest).error());
    }
    CO_TRY_VOID(entry->state.chosen(session->id(), *newest));
  }
  co_return fail(ErrorCode::kStale, "the session has ended");
}

// If ranks may live elsewhere, the coordinator chooses for all of them. Otherwise, and when it is
// away, the host does.
async::Task<Result<ModelVersion>> SessionServing::newest_for(SessionPtr session) {
  while (!session->state.ended() && !co_await async::is_cancelled()) {
    const auto* const entry = parts_.instances.find(session->instance);
    if (entry == nullptr || !parts_.fleet.spans(*entry)) break;
    auto newest = co_await parts_.fleet.newest_for(session->instance, session->rank());
    if (newest) co_return newest;
    const Error& error = newest.error();
    if (is_refusal(error) || error.code() == ErrorCode::kNotFound) co_return newest;
    if (error.code() != ErrorCode::kUnavailable) break;
    // The coordinator has just started, and this host may know an older version than it. The
    // deadline of the attach ends this.
    session->state.wait_for(error);
    co_await async::sleep_for(kNewestRetry);
  }
  session->state.wait_for(std::nullopt);
  co_return co_await parts_.copies.newest(session->wanted().model);
}

async::Task<Result<void>> SessionServing::follow(SessionPtr session,
                                                 std::shared_ptr<VersionFeed> feed) {
  const Lease interest = feed->interest();
  WorkerSession& state = session->state;
  while (!state.ended() && !co_await async::is_cancelled()) {
    state.wait_for(feed->obstacle());
    state.phases().enter(feed->phase(), steady_now());
    if (feed->view() != nullptr && state.state() == SessionState::kResolving) {
      CO_TRY_VOID(hand_over(*session, *feed));
    }
    note_phase(parts_.events, *session);
    if (feed->failed()) {
      // After a broadcast the worker needs no bytes of this host.
      if (state.was_given_all()) co_return Result<void>();
      co_return fail(*feed->failed());
    }
    if (state.state() != SessionState::kResolving) {
      state.fall_to(feed->view()->rung);
      if (feed->complete()) {
        session->copy.commit(feed->view()->stored);
        announce(session, state.complete(steady_now()));
        note_phase(parts_.events, *session);
        co_return Result<void>();
      }
      const auto runs = state.ready(feed->verified());
      if (!runs.empty()) announce(session, runs);
    }
    co_await feed->changed.wait_until(steady_now() + kTilesInterval);
  }
  co_return Result<void>();
}

Result<void> SessionServing::hand_over(Session& session, VersionFeed& feed) {
  const VersionFeed::View& view = *feed.view();
  TRY(auto descriptors, open_for_reading(view.segments));
  WorkerSession::Offer offer;
  offer.id = view.checkpoint->id;
  offer.rung = view.rung;
  offer.held = view.portion->held;
  offer.payload_bytes = view.portion->payload_bytes;
  TRY_VOID(session.state.serve(steady_now(), std::move(offer)));
  AttachedTo own{session.attach_call, session.id(), view.rung, descriptors.size()};
  session.attach_call = 0;
  session.lent = view.files;
  session.copy.hand_over(view.stored);
  const bool in_round = parts_.rounds.enters(session.id(), feed);
  const bool direct = session.direct != nullptr && !session.direct->is_over() && !in_round &&
                      view.stored == nullptr;
  const DeviceWay way = in_round ? DeviceWay::kRound
                        : direct ? DeviceWay::kDirect
                                 : DeviceWay::kUpload;
  std::optional<std::string> alone;
  if (session.order.device.empty()) {
    alone = "it wants its weights on no device";
  } else if (auto channel =
                 give_device(session, view, way, attached_frame(own, view.portion->encoded))) {
    descriptors.push_back(std::move(*channel));
    own.descriptors = descriptors.size();
    own.device_channel = true;
    if (way != DeviceWay::kUpload) session.state.enter_round();
  } else {
    own.no_device_channel = channel.error().message();
    log::info("worker.no_device", "session", session.id(), "device", session.order.device, "why",
              channel.error().message());
    alone = channel.error().message();
  }
  if (!session.with_device || way != DeviceWay::kDirect) {
    parts_.direct.end(session.id(), alone.value_or("the session is served another way"));
  }
  session.client->send_encoded(attached_frame(own, view.portion->encoded), std::move(descriptors));
  parts_.rounds.hand_over(session.id(), view, std::move(alone));
  return {};
}

// Returns the worker's end of the channel that brings its buckets.
Result<UniqueFd> SessionServing::give_device(Session& session, const VersionFeed::View& view,
                                             DeviceWay way, std::string attached) {
  device::DeviceOrder order;
  order.session = session.id();
  order.device = session.order.device;
  if (way == DeviceWay::kDirect) parts_.direct.hand_over(session.id(), attached);
  order.attached = std::move(attached);
  order.bucket_bytes = session.order.bucket_bytes;
  order.release = session.state.times().load;
  order.in_round = way == DeviceWay::kRound;
  order.direct = way == DeviceWay::kDirect;
  order.keep = std::make_shared<const VersionFeed::Files>(view.files);
  TRY(order.segments, duplicate_all(view.segments, "share a segment with the device process"));
  order.verify_upload = verify_uploads_;
  if (way != DeviceWay::kUpload || order.verify_upload)
    TRY_VOID(add_leaves(*view.checkpoint, order));
  TRY(auto channel, parts_.devices.serve_device(std::move(order)));
  session.with_device = true;
  return channel;
}

void SessionServing::leave_device(Session& session) {
  parts_.direct.end(session.id(), "the session has ended");
  if (!std::exchange(session.with_device, false)) return;
  parts_.devices.end_device(session.id(), session.worker != Session::WorkerLife::kConnected);
}

void SessionServing::announce(const SessionPtr& session, const TileRuns& runs) {
  session->client->send(ready_frame(session->state, runs));
  if (session->with_device) {
    parts_.devices.tell_device(session->id(), runs, session->state.is_complete());
  }
  effects_.bytes_announced(session);
}

}  // namespace rekindle::worker
