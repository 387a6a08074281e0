#include "recovery/worker/residents.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <set>
#include <utility>

#include <poll.h>

#include <boost/asio/this_coro.hpp>

#include "recovery/keeper/keeper.h"
#include "recovery/rpc/convert.h"
#include "src/base/duplicate_fd.h"
#include "src/base/log.h"
#include "src/ipc/process_age.h"
#include "src/tensor/checkpoint.h"

namespace rekindle::worker {

namespace asio = boost::asio;

namespace {

constexpr std::size_t kMostKeyBytes = 4096;
// The agent sees the death of a worker before the kernel has freed what it had.
constexpr std::chrono::milliseconds kDeathWait{10'000};
// A check of a copy that nobody uses tells for this long what it has found.
constexpr std::chrono::milliseconds kCheckHolds{30'000};
// For the device process to come back, in a check of a copy that no worker waits for.
constexpr std::chrono::milliseconds kCheckPatience{60'000};
// Between two tries to have a copy checked while the device process starts.
constexpr std::chrono::milliseconds kCheckAgain{200};
// From the end of a search to the worker's deadline, so that it hears the reason.
constexpr std::chrono::milliseconds kRefusalTime{1000};
constexpr std::size_t kMostSeals = 16;
// Keepers that end one after the other may do so because of what they get.
constexpr int kMeetTries = 3;
// Children that a dead worker leaves behind have this time to end.
constexpr std::chrono::milliseconds kChildrenEnd{2000};
constexpr std::chrono::milliseconds kLookAgain{100};
constexpr int kDropTries = 3;
constexpr std::chrono::milliseconds kDropAgain{1000};
// A worker that dies so soon after it got its copy may die of it.
constexpr std::chrono::seconds kProven{60};
// A copy with more wrong tiles is dropped: it was written to.
constexpr std::size_t kMostMended = 16;
// For a worker that was told to have its copy mended.
constexpr std::chrono::seconds kMendPatience{60};
// The GPU reads a piece in about a millisecond.
constexpr std::size_t kPieceTiles = 512;
// Names of tensors in an event, and in an order.
constexpr std::size_t kMostNamed = 8;
constexpr std::size_t kMostOrdered = 256;
// For a device process that starts anew in a mend.
constexpr std::chrono::seconds kMendTime{10};
// Of reads, each of which ends the device process.
constexpr int kMostFailures = 2;
constexpr std::chrono::milliseconds kMeetAgain{500};

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

std::vector<std::string> names_in(const OpenResident& opened,
                                  const std::vector<std::size_t>& tiles) {
  std::vector<std::string> names;
  for (const std::size_t tile : tiles) {
    for (const auto* const tensor : opened.tensors_in(tile)) {
      if (names.size() == kMostOrdered) return names;
      if (std::ranges::find(names, tensor->name()) == names.end()) names.push_back(tensor->name());
    }
  }
  return names;
}

std::string version_of(const OpenResident& opened) {
  return fmt::format("{}@{}", opened.record().id().model(), opened.record().id().version());
}

// "layers.3.up.weight, layers.3.down.weight (MiB 17, 512)"
std::string describe(const OpenResident& opened, std::vector<std::size_t> tiles) {
  std::vector<std::string> names = names_in(opened, tiles);
  const std::size_t more_names = names.size() - std::min(names.size(), kMostNamed);
  const std::size_t more_tiles = tiles.size() - std::min(tiles.size(), kMostNamed);
  names.resize(names.size() - more_names);
  tiles.resize(tiles.size() - more_tiles);
  const auto more = [](std::size_t count) {
    return count > 0 ? fmt::format(" and {} more", count) : std::string();
  };
  return fmt::format("{}{} (MiB {}{})",
                     names.empty() ? "no tensor that the worker has named"
                                   : fmt::to_string(fmt::join(names, ", ")),
                     more(more_names), fmt::join(tiles, ", "), more(more_tiles));
}

// A GPU whose memory has an uncorrectable error fails each read of it.
Error unreadable(const Error& why) {
  return Error(ErrorCode::kCorrupt, "its GPU cannot read it: " + why.message());
}

bool has_ended(const UniqueFd& pidfd) {
  pollfd ended{pidfd.get(), POLLIN, 0};
  return ::poll(&ended, 1, 0) == 1;
}

Result<ResidentIdentity> identity_of(const proto::ResidentRecord& record) {
  TRY(auto id, rpc::from_proto(record.id()));
  return ResidentIdentity{std::move(id), rpc::from_proto(record.root()),
                          record.key(),  record.device(),
                          record.uid(),  record.shared()};
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
  return check_tensors(request);
}

}  // namespace

Result<Residents::User> Residents::user_of(const Client& client) {
  TRY(auto pidfd, client.pidfd());
  return User{client.process, std::move(pidfd), ipc::lineage_of(static_cast<pid_t>(client.pid()))};
}

bool Residents::Copy::is_used() const {
  return !sessions.empty() ||
         std::ranges::any_of(users, [](const auto& user) { return !user.second.dying; });
}

void Residents::Copy::remove(keeper::UserId user) {
  if (const auto found = users.find(user); found != users.end()) {
    gone = found->second.lineage;
    users.erase(found);
  }
  close_unused();
}

void Residents::Copy::close_unused() {
  const bool is_checked = check != nullptr && !check->verdict;
  if (!users.empty() || is_checked || opened == nullptr) return;
  files = ipc::ids_of(opened->blocks());
  opened.reset();
}

Residents::Residents(CopyHost& copies, DeviceHost& devices, EventLog& events,
                     async::TaskGroup& tasks, asio::any_io_executor executor, Options options)
    : copies_(copies),
      bytes_(copies, devices, executor),
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
  const bool runs =
      std::filesystem::exists(options_.keeper.directory / keeper::kKeeperSocket, ignored);
  if (!runs && kept_.empty()) return;
  recovering_ = true;
  tasks_.spawn("worker.residents", meet_keeper());
}

async::Task<void> Residents::meet_keeper() {
  co_await asio::this_coro::throw_if_cancelled(false);
  for (int tries = 0; tries < kMeetTries && !co_await async::is_cancelled(); ++tries) {
    const std::uint64_t before = losses_;
    auto reading = read_keeper();
    auto met = co_await std::move(reading);
    if (met) {
      auto bringing = bring_back();
      met = co_await std::move(bringing);
    }
    if (!met) {
      log::warn("resident.keeper", "error", met.error().message());
      co_await async::sleep_for(kMeetAgain);
    }
    const bool lost = !met && met.error().code() == ErrorCode::kPeerLost;
    if (!lost && losses_ == before) break;
  }
  std::vector<std::string> lost;
  for (const auto& [name, copy] : kept_) {
    if (!copy.at_keeper) lost.push_back(name);
  }
  for (const std::string& name : lost) drop(name, "the keeper that had it is gone");
  recovering_ = false;
  changed_.notify();
}

// Adds copies that this agent does not know. Marks those that it knows and the keeper has.
async::Task<Result<void>> Residents::read_keeper() {
  auto listing = link_.list();
  CO_TRY(const auto listed, co_await std::move(listing));
  std::vector<std::string> names;
  for (const auto& [name, users] : listed) {
    const auto known = kept_.find(name);
    if (known == kept_.end()) {
      if (!dropping_.contains(name)) names.push_back(name);
      continue;
    }
    known->second.at_keeper = true;
    std::vector<keeper::UserId> gone;
    bool lives = false;
    for (const auto& [user, process] : known->second.users) {
      if (std::ranges::find(users, user) != users.end()) continue;
      gone.push_back(user);
      lives = lives || !has_ended(process.pidfd);
    }
    if (lives) {
      // The keeper would free the memory, or give it away, beside a living worker.
      drop(name, "the keeper does not know its worker");
      continue;
    }
    for (const keeper::UserId user : gone) known->second.remove(user);
    came_free(name);
  }
  for (const std::string& name : names) {
    if (!enabled() || drained_) {
      tasks_.spawn("worker.residents", tell_drop(name));
      continue;
    }
    auto getting = link_.get(name);
    auto kept = co_await std::move(getting);
    const bool unwanted = drained_ || dropping_.contains(name) || kept_.contains(name);
    if (kept && !unwanted) add_kept(name, std::move(*kept));
  }
  co_return Result<void>();
}

// A new keeper gets the copies whose workers live.
async::Task<Result<void>> Residents::bring_back() {
  std::vector<std::string> names;
  for (const auto& [name, copy] : kept_) {
    if (!copy.at_keeper && copy.opened != nullptr && !copy.users.empty()) names.push_back(name);
  }
  for (const std::string& name : names) {
    auto keeping = keep_again(name);
    const auto kept = co_await std::move(keeping);
    if (!kept && kept.error().code() == ErrorCode::kPeerLost) co_return kept;
    if (!kept) log::warn("resident.keep_again", "name", name, "error", kept.error().message());
    if (kept) log::info("resident.kept_again", "name", name);
  }
  co_return Result<void>();
}

async::Task<Result<void>> Residents::keep_again(std::string name) {
  const std::uint64_t before = losses_;
  // By the new keeper's numbers.
  std::set<keeper::UserId> renewed;
  for (;;) {
    auto found = kept_.find(name);
    if (found == kept_.end()) co_return fail(ErrorCode::kStale, "the resident copy was released");
    const auto next = std::ranges::find_if(
        found->second.users, [&](const auto& user) { return !renewed.contains(user.first); });
    if (next == found->second.users.end()) break;
    const keeper::UserId old_number = next->first;
    CO_TRY(auto order, order_for(name, found->second, next->second));
    auto asking =
        renewed.empty() ? link_.keep(std::move(order)) : link_.use(name, std::move(order.user));
    CO_TRY(const keeper::UserId number, co_await std::move(asking));
    renewed.insert(number);
    found = kept_.find(name);
    if (found == kept_.end()) {
      tasks_.spawn("worker.residents", tell_drop(name));
      continue;
    }
    auto user = found->second.users.extract(old_number);
    if (user.empty()) {
      // It has left meanwhile.
      tasks_.spawn("worker.residents", tell_leave(name, number));
      continue;
    }
    // At once, because the keeper may tell its death next.
    user.key() = number;
    found->second.users.insert(std::move(user));
    for (auto& [session, its_user] : found->second.sessions) {
      if (its_user == old_number) its_user = number;
    }
  }
  if (losses_ != before) co_return fail(ErrorCode::kPeerLost, "the new keeper is gone as well");
  kept_.find(name)->second.at_keeper = true;
  co_return Result<void>();
}

Result<keeper::KeeperLink::Order> Residents::order_for(const std::string& name, const Copy& copy,
                                                       const User& user) const {
  if (copy.opened == nullptr) return fail(ErrorCode::kStale, "its workers have ended");
  TRY(auto blocks, copy.opened->share());
  TRY(auto pidfd, duplicate(user.pidfd.get(), "keep a pidfd"));
  return keeper::KeeperLink::Order{name,
                                   copy.opened->record().SerializeAsString(),
                                   std::move(blocks),
                                   std::move(pidfd),
                                   options_.time_to_live,
                                   copy.identity.uid};
}

// Drops a copy whose record is damaged, or of a later release.
void Residents::add_kept(const std::string& name, keeper::KeeperLink::Kept kept) {
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
  for (auto& [user, pidfd] : kept.users) {
    // Neither is known of a worker of another PID namespace.
    const pid_t pid = ipc::pid_of(pidfd.get()).value_or(0);
    const std::string process = pid > 0 ? fmt::format("pid-{}", pid) : std::string();
    copy.users[user] = {process, std::move(pidfd), ipc::lineage_of(pid)};
  }
  if (!copy.users.empty()) {
    auto opened = OpenResident::open(kept.record, std::move(kept.blocks));
    if (!opened) {
      log::warn("resident.unknown", "name", name, "error", opened.error().message());
      return tasks_.spawn("worker.residents", tell_drop(name));
    }
    copy.opened = std::move(*opened);
  }
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
  if (drained_) {
    co_return fail(ErrorCode::kUnavailable, "this host is drained, so it keeps no resident copies");
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
  ResidentIdentity identity{session->wanted(),      *root,
                            request.key(),          session->order.device,
                            session->client->uid(), request.shared()};
  proto::ResidentRecord record;
  *record.mutable_id() = rpc::to_proto(identity.id);
  *record.mutable_root() = rpc::to_proto(*root);
  record.set_key(request.key());
  record.set_description(std::move(*request.mutable_description()));
  *record.mutable_block_bytes() = request.block_bytes();
  record.set_device(identity.device);
  record.set_uid(identity.uid);
  record.set_shared(identity.shared);
  record.set_instance(session->instance);
  *record.mutable_tensors() = std::move(*request.mutable_tensors());
  CO_TRY(auto files, files_of(blocks, record));
  auto checking = bytes_.digests(identity.device, std::move(files));
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
      fmt::format("the worker has ended or attached again, or the host is drained; its parameters "
                  "of {} are not kept",
                  identity.id.to_string()));
  if (session->state.ended() || sealing->stale || drained_) co_return fail(stale);
  CO_TRY(auto pidfd, session->client->pidfd());
  const std::string name = Incarnation::random().hex();
  Copy copy;
  copy.identity = std::move(identity);
  copy.bytes = bytes_of(record);
  copy.instance = session->instance;
  std::string text = record.SerializeAsString();
  CO_TRY(auto own, duplicate_all(blocks, "keep a block for a new keeper"));
  CO_TRY(copy.opened, OpenResident::open(text, std::move(own)));
  CO_TRY(User worker, user_of(*session->client));
  auto keeping = link_.keep({name, std::move(text), std::move(blocks), std::move(pidfd),
                             options_.time_to_live, copy.identity.uid});
  CO_TRY(const keeper::UserId user, co_await std::move(keeping));
  const bool ended = session->state.ended();
  if (sealing->stale || drained_ || (ended && session->worker == Session::WorkerLife::kConnected)) {
    tasks_.spawn("worker.residents", tell_drop(name));
    co_return fail(stale);
  }
  worker.dying = ended;
  copy.users[user] = std::move(worker);
  if (!ended) copy.sessions[session->id()] = user;
  session->resident = name;
  note(copy, "resident", "");
  log::info("resident.kept", "name", name, "session", session->id(), "version",
            copy.identity.id.to_string(), "device", copy.identity.device, "bytes", copy.bytes);
  kept_.insert_or_assign(name, std::move(copy));
  changed_.notify();
  co_return Result<void>();
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
  const ResidentIdentity wanted{id,
                                *root,
                                session->order.resident_key,
                                session->order.device,
                                session->client->uid(),
                                session->order.resident_shared};
  auto waiting = wait_for_free(session, wanted, std::min(give_up, steady_now() + kDeathWait));
  const auto free = co_await std::move(waiting);
  if (!free) co_return fail(free.error());
  auto opening = open(session, *free, give_up);
  auto taken = co_await std::move(opening);
  if (taken && !session->state.ended()) {
    session->resident = *free;
    co_return taken;
  }
  const Error why = taken ? Error(ErrorCode::kStale, "the session has ended") : taken.error();
  lose(session, *free, why);
  co_return fail(why);
}

// The worker loads now, and needs the memory. Others go on to use a shared copy, unless it is bad.
void Residents::lose(const SessionPtr& session, const std::string& name, const Error& why) {
  const auto found = kept_.find(name);
  if (found == kept_.end()) return;
  Copy& copy = found->second;
  const auto mine = copy.sessions.extract(session->id());
  if (!copy.is_used() || why.code() == ErrorCode::kCorrupt) return drop(name, why.message());
  if (!mine.empty()) leave(name, mine.mapped(), why.message());
}

// Claims the copy for this session.
async::Task<Result<std::string>> Residents::wait_for_free(SessionPtr session,
                                                          ResidentIdentity wanted,
                                                          TimePoint give_up) {
  std::optional<TimePoint> children_end;
  while (!session->state.ended() && !co_await async::is_cancelled()) {
    const auto found = find(wanted);
    const bool waits = recovering_ || (found != kept_.end() && !found->second.is_used());
    if (found != kept_.end() && !recovering_ && found->second.may_be_taken()) {
      const auto why = still_open(found->second);
      // What a check has found so far may be over.
      if (why) found->second.check.reset();
      if (!why) {
        found->second.sessions[session->id()] = 0;
        found->second.gone.reset();
        co_return found->first;
      }
      // The children of a dead process may be about to end as well.
      children_end = children_end.value_or(std::min(give_up, steady_now() + kChildrenEnd));
      if (steady_now() >= *children_end) co_return fail(*why);
      co_await changed_.wait_until(std::min(*children_end, steady_now() + kLookAgain));
      continue;
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

// Work that a dead worker has queued on a GPU ends with the last process that has its files open,
// and might write to the blocks after their check. Readers queue no writes.
std::optional<Error> Residents::still_open(const Copy& copy) const {
  if (copy.identity.shared || !copy.gone) return std::nullopt;
  const auto heir = ipc::find_heir(*copy.gone, copy.files, options_.is_worker);
  if (!heir) return std::nullopt;
  return Error(
      ErrorCode::kUnavailable,
      fmt::format("process {}, which the dead worker of the resident copy of {} has forked, "
                  "still has the worker's GPU open",
                  *heir, copy.identity.id.to_string()));
}

// The check begins first: often it is over already, because it began at the death of the worker
// before.
async::Task<Result<Residents::Taken>> Residents::open(SessionPtr session, std::string name,
                                                      TimePoint give_up) {
  const TimePoint begun = steady_now();
  const std::shared_ptr<Check> check = check_of(name);
  CO_TRY(auto pidfd, session->client->pidfd());
  CO_TRY(User worker, user_of(*session->client));
  auto using_it = link_.use(name, std::move(pidfd));
  CO_TRY(const keeper::UserId user, co_await std::move(using_it));
  if (const auto copy = kept_.find(name); copy != kept_.end()) {
    copy->second.users[user] = std::move(worker);
    copy->second.sessions[session->id()] = user;
  }
  while (!check->verdict && !session->state.ended() && steady_now() < give_up) {
    const bool cancelled = co_await async::is_cancelled();
    if (cancelled) break;
    co_await check->done.wait_until(give_up);
  }
  if (!check->verdict) {
    co_return fail(ErrorCode::kTimeout, "the resident copy is not checked yet");
  }
  if (!*check->verdict) co_return fail(check->verdict->error());
  auto opening = open_copy(name);
  CO_TRY(const OpenResidentPtr opened, co_await std::move(opening));
  // From here on the worker may write to it.
  if (const auto copy = kept_.find(name); copy != kept_.end()) copy->second.check.reset();
  CO_TRY(auto blocks, opened->share());
  log::info("resident.taken", "name", name, "session", session->id(), "bytes",
            bytes_of(opened->record()), "wait_us",
            std::chrono::duration_cast<std::chrono::microseconds>(steady_now() - begun).count());
  co_return Taken{name, opened->record(), std::move(blocks)};
}

// --- the check

async::Task<Result<OpenResidentPtr>> Residents::open_copy(std::string name) {
  const auto known = kept_.find(name);
  if (known != kept_.end() && known->second.opened != nullptr) co_return known->second.opened;
  auto getting = link_.get(name);
  CO_TRY(auto kept, co_await std::move(getting));
  CO_TRY(auto opened, OpenResident::open(kept.record, std::move(kept.blocks)));
  const auto found = kept_.find(name);
  if (found == kept_.end()) co_return fail(ErrorCode::kStale, "the resident copy was released");
  if (found->second.opened == nullptr) found->second.opened = std::move(opened);
  co_return found->second.opened;
}

// The worker is dead and no other has the copy: its bytes change no more. A copy that nobody comes
// for is checked once.
void Residents::came_free(const std::string& name) {
  const auto found = kept_.find(name);
  if (found == kept_.end() || !found->second.is_free()) return;
  if (!still_open(found->second)) (void)check_of(name);
}

std::shared_ptr<Residents::Check> Residents::check_of(const std::string& name) {
  const auto found = kept_.find(name);
  if (found == kept_.end()) {
    const auto none = std::make_shared<Check>(executor_);
    none->verdict = fail(ErrorCode::kStale, "the resident copy was released");
    return none;
  }
  auto check = found->second.check;
  const bool holds = check != nullptr &&
                     (!check->verdict ||
                      (check->verdict->has_value() && steady_now() - check->begun < kCheckHolds));
  if (holds) return check;
  check = std::make_shared<Check>(executor_);
  found->second.check = check;
  // It may end at once, and the copy with it.
  tasks_.spawn("worker.residents", run_check(name, check));
  return check;
}

async::Task<void> Residents::run_check(std::string name, std::shared_ptr<Check> check) {
  co_await asio::this_coro::throw_if_cancelled(false);
  auto verifying = verify(name);
  check->verdict = co_await std::move(verifying);
  log::info(
      "resident.checked", "name", name, "error",
      *check->verdict ? std::string() : check->verdict->error().message(), "check_us",
      std::chrono::duration_cast<std::chrono::microseconds>(steady_now() - check->begun).count());
  check->done.notify();
  const auto found = kept_.find(name);
  if (found == kept_.end()) co_return;
  if (!*check->verdict) {
    const Error& why = check->verdict->error();
    if (why.code() == ErrorCode::kCorrupt) co_return give_up(name, why);
    // Workers that read a shared copy go on.
    if (!may_work_later(why) && !found->second.identity.shared) {
      co_return drop(name, why.message());
    }
  }
  found->second.close_unused();
}

// Mends wrong tiles without asking: nobody writes to the copy.
async::Task<Result<void>> Residents::verify(std::string name) {
  auto opening = open_copy(name);
  CO_TRY(const OpenResidentPtr opened, co_await std::move(opening));
  auto comparing = compare_all(name, opened);
  CO_TRY(const auto wrong, co_await std::move(comparing));
  if (wrong.empty()) co_return Result<void>();
  found_wrong(name, wrong);
  Result<void> mended = fail(ErrorCode::kCorrupt, "{} MiB of it are wrong", wrong.size());
  if (wrong.size() <= kMostMended) {
    auto mending = mend_all(name, opened, wrong, [this, name] { return kept_.contains(name); });
    mended = co_await std::move(mending);
  }
  if (mended) co_return mended;
  co_return fail(
      mended.error().code() == ErrorCode::kStale ? ErrorCode::kStale : ErrorCode::kCorrupt,
      "the resident copy of {} on {} was changed after its seal, in its MiB {}: {}",
      version_of(*opened), opened->record().device(), wrong.front(), mended.error().message());
}

// The device process may be starting.
async::Task<Result<std::vector<std::size_t>>> Residents::compare_all(std::string name,
                                                                     OpenResidentPtr opened) {
  const TimePoint give_up = steady_now() + kCheckPatience;
  int failures = 0;
  for (;;) {
    auto comparing = bytes_.compare(opened);
    auto wrong = co_await std::move(comparing);
    if (!wrong && wrong.error().code() == ErrorCode::kInternal && ++failures == kMostFailures) {
      co_return fail(unreadable(wrong.error()));
    }
    const bool cancelled = co_await async::is_cancelled();
    const bool over = cancelled || !kept_.contains(name) || steady_now() >= give_up;
    if (wrong || over || !may_work_later(wrong.error())) co_return wrong;
    co_await async::sleep_for(kCheckAgain);
  }
}

// Of several equal copies the one that comes free first.
Residents::Copies::iterator Residents::find(const ResidentIdentity& identity) {
  auto best = kept_.end();
  const auto order = [](const Copy& copy) {
    return copy.may_be_taken() ? 0 : copy.is_used() ? 2 : 1;
  };
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
        {has.key == wanted.key, "has another key"},
        {has.shared == wanted.shared,
         has.shared ? "is for workers that share it" : "belongs to one worker"}};
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

// --- scrub and mend

async::Task<std::vector<Residents::Piece>> Residents::scrub_pieces() {
  std::vector<std::string> names;
  for (const auto& [name, copy] : kept_) names.push_back(name);
  std::vector<Piece> pieces;
  for (const std::string& name : names) {
    auto opening = open_copy(name);
    const auto opened = co_await std::move(opening);
    if (!opened) continue;
    for (std::size_t at = 0; at < (*opened)->tiles();) {
      std::size_t end = at + 1;
      const std::uint32_t block = (*opened)->tile(at).block;
      const std::size_t most = std::min((*opened)->tiles(), at + kPieceTiles);
      while (end < most && (*opened)->tile(end).block == block) ++end;
      pieces.push_back({name, at, end - at});
      at = end;
    }
    if (const auto copy = kept_.find(name); copy != kept_.end()) copy->second.close_unused();
  }
  co_return pieces;
}

// A tile is read once more before it counts as wrong. What is read of a copy that was dropped
// meanwhile counts for nothing: its worker may have written.
async::Task<bool> Residents::scrub(Piece piece) {
  const auto known = kept_.find(piece.name);
  if (known == kept_.end()) co_return true;
  auto opening = open_copy(piece.name);
  const auto open = co_await std::move(opening);
  if (!open) co_return true;
  const OpenResidentPtr opened = *open;
  auto comparing = bytes_.compare(opened, piece.first, piece.count);
  const auto suspect = co_await std::move(comparing);
  const auto copy_read = kept_.find(piece.name);
  if (copy_read != kept_.end()) {
    copy_read->second.close_unused();
    int& failures = copy_read->second.failures;
    if (suspect) failures = 0;
    const bool failed = !suspect && suspect.error().code() == ErrorCode::kInternal;
    if (failed && ++failures == kMostFailures) {
      give_up(piece.name, unreadable(suspect.error()));
      co_return true;
    }
  }
  if (!suspect) co_return !may_work_later(suspect.error());
  std::vector<std::size_t> wrong;
  for (const std::size_t tile : *suspect) {
    auto again = bytes_.compare(opened, tile, 1);
    const auto still = co_await std::move(again);
    if (!still) co_return !may_work_later(still.error());
    if (!still->empty()) wrong.push_back(tile);
  }
  const auto found = kept_.find(piece.name);
  if (found == kept_.end()) co_return true;
  found->second.close_unused();
  for (std::size_t i = 0; i < piece.count; ++i) {
    totals_.scrubbed_bytes += opened->tile(piece.first + i).bytes;
  }
  std::erase_if(wrong, [&](std::size_t tile) { return found->second.damaged.contains(tile); });
  if (wrong.empty()) co_return true;
  Copy& copy = found->second;
  // A check that runs mends it, and one that begins later finds it.
  if (copy.check != nullptr && !copy.check->verdict) co_return true;
  if (copy.is_free() && still_open(copy)) co_return true;
  if (copy.is_free() || copy.identity.shared) {
    // Another check finds these tiles, and mends them: before a worker gets the copy, or while
    // workers only read it.
    if (copy.check != nullptr && copy.check->verdict) copy.check.reset();
    (void)check_of(piece.name);
    co_return true;
  }
  // The check after its death finds it.
  if (!copy.is_used()) co_return true;
  found_wrong(piece.name, wrong);
  const bool asked = !copy.damaged.empty();
  copy.damaged.insert(wrong.begin(), wrong.end());
  if (asked) co_return true;
  tasks_.spawn("worker.residents", have_mended(piece.name));
  co_return true;
}

void Residents::scrubbed(const std::vector<Piece>& pieces) {
  const auto now = std::chrono::duration_cast<std::chrono::microseconds>(
      std::chrono::system_clock::now().time_since_epoch());
  for (const Piece& piece : pieces) {
    const auto found = kept_.find(piece.name);
    if (found == kept_.end()) continue;
    found->second.read_unix_us = static_cast<std::uint64_t>(now.count());
  }
  ++totals_.passes;
}

void Residents::found_wrong(const std::string& name, const std::vector<std::size_t>& tiles) {
  const auto found = kept_.find(name);
  if (found == kept_.end() || found->second.opened == nullptr) return;
  totals_.wrong_tiles += tiles.size();
  note(found->second, "resident_damaged", describe(*found->second.opened, tiles));
}

// The worker computes with wrong bytes. It has them mended, or it is started again.
async::Task<void> Residents::have_mended(std::string name) {
  co_await asio::this_coro::throw_if_cancelled(false);
  const auto known = kept_.find(name);
  if (known == kept_.end()) co_return;
  if (known->second.opened == nullptr) co_return known->second.damaged.clear();
  const std::vector<std::size_t> tiles(known->second.damaged.begin(), known->second.damaged.end());
  const OpenResidentPtr opened = known->second.opened;
  Result<void> mended = fail(ErrorCode::kUnavailable, "its worker has no session");
  const auto& sessions = known->second.sessions;
  if (!sessions.empty() && owners_ != nullptr) {
    auto ordering = owners_->order_mend(sessions.begin()->first, names_in(*opened, tiles),
                                        steady_now() + kMendPatience);
    mended = co_await std::move(ordering);
  }
  const bool cancelled = co_await async::is_cancelled();
  const auto found = kept_.find(name);
  if (cancelled || found == kept_.end()) co_return;
  // Tiles that were found later have an order of their own.
  const std::set<std::size_t>& damaged = found->second.damaged;
  if (std::ranges::none_of(tiles, [&](auto tile) { return damaged.contains(tile); })) co_return;
  // The check after its death mends the copy.
  if (!found->second.is_used()) co_return found->second.damaged.clear();
  give_up(name,
          Error(ErrorCode::kCorrupt,
                fmt::format("GPU memory went wrong in {}, and is not mended: {}",
                            describe(*opened, tiles),
                            mended ? "the worker did not ask for it" : mended.error().message())));
}

void Residents::give_up(const std::string& name, const Error& why) {
  const auto found = kept_.find(name);
  if (found == kept_.end()) return;
  std::vector<SessionId> sessions;
  for (const auto& [session, user] : found->second.sessions) sessions.push_back(session);
  drop(name, why.message());
  if (owners_ == nullptr) return;
  for (const SessionId session : sessions) owners_->resident_is_wrong(session, why);
}

async::Task<Result<void>> Residents::mend(SessionPtr session) {
  const std::string name = session->resident;
  for (;;) {
    const auto found = kept_.find(name);
    if (found == kept_.end() || !found->second.sessions.contains(session->id())) {
      co_return fail(ErrorCode::kNotFound, "session {} has no resident copy", session->id());
    }
    if (found->second.damaged.empty() || found->second.opened == nullptr) co_return Result<void>();
    const std::vector<std::size_t> tiles(found->second.damaged.begin(),
                                         found->second.damaged.end());
    const auto owns = [this, name, id = session->id()] {
      const auto copy = kept_.find(name);
      return copy != kept_.end() && copy->second.sessions.contains(id);
    };
    auto mending = mend_all(name, found->second.opened, tiles, owns);
    const auto mended = co_await std::move(mending);
    if (!mended) {
      if (owns()) give_up(name, mended.error());
      co_return mended;
    }
  }
}

async::Task<Result<void>> Residents::mend_all(std::string name, OpenResidentPtr opened,
                                              std::vector<std::size_t> tiles,
                                              std::function<bool()> may_write) {
  const TimePoint give_up = steady_now() + kMendTime;
  for (const std::size_t tile : tiles) {
    for (;;) {
      auto mending = bytes_.mend(opened, tile, may_write);
      const auto mended = co_await std::move(mending);
      if (mended) break;
      const bool cancelled = co_await async::is_cancelled();
      if (cancelled || steady_now() >= give_up || !may_work_later(mended.error())) {
        co_return mended;
      }
      co_await async::sleep_for(kCheckAgain);
    }
    const auto found = kept_.find(name);
    if (found == kept_.end()) continue;
    ++totals_.mended_tiles;
    found->second.damaged.erase(tile);
    note(found->second, "resident_mended", describe(*opened, {tile}));
  }
  changed_.notify();
  co_return Result<void>();
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
  std::vector<std::pair<std::string, keeper::UserId>> written;
  for (const auto& [name, copy] : kept_) {
    const ResidentIdentity& has = copy.identity;
    for (const auto& [user, worker] : copy.users) {
      if (there(worker.process, has.id.model, has.device)) written.emplace_back(name, user);
    }
  }
  for (const auto& [name, user] : written) leave(name, user, "its worker writes to it");
}

// The copy goes with its last worker that lives: that one has given it up, and needs memory.
void Residents::leave(const std::string& name, keeper::UserId user, const std::string& why) {
  const auto found = kept_.find(name);
  if (found == kept_.end()) return;
  Copy& copy = found->second;
  if (user != 0) {
    copy.remove(user);
    std::erase_if(copy.sessions, [user](const auto& session) { return session.second == user; });
  }
  if (!copy.is_used()) return drop(name, why);
  if (user != 0) tasks_.spawn("worker.residents", tell_leave(name, user));
}

async::Task<void> Residents::tell_leave(std::string name, keeper::UserId user) {
  co_await asio::this_coro::throw_if_cancelled(false);
  auto leaving = link_.leave(std::move(name), user);
  const auto left = co_await std::move(leaving);
  // The keeper then waits for the end of the process.
  if (!left) log::warn("resident.leave", "error", left.error().message());
}

void Residents::session_ended(const Session& session, bool detached) {
  const auto found = kept_.find(session.resident);
  if (found == kept_.end() || !found->second.sessions.contains(session.id())) return;
  Copy& copy = found->second;
  const keeper::UserId user = copy.sessions.extract(session.id()).mapped();
  if (detached) return leave(found->first, user, "its worker has detached");
  // The process may live without its connection, or without this session. Its pidfd tells the
  // keeper when it dies.
  if (const auto worker = copy.users.find(user); worker != copy.users.end()) {
    worker->second.dying = session.worker != Session::WorkerLife::kConnected;
  }
  // Workers that go on with the same bytes show that these are not the reason.
  const bool proven = session.committed && steady_now() - *session.committed >= kProven;
  const bool others = std::ranges::any_of(
      copy.users, [user](const auto& other) { return other.first != user && !other.second.dying; });
  if (session.state.rung() == Rung::kResident && !proven && !others) {
    return drop(found->first, "a worker that got it failed soon after");
  }
  came_free(session.resident);
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
  for (const auto& sealing : sealing_) {
    const bool there =
        (model.empty() || sealing->model == model) && (device.empty() || sealing->device == device);
    if (there) sealing->stale = true;
  }
  return released.size();
}

void Residents::drain(bool drained) {
  drained_ = drained;
  if (drained) (void)release("", std::nullopt, "", "the host is drained");
}

// Another user's copies stay: they are not this worker's to drop.
void Residents::make_room(const Session& session) {
  const std::string& device = session.order.device;
  const std::uint32_t uid = session.client->uid();
  std::vector<std::string> unused;
  for (const auto& [name, copy] : kept_) {
    const bool there = copy.identity.device == device && copy.identity.uid == uid;
    if (there && !copy.is_used()) unused.push_back(name);
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
  dropping_.insert(name);
  co_await asio::this_coro::throw_if_cancelled(false);
  for (int tries = 0; tries < kDropTries && !co_await async::is_cancelled(); ++tries) {
    auto dropping = link_.drop(name);
    const auto dropped = co_await std::move(dropping);
    // Not found: the keeper is a new one, without copies.
    if (dropped || dropped.error().code() == ErrorCode::kNotFound) break;
    log::warn("resident.drop", "error", dropped.error().message());
    co_await async::sleep_for(kDropAgain);
  }
  dropping_.erase(name);
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
  found->second.remove(user);
  came_free(name);
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

// A keeper that only did not answer still has its copies.
void Residents::keeper_lost(const Error& why) {
  log::warn("resident.keeper_lost", "copies", kept_.size(), "error", why.message());
  ++losses_;
  for (auto& [name, copy] : kept_) copy.at_keeper = false;
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
    shown.set_read_unix_us(copy.read_unix_us);
  }
}

}  // namespace rekindle::worker
