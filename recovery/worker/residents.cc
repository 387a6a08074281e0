#include "recovery/worker/residents.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include <boost/asio/this_coro.hpp>

#include "recovery/keeper/keeper.h"
#include "recovery/rpc/convert.h"
#include "src/base/duplicate_fd.h"
#include "src/base/log.h"
#include "src/tensor/checkpoint.h"

namespace rekindle::worker {

namespace asio = boost::asio;

namespace {

constexpr std::size_t kMostKeyBytes = 4096;
// The agent sees the death of a worker before the kernel has freed what it had.
constexpr std::chrono::milliseconds kDeathWait{10'000};
// For a check. The device process ends it earlier, unless it hangs itself.
constexpr std::chrono::milliseconds kCheckPatience{60'000};
// Between two tries to have a copy checked while the device process starts.
constexpr std::chrono::milliseconds kCheckAgain{200};
// From the end of a search to the worker's deadline, so that it hears the reason.
constexpr std::chrono::milliseconds kRefusalTime{1000};
constexpr std::size_t kMostSeals = 16;
constexpr int kDropTries = 3;
constexpr std::chrono::milliseconds kDropAgain{1000};
// A worker that dies so soon after it got its copy may die of it.
constexpr std::chrono::seconds kProven{60};

Result<std::vector<bucket::BlockFile>> files_of(const std::vector<UniqueFd>& blocks,
                                                const proto::ResidentRecord& record) {
  std::vector<bucket::BlockFile> files;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    TRY(auto copy, duplicate(blocks[i].get(), "share a block with the device process"));
    files.push_back({std::move(copy), record.block_bytes(static_cast<int>(i))});
  }
  return files;
}

std::uint64_t bytes_of(const proto::ResidentRecord& record) {
  return std::accumulate(record.block_bytes().begin(), record.block_bytes().end(),
                         std::uint64_t{0});
}

std::string to_bytes(const std::vector<Digest>& digests) {
  return std::string(digest_bytes(digests));
}

Result<ResidentIdentity> identity_of(const proto::ResidentRecord& record) {
  TRY(auto id, rpc::from_proto(record.id()));
  return ResidentIdentity{std::move(id), rpc::from_proto(record.root()), record.key(),
                          record.device(), record.uid()};
}

Result<void> check(const proto::SealResident& request, std::size_t descriptors) {
  if (request.key().empty() || request.key().size() > kMostKeyBytes) {
    return fail(ErrorCode::kInvalid, "a resident key of {} bytes: 1 to {} are possible",
                request.key().size(), kMostKeyBytes);
  }
  const auto blocks = static_cast<std::size_t>(request.block_bytes_size());
  if (blocks == 0 || blocks > kMostResidentBlocks || blocks != descriptors) {
    return fail(ErrorCode::kInvalid,
                "{} blocks came with {} descriptors: 1 to {} blocks are possible, each with its "
                "descriptor",
                blocks, descriptors, kMostResidentBlocks);
  }
  // The sum of fewer than 65 of them cannot overflow.
  constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 48;
  for (const std::uint64_t bytes : request.block_bytes()) {
    if (bytes == 0 || bytes > kMostBytes) {
      return fail(ErrorCode::kInvalid, "a block of {} bytes", bytes);
    }
  }
  return {};
}

}  // namespace

Residents::Residents(CopyHost& copies, DeviceHost& devices, EventLog& events,
                     async::TaskGroup& tasks, asio::any_io_executor executor, Options options)
    : copies_(copies),
      devices_(devices),
      events_(events),
      tasks_(tasks),
      executor_(executor),
      options_(std::move(options)),
      link_(executor, options_.keeper),
      changed_(executor) {
  link_.tell_events(this);
}

async::Task<void> Residents::close(std::chrono::milliseconds deadline) {
  changed_.notify();
  link_.tell_events(nullptr);
  co_await link_.close(deadline);
}

// --- copies of an earlier agent

void Residents::recover() {
  std::error_code ignored;
  if (recovering_) return;
  if (!std::filesystem::exists(options_.keeper.directory / keeper::kKeeperSocket, ignored)) return;
  recovering_ = true;
  tasks_.spawn("worker.residents", read_keeper());
}

async::Task<void> Residents::read_keeper() {
  co_await asio::this_coro::throw_if_cancelled(false);
  auto listing = link_.list();
  const auto listed = co_await std::move(listing);
  if (!listed) log::warn("resident.keeper", "error", listed.error().message());
  std::vector<std::string> names;
  if (listed) {
    for (const auto& [name, users] : *listed) names.push_back(name);
  }
  for (const std::string& name : names) {
    if (kept_.contains(name)) continue;
    if (!enabled()) {
      tasks_.spawn("worker.residents", tell_drop(name));
      continue;
    }
    auto getting = link_.get(name);
    const auto kept = co_await std::move(getting);
    if (kept) add_kept(name, *kept);
  }
  recovering_ = false;
  changed_.notify();
}

// Drops a copy whose record is damaged, or of a later release.
void Residents::add_kept(const std::string& name, const keeper::KeeperLink::Kept& kept) {
  proto::ResidentRecord record;
  Result<ResidentIdentity> identity = fail(ErrorCode::kInvalid, "a malformed record");
  if (record.ParseFromString(kept.record)) identity = identity_of(record);
  if (!identity) {
    log::warn("resident.unknown", "name", name, "error", identity.error().message());
    return tasks_.spawn("worker.residents", tell_drop(name));
  }
  Copy copy;
  copy.identity = std::move(*identity);
  copy.bytes = bytes_of(record);
  copy.instance = record.instance();
  copy.process = record.process();
  copy.users = {kept.users.begin(), kept.users.end()};
  log::info("resident.found", "name", name, "version", copy.identity.id.to_string(), "device",
            copy.identity.device, "bytes", copy.bytes, "users", copy.users.size());
  kept_.insert_or_assign(name, std::move(copy));
  changed_.notify();
}

// --- the seal

async::Task<Result<void>> Residents::seal(SessionPtr session, proto::SealResident request,
                                          std::vector<UniqueFd> blocks) {
  if (!enabled()) {
    co_return fail(ErrorCode::kUnavailable,
                   "this agent keeps no resident copies; start it with --resident-ttl");
  }
  CO_TRY_VOID(check(request, blocks.size()));
  if (session->state.state() != SessionState::kCommitted || session->order.device.empty()) {
    co_return fail(ErrorCode::kInvalid,
                   "session {} cannot be kept: only a committed session with a device can",
                   session->id());
  }
  const std::string& model = session->wanted().model;
  const bool busy = std::ranges::any_of(sealing_, [&](const auto& other) {
    return other->process == session->client->process && other->model == model &&
           other->device == session->order.device;
  });
  if (busy || sealing_.size() >= kMostSeals) {
    co_return fail(ErrorCode::kExhausted, "{}",
                   busy ? "another seal of this worker is under way"
                        : "too many seals are under way; seal again");
  }
  before_write(*session->client, model, session->order.device);
  const auto sealing =
      std::make_shared<Sealing>(Sealing{session->client->process, model, session->order.device});
  sealing_.push_back(sealing);
  auto alone = seal_alone(std::move(session), std::move(request), std::move(blocks), sealing);
  auto sealed = co_await std::move(alone);
  sealing_.remove(sealing);
  co_return sealed;
}

async::Task<Result<void>> Residents::seal_alone(SessionPtr session, proto::SealResident request,
                                                std::vector<UniqueFd> blocks,
                                                std::shared_ptr<Sealing> sealing) {
  const auto root = copies_.root_here(session->wanted());
  if (!root) {
    co_return fail(ErrorCode::kUnavailable, "this host has no copy of {} any more",
                   session->wanted().to_string());
  }
  ResidentIdentity identity{session->wanted(), *root, request.key(), session->order.device,
                            session->client->uid()};
  proto::ResidentRecord record;
  *record.mutable_id() = rpc::to_proto(identity.id);
  *record.mutable_root() = rpc::to_proto(*root);
  record.set_key(request.key());
  record.set_description(std::move(*request.mutable_description()));
  *record.mutable_block_bytes() = request.block_bytes();
  record.set_device(identity.device);
  record.set_uid(identity.uid);
  record.set_instance(session->instance);
  record.set_process(sealing->process);
  CO_TRY(auto files, files_of(blocks, record));
  auto checking = digests_of(identity.device, std::move(files));
  CO_TRY(const auto digests, co_await std::move(checking));
  record.set_digests(to_bytes(digests));
  auto keeping =
      keep(std::move(session), std::move(identity), std::move(record), std::move(blocks), sealing);
  co_return co_await std::move(keeping);
}

async::Task<Result<void>> Residents::keep(SessionPtr session, ResidentIdentity identity,
                                          proto::ResidentRecord record,
                                          std::vector<UniqueFd> blocks,
                                          std::shared_ptr<const Sealing> sealing) {
  const Error stale(
      ErrorCode::kStale,
      fmt::format("the worker has ended, or attached again; its parameters of {} are not kept",
                  identity.id.to_string()));
  if (session->state.ended() || sealing->stale) co_return fail(stale);
  CO_TRY(auto pidfd, session->client->pidfd());
  const std::string name = Incarnation::random().hex();
  Copy copy;
  copy.identity = std::move(identity);
  copy.bytes = bytes_of(record);
  copy.instance = session->instance;
  copy.process = sealing->process;
  auto keeping = link_.keep({name, record.SerializeAsString(), std::move(blocks), std::move(pidfd),
                             options_.time_to_live});
  CO_TRY(const keeper::UserId user, co_await std::move(keeping));
  const bool ended = session->state.ended();
  if (sealing->stale || (ended && session->worker == Session::WorkerLife::kConnected)) {
    tasks_.spawn("worker.residents", tell_drop(name));
    co_return fail(stale);
  }
  copy.users.insert(user);
  copy.dying = ended;
  copy.session = ended ? 0 : session->id();
  session->resident = name;
  note(copy, "resident", "");
  log::info("resident.kept", "name", name, "session", session->id(), "version",
            copy.identity.id.to_string(), "device", copy.identity.device, "bytes", copy.bytes);
  kept_.insert_or_assign(name, std::move(copy));
  changed_.notify();
  co_return Result<void>();
}

async::Task<Result<std::vector<Digest>>> Residents::digests_of(
    std::string device, std::vector<bucket::BlockFile> blocks) {
  struct Waiting {
    explicit Waiting(const asio::any_io_executor& executor) : done(executor) {}
    async::Notifier done;
    std::optional<Result<std::vector<Digest>>> digests;
  };
  const auto waiting = std::make_shared<Waiting>(executor_);
  devices_.check_blocks(device, std::move(blocks), [waiting](Result<std::vector<Digest>> digests) {
    waiting->digests = std::move(digests);
    waiting->done.notify();
  });
  const TimePoint give_up = steady_now() + kCheckPatience;
  while (!waiting->digests && steady_now() < give_up && !co_await async::is_cancelled()) {
    co_await waiting->done.wait_until(give_up);
  }
  if (waiting->digests) co_return std::move(*waiting->digests);
  co_return fail(ErrorCode::kTimeout, "the device process has not checked a resident copy for {} s",
                 std::chrono::duration_cast<std::chrono::seconds>(kCheckPatience).count());
}

// --- the hand-over

async::Task<Result<Residents::Taken>> Residents::take(SessionPtr session, ModelVersion id) {
  const auto root = copies_.root_here(id);
  if (!root) {
    co_return fail(ErrorCode::kNotFound,
                   "this host has no copy of {} that would tell whether its version is the same",
                   id.to_string());
  }
  const TimePoint deadline = session->state.next_deadline().value_or(steady_now());
  const TimePoint give_up = deadline - kRefusalTime;
  const ResidentIdentity wanted{id, *root, session->order.resident_key, session->order.device,
                                session->client->uid()};
  auto waiting = wait_for_free(session, wanted, std::min(give_up, steady_now() + kDeathWait));
  const auto free = co_await std::move(waiting);
  if (!free) co_return fail(free.error());
  auto opening = open(session, *free, give_up);
  auto taken = co_await std::move(opening);
  if (taken && !session->state.ended()) {
    session->resident = *free;
    co_return taken;
  }
  // The worker loads now, and needs the memory.
  const Error why = taken ? Error(ErrorCode::kStale, "the session has ended") : taken.error();
  drop(*free, why.message());
  co_return fail(why);
}

// Claims the copy for this session.
async::Task<Result<std::string>> Residents::wait_for_free(SessionPtr session,
                                                          ResidentIdentity wanted,
                                                          TimePoint give_up) {
  while (!session->state.ended() && !co_await async::is_cancelled()) {
    const auto found = find(wanted);
    const bool waits = recovering_ || (found != kept_.end() && found->second.dying);
    if (found != kept_.end() && found->second.is_free()) {
      Copy& copy = found->second;
      copy.session = session->id();
      copy.process = session->client->process;
      copy.dying = false;
      co_return found->first;
    }
    if (!waits || steady_now() >= give_up) {
      if (found == kept_.end()) co_return fail(why_none(wanted));
      co_return fail(ErrorCode::kUnavailable, "another worker has the resident copy of {} on {}",
                     wanted.id.to_string(), wanted.device);
    }
    co_await changed_.wait_until(give_up);
  }
  co_return fail(ErrorCode::kStale, "the session has ended");
}

async::Task<Result<Residents::Taken>> Residents::open(SessionPtr session, std::string name,
                                                      TimePoint give_up) {
  CO_TRY(auto pidfd, session->client->pidfd());
  auto using_it = link_.use(name, std::move(pidfd));
  CO_TRY(const keeper::UserId user, co_await std::move(using_it));
  if (const auto copy = kept_.find(name); copy != kept_.end()) copy->second.users.insert(user);
  auto getting = link_.get(name);
  CO_TRY(auto kept, co_await std::move(getting));
  Taken taken{name, {}, std::move(kept.blocks)};
  if (!taken.record.ParseFromString(kept.record) ||
      taken.blocks.size() != static_cast<std::size_t>(taken.record.block_bytes_size())) {
    co_return fail(ErrorCode::kCorrupt, "the record of a resident copy is malformed");
  }
  const TimePoint begun = steady_now();
  std::string found;
  for (;;) {
    CO_TRY(auto files, files_of(taken.blocks, taken.record));
    auto checking = digests_of(taken.record.device(), std::move(files));
    const auto digests = co_await std::move(checking);
    if (digests) found = to_bytes(*digests);
    if (digests) break;
    // The device process may be starting.
    const bool starts = digests.error().code() == ErrorCode::kUnavailable ||
                        digests.error().code() == ErrorCode::kPeerLost;
    const bool cancelled = co_await async::is_cancelled();
    if (!starts || cancelled || session->state.ended() || steady_now() >= give_up) {
      co_return fail(digests.error());
    }
    co_await async::sleep_for(kCheckAgain);
  }
  const std::string& sealed = taken.record.digests();
  if (found.size() != sealed.size()) {
    co_return fail(ErrorCode::kCorrupt, "a resident copy has other blocks than at its seal");
  }
  const auto differs = std::ranges::mismatch(found, sealed).in1 - found.begin();
  if (static_cast<std::size_t>(differs) < found.size()) {
    co_return fail(ErrorCode::kCorrupt,
                   "the resident copy of {} on {} was changed after its seal, in its MiB {}",
                   session->wanted().to_string(), taken.record.device(),
                   differs / static_cast<std::ptrdiff_t>(sizeof(Digest)));
  }
  if (!kept_.contains(name)) co_return fail(ErrorCode::kStale, "the resident copy was released");
  log::info("resident.taken", "name", name, "session", session->id(), "bytes",
            bytes_of(taken.record), "check_us",
            std::chrono::duration_cast<std::chrono::microseconds>(steady_now() - begun).count());
  co_return taken;
}

// Of several equal copies the one that comes free first.
Residents::Copies::iterator Residents::find(const ResidentIdentity& identity) {
  auto best = kept_.end();
  const auto order = [](const Copy& copy) { return copy.is_free() ? 0 : copy.dying ? 1 : 2; };
  for (auto at = kept_.begin(); at != kept_.end(); ++at) {
    if (at->second.identity != identity) continue;
    if (best == kept_.end() || order(at->second) < order(best->second)) best = at;
  }
  return best;
}

// Says what differs in the copy that comes nearest.
Error Residents::why_none(const ResidentIdentity& wanted) const {
  const char* differs = nullptr;
  std::ptrdiff_t nearest = -1;
  for (const auto& [name, copy] : kept_) {
    const ResidentIdentity& has = copy.identity;
    if (has.device != wanted.device || has.id.model != wanted.id.model) continue;
    const std::pair<bool, const char*> same[] = {
        {has.uid == wanted.uid, "belongs to another user"},
        {has.id.version == wanted.id.version && has.root == wanted.root, "is of another version"},
        {has.key == wanted.key, "has another key"}};
    const auto first = std::ranges::find(same, false, &std::pair<bool, const char*>::first);
    if (first == std::end(same) || first - same <= nearest) continue;
    nearest = first - same;
    differs = first->second;
  }
  if (differs == nullptr) {
    return Error(ErrorCode::kNotFound, fmt::format("no resident copy of {} is on {}",
                                                   wanted.id.to_string(), wanted.device));
  }
  return Error(ErrorCode::kNotFound, fmt::format("the resident copy of {} on {} {}",
                                                 wanted.id.model, wanted.device, differs));
}

// --- the end of copies

void Residents::before_write(const Client& client, const std::string& model,
                             const std::string& device) {
  const auto there = [&](const std::string& process, const std::string& of, const std::string& on) {
    return process == client.process && of == model && (device.empty() || on == device);
  };
  for (const auto& sealing : sealing_) {
    if (there(sealing->process, sealing->model, sealing->device)) sealing->stale = true;
  }
  std::vector<std::string> written;
  for (const auto& [name, copy] : kept_) {
    const ResidentIdentity& has = copy.identity;
    if (there(copy.process, has.id.model, has.device)) written.push_back(name);
  }
  for (const std::string& name : written) drop(name, "its worker writes to it");
}

void Residents::session_ended(const Session& session, bool detached) {
  const auto found = kept_.find(session.resident);
  if (found == kept_.end() || found->second.session != session.id()) return;
  Copy& copy = found->second;
  if (detached) return drop(found->first, "its worker has detached");
  const bool proven = session.committed && steady_now() - *session.committed >= kProven;
  if (session.state.rung() == Rung::kResident && !proven) {
    return drop(found->first, "a worker that got it failed soon after");
  }
  // The process may live without its connection, or without this session. Its pidfd tells the
  // keeper when it dies.
  copy.dying = session.worker != Session::WorkerLife::kConnected;
  copy.session = 0;
}

std::size_t Residents::release(const std::string& model, std::optional<std::uint64_t> version,
                               const std::string& device, const std::string& why) {
  std::vector<std::string> released;
  for (const auto& [name, copy] : kept_) {
    const ResidentIdentity& has = copy.identity;
    if (!model.empty() && has.id.model != model) continue;
    if (version && has.id.version != *version) continue;
    if (!device.empty() && has.device != device) continue;
    released.push_back(name);
  }
  for (const std::string& name : released) drop(name, why);
  return released.size();
}

// Another user's copies stay: they are not this worker's to drop.
void Residents::make_room(const Session& session) {
  const std::string& device = session.order.device;
  const std::uint32_t uid = session.client->uid();
  std::vector<std::string> unused;
  for (const auto& [name, copy] : kept_) {
    const bool used = copy.session != 0 || (!copy.users.empty() && !copy.dying);
    const bool there = copy.identity.device == device && copy.identity.uid == uid;
    if (there && !used) unused.push_back(name);
  }
  for (const std::string& name : unused) drop(name, "another worker needs the memory of its GPU");
}

void Residents::drop(std::string name, std::string why) {
  const auto found = kept_.find(name);
  if (found == kept_.end()) return;
  note(found->second, "resident_dropped", why);
  log::info("resident.dropped", "name", name, "version", found->second.identity.id.to_string(),
            "device", found->second.identity.device, "bytes", found->second.bytes, "why", why);
  kept_.erase(found);
  changed_.notify();
  tasks_.spawn("worker.residents", tell_drop(std::move(name)));
}

async::Task<void> Residents::tell_drop(std::string name) {
  co_await asio::this_coro::throw_if_cancelled(false);
  for (int tries = 0; tries < kDropTries && !co_await async::is_cancelled(); ++tries) {
    auto dropping = link_.drop(name);
    const auto dropped = co_await std::move(dropping);
    // Not found: the keeper is a new one, without copies.
    if (dropped || dropped.error().code() == ErrorCode::kNotFound) co_return;
    log::warn("resident.drop", "error", dropped.error().message());
    co_await async::sleep_for(kDropAgain);
  }
}

void Residents::note(const Copy& copy, std::string kind, std::string why) {
  Event event;
  event.kind = std::move(kind);
  event.why = why.empty() ? copy.identity.device : copy.identity.device + ": " + why;
  event.version = copy.identity.id;
  event.instance = copy.instance;
  events_.add(std::move(event));
}

// --- events of the keeper

void Residents::user_gone(const std::string& name, keeper::UserId user) {
  const auto found = kept_.find(name);
  if (found == kept_.end()) return;
  found->second.users.erase(user);
  changed_.notify();
}

void Residents::copy_expired(const std::string& name) {
  const auto found = kept_.find(name);
  if (found == kept_.end()) return;
  note(found->second, "resident_dropped", "no worker came for it in its time");
  log::info("resident.expired", "name", name, "bytes", found->second.bytes);
  kept_.erase(found);
  changed_.notify();
}

// Living workers keep their memory, and their successors load. A keeper that only did not answer
// still has its copies.
void Residents::keeper_lost(const Error& why) {
  for (const auto& [name, copy] : kept_) note(copy, "resident_dropped", why.message());
  log::warn("resident.keeper_lost", "copies", kept_.size(), "error", why.message());
  kept_.clear();
  changed_.notify();
  recover();
}

void Residents::add_status(proto::AgentStatusResponse& status) const {
  for (const auto& [name, copy] : kept_) {
    auto& shown = *status.add_residents();
    *shown.mutable_id() = rpc::to_proto(copy.identity.id);
    shown.set_device(copy.identity.device);
    shown.set_bytes(copy.bytes);
    shown.set_instance(copy.instance);
    shown.set_users(static_cast<std::uint32_t>(copy.users.size()));
  }
}

}  // namespace rekindle::worker
