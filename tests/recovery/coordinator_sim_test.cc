#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include <gtest/gtest.h>

#include "recovery/coordinator/core/core.h"
#include "tests/support/durable_core.h"
#include "tests/support/effort.h"
#include "tests/support/numbered_digest.h"

// The real core in a world that crashes, restarts, pauses, repeats, delays and reorders. Each seed
// is one run. The rules are checked after each answer.
namespace rekindle::coordinator {
namespace {

using namespace std::chrono_literals;

constexpr const char* kModels[] = {"m", "n"};

class Simulation {
 public:
  explicit Simulation(std::uint64_t seed) : random_(seed) {
    limits_.max_pullers_per_source = 3;
    limits_.max_sources_per_pull = 4;
    start_coordinator();
  }

  void run(int steps) {
    for (int i = 0; i < steps && !::testing::Test::HasFailure(); ++i) step();
  }
  int answers() const { return answers_; }

 private:
  // One process of the fleet: an id it wants, an incarnation, a connection.
  struct Agent {
    NodeInfo info;
    bool running = true;
    std::uint64_t connection = 0;
    bool connection_open = true;
    std::uint64_t highest_epoch = 0;
    std::map<ModelVersion, std::uint64_t> holds;  // version → root
    TimePoint last_heard{};                       // when the core last accepted it
    std::uint64_t heard_in_life = 0;              // of the coordinator
  };
  struct Message {
    TimePoint at;
    std::function<void()> deliver;
  };
  struct OpenPull {
    PullId id;
    ModelVersion version;
    std::size_t agent;
  };

  std::uint64_t pick(std::uint64_t below) { return random_() % below; }
  bool chance(int percent) { return pick(100) < static_cast<std::uint64_t>(percent); }

  void start_coordinator() {
    ++life_;
    serials_.clear();
    core_.emplace(
        timing_, limits_, disk_,
        [this](const StateChange& change) -> Result<void> {
          if (disk_fails_) {
            if (chance(50)) change.apply_to(disk_);  // an error may come after the write
            return fail(ErrorCode::kUnavailable, "disk");
          }
          change.apply_to(disk_);
          return {};
        },
        [this] {
          PullId id;
          for (auto& byte : id.bytes) byte = static_cast<std::uint8_t>(random_());
          return id;
        });
    disk_fails_ = false;
    ASSERT_TRUE(core_->start(now_));
    ASSERT_GT(core_->fleet().epoch(), highest_told_) << "a new term is above all that was told";
    highest_told_ = core_->fleet().epoch();
  }

  // Delivered later, perhaps twice, in any order.
  void send(std::function<void()> deliver) {
    const int copies = chance(10) ? 2 : 1;
    for (int i = 0; i < copies; ++i) {
      const auto delay = chance(70) ? pick(20) : pick(1500);
      messages_.push_back({now_ + std::chrono::milliseconds(delay), deliver});
    }
  }

  void deliver_due() {
    std::shuffle(messages_.begin(), messages_.end(), random_);
    std::vector<Message> due;
    const auto later = std::partition(messages_.begin(), messages_.end(),
                                      [&](const Message& message) { return message.at <= now_; });
    due.assign(messages_.begin(), later);
    messages_.erase(messages_.begin(), later);
    for (const Message& message : due) message.deliver();
  }

  void step() {
    now_ += std::chrono::milliseconds(pick(100));
    if (chance(1) && chance(30)) {  // the coordinator is stopped for a while
      now_ += std::chrono::milliseconds(500 + pick(8000));
    }
    core_->tick(now_);
    if (chance(1) && chance(50)) start_coordinator();
    disk_fails_ = chance(3);
    deliver_due();
    act();
    check_shares();
  }

  void act() {
    if (agents_.size() < 6 || chance(2)) return start_agent();
    const std::size_t index = pick(agents_.size());
    Agent& agent = agents_[index];
    if (!agent.running) return;
    switch (pick(12)) {
      case 0:
        return chance(20) ? crash(index) : send_register(index);
      case 1:
        return send_publish(index);
      case 2:
      case 3:
        return send_announce(index);
      case 4:
        return send_open(index);
      case 5:
        return send_progress();
      case 6:
        if (chance(10)) send_retire();
        return;
      default:
        return beat_all();
    }
  }

  void start_agent() {
    Agent agent;
    agent.info.node_id = fmt::format("node{}", pick(4));  // few names: they collide
    for (auto& byte : agent.info.incarnation.bytes) byte = static_cast<std::uint8_t>(random_());
    agent.info.control_endpoint = fmt::format("10.0.0.{}:7400", agents_.size());
    agent.info.host_id = agent.info.control_endpoint;
    agent.connection = ++connections_;
    agents_.push_back(std::move(agent));
    send_register(agents_.size() - 1);
  }

  void crash(std::size_t index) {
    agents_[index].running = false;
    const std::uint64_t connection = agents_[index].connection;
    send([this, index, connection] {
      const Agent& agent = agents_[index];
      agents_[index].connection_open = false;
      core_->disconnected(agent.info.node_id, agent.info.incarnation, std::to_string(connection),
                          now_);
    });
  }

  void heard(Agent& agent) {
    agent.last_heard = now_;
    agent.heard_in_life = life_;
    ++answers_;
  }

  void told_epoch(std::uint64_t epoch) {
    ASSERT_GE(epoch, highest_told_) << "epochs never go back";
    highest_told_ = epoch;
    ASSERT_GE(disk_.epoch, epoch) << "told before it was durable";
  }

  // The process that is connected and was heard in time, without an excuse in between.
  const Agent* live_holder(const std::string& node_id, const Incarnation& other_than) const {
    for (const Agent& agent : agents_) {
      if (agent.info.node_id == node_id && agent.info.incarnation != other_than &&
          agent.connection_open && agent.heard_in_life == life_ &&
          now_ - agent.last_heard < timing_.dead_after) {
        return &agent;
      }
    }
    return nullptr;
  }

  void send_register(std::size_t index) {
    send([this, index] {
      Agent& agent = agents_[index];
      const Agent* holder = live_holder(agent.info.node_id, agent.info.incarnation);
      const auto answer = core_->enroll(agent.info, "", agent.highest_epoch,
                                        std::to_string(agent.connection), now_);
      if (!answer) return;
      ASSERT_EQ(holder, nullptr) << agent.info.node_id << " was taken from its live holder";
      told_epoch(answer->epoch);
      agent.highest_epoch = std::max(agent.highest_epoch, answer->epoch);
      heard(agent);
    });
  }

  void beat_all() {
    for (std::size_t index = 0; index < agents_.size(); ++index) {
      if (!agents_[index].running || chance(10)) continue;
      send([this, index] {
        Agent& agent = agents_[index];
        const auto answer = core_->heartbeat(agent.info.node_id, agent.info.incarnation,
                                             {.epoch = agent.highest_epoch}, now_);
        if (!answer) return;
        told_epoch(answer->epoch);
        heard(agent);
        for (const ModelVersion& id : answer->retiring) {
          ASSERT_TRUE(core_->fleet().catalog.find(id)->retiring);
        }
        ASSERT_TRUE(answer->retire.empty()) << "it did not say that nobody reads";
      });
    }
  }

  ModelVersion some_version() { return {kModels[pick(2)], 1 + pick(4)}; }

  void told_root(const ModelVersion& id, const Digest& root) {
    const auto [known, is_new] = roots_.emplace(id, root);
    ASSERT_EQ(known->second, root) << id.to_string() << " has two roots";
  }

  void send_publish(std::size_t index) {
    const ModelVersion id = some_version();
    const Digest root = test::numbered_digest(1 + pick(2), 1);
    send([this, index, id, root] {
      Agent& agent = agents_[index];
      const auto answer =
          core_->publish(agent.info.node_id, agent.info.incarnation, id, root,
                         test::numbered_digest(test::first_number(root), 2), 100, now_);
      if (!answer) {
        // The write may have been done before its error. A restart then finds the version revived.
        const auto written = disk_.versions.find(id);
        if (written != disk_.versions.end() && !written->second.retiring) retired_.erase(id);
        return;
      }
      heard(agent);
      told_root(id, root);
      ASSERT_EQ(disk_.versions.at(id).root, root) << "told before it was durable";
      retired_.erase(id);
      agent.holds[id] = test::first_number(root);
    });
  }

  void send_announce(std::size_t index) {
    std::vector<Holding> add;
    if (chance(30)) agents_[index].holds.emplace(some_version(), 1 + pick(2));
    for (const auto& [id, root] : agents_[index].holds) {
      Holding holding;
      holding.id = id;
      holding.root = test::numbered_digest(root, 1);
      holding.tensor_set = test::numbered_digest(root, 2);
      holding.layout = test::numbered_digest(1 + pick(2), 3);
      holding.complete = chance(80);
      holding.verified = holding.complete && chance(90);
      holding.whole = chance(80);
      add.push_back(std::move(holding));
    }
    send([this, index, add] {
      Agent& agent = agents_[index];
      const auto conflicts =
          core_->announce(agent.info.node_id, agent.info.incarnation, agent.highest_epoch,
                          /*full=*/true, add, {}, now_);
      if (conflicts) heard(agent);
    });
  }

  // A node that this puller may always read from has all of it.
  bool has_good_copy(const NodeInfo& puller, const ModelVersion& id, const Digest& root) const {
    return std::ranges::any_of(core_->fleet().members.all(), [&](const auto& entry) {
      const Member& member = entry.second;
      return member.state != NodeState::kDead && !member.standing.quarantined(now_) &&
             member.info.incarnation != puller.incarnation && member.holdings.holds_whole(id, root);
    });
  }

  void check_offers(const NodeInfo& puller, const ModelVersion& id, const Digest& root,
                    const std::vector<SourceOffer>& offers) {
    ASSERT_LE(offers.size(), limits_.max_sources_per_pull);
    for (const SourceOffer& offer : offers) {
      const auto member = core_->fleet().members.all().find(offer.node.node_id);
      ASSERT_NE(member, core_->fleet().members.all().end());
      ASSERT_EQ(offer.grant.source, member->second.info.incarnation) << "another life";
      ASSERT_NE(member->second.state, NodeState::kDead);
      ASSERT_NE(offer.grant.source, puller.incarnation) << "its own source";
      ASSERT_EQ(offer.grant.puller, puller.incarnation);
      ASSERT_EQ(offer.grant.root, root);
      ASSERT_TRUE(serials_.insert(offer.grant.serial).second) << "a serial twice";
      const auto struck = quarantined_.find(offer.grant.source);
      if (struck != quarantined_.end() && struck->second.life == life_ &&
          now_ < struck->second.until && struck->second.by.size() > 1) {
        ASSERT_FALSE(has_good_copy(puller, id, root)) << "offered in quarantine";
      }
    }
  }

  void send_open(std::size_t index) {
    const ModelVersion wanted = some_version();
    const bool latest = chance(50);
    send([this, index, wanted, latest] {
      const Agent& agent = agents_[index];
      OpenPullRequest request{agent.info, wanted.model, std::nullopt, ""};
      if (!latest) request.version = wanted.version;
      const auto opened = core_->open_pull(request, now_);
      if (!opened) return;
      ++answers_;
      told_root(opened->id, opened->version.root);
      ASSERT_FALSE(retired_.contains(opened->id)) << "a retired version";
      check_offers(agent.info, opened->id, opened->version.root, opened->sources);
      if (opened->sources.empty() && opened->retry_after == Duration::zero()) {
        ASSERT_TRUE(agent.holds.contains(opened->id)) << "nobody to read from, not even itself";
      } else {
        ASSERT_EQ(opened->sources.empty(), opened->retry_after > Duration::zero());
      }
      if (!opened->pull_id.is_nil()) pulls_.push_back({opened->pull_id, opened->id, index});
    });
  }

  void send_progress() {
    if (pulls_.empty()) return;
    const OpenPull pull = pulls_[pick(pulls_.size())];
    if (chance(20)) {
      const Incarnation& by =
          agents_[chance(90) ? pull.agent : pick(agents_.size())].info.incarnation;
      return send([this, pull, by] { (void)core_->close_pull(pull.id, by, now_); });
    }
    PullProgress progress{pull.id, agents_[pull.agent].info, pull.version, pick(100), 100, {}};
    if (chance(20)) {
      const NodeInfo& source = agents_[pick(agents_.size())].info;
      progress.sources.push_back(
          {source.node_id, source.incarnation, 0, 0, 1, chance(50), chance(30), ""});
    }
    send([this, progress] {
      const auto known = core_->pulls().table().all().find(progress.pull_id);
      const bool is_known = known != core_->pulls().table().all().end();
      const Pull before = is_known ? known->second : Pull();
      const auto answer = core_->pull_progress(progress, now_);
      if (!answer) return;
      ++answers_;
      for (const SourceReport& report : progress.sources)
        note_strike(progress.puller.incarnation, report, before);
      check_offers(progress.puller, progress.id, core_->fleet().catalog.find(progress.id)->root,
                   answer->sources);
    });
  }

  // `before`: the pull as it was.
  void note_strike(const Incarnation& puller, const SourceReport& report, const Pull& before) {
    if (!before.opened_here || !before.granted.contains(report.incarnation)) return;
    const auto& reports = before.reports.all();
    const bool repeated = std::any_of(reports.begin(), reports.end(), [&](const SourceReport& old) {
      return old.incarnation == report.incarnation && old.quarantine;
    });
    const auto member = core_->fleet().members.all().find(report.node_id);
    if (!report.quarantine || repeated || member == core_->fleet().members.all().end() ||
        member->second.info.incarnation != report.incarnation) {
      return;
    }
    Quarantine& quarantine = quarantined_[report.incarnation];
    if (quarantine.life != life_ || quarantine.until <= now_) quarantine = {life_, {}, {}};
    quarantine.by.insert(puller);
    quarantine.until = std::max(quarantine.until, now_ + timing_.quarantine_first);
  }

  void send_retire() {
    const ModelVersion id = some_version();
    send([this, id] {
      if (core_->retire(id, now_)) retired_.insert(id);
    });
  }

  void check_shares() {
    std::map<Incarnation, std::size_t> shares;
    for (const auto& [id, pull] : core_->pulls().table().all()) {
      for (const Incarnation& source : pull.sources) {
        ASSERT_LE(++shares[source],
                  std::max(limits_.max_pullers_per_source, limits_.max_sources_per_pull))
            << "too many pullers";
      }
    }
  }

  std::mt19937_64 random_;
  Timing timing_;
  Limits limits_;
  TimePoint now_{1h};
  DurableState disk_;
  bool disk_fails_ = false;
  std::optional<rekindle::testing::DurableCore> core_;
  std::uint64_t life_ = 0;
  std::vector<Agent> agents_;
  std::vector<Message> messages_;
  std::uint64_t connections_ = 0;
  std::vector<OpenPull> pulls_;
  int answers_ = 0;

  std::uint64_t highest_told_ = 0;
  std::map<ModelVersion, Digest> roots_;
  std::set<ModelVersion> retired_;
  std::set<std::uint64_t> serials_;
  struct Quarantine {
    std::uint64_t life = 0;
    TimePoint until;
    std::set<Incarnation> by;
  };
  std::map<Incarnation, Quarantine> quarantined_;
};

constexpr std::uint64_t kFixed = testing::effort(3000);
constexpr std::uint64_t kFresh = testing::effort(500);

TEST(CoordinatorSimulation, NoRuleBreaksInThousandsOfRuns) {
  const std::uint64_t fresh = std::random_device()();
  long answers = 0;
  for (std::uint64_t i = 0; i < kFixed + kFresh; ++i) {
    const std::uint64_t seed = i < kFixed ? i : fresh + i;
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    Simulation simulation(seed);
    simulation.run(300);
    answers += simulation.answers();
    if (HasFailure()) break;
  }
  EXPECT_GT(answers, 30 * (kFixed + kFresh)) << "the world must not be all refusals";
}

}  // namespace
}  // namespace rekindle::coordinator
