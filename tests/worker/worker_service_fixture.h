#pragma once

// The service behind a real socket. The test is the worker, and sends frames.
#include <future>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include <sys/socket.h>

#include <boost/asio/any_io_executor.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_future.hpp>
#include <gtest/gtest.h>

#include "recovery/worker/worker_service.h"
#include "src/async/task.h"
#include "src/ipc/unix_socket.h"
#include "tests/support/process.h"
#include "tests/worker/published_version.h"

namespace rekindle::worker {

using namespace std::chrono_literals;  // NOLINT(google-build-using-namespace)
using testing::eventually;
using testing::TempDir;

inline TimePoint soon() { return std::chrono::steady_clock::now() + 20s; }

// A host with a real store. No other host has the versions in it.
class LonelyHost final : public Host {
 public:
  LonelyHost(const std::filesystem::path& directory, const boost::asio::any_io_executor& executor)
      : store_(std::move(*store::SegmentStore::open({directory, 0}))),
        verifier_(std::make_unique<CopyVerifier>(executor, *store_, blocking_, digests_, hooks())) {
  }
  store::SegmentStore& store() override { return *store_; }
  WorkerPool& blocking_pool() override { return blocking_; }
  async::Task<Result<ModelVersion>> newest(std::string model) override {
    ModelVersion newest{model, 0};
    for (const auto& stored : store_->versions()) {
      newest.version = std::max(newest.version, stored->manifest.checkpoint->id.version);
    }
    if (newest.version == 0) co_return fail(ErrorCode::kNotFound, "no version of {}", model);
    co_return newest;
  }
  async::Task<Result<std::shared_ptr<const store::StoredVersion>>> pull(
      pull::PullRequest request, pull::OnProgress, pull::PullWatch watch) override {
    {
      const std::lock_guard lock(mutex_);
      requested_ = request;
    }
    if (on_pull) co_return co_await on_pull(std::move(watch));
    co_return fail(ErrorCode::kNotFound, "NO_SOURCE for {}", request.ref.to_string());
  }
  std::function<void(const store::FilledSegments&)> on_publish;  // set before anybody publishes
  async::Task<Result<Digest>> publish(ModelVersion id, store::FilledSegments filled) override {
    if (on_publish) on_publish(filled);
    co_return publish_now(id, std::move(filled));
  }
  CopyVerifier& verifier() override { return *verifier_; }
  bool has_fleet() const override { return fleet; }
  async::Task<Result<InstanceVerdict>> report(RankReport report) override {
    const std::lock_guard lock(mutex_);
    reports_.push_back(std::move(report));
    if (reports_.back().rank == refuse_rank) co_return fail(ErrorCode::kDenied, "it lives on b");
    co_return answer_;
  }
  // --- the device process, played by the test
  Result<UniqueFd> serve_device(device::DeviceOrder order) override {
    const std::lock_guard lock(mutex_);
    if (!has_device) return Host::serve_device(std::move(order));
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) {
      return fail_errno(errno, "socketpair");
    }
    device_ends.emplace_back(ends[1]);
    device_orders.push_back(std::move(order));
    return UniqueFd(ends[0]);
  }
  void tell_device(std::uint64_t, const TileRuns& runs, bool complete) override {
    for (const auto& [begin, end] : runs) tiles_told += end - begin;
    if (complete) device_complete = true;
  }
  void end_device(std::uint64_t session, bool) override { device_ended = session; }
  void spread_device(const device::SpreadOrder& order) override {
    keeping = order.keep_count;
    fetching = order.fetched.size();
    spreading = order.session;
  }
  void stop_spread(std::uint64_t session, const std::string&) override { stopped = session; }
  Result<std::vector<std::string>> homes_near(const std::string& device) override {
    if (homes.empty()) return Host::homes_near(device);
    return homes;
  }
  Result<transport::DeviceLanding> land_in_device(int, std::uint64_t bytes,
                                                  std::vector<std::string> near) override {
    const std::lock_guard lock(mutex_);
    EXPECT_EQ(near, homes);
    if (refuses_memory) return fail(ErrorCode::kUnavailable, "the NIC refuses");
    landing_.resize(bytes);
    return transport::DeviceLanding{landing_, {}, nullptr};
  }
  void bucket_landed(std::uint64_t, std::size_t bucket) override {
    const std::lock_guard lock(mutex_);
    buckets_landed_.push_back(bucket);
  }
  void reads_over(std::uint64_t session, const std::string&) override { reads_over_of = session; }
  std::vector<std::size_t> buckets_landed() {
    const std::lock_guard lock(mutex_);
    return buckets_landed_;
  }
  // Set before anybody attaches. Empty: no NIC is near.
  std::vector<std::string> homes;
  std::atomic<bool> refuses_memory = false;
  std::atomic<std::uint64_t> reads_over_of = 0;
  std::atomic<std::uint64_t> spreading = 0;
  std::atomic<std::size_t> fetching = 0;   // shares, in that order
  std::atomic<std::uint32_t> keeping = 0;  // keep_count of that order
  std::atomic<std::uint64_t> stopped = 0;
  std::atomic<bool> has_device = false;
  // Both written by the service before it answers the worker.
  std::vector<UniqueFd> device_ends;
  std::vector<device::DeviceOrder> device_orders;
  std::atomic<std::uint64_t> tiles_told = 0;
  std::atomic<bool> device_complete = false;
  std::atomic<std::uint64_t> device_ended = 0;

  // --- the coordinator, played by the test
  std::atomic<bool> fleet = false;
  std::atomic<std::uint32_t> refuse_rank = 1000;
  using Pulled = async::Task<Result<std::shared_ptr<const store::StoredVersion>>>;
  std::function<Pulled(pull::PullWatch)> on_pull;  // set before anybody attaches
  pull::PullRequest last_request() {
    const std::lock_guard lock(mutex_);
    return requested_;
  }
  // Keeps the report and answers with the orders.
  async::Task<Result<proto::RoundOrders>> report_rounds(proto::RoundReport report) override {
    {
      const std::lock_guard lock(mutex_);
      for (const auto& member : report.members()) {
        reported_.emplace(member.session(), member.state());
      }
      report_ = std::move(report);
    }
    co_await async::sleep_for(5ms);
    const std::lock_guard lock(mutex_);
    co_return orders_;
  }
  proto::RoundReport last_report() {
    const std::lock_guard lock(mutex_);
    return report_;
  }
  // In any report so far: the last one of a member is soon followed by one without it.
  bool has_reported(std::uint64_t session, proto::RoundMemberState state) {
    const std::lock_guard lock(mutex_);
    return reported_.contains({session, state});
  }
  void order(const proto::RoundOrder& round) {
    const std::lock_guard lock(mutex_);
    orders_.set_revision(orders_.revision() + 1);
    orders_.clear_rounds();
    if (round.round() != 0) *orders_.add_rounds() = round;
  }
  async::Task<Result<std::uint64_t>> begin_update(ModelVersion id, std::string group,
                                                  std::chrono::milliseconds gather,
                                                  std::uint32_t members) override {
    if (!fleet) co_return co_await Host::begin_update(id, group, gather, members);
    if (id.version != 2) co_return fail(ErrorCode::kNotFound, "no {}", id.to_string());
    co_return 7;
  }
  async::Task<Result<proto::RoundStatus>> update_status(std::uint64_t round,
                                                        std::chrono::milliseconds) override {
    co_await async::sleep_for(5ms);
    const std::lock_guard lock(mutex_);
    if (round != 7) co_return fail(ErrorCode::kInternal, "round {}", round);
    co_return status_;
  }
  void show(proto::RoundStatus status) {
    const std::lock_guard lock(mutex_);
    status_ = std::move(status);
  }
  void answer(Result<InstanceVerdict> answer) {
    const std::lock_guard lock(mutex_);
    answer_ = std::move(answer);
  }
  // The last report of each rank.
  std::map<std::uint32_t, RankReport> reports() {
    const std::lock_guard lock(mutex_);
    std::map<std::uint32_t, RankReport> last;
    for (const auto& report : reports_) last[report.rank] = report;
    return last;
  }

  Result<Digest> publish_now(const ModelVersion& id, store::FilledSegments filled) {
    TRY(auto staged, store_->stage_segments(id, std::move(filled), {}));
    TRY(const auto stored, store_->commit_staged(staged));
    return stored->manifest.checkpoint->root;
  }

 private:
  CopyVerifier::Hooks hooks() {
    CopyVerifier::Hooks hooks;
    hooks.replace = [this](std::shared_ptr<const store::StoredVersion> copy,
                           const CopyVerifier::BadCopy&) -> async::Task<void> {
      (void)store_->retire_copy(*copy);
      co_return;
    };
    return hooks;
  }

  std::unique_ptr<store::SegmentStore> store_;
  std::unique_ptr<CopyVerifier> verifier_;
  WorkerPool blocking_{"t-blocking", 2, 64};
  WorkerPool digests_{"t-digest", 2, 64};
  std::mutex mutex_;
  std::vector<std::byte> landing_;                                          // guarded by mutex_
  std::vector<std::size_t> buckets_landed_;                                 // guarded by mutex_
  std::set<std::pair<std::uint64_t, proto::RoundMemberState>> reported_;    // guarded by mutex_
  proto::RoundReport report_;                                               // guarded by mutex_
  proto::RoundOrders orders_;                                               // guarded by mutex_
  proto::RoundStatus status_;                                               // guarded by mutex_
  pull::PullRequest requested_;                                             // guarded by mutex_
  std::vector<RankReport> reports_;                                         // guarded by mutex_
  Result<InstanceVerdict> answer_ = fail(ErrorCode::kUnavailable, "away");  // guarded by mutex_
};

// The worker's end of the channel.
class Raw {
 public:
  explicit Raw(const std::string& path)
      : channel_(*ipc::Channel::adopt(std::move(*ipc::connect_unix_socket(path, soon())), 1024)) {}

  std::uint64_t send(proto::WorkerFrame frame) {
    frame.set_call(++call_);
    EXPECT_TRUE(channel_.send(frame.SerializeAsString(), {}, soon()));
    return call_;
  }
  void send_bytes(std::string bytes) { EXPECT_TRUE(channel_.send(std::move(bytes), {}, soon())); }
  // Returns the next frame; nullopt: the connection has ended.
  std::optional<proto::AgentFrame> next() {
    auto frame = channel_.receive(soon());
    if (!frame) return std::nullopt;
    descriptors = std::move(frame->descriptors);
    proto::AgentFrame parsed;
    EXPECT_TRUE(parsed.ParseFromString(frame->body));
    EXPECT_EQ(parsed.descriptors(), descriptors.size());
    return parsed;
  }
  // Returns the answer to the call. Keeps the events before it.
  proto::AgentFrame answer(std::uint64_t call) {
    while (auto frame = next()) {
      if (frame->call() == call) return *frame;
      events.push_back(*frame);
    }
    ADD_FAILURE() << "the connection ended";
    return {};
  }
  proto::AgentFrame hello() {
    proto::WorkerFrame frame;
    frame.mutable_hello()->set_protocol_min(1);
    frame.mutable_hello()->set_protocol_max(1);
    return answer(send(frame));
  }
  proto::AgentFrame attach(const std::string& instance, std::uint32_t rank = 0,
                           std::uint32_t world = 1, std::uint64_t version = 1,
                           const std::string& device = "") {
    proto::WorkerFrame frame;
    auto& attach = *frame.mutable_attach();
    attach.set_model("m");
    attach.set_version(version);
    attach.set_instance(instance);
    attach.set_rank(rank);
    attach.set_world(world);
    attach.set_device(device);
    return answer(send(frame));
  }
  proto::AgentFrame attach_staged(const std::string& instance, std::uint64_t generation,
                                  std::uint64_t version = 1) {
    proto::WorkerFrame frame;
    auto& attach = *frame.mutable_attach();
    attach.set_model("m");
    attach.set_version(version);
    attach.set_instance(instance);
    attach.set_generation(generation);
    attach.set_world(1);
    attach.set_staged(true);
    return answer(send(frame));
  }
  proto::AgentFrame begin_switch(std::uint64_t session) {
    proto::WorkerFrame frame;
    frame.set_session(session);
    frame.mutable_begin_switch();
    return answer(send(frame));
  }
  void wait_complete() {
    wait_ready([](const proto::TilesReady& ready) { return ready.complete(); });
  }
  // Waits until all tiles have verified. The copy may not be committed yet.
  void wait_all_told() {
    wait_ready([](const proto::TilesReady& ready) {
      return ready.bytes_total() > 0 && ready.bytes_done() == ready.bytes_total();
    });
  }
  std::uint64_t say_loaded(std::uint64_t session, std::uint64_t bytes) {
    proto::WorkerFrame frame;
    frame.set_session(session);
    frame.mutable_loaded()->set_bytes(bytes);
    return send(frame);
  }

  // These calls return the answer.
  proto::AgentFrame ping() {
    proto::WorkerFrame frame;
    frame.mutable_ping();
    return answer(send(frame));
  }
  proto::AgentFrame detach(std::uint64_t session) {
    proto::WorkerFrame frame;
    frame.set_session(session);
    frame.mutable_detach();
    return answer(send(frame));
  }
  proto::AgentFrame watch(std::uint64_t session, std::uint64_t have) {
    proto::WorkerFrame frame;
    frame.set_session(session);
    frame.mutable_watch()->mutable_have()->set_model("m");
    frame.mutable_watch()->mutable_have()->set_version(have);
    return answer(send(frame));
  }
  // Begins m@5, with so many floats.
  proto::AgentFrame begin_publish(std::uint64_t floats = 1024) {
    proto::WorkerFrame frame;
    auto& begin = *frame.mutable_publish_begin();
    begin.mutable_id()->set_model("m");
    begin.mutable_id()->set_version(5);
    auto& tensor = *begin.add_tensors();
    tensor.set_name("w");
    tensor.set_dtype("F32");
    tensor.add_shape(floats);
    return answer(send(frame));
  }
  proto::AgentFrame say_written(std::uint64_t publication, std::uint32_t segment) {
    proto::WorkerFrame frame;
    frame.set_session(publication);
    frame.mutable_publish_written()->set_segment(segment);
    return answer(send(frame));
  }
  std::uint64_t ask_commit_publish(std::uint64_t publication) {
    proto::WorkerFrame frame;
    frame.set_session(publication);
    frame.mutable_publish_commit();
    return send(frame);
  }
  proto::AgentFrame commit_publish(std::uint64_t publication) {
    return answer(ask_commit_publish(publication));
  }
  proto::AgentFrame abandon_publish(std::uint64_t publication) {
    proto::WorkerFrame frame;
    frame.set_session(publication);
    frame.mutable_publish_abandon();
    return answer(send(frame));
  }

  std::vector<UniqueFd> descriptors;  // of the last frame
  std::vector<proto::AgentFrame> events;

 private:
  void wait_ready(const std::function<bool(const proto::TilesReady&)>& is_it) {
    while (true) {
      for (const auto& event : events) {
        if (event.has_ready() && is_it(event.ready())) return;
      }
      const auto frame = next();
      ASSERT_TRUE(frame) << "the connection ended";
      events.push_back(*frame);
    }
  }
  ipc::Channel channel_;
  std::uint64_t call_ = 0;
};

inline constexpr std::uint64_t kPayload = 8 * 1024 * 4;

class WorkerServiceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directory(agent_);
    std::filesystem::permissions(agent_, std::filesystem::perms::owner_all);
    host_ = std::make_unique<LonelyHost>(dir_ / "store", context_.get_executor());
    options.directory = agent_;
    options.incarnation = Incarnation::random();
    auto service = WorkerService::start(*host_, context_.get_executor(), options);
    ASSERT_TRUE(service) << service.error().message();
    service_ = std::move(*service);
    thread_ = std::thread([this] { context_.run(); });
    publish(1);
  }
  void TearDown() override {
    boost::asio::co_spawn(context_, service_->close(5s), boost::asio::use_future).get();
    work_.reset();
    thread_.join();
    service_.reset();
  }
  void publish(std::uint64_t version) {
    publish_rows(host_->store(), dir_ / "made", {"m", version}, 8);
  }
  std::string socket() const { return (agent_ / "worker.sock").string(); }
  Raw greeted() {
    Raw raw(socket());
    EXPECT_TRUE(raw.hello().has_hello());
    return raw;
  }
  HealthAnswer ready(const std::string& target) {
    std::promise<HealthAnswer> answer;
    boost::asio::post(context_, [&] { answer.set_value(service_->board().get(target)); });
    return answer.get_future().get();
  }

  std::vector<std::string> event_kinds() {
    proto::AgentEventsRequest all;
    auto ask = service_->events_after(all);
    const auto events =
        boost::asio::co_spawn(context_, std::move(ask), boost::asio::use_future).get();
    std::vector<std::string> kinds;
    for (const auto& event : events.events()) kinds.push_back(event.kind());
    return kinds;
  }

  ServiceOptions options;
  TempDir dir_{true};
  const std::filesystem::path agent_ = dir_ / "agent";
  boost::asio::io_context context_{1};
  boost::asio::executor_work_guard<boost::asio::io_context::executor_type> work_{
      context_.get_executor()};
  std::unique_ptr<LonelyHost> host_;
  std::unique_ptr<WorkerService> service_;
  std::thread thread_;
};

}  // namespace rekindle::worker
