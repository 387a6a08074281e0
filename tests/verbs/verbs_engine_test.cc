// Whole batches over two sources of two rails each, while rails, routes, NICs and sessions fail.
#include <map>
#include <mutex>
#include <random>
#include <thread>

#include <gtest/gtest.h>

#include "src/base/units.h"
#include "tests/transport/engine_fixture.h"
#include "tests/verbs/fake_verbs.h"
#include "tests/verbs/verbs_hosts.h"

namespace rekindle::transport::verbs {
namespace {

using namespace std::chrono_literals;
using testing::TestObserver;
using testing::TestSlices;

constexpr std::size_t kRails = 2;
constexpr std::byte kMark{0xd7};
constexpr auto kFaultsFor = 1500ms;

// What failed is marked when it is reported; when it is read again, the marks must still be there:
// nothing was written in between. And nobody reads into what another path reads into.
class Marks {
 public:
  void posted(const ReadOp& op) {
    const std::lock_guard lock(mutex_);
    if (!writers_.insert({op.local, op.total_bytes()}).second) ++conflicts;
    const auto marked = marked_.find(op.local);
    if (marked == marked_.end()) return;
    const auto* const end = op.local + marked->second;
    late_bytes += static_cast<std::uint64_t>(std::count_if(
        op.local, const_cast<std::byte*>(end), [](auto byte) { return byte != kMark; }));
    marked_.erase(marked);
  }
  void reported(const ReadOp& op, OpStatus status) {
    const std::lock_guard lock(mutex_);
    if (writers_.erase(op.local) == 0) ++conflicts;
    if (status == OpStatus::kOk) return;
    std::fill_n(op.local, op.total_bytes(), kMark);
    marked_[op.local] = op.total_bytes();
    ++failed;
  }
  std::uint64_t conflicts = 0, late_bytes = 0, failed = 0;

 private:
  std::mutex mutex_;
  std::map<const std::byte*, std::uint64_t> writers_, marked_;
};

class MarkedPath final : public Path {
 public:
  MarkedPath(std::unique_ptr<Path> path, Marks& marks) : path_(std::move(path)), marks_(marks) {}

  Result<std::size_t> post(std::span<const ReadOp> ops) override {
    // Before: a read may land inside post().
    std::size_t taken = 0;
    for (const ReadOp& op : ops) {
      marks_.posted(op);
      const auto one = path_->post({&op, 1});
      if (one.value_or(0) == 1) {
        out_[op.wr_id] = op;
        ++taken;
        continue;
      }
      marks_.reported(op, OpStatus::kAborted);
      if (!one && taken == 0) return one;
      return taken;
    }
    return ops.empty() ? path_->post(ops) : taken;
  }
  std::size_t poll(std::span<Completion> out) override {
    const std::size_t count = path_->poll(out);
    for (const Completion& completion : out.first(count)) {
      const auto op = out_.find(completion.wr_id);
      if (op == out_.end()) {
        ++marks_.conflicts;
        continue;
      }
      marks_.reported(op->second, completion.status);
      out_.erase(op);
    }
    return count;
  }
  void abort() override { path_->abort(); }
  std::size_t in_flight() const override { return path_->in_flight(); }
  std::uint64_t bytes_landed() const override { return path_->bytes_landed(); }
  int wait_fd() const override { return path_->wait_fd(); }
  bool arm() override { return path_->arm(); }
  std::optional<TimePoint> wake_at() const override { return path_->wake_at(); }
  std::string_view transport() const override { return path_->transport(); }
  std::string describe() const override { return path_->describe(); }
  std::string why_broken() const override { return path_->why_broken(); }
  const PollerHome* home() const override { return path_->home(); }

 private:
  const std::unique_ptr<Path> path_;
  Marks& marks_;
  std::map<std::uint64_t, ReadOp> out_;
};

class Chaos {
 public:
  Chaos(std::uint32_t seed, bool registered, bool staged) : random_(seed), slices_(600, 64 * kKiB) {
    for (auto* host : {&source_apis_[0], &source_apis_[1], &puller_api_}) {
      for (std::size_t i = 0; i < kRails; ++i) {
        devices_.push_back(host->add_device({.name = fmt::format("mlx5_{}", i)}));
      }
    }
    const VerbsServerOptions server{.registration_patience = 10s};
    RegistrarOptions registrar;
    if (staged) registrar.max_bytes_per_device = kPageBytes;
    for (SourceIndex i = 0; i < 2; ++i) {
      sources_[i] =
          std::make_unique<VerbsSource>(source_apis_[i], FabricOptions{}, registrar, server);
      keys_[i] = sources_[i]->serve(slices_.segment());
      tokens_[i] = sources_[i]->admit({keys_[i]});
      slices_.set_region(i, keys_[i]);
    }
    puller_ = std::make_unique<VerbsPuller>(
        puller_api_, FabricOptions{},
        VerbsConnectorOptions{.bounce_bytes = 1 * kMiB, .probe_deadline = 100ms});
    if (registered) used_ = puller_->use(slices_.local());
    network_.deliver_by_thread(4ms, 30ms);
  }

  void run() {
    BatchOptions options;
    options.progress_timeout = 300ms;
    options.starvation_timeout = 15s;
    options.max_attempts = 10'000;
    const auto batch = engine_->start(slices_, observer_, options);
    slices_.set_batch(batch.get());
    const TimePoint heal_at = std::chrono::steady_clock::now() + kFaultsFor;
    while (!observer_.finished() && std::chrono::steady_clock::now() < heal_at) {
      for (SourceIndex i = 0; i < 2; ++i) connect(*batch, i);
      harm();
      std::this_thread::sleep_for(std::chrono::milliseconds(1 + random_() % 30));
    }
    heal();
    const TimePoint deadline = testing::test_deadline();
    while (!observer_.finished() && std::chrono::steady_clock::now() < deadline) {
      for (SourceIndex i = 0; i < 2; ++i) connect(*batch, i);
      std::this_thread::sleep_for(20ms);
    }
    const auto outcome = observer_.wait();
    EXPECT_TRUE(outcome) << outcome.error().message();
    EXPECT_EQ(observer_.finishes(), 1);
    EXPECT_EQ(batch->progress().slices_done, slices_.slice_count());
    EXPECT_TRUE(slices_.complete());
    EXPECT_EQ(slices_.double_writes, 0u);
    EXPECT_EQ(slices_.outstanding(), 0u);
    EXPECT_EQ(slices_.rejected, 0u);
    EXPECT_EQ(marks_.conflicts, 0u);
    EXPECT_EQ(marks_.late_bytes, 0u);
  }
  std::uint64_t failed_ops() const { return marks_.failed; }

 private:
  void connect(Batch& batch, SourceIndex index) {
    std::vector<std::string> in_use;
    for (const auto& path : batch.progress().paths) {
      if (path.source == index && path.alive) in_use.push_back(path.home);
    }
    auto made = puller_->connect(*sources_[index], tokens_[index], in_use);
    if (!made) return;
    Paths paths;
    for (auto& path : *made) paths.push_back(std::make_unique<MarkedPath>(std::move(path), marks_));
    batch.add_paths(index, std::move(paths));
  }
  void harm() {
    const auto& device = devices_[random_() % devices_.size()];
    const auto& other = devices_[random_() % devices_.size()];
    switch (random_() % 8) {
      case 0:
      case 1:
        network_.set_port_state({device}, IBV_PORT_DOWN, random_() % 2 == 0);
        break;
      case 2:
      case 3:
        network_.set_port_state({device}, IBV_PORT_ACTIVE);
        break;
      case 4:
        network_.cut({device}, {other});
        break;
      case 5:
        network_.join({device}, {other});
        break;
      case 6:
        network_.change(device, [&](FakeDevice& spec) { spec.flushes = random_() % 4 != 0; });
        break;
      default: {
        const auto index = static_cast<SourceIndex>(random_() % 2);
        sources_[index]->revoke(tokens_[index]);
        tokens_[index] = sources_[index]->admit({keys_[index]});
      }
    }
  }
  void heal() {
    for (const auto& device : devices_) {
      network_.set_port_state({device}, IBV_PORT_ACTIVE);
      network_.change(device, [](FakeDevice& spec) { spec.flushes = true; });
      for (const auto& other : devices_) network_.join({device}, {other});
    }
  }

  std::mt19937 random_;
  TestSlices slices_;
  TestObserver observer_;
  Marks marks_;
  FakeNetwork network_;
  std::array<FakeVerbs, 2> source_apis_{FakeVerbs{network_, "s0"}, FakeVerbs{network_, "s1"}};
  FakeVerbs puller_api_{network_, "p"};
  std::vector<std::string> devices_;
  std::array<std::unique_ptr<VerbsSource>, 2> sources_;
  std::array<RegionKey, 2> keys_;
  std::array<SessionToken, 2> tokens_;
  std::unique_ptr<VerbsPuller> puller_;
  std::shared_ptr<const void> used_;
  const std::unique_ptr<Engine> engine_ = Engine::create({.poller_threads = 2});
};

TEST(VerbsEngine, EverySliceEndsOnceWhateverFails) {
  std::uint64_t failed = 0;
  for (const bool staged : {false, true}) {
    for (const bool registered : {true, false}) {
      const auto seed = std::random_device{}();
      SCOPED_TRACE(::testing::Message() << "seed " << seed << ", staged " << staged
                                        << ", landing registered " << registered);
      Chaos chaos(seed, registered, staged);
      chaos.run();
      failed += chaos.failed_ops();
    }
  }
  EXPECT_GT(failed, 0u) << "nothing failed: the faults prove nothing";
}

}  // namespace
}  // namespace rekindle::transport::verbs
