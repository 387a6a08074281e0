#include "tests/scale/scale_host.h"

#include <cstring>
#include <utility>

#include "tests/support/numbered_digest.h"

namespace rekindle::scale {

using coordinator::HeartbeatAnswer;
using coordinator::Holding;
using coordinator::InstanceAnswer;
using coordinator::RankReport;

namespace {

constexpr Duration kHeartbeat = 250ms;
constexpr Duration kGrowthLook = 100ms;
constexpr Duration kRankInterval = 500ms;
constexpr std::size_t kMaxRuns = 256;  // of an announced copy that fills up
// The workers load while the pull runs, faster than it; what is left when it ends is the last of
// it.
constexpr Duration kLoadTail = 50ms;

Digest root_of(const ModelVersion& id) { return test::numbered_digest(id.version, 7); }

}  // namespace

Host::Host(PullSite& site, HostId id, std::string rack, std::uint64_t capacity)
    : site_(site), id_(id), rack_(std::move(rack)), capacity_(capacity) {
  site_.network.set_up(id_, false);
}

std::function<void()> Host::mine(std::function<void()> run) const {
  return [alive = alive_, run = std::move(run)] {
    if (*alive) run();
  };
}

void Host::put(const ModelVersion& id) {
  auto copy = std::make_unique<SharedCopy>(site_.chunks);
  for (SliceIndex chunk = 0; chunk < site_.chunks.count; ++chunk) copy->held.set(chunk);
  copy->complete = true;
  copies_[id] = std::move(copy);
}

void Host::start(std::optional<Assignment> work) {
  alive_ = std::make_shared<bool>(true);
  up_ = true;
  site_.network.set_up(id_, true);
  started_ = site_.events.now();
  work_ = std::move(work);
  loaded_ = work_ && holds(work_->serve);
  ready_after_.reset();
  ++lives_;
  info_.node_id = fmt::format("h{:04}", id_);
  const std::uint64_t number = (std::uint64_t{id_} + 1) << 32 | lives_;
  std::memcpy(info_.incarnation.bytes.data(), &number, sizeof number);
  info_.control_endpoint = info_.node_id + ":7400";
  info_.host_id = info_.node_id;
  enroll();
}

// Refused while its earlier life is not known to be dead.
void Host::enroll() {
  site_.control.call<Result<coordinator::Registered>>(
      [info = info_, rack = rack_, epoch = epoch_](testing::DurableCore& core, TimePoint now) {
        return core.enroll(info, rack, epoch, info.incarnation.hex(), now);
      },
      [this, alive = alive_](Result<coordinator::Registered> answer) {
        if (!*alive) return;
        if (!answer) return site_.events.after(kHeartbeat, mine([this] { enroll(); }));
        epoch_ = answer->epoch;
        enrolled();
      });
}

void Host::enrolled() {
  for (const auto& [id, copy] : copies_) announce(id);
  beat();
  grow();
  if (!work_) return;
  repeat_ranks();
  if (!loaded_) pull(work_->serve);
}

void Host::lose_power() {
  *alive_ = false;
  up_ = false;
  puller_.reset();
  copies_.clear();
  site_.network.set_up(id_, false);
}

const SharedCopy* Host::copy(const ModelVersion& id) const {
  const auto found = copies_.find(id);
  return up_ && found != copies_.end() ? found->second.get() : nullptr;
}

bool Host::holds(const ModelVersion& id) const {
  const SharedCopy* found = copy(id);
  return found != nullptr && found->complete;
}

std::uint64_t Host::free_bytes() const {
  const std::uint64_t used = copies_.size() * site_.chunks.total();
  return used >= capacity_ ? 0 : capacity_ - used;
}

Holding Host::holding(const ModelVersion& id) const {
  const SharedCopy& copy = *copies_.at(id);
  Holding holding;
  holding.id = id;
  holding.root = root_of(id);
  holding.tensor_set = test::numbered_digest(id.version, 8);
  holding.layout = {1, 9};
  holding.payload_bytes = holding.checkpoint_bytes = site_.chunks.total();
  holding.complete = copy.complete;
  holding.whole = true;
  holding.verified = copy.complete;
  if (!copy.complete) holding.held = swarm::summarize(copy.held.snapshot().ranges(), kMaxRuns);
  return holding;
}

void Host::announce(const ModelVersion& id) {
  site_.control.call<Result<std::vector<coordinator::AnnounceConflict>>>(
      [info = info_, epoch = epoch_, add = holding(id)](testing::DurableCore& core, TimePoint now) {
        return core.announce(info.node_id, info.incarnation, epoch, false, {add}, {}, now);
      },
      [](const Result<std::vector<coordinator::AnnounceConflict>>&) {});
}

void Host::beat() {
  coordinator::Heartbeat heartbeat;
  heartbeat.epoch = epoch_;
  heartbeat.store_free_bytes = free_bytes();
  site_.control.call<Result<HeartbeatAnswer>>(
      [info = info_, heartbeat](testing::DurableCore& core, TimePoint now) {
        return core.heartbeat(info.node_id, info.incarnation, heartbeat, now);
      },
      [this, alive = alive_](const Result<HeartbeatAnswer>& answer) {
        if (!*alive || !answer) return;
        for (const auto& fetch : answer->fetch) {
          if (!holds(fetch.id) && puller_ == nullptr) pull(fetch.id);
        }
      });
  site_.events.after(kHeartbeat, mine([this] { beat(); }));
}

// While a copy fills up.
void Host::grow() {
  if (puller_ != nullptr) {
    const SharedCopy& copy = *copies_.at(pulling_);
    if (growth_.due(copy.held.count(), site_.chunks.count, site_.events.now())) {
      announce(pulling_);
    }
  }
  site_.events.after(kGrowthLook, mine([this] { grow(); }));
}

void Host::pull(const ModelVersion& id) {
  pulling_ = id;
  growth_ = {};
  auto& copy = copies_[id];
  copy = std::make_unique<SharedCopy>(site_.chunks);
  puller_ = std::make_unique<Puller>(site_, info_, id_, id, *copy);
  puller_->open();
}

void Host::finish_pull() {
  if (!puller_->failure().empty()) failure_ = puller_->failure();
  const bool ok = puller_->complete();
  copies_.at(pulling_)->complete = ok;
  puller_.reset();
  if (!ok) return;
  announce(pulling_);
  if (work_ && pulling_ == work_->serve) {
    site_.events.after(kLoadTail, mine([this] {
                         loaded_ = true;
                         report_ranks();
                       }));
  }
}

// Each rank by itself, as its worker's session does.
void Host::report_ranks() {
  ++rank_sequence_;
  for (std::uint32_t i = 0; i < kRanksPerHost; ++i) {
    RankReport report;
    report.node_id = info_.node_id;
    report.incarnation = info_.incarnation;
    report.instance = work_->instance;
    report.generation = work_->generation;
    report.rank = work_->position * kRanksPerHost + i;
    report.world = work_->hosts * kRanksPerHost;
    report.model = work_->serve.model;
    report.version = work_->serve.version;
    report.state = loaded_ ? coordinator::RankState::kLoaded : coordinator::RankState::kAttached;
    if (loaded_) report.has = work_->serve;
    report.sequence = rank_sequence_;
    site_.control.call<Result<InstanceAnswer>>(
        [report](testing::DurableCore& core, TimePoint now) {
          return core.report_rank(report, now);
        },
        [this, alive = alive_](const Result<InstanceAnswer>& answer) {
          if (!*alive || !answer || ready_after_) return;
          if (answer->state == coordinator::InstanceState::kCommitted) {
            ready_after_ = site_.events.now() - started_;
          }
        });
  }
}

void Host::repeat_ranks() {
  report_ranks();
  site_.events.after(kRankInterval, mine([this] { repeat_ranks(); }));
}

void Host::before_step() {
  if (puller_ != nullptr) puller_->before_step();
}

void Host::step(Duration length) {
  if (puller_ == nullptr) return;
  puller_->step(length);
  if (puller_->complete() || !puller_->failure().empty()) finish_pull();
}

}  // namespace rekindle::scale
