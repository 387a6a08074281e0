// Broadcast rounds of a fleet in virtual time. Real are the coordinator's rounds and membership,
// each agent's HostRounds and DeviceLedger, and Placing, which keeps a pull from fetching what a
// device writes. Doubles stand for the rest: the driver, devices, pulls, workers and the network.
// Each seed is one run of random faults. Then the fleet must come to rest and take an update.
// REKINDLE_SEED and REKINDLE_CASES repeat or extend a run.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "recovery/coordinator/round_wire.h"
#include "recovery/device/device_ledger.h"
#include "recovery/pull/pull_watch.h"
#include "recovery/worker/host_rounds.h"
#include "tests/support/effort.h"
#include "tests/support/numbered_digest.h"
#include "tests/support/virtual_time.h"

namespace rekindle::testing {
namespace {

using namespace std::chrono_literals;
using coordinator::Membership;
using coordinator::Rounds;
using pull::Placing;
using worker::HostRounds;
using worker::SessionId;

// Of each share.
constexpr std::uint64_t kBuckets = 6;
constexpr std::uint64_t kPayload = 600;
constexpr Duration kTick = 50ms;
constexpr Duration kMeet = 10s;
constexpr Duration kFill = 8s;
constexpr Duration kFetch = 20s;

Digest root_of(std::uint64_t version) { return test::numbered_digest(version, 7); }
Digest contents_of(std::uint64_t version) { return test::numbered_digest(version, 1); }

// What a rank brings to one collective. All ranks must mean the same bytes.
struct Part {
  std::uint64_t version = 0;
  std::uint64_t bucket = 0;
  std::uint64_t bucket_bytes = 0;
  std::vector<std::uint32_t> owners;
  bool operator==(const Part&) const = default;
};

// A communicator.
struct Meeting {
  // The device of each rank that has come.
  std::map<std::uint32_t, std::string> here;
  bool aborted = false;
  // By rank.
  std::map<std::uint32_t, std::vector<Part>> queued;
  bool is_complete(std::size_t number) const {
    return std::ranges::all_of(here, [&](const auto& item) {
      const auto found = queued.find(item.first);
      return found != queued.end() && found->second.size() > number;
    });
  }
};

// A version on a host, and the pull that brings it.
struct Copy {
  bool complete = false;
  bool wanted = false;
  bool wanted_now = false;
  LeaseGrantor pauses;
  Placing placing;
  TimePoint whole_at = TimePoint::max();
  // Tiles of shares that are fetched for a party, and when they are here.
  std::map<TileIndex, TimePoint> share;
  bool has(TileIndex tile, TimePoint now) const {
    const auto found = share.find(tile);
    return complete || (found != share.end() && found->second <= now);
  }
};

// A session of the device process.
struct DeviceSession {
  enum class State { kJoined, kMeeting, kSpreading, kAlone, kOver };
  State state = State::kJoined;
  std::string device;
  std::uint64_t version = 0;
  bool worker_gone = false;
  bool stopped = false;
  device::SpreadOrder order;
  std::shared_ptr<Meeting> meeting;
  std::uint64_t bucket = 0;
  bool queued = false;
  TimePoint since{};
  // The version of each delivered bucket.
  std::vector<std::uint64_t> delivered;
};

struct Worker {
  std::string instance;
  std::string device;
  std::string group;
  // 0: it is not attached.
  SessionId session = 0;
  std::uint64_t chosen = 0;
  std::uint64_t have = 0;
  bool handed_over = false;
  bool has_all = false;
  bool serves = false;
  TimePoint next{};
};

struct Tally {
  std::uint64_t fetched_spreads = 0;
  std::uint64_t stopped_parties = 0;
  std::uint64_t kept_buckets = 0;
  std::uint64_t reused_communicators = 0;
};

class World;

// An agent with its device process and its workers.
class Host final : public worker::RoundEffects {
 public:
  Host(World& world, std::string name, int workers);
  void tick();
  void kill_agent();
  void kill_device_process();
  void kill_worker(std::size_t index);
  void freeze(bool frozen);
  bool frozen() const { return frozen_; }
  std::size_t workers() const { return workers_.size(); }
  bool at_rest(std::string& why) const;
  bool all_serve(std::uint64_t version) const;

 private:
  struct Shares {
    std::vector<SessionId> sessions;
    std::set<SessionId> awaited;
    std::vector<TileRuns> lists;
  };
  struct Keeper {
    std::uint64_t version = 0;
    Lease writing;
  };
  struct Paused {
    std::uint64_t version = 0;
    Lease pause;
  };
  struct Fetching {
    std::uint64_t version = 0;
    std::string party;
  };

  void start();
  // Runs when the message has arrived, unless the agent or its device process died meanwhile.
  void to_agent(std::function<void()> run);
  void to_device(std::function<void()> run);
  void post(TimePoint& last, bool device, std::function<void()> run);

  // --- the effects of HostRounds
  void spread(const device::SpreadOrder& order) override;
  void stop_spread(SessionId session, const std::string& why) override;
  void make_meeting_id(std::uint64_t number) override;
  void left_round(SessionId session, bool all, const std::string& why) override;
  void await_device(const device::SpreadOrder& ordered);
  void await_share(const device::SpreadOrder& order);
  void take_share(SessionId session, TileRuns tiles);
  void hear_spread_over(const device::SpreadOver& over);
  void hear_device_over(const device::DeviceOver& over);

  // --- the coordinator
  void ask();
  void send_report(bool wait);
  void unanswered(bool wait);

  // --- workers, pulls, devices
  void tick_worker(Worker& worker);
  void attach(Worker& worker);
  void hand_over(SessionId session);
  void lose_session(Worker& worker, const std::string& why);
  Worker* worker_of(SessionId session);
  void tick_copy(Copy& copy) const;
  void tick_device(SessionId session, DeviceSession& one);
  void meet(SessionId session, DeviceSession& one);
  void spread_bucket(SessionId session, DeviceSession& one);
  void keep(const DeviceSession& one);
  void end_spread(SessionId session, DeviceSession& one, std::optional<Error> error);
  Copy& copy(std::uint64_t version);

  World& world_;
  const std::string name_;
  coordinator::NodeInfo info_;
  std::uint64_t life_ = 0;
  bool frozen_ = false;
  // Messages to a frozen agent.
  std::vector<std::function<void()>> inbox_;
  TimePoint last_to_agent_{};
  TimePoint last_to_device_{};
  std::unique_ptr<HostRounds> rounds_;
  device::DeviceLedger ledger_;
  bool waiting_ = false;
  bool prompt_ = false;
  TimePoint ask_after_{};
  std::map<std::uint64_t, std::unique_ptr<Copy>> copies_;
  std::map<SessionId, Paused> paused_;
  std::map<SessionId, Keeper> keepers_;
  std::map<std::string, Shares> shares_;
  std::map<SessionId, Fetching> fetching_;
  std::vector<Worker> workers_;
  std::map<SessionId, DeviceSession> device_;
  // By device and name.
  std::map<std::pair<std::string, std::string>, std::shared_ptr<Meeting>> kept_;
};

class World {
 public:
  explicit World(std::uint64_t seed) : random_(seed) {
    start_coordinator();
    for (const char* name : {"a", "b", "c"}) {
      hosts_.push_back(std::make_unique<Host>(*this, name, 1 + static_cast<int>(pick(2))));
    }
  }
  void run();
  const Tally& tally() const { return tally_; }

  std::uint64_t pick(std::uint64_t below) { return random_() % below; }
  bool faulty(std::uint64_t one_in) { return faults_ && pick(one_in) == 0; }
  Duration delay(int longest_ms = 20) {
    return std::chrono::milliseconds(1 + pick(static_cast<std::uint64_t>(longest_ms)));
  }
  TimePoint now() const { return time_.now(); }
  void after(Duration wait, std::function<void()> run) { time_.after(wait, std::move(run)); }
  SessionId next_session() { return ++sessions_; }
  std::uint64_t next_number() { return ++numbers_; }

  // --- the coordinator
  void hear(const coordinator::NodeInfo& info);
  void report(proto::RoundReport report, std::function<void(const proto::RoundOrders*)> answered);

  Tally tally_;
  // By id.
  std::map<std::string, std::shared_ptr<Meeting>> meetings;

 private:
  struct Call {
    coordinator::RoundReport report;
    std::string before;
    TimePoint until;
    std::uint64_t term = 0;
    std::function<void(const proto::RoundOrders*)> answered;
  };
  void start_coordinator() {
    ++term_;
    members_ = std::make_unique<Membership>(coordinator::Timing{}, 100);
    rounds_ = std::make_unique<Rounds>();
  }
  void tick(Duration duration);
  void misfortune();
  void begin_update();
  void answer(const Call& call);
  proto::RoundOrders orders_of(const std::string& node) const {
    return coordinator::to_proto(rounds_->orders_for(node));
  }
  void expect_rest();

  std::mt19937_64 random_;
  VirtualTime time_;
  bool faults_ = true;
  std::uint64_t term_ = 0;
  std::uint64_t newest_ = 1;
  std::uint64_t sessions_ = 0;
  std::uint64_t numbers_ = 0;
  std::unique_ptr<Membership> members_;
  std::unique_ptr<Rounds> rounds_;
  std::vector<std::unique_ptr<Host>> hosts_;
};

// --- messages

void Host::post(TimePoint& last, bool device, std::function<void()> run) {
  last = std::max(last, world_.now() + world_.delay());
  world_.after(last - world_.now(),
               [this, device, run = std::move(run), life = life_, incarnation = info_.incarnation] {
                 if (life != life_ || incarnation != info_.incarnation) return;
                 if (frozen_ && !device) return inbox_.push_back(run);
                 run();
               });
}
void Host::to_agent(std::function<void()> run) { post(last_to_agent_, false, std::move(run)); }
void Host::to_device(std::function<void()> run) { post(last_to_device_, true, std::move(run)); }

// --- lives

Host::Host(World& world, std::string name, int workers) : world_(world), name_(std::move(name)) {
  for (int i = 0; i < workers; ++i) {
    Worker worker;
    worker.instance = name_ + std::to_string(i);
    worker.device = "double:" + std::to_string(i);
    worker.group = world_.pick(3) == 0 ? "h" : "g";
    workers_.push_back(std::move(worker));
  }
  start();
}

void Host::start() {
  const std::uint64_t number = world_.next_number();
  info_ = {};
  info_.node_id = name_;
  std::memcpy(info_.incarnation.bytes.data() + 8, &number, sizeof number);
  info_.control_endpoint = name_ + ":7400";
  life_ = world_.next_number();
  rounds_ = std::make_unique<HostRounds>(*this);
  ledger_ = {};
  waiting_ = prompt_ = false;
  inbox_.clear();
  paused_.clear();
  keepers_.clear();
  shares_.clear();
  fetching_.clear();
  device_.clear();
  kept_.clear();
  for (Worker& worker : workers_) {
    worker.session = 0;
    worker.serves = false;
    worker.next = world_.now() + world_.delay(500);
  }
  for (auto& [version, copy] : copies_) {
    const bool complete = copy->complete;
    copy = std::make_unique<Copy>();
    copy->complete = complete;
  }
}

void Host::kill_agent() {
  frozen_ = false;
  start();
}

// The agent notices, and reaps it.
void Host::kill_device_process() {
  device_.clear();
  kept_.clear();
  life_ = world_.next_number();
  const auto lost = ledger_.lose_all();
  ledger_.reaped();
  const Error why(ErrorCode::kPeerLost, "the device process has ended");
  to_agent([this, lost, why] {
    for (const SessionId session : lost.spreads) {
      device::SpreadOver over;
      over.session = session;
      over.error = why;
      hear_spread_over(over);
    }
    for (const SessionId session : lost.sessions) {
      device::DeviceOver over;
      over.session = session;
      over.error = why;
      hear_device_over(over);
    }
    for (const std::uint64_t number : lost.ids) rounds_->meeting_id(number, fail(why));
  });
}

void Host::kill_worker(std::size_t index) {
  if (frozen_) return;
  lose_session(workers_[index], "the worker was killed");
}

void Host::freeze(bool frozen) {
  frozen_ = frozen;
  if (frozen) return;
  for (const auto& run : std::exchange(inbox_, {})) run();
}

// --- what the driver of rounds does

void Host::spread(const device::SpreadOrder& order) {
  device::SpreadOrder ordered = order;
  const auto paused = paused_.find(order.session);
  bool keeps = order.keep_count > 0 && paused != paused_.end();
  if (keeps) {
    Copy& its = copy(paused->second.version);
    Lease writing = its.complete || its.wanted_now ? Lease() : its.placing.begin();
    keeps = static_cast<bool>(writing);
    if (keeps) keepers_[order.session] = {paused->second.version, std::move(writing)};
  }
  if (!keeps) ordered.keep_index = ordered.keep_count = 0;
  await_device(ordered);
  await_share(order);
}

void Host::await_device(const device::SpreadOrder& ordered) {
  if (!ledger_.is_open(ordered.session)) {
    device::SpreadOver refused;
    refused.session = ordered.session;
    refused.error = Error(ErrorCode::kNotFound, "the device has no such session any more");
    return to_agent([this, refused] { hear_spread_over(refused); });
  }
  ledger_.spread(ordered.session);
  to_device([this, ordered] {
    const auto one = device_.find(ordered.session);
    if (one == device_.end() || one->second.state != DeviceSession::State::kJoined) {
      device::SpreadOver over;
      over.session = ordered.session;
      over.error = Error(ErrorCode::kNotFound, "the session does not wait for a round");
      return to_agent([this, over] {
        if (ledger_.spread_over(over.session)) hear_spread_over(over);
      });
    }
    one->second.order = ordered;
    one->second.state = DeviceSession::State::kMeeting;
    one->second.since = world_.now();
    const auto own = std::ranges::find(ordered.owners, ordered.rank);
    if (own == ordered.owners.end()) return;
    const auto share = static_cast<std::uint32_t>(own - ordered.owners.begin());
    if (std::ranges::find(ordered.fetched, share) == ordered.fetched.end()) return;
    const auto begin = static_cast<TileIndex>(share * kBuckets);
    to_agent([this, session = ordered.session, begin] {
      if (!ledger_.is_spreading(session)) return;
      take_share(session, {{begin, begin + static_cast<TileIndex>(kBuckets)}});
    });
  });
}

void Host::stop_spread(SessionId session, const std::string& /*why*/) {
  if (!ledger_.stop(session, world_.now())) return;
  to_device([this, session] {
    const auto one = device_.find(session);
    if (one == device_.end()) return;
    if (one->second.state == DeviceSession::State::kJoined) {
      one->second.state = DeviceSession::State::kAlone;
    }
    one->second.stopped = true;
  });
}

void Host::make_meeting_id(std::uint64_t number) {
  ledger_.ask_for_id(number);
  to_device([this, number] {
    const bool fails = world_.faulty(10);
    const std::string id = "id-" + std::to_string(world_.next_number());
    if (!fails) world_.meetings[id] = std::make_shared<Meeting>();
    to_agent([this, number, id, fails] {
      if (!ledger_.id_made(number)) return;
      if (fails) return rounds_->meeting_id(number, fail(ErrorCode::kUnavailable, "no id"));
      rounds_->meeting_id(number, id);
    });
  });
}

void Host::left_round(SessionId session, bool all, const std::string& why) {
  EXPECT_TRUE(all || !why.empty()) << "a member goes on alone, without a reason";
  const auto paused = paused_.extract(session);
  if (!paused.empty() && !all) copy(paused.mapped().version).wanted_now = true;
  Worker* const worker = worker_of(session);
  if (worker != nullptr && all) worker->has_all = true;
}

void Host::await_share(const device::SpreadOrder& order) {
  const auto is_own = [&](std::uint32_t share) { return order.owners[share] == order.rank; };
  if (std::ranges::none_of(order.fetched, is_own)) return;
  const auto paused = paused_.find(order.session);
  if (paused == paused_.end()) return stop_spread(order.session, "it does not fetch any more");
  const std::uint64_t version = paused->second.version;
  const bool busy = std::ranges::any_of(fetching_, [&](const auto& item) {
    return item.second.version == version && item.second.party != order.communicator;
  });
  if (busy) return stop_spread(order.session, "another party's share is fetched");
  fetching_[order.session] = {version, order.communicator};
  Shares& shares = shares_[order.communicator];
  shares.sessions.push_back(order.session);
  shares.awaited.insert(order.session);
}

void Host::take_share(SessionId session, TileRuns tiles) {
  const auto party = std::ranges::find_if(
      shares_, [&](const auto& item) { return item.second.awaited.contains(session); });
  if (party == shares_.end()) return;
  Shares& shares = party->second;
  shares.awaited.erase(session);
  if (!tiles.empty()) shares.lists.push_back(std::move(tiles));
  if (!shares.awaited.empty()) return;
  const auto stop = [this, incarnation = info_.incarnation,
                     sessions = shares.sessions](const Error& why) {
    if (incarnation != info_.incarnation) return;
    for (const SessionId each : sessions) stop_spread(each, why.message());
  };
  auto lists = std::move(shares.lists);
  const auto fetching = fetching_.find(session);
  shares_.erase(party);
  if (fetching == fetching_.end()) return;
  copy(fetching->second.version).placing.fetch_now(std::move(lists), stop);
}

void Host::hear_spread_over(const device::SpreadOver& over) {
  take_share(over.session, {});
  fetching_.erase(over.session);
  keepers_.erase(over.session);
  rounds_->spread_over(over, world_.now());
}

void Host::hear_device_over(const device::DeviceOver& over) {
  rounds_->device_over(over, world_.now());
  Worker* const worker = worker_of(over.session);
  if (worker == nullptr) return;
  if (over.error) return lose_session(*worker, over.error->message());
  worker->has_all = true;
}

// --- the coordinator

void Host::ask() {
  const TimePoint now = world_.now();
  rounds_->check(now);
  const auto due = rounds_->due();
  const bool news = due && *due <= now;
  if (!rounds_->has_members() && !due && !waiting_ && !prompt_) return rounds_->forget_orders();
  if (now < ask_after_) return;
  if (!waiting_ && (rounds_->has_members() || news)) {
    waiting_ = true;
    send_report(true);
  } else if (!prompt_ && news) {
    prompt_ = true;
    send_report(false);
  }
}

void Host::send_report(bool wait) {
  auto report = rounds_->report(std::to_string(life_), wait ? 1000ms : 0ms, world_.now());
  report.set_node_id(name_);
  report.set_incarnation(std::string(reinterpret_cast<const char*>(info_.incarnation.bytes.data()),
                                     info_.incarnation.bytes.size()));
  const std::uint64_t sequence = report.sequence();
  const auto arrives = [this, wait, sequence,
                        incarnation = info_.incarnation](const proto::RoundOrders* orders) {
    if (incarnation != info_.incarnation) return;
    const auto hear = [this, wait, sequence, known = orders != nullptr,
                       orders = orders != nullptr ? *orders : proto::RoundOrders()] {
      if (!known) return unanswered(wait);
      (wait ? waiting_ : prompt_) = false;
      rounds_->obey(orders, sequence, world_.now());
    };
    if (frozen_) return inbox_.push_back(hear);
    hear();
  };
  if (world_.faulty(20)) return world_.after(2s, [arrives] { arrives(nullptr); });
  const Duration way = world_.faulty(10) ? world_.delay(1500) : world_.delay();
  world_.after(way, [this, report, arrives] { world_.report(report, arrives); });
}

void Host::unanswered(bool wait) {
  (wait ? waiting_ : prompt_) = false;
  rounds_->unanswered();
  ask_after_ = world_.now() + 250ms;
}

// --- workers

Worker* Host::worker_of(SessionId session) {
  const auto found = std::ranges::find(workers_, session, &Worker::session);
  return found == workers_.end() ? nullptr : &*found;
}

void Host::attach(Worker& worker) {
  worker.session = world_.next_session();
  worker.handed_over = worker.has_all = worker.serves = false;
  const auto gathers = rounds_->known().gathers("m", worker.group);
  worker.chosen = gathers.value_or(std::max<std::uint64_t>(worker.have, 1));
  rounds_->attach(worker.session, {worker.group, worker.instance, 0, "m", worker.device});
  Copy& its = copy(worker.chosen);
  its.wanted = true;
  if (rounds_->choose(worker.session, {"m", worker.chosen})) {
    paused_[worker.session] = {worker.chosen, its.pauses.grant()};
  } else {
    its.wanted_now = true;
  }
  world_.after(world_.delay(150), [this, session = worker.session] {
    if (frozen_) return inbox_.push_back([this, session] { hand_over(session); });
    hand_over(session);
  });
}

void Host::hand_over(SessionId session) {
  Worker* const worker = worker_of(session);
  if (worker == nullptr || worker->handed_over) return;
  worker->handed_over = true;
  const bool in_round = rounds_->enters(session);
  if (!in_round) {
    copy(worker->chosen).wanted_now = true;
    paused_.erase(session);
  }
  const std::uint64_t version = worker->chosen;
  rounds_->want(session, contents_of(version), kPayload, nullptr);
  rounds_->hand_over(session, root_of(version), std::nullopt);
  ledger_.begin(session, nullptr);
  to_device([this, session, version, in_round, device = worker->device] {
    DeviceSession one;
    one.version = version;
    one.device = device;
    one.state = in_round ? DeviceSession::State::kJoined : DeviceSession::State::kAlone;
    device_[session] = std::move(one);
    if (!in_round) return;
    device::DeviceJoined joined{
        session, 64 + world_.pick(2) * 64, contents_of(version), kPayload, {}};
    for (const auto& [key, meeting] : kept_) {
      if (key.first == device) joined.communicators.push_back(key.second);
    }
    to_agent([this, joined, version] {
      if (!ledger_.is_open(joined.session)) return;
      const Copy& its = copy(version);
      const bool can_fetch = paused_.contains(joined.session) && !its.placing.closed();
      using Bytes = worker::RoundMember::Bytes;
      rounds_->joined(joined, its.complete ? Bytes::kAll
                              : can_fetch  ? Bytes::kFetchable
                                           : Bytes::kNone);
    });
  });
}

void Host::lose_session(Worker& worker, const std::string& why) {
  worker.next = world_.now() + world_.delay(1000);
  const SessionId session = std::exchange(worker.session, 0);
  worker.serves = false;
  if (session == 0) return;
  paused_.erase(session);
  rounds_->fail(session, why, world_.now());
  (void)ledger_.end(session);
  to_device([this, session] {
    const auto one = device_.find(session);
    if (one != device_.end()) one->second.worker_gone = true;
  });
}

void Host::tick_worker(Worker& worker) {
  if (worker.session == 0) {
    if (world_.now() >= worker.next) attach(worker);
    return;
  }
  if (worker.has_all && !worker.serves && world_.pick(3) == 0) {
    worker.serves = true;
    worker.have = worker.chosen;
    rounds_->commit(worker.session);
  }
  if (!worker.serves || world_.pick(4) != 0) return;
  if (!rounds_->news_for(worker.session, {"m", worker.have})) return;
  const SessionId session = std::exchange(worker.session, 0);
  worker.serves = false;
  worker.next = world_.now() + (world_.faulty(15) ? Duration(7s) : world_.delay(100));
  const auto news = rounds_->news_for(session, {"m", worker.have});
  worker.have = *news;
  paused_.erase(session);
  rounds_->detach(session, world_.now());
  (void)ledger_.end(session);
  to_device([this, session] { device_.erase(session); });
}

// --- pulls

// Of most versions the host has nothing at first.
Copy& Host::copy(std::uint64_t version) {
  auto& its = copies_[version];
  if (its == nullptr) {
    its = std::make_unique<Copy>();
    its->complete = version == 1 || world_.pick(6) == 0;
  }
  return *its;
}

void Host::tick_copy(Copy& copy) const {
  if (copy.complete || !copy.wanted) return;
  const TimePoint now = world_.now();
  if (copy.placing.closed()) {
    EXPECT_FALSE(copy.placing.busy()) << "a device writes to a copy that is fetched";
    if (copy.whole_at <= now) copy.complete = true;
    return;
  }
  if (copy.placing.wants_now()) {
    const auto lists = copy.placing.take_wanted_now();
    if (world_.faulty(8)) {
      return copy.placing.fail_wanted(Error(ErrorCode::kUnavailable, "no source"));
    }
    for (const auto& runs : lists) {
      TimePoint at = now;
      for (const auto& [begin, end] : runs) {
        for (TileIndex tile = begin; tile < end; ++tile) copy.share[tile] = at += world_.delay(300);
      }
    }
    return;
  }
  if (copy.placing.busy() || (copy.pauses.held() && !copy.wanted_now)) return;
  (void)copy.placing.close();
  copy.whole_at = now + world_.delay(2000);
}

// --- devices

void Host::end_spread(SessionId session, DeviceSession& one, std::optional<Error> error) {
  device::SpreadOver over;
  over.session = session;
  over.buckets = one.bucket;
  over.bytes = one.bucket * kPayload / kBuckets;
  over.meet = over.elapsed = 1ms;
  if (error && one.meeting != nullptr) one.meeting->aborted = true;
  if (one.worker_gone && !error) over.worker_lost = Error(ErrorCode::kPeerLost, "it was killed");
  const bool all = !error && !one.worker_gone;
  one.state = all || one.worker_gone ? DeviceSession::State::kOver : DeviceSession::State::kAlone;
  over.error = std::move(error);
  to_agent([this, over] {
    if (ledger_.spread_over(over.session)) hear_spread_over(over);
  });
  if (one.state != DeviceSession::State::kOver) return;
  device::DeviceOver ended;
  ended.session = session;
  if (!all) ended.error = Error(ErrorCode::kTimeout, "the worker hangs");
  to_agent([this, ended] {
    if (ledger_.over(ended.session, false)) hear_device_over(ended);
  });
}

void Host::meet(SessionId session, DeviceSession& one) {
  const auto& order = one.order;
  if (one.meeting == nullptr) {
    const std::string it = fmt::format("{} of {}, life {}", one.device, name_, life_);
    if (order.id.empty()) {
      const auto kept = kept_.extract({one.device, order.communicator});
      if (kept.empty()) {
        return end_spread(session, one, Error(ErrorCode::kStale, "its communicator is gone"));
      }
      one.meeting = kept.mapped();
      EXPECT_EQ(one.meeting->here.size(), order.ranks) << "others have met";
      EXPECT_EQ(one.meeting->here[order.rank], it) << "another device has met";
      ++world_.tally_.reused_communicators;
    } else {
      const auto found = world_.meetings.find(order.id);
      ASSERT_NE(found, world_.meetings.end());
      one.meeting = found->second;
      EXPECT_TRUE(one.meeting->here.emplace(order.rank, it).second) << "a rank came twice";
    }
  }
  if (one.meeting->aborted) {
    return end_spread(session, one, Error(ErrorCode::kStale, "the meeting is over"));
  }
  if (one.meeting->here.size() == order.ranks) {
    one.state = DeviceSession::State::kSpreading;
    one.since = world_.now();
  } else if (world_.now() - one.since >= kMeet) {
    end_spread(session, one, Error(ErrorCode::kTimeout, "not all ranks have met"));
  }
}

void Host::spread_bucket(SessionId session, DeviceSession& one) {
  const TimePoint now = world_.now();
  const auto& order = one.order;
  if (now - one.since >= (order.owners_fetch ? kFetch : kFill) || world_.faulty(400)) {
    return end_spread(session, one, Error(ErrorCode::kTimeout, "no progress"));
  }
  auto& queue = one.meeting->queued[order.rank];
  if (!one.queued) {
    for (std::size_t share = 0; share < order.owners.size(); ++share) {
      const auto tile = static_cast<TileIndex>(share * kBuckets + one.bucket);
      if (order.owners[share] == order.rank && !copy(one.version).has(tile, now)) return;
    }
    queue.push_back({one.version, one.bucket, order.bucket_bytes, order.owners});
    one.queued = true;
  }
  const std::size_t number = queue.size() - 1;
  if (one.meeting->aborted || !one.meeting->is_complete(number)) return;
  for (const auto& [rank, parts] : one.meeting->queued) {
    EXPECT_EQ(parts[number], queue[number]) << "ranks of one collective mean different bytes";
  }
  one.queued = false;
  one.since = now;
  keep(one);
  // The worker hangs.
  if (world_.faulty(300)) one.worker_gone = true;
  if (!one.worker_gone) one.delivered.push_back(queue[number].version);
  if (++one.bucket < kBuckets) return;
  if (order.owners_fetch) ++world_.tally_.fetched_spreads;
  kept_[{one.device, order.communicator}] = one.meeting;
  EXPECT_TRUE(std::ranges::all_of(one.delivered, [&](auto v) { return v == one.version; }))
      << "bytes of two versions";
  end_spread(session, one, std::nullopt);
}

// What a device writes to a copy, nobody fetches.
void Host::keep(const DeviceSession& one) {
  const auto& order = one.order;
  if (order.keep_count == 0 || one.bucket % order.keep_count != order.keep_index) return;
  const Copy& its = copy(one.version);
  EXPECT_FALSE(its.placing.closed()) << "a device writes to a copy that is fetched";
  EXPECT_TRUE(its.placing.busy()) << "a device writes to a copy without a lease";
  ++world_.tally_.kept_buckets;
  for (std::size_t share = 0; share < order.owners.size(); ++share) {
    const bool fetched = std::ranges::find(order.fetched, share) != order.fetched.end();
    const auto tile = static_cast<TileIndex>(share * kBuckets + one.bucket);
    for (const auto& [session, fetching] : fetching_) {
      const bool same = fetching.version == one.version && fetching.party == order.communicator;
      EXPECT_TRUE(fetched || !same || !its.share.contains(tile)) << "a tile is fetched and kept";
    }
  }
}

void Host::tick_device(SessionId session, DeviceSession& one) {
  using State = DeviceSession::State;
  const bool in_party = one.state == State::kMeeting || one.state == State::kSpreading;
  if (in_party && one.stopped) {
    end_spread(session, one, Error(ErrorCode::kStale, "it was told to stop"));
  } else if (one.state == State::kMeeting) {
    meet(session, one);
  } else if (one.state == State::kSpreading) {
    spread_bucket(session, one);
  } else if (one.state == State::kAlone && !one.worker_gone && copy(one.version).complete) {
    one.state = State::kOver;
    to_agent([this, session] {
      if (ledger_.over(session, false)) hear_device_over({.session = session});
    });
  } else if (one.worker_gone) {
    one.state = State::kOver;
  }
}

void Host::tick() {
  for (auto& [session, one] : device_) tick_device(session, one);
  std::erase_if(device_,
                [](const auto& item) { return item.second.state == DeviceSession::State::kOver; });
  if (frozen_) return;
  world_.hear(info_);
  for (auto& [version, copy] : copies_) tick_copy(*copy);
  for (Worker& worker : workers_) tick_worker(worker);
  ask();
}

bool Host::at_rest(std::string& why) const {
  for (const Worker& worker : workers_) {
    if (!worker.serves) why += " " + worker.instance + " does not serve";
    const auto phase = rounds_->phase_of(worker.session);
    if (!phase.empty()) why += " " + worker.instance + " is " + std::string(phase);
  }
  for (const auto& [session, one] : device_) {
    why += fmt::format(" {}: session {} of the device process in state {}", name_, session,
                       static_cast<int>(one.state));
  }
  if (!paused_.empty()) why += " " + name_ + ": a pull is held";
  if (!keepers_.empty()) why += " " + name_ + ": a device writes";
  if (!shares_.empty() || !fetching_.empty()) why += " " + name_ + ": a share is fetched";
  for (const auto& [version, copy] : copies_) {
    if (copy->wanted && !copy->complete) why += fmt::format(" {}: m@{} lacks", name_, version);
  }
  return why.empty();
}

bool Host::all_serve(std::uint64_t version) const {
  return std::ranges::all_of(workers_,
                             [&](const Worker& one) { return one.serves && one.have == version; });
}

// --- the world

void World::hear(const coordinator::NodeInfo& info) {
  if (!members_->hear(info.node_id, info.incarnation, now())) {
    (void)members_->enroll(info, "", "connection of " + info.node_id, now());
  }
}

void World::report(proto::RoundReport report,
                   std::function<void(const proto::RoundOrders*)> answered) {
  auto parsed = coordinator::from_proto(report, now());
  ASSERT_TRUE(parsed) << parsed.error().message();
  const bool registered = members_->find(parsed->node_id, parsed->incarnation) != nullptr;
  const bool heard_all = rounds_->revision() == report.seen();
  parsed->wait = std::chrono::milliseconds(report.wait_ms());
  const std::string before = orders_of(parsed->node_id).SerializeAsString();
  if (!registered || !rounds_->report(*parsed, now())) return answered(nullptr);
  const bool waits = heard_all && report.wait_ms() > 0;
  answer({*parsed, waits ? before : "answer at once", now() + parsed->wait, term_,
          std::move(answered)});
}

void World::answer(const Call& call) {
  if (call.term != term_) return call.answered(nullptr);
  auto orders = orders_of(call.report.node_id);
  if (orders.SerializeAsString() == call.before && now() < call.until) {
    return after(kTick, [this, call] { answer(call); });
  }
  orders.set_revision(rounds_->revision());
  if (faulty(20)) return after(2s, [call] { call.answered(nullptr); });
  after(delay(), [call, orders] { call.answered(&orders); });
}

void World::tick(Duration duration) {
  for (const TimePoint end = now() + duration; now() < end;) {
    time_.run_until(now() + kTick);
    for (auto& host : hosts_) host->tick();
    members_->advance(now(), {});
    rounds_->advance(*members_, now());
    if (::testing::Test::HasFailure()) return;
  }
}

void World::misfortune() {
  Host& host = *hosts_[pick(hosts_.size())];
  switch (pick(12)) {
    case 0:
      return host.kill_agent();
    case 1:
      return host.frozen() ? void() : host.kill_device_process();
    case 2:
      return host.freeze(!host.frozen());
    case 3:
    case 4:
      return host.kill_worker(pick(host.workers()));
    case 5:
      return start_coordinator();
    default:
      return begin_update();
  }
}

void World::begin_update() {
  const std::uint64_t version = pick(4) == 0 ? 1 + pick(newest_) : ++newest_;
  constexpr const char* kGroups[] = {"g", "g", "h", ""};
  (void)rounds_->begin({"m", version}, root_of(version), kGroups[pick(4)], {}, term_, now());
}

void World::run() {
  tick(2s);
  for (int i = 0; i < 40 && !::testing::Test::HasFailure(); ++i) {
    misfortune();
    tick(std::chrono::milliseconds(pick(4) == 0 ? 3000 : 50 + pick(800)));
  }
  faults_ = false;
  for (auto& host : hosts_) host->freeze(false);
  tick(90s);
  if (::testing::Test::HasFailure()) return;
  expect_rest();
  const std::uint64_t last = ++newest_;
  const auto number = rounds_->begin({"m", last}, root_of(last), "", {}, term_, now());
  ASSERT_TRUE(number) << number.error().message();
  tick(60s);
  expect_rest();
  for (const auto& place : rounds_->find(*number)->places()) {
    EXPECT_TRUE(place.ready()) << place.to_string() << ": " << place.why;
    EXPECT_TRUE(place.filled() || !place.aside.empty()) << place.to_string() << " fell out";
  }
  for (const auto& host : hosts_) EXPECT_TRUE(host->all_serve(last));
}

void World::expect_rest() {
  for (const auto& host : hosts_) {
    std::string why;
    EXPECT_TRUE(host->at_rest(why)) << why;
  }
  for (const auto& [number, round] : rounds_->all()) {
    EXPECT_TRUE(round.over()) << number << " is " << to_string(round.phase());
    for (const auto& place : round.places()) {
      EXPECT_TRUE(place.settled()) << place.to_string();
      EXPECT_TRUE(place.ready() || !place.why.empty()) << place.to_string() << " has no reason";
    }
    for (const auto& party : round.parties()) {
      tally_.stopped_parties += party.state == coordinator::PartyState::kStopped ? 1 : 0;
    }
  }
}

std::uint64_t from_environment(const char* name, std::uint64_t otherwise) {
  const char* const value = std::getenv(name);
  return value == nullptr ? otherwise : std::strtoull(value, nullptr, 10);
}

TEST(RoundMachines, WhateverFailsEveryMemberEndsReadyOrWithAReasonAndNothingIsMixed) {
  const std::uint64_t first = from_environment("REKINDLE_SEED", 1);
  const std::uint64_t cases = from_environment("REKINDLE_CASES", effort(100));
  Tally all;
  for (std::uint64_t seed = first; seed < first + cases; ++seed) {
    SCOPED_TRACE(fmt::format("REKINDLE_SEED={} REKINDLE_CASES=1", seed));
    World world(seed);
    world.run();
    if (::testing::Test::HasFailure()) return;
    all.fetched_spreads += world.tally().fetched_spreads;
    all.stopped_parties += world.tally().stopped_parties;
    all.kept_buckets += world.tally().kept_buckets;
    all.reused_communicators += world.tally().reused_communicators;
  }
  // Of few cases, as under sanitizers, the counts say little.
  if (cases < 100) return;
  EXPECT_GT(all.fetched_spreads, cases) << "hardly any spread with owners that fetch has ended";
  EXPECT_GT(all.stopped_parties, cases / 4) << "hardly any party was stopped";
  EXPECT_GT(all.kept_buckets, cases) << "hardly any device kept a bucket";
  EXPECT_GT(all.reused_communicators, cases / 4) << "hardly any communicator was used again";
}

}  // namespace
}  // namespace rekindle::testing
