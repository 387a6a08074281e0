// Direct reads with every part but the hardware and the coordinator: a session on a device double,
// whose slots are registered with fake NICs; the transfer, the engine and the verbs transport; and
// sources that serve the sample over a fake network. The worker's end compares what it got with the
// sample. No soft-RoCE device takes dmabufs, so nothing of this runs on a kernel's RDMA device.
#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <sys/mman.h>

#include <boost/asio/post.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/agent.pb.h"
#include "recovery/device/process/pinned_copies.h"
#include "recovery/pull/direct_transfer.h"
#include "recovery/rpc/convert.h"
#include "recovery/rpc/methods.h"
#include "src/base/units.h"
#include "src/bucket/double_device.h"
#include "tests/device/started_session.h"
#include "tests/recovery/rpc_fixture.h"
#include "tests/verbs/fake_verbs.h"
#include "tests/verbs/verbs_hosts.h"

namespace rekindle::device {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using transport::verbs::FakeCall;
using transport::verbs::FakeNetwork;
using transport::verbs::FakeVerbs;

constexpr std::uint64_t kSlot = 256 * kKiB;

// A host that serves the sample: its control connection, and its verbs end.
class SourceHost {
 public:
  SourceHost(rpc::testing::Loop& loop, FakeNetwork& network, const std::string& name,
             const bucket::testing::Sample& sample)
      : loop_(loop), api_(network, name), name_(name) {
    api_.add_device({.name = "mlx5_0"});
    api_.add_device({.name = "mlx5_1"});
    auto identity = rpc::testing::make_identity(proto::ROLE_AGENT, name);
    incarnation_ = identity.incarnation.to_bytes();
    source_ = std::make_unique<transport::verbs::VerbsSource>(
        api_, transport::verbs::FabricOptions{}, transport::verbs::RegistrarOptions{},
        transport::verbs::VerbsServerOptions{.registration_patience = 10s}, identity.incarnation);
    files_ = sample.files();
    for (std::size_t i = 0; i < files_.size(); ++i) {
      const std::uint64_t bytes = sample.segment_bytes[i];
      void* const mapped =
          ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, files_[i].get(), 0);
      if (mapped == MAP_FAILED) throw std::runtime_error("mmap");
      segments_.emplace_back(static_cast<std::byte*>(mapped), bytes);
      keys_.push_back(source_->registry().add(segments_.back(), files_[i].get(), 0, {}, nullptr));
    }
    server_ = rpc::RpcServer::create(loop_.executor(), std::move(identity));
    rpc::handle<proto::AGENT_OPEN_SESSION>(*server_, [this](const rpc::Peer&, auto request, auto) {
      return request.renews().empty() ? open_session() : renew_session(std::move(request));
    });
    rpc::handle<proto::AGENT_CONNECT_PATHS>(*server_, [this](const rpc::Peer&, auto request, auto) {
      return connect_paths(std::move(request));
    });
    rpc::handle<proto::AGENT_CLOSE_SESSION>(
        *server_,
        [](const rpc::Peer&, auto, auto) -> async::Task<Result<proto::CloseSessionResponse>> {
          co_return proto::CloseSessionResponse();
        });
    address_ = *server_->listen("127.0.0.1:0");
  }
  ~SourceHost() {
    stop();
    loop_.run(server_->close(5s));
    for (const auto& segment : segments_) ::munmap(segment.data(), segment.size());
  }
  SourceHost(const SourceHost&) = delete;
  SourceHost& operator=(const SourceHost&) = delete;

  std::shared_ptr<pull::SourcePeer> peer() {
    return loop_.run([](SourceHost* host) -> async::Task<std::shared_ptr<pull::SourcePeer>> {
      auto client = co_await rpc::RpcClient::connect(
          host->address_, rpc::testing::make_identity(proto::ROLE_PULLER, "p"), 5s);
      co_return std::make_shared<pull::SourcePeer>(host->record(1), std::move(*client));
    }(this));
  }
  // As the coordinator names it, with its grant of this number.
  proto::Source record(std::uint64_t serial) const {
    proto::Source record;
    record.mutable_node()->set_incarnation(incarnation_);
    record.mutable_grant()->set_source_incarnation(incarnation_);
    record.mutable_grant()->set_issuer("coordinator");
    record.mutable_grant()->set_serial(serial);
    return record;
  }
  // The highest serial of a grant that renewed the open session.
  std::uint64_t renewed_by() const { return renewed_by_; }
  std::function<void()> on_renewal;
  // As if the host died: its queue pairs are gone.
  void stop() { source_->stop(); }
  std::span<std::byte> segment(std::size_t i) const { return segments_[i]; }
  bool offers_verbs = true;
  const std::string& name() const { return name_; }

 private:
  async::Task<Result<proto::OpenSessionResponse>> open_session() {
    proto::OpenSessionResponse response;
    const SessionToken token = source_->admit(keys_);
    token_ = token;
    response.set_token(token.to_bytes());
    for (std::uint32_t i = 0; i < keys_.size(); ++i) {
      auto& region = *response.add_regions();
      region.set_segment(i);
      region.set_region(keys_[i].region);
      region.set_generation(keys_[i].generation);
    }
    if (offers_verbs && source_->server() != nullptr) {
      auto& offer = *response.add_offers();
      offer.set_transport("verbs");
      offer.set_endpoint(source_->target(token).endpoint);
      offer.set_max_paths(1);
    }
    co_return response;
  }
  async::Task<Result<proto::OpenSessionResponse>> renew_session(proto::OpenSessionRequest request) {
    if (request.renews() != token_.to_bytes()) co_return fail(ErrorCode::kDenied, "no session");
    renewed_by_ = std::max(renewed_by_, request.grant().serial());
    if (on_renewal) on_renewal();
    proto::OpenSessionResponse response;
    response.set_token(request.renews());
    co_return response;
  }
  async::Task<Result<proto::ConnectPathsResponse>> connect_paths(proto::ConnectPathsRequest from) {
    proto::ConnectPathsResponse response;
    if (source_->server() == nullptr) co_return fail(ErrorCode::kUnavailable, "is gone");
    CO_TRY(const auto token, SessionToken::from_bytes(from.token()));
    CO_TRY(*response.mutable_response(), source_->server()->accept(token, from.request()));
    co_return response;
  }

  rpc::testing::Loop& loop_;
  FakeVerbs api_;
  const std::string name_;
  std::string incarnation_;
  std::unique_ptr<transport::verbs::VerbsSource> source_;
  std::vector<UniqueFd> files_;
  std::vector<std::span<std::byte>> segments_;
  std::vector<transport::RegionKey> keys_;
  SessionToken token_;
  std::uint64_t renewed_by_ = 0;
  std::unique_ptr<rpc::RpcServer> server_;
  std::string address_;
};

class DirectReadsTest : public ::testing::Test {
 protected:
  DirectReadsTest() {
    puller_api_.add_device({.name = "mlx5_0"});
    puller_api_.add_device({.name = "mlx5_1"});
    puller_ = std::make_unique<transport::verbs::VerbsPuller>(puller_api_,
                                                              transport::verbs::FabricOptions{});
    for (const char* const name : {"a", "b"}) {
      sources_.push_back(std::make_unique<SourceHost>(loop_, network_, name, sample_));
    }
    const auto contents = sample_.contents();
    checkpoint_ = std::make_shared<const Checkpoint>(
        Checkpoint{{"m", 1}, contents.tensors(), contents.tiles(), sample_.leaves(), {}});
    environment_.executor = loop_.executor();
    environment_.engine = engine_.get();
    environment_.blocking_pool = &blocking_;
    environment_.digest_pool = &blocking_;
    environment_.handshakes = {&puller_->connector()};
    environment_.metrics = &pull_metrics_;
  }

  static bucket::testing::Sample sample() {
    std::vector<TensorInfo> tensors;
    for (int i = 0; i < 12; ++i) {
      tensors.push_back({fmt::format("t{:02}", i), DType::kBF16, Shape{512, 200}});
    }
    return bucket::testing::sample_of(std::move(tensors), 7, kMiB);
  }

  void begin_session() {
    SessionOrder order;
    order.open = [this]() -> Result<bucket::Device*> { return device_.get(); };
    order.pinner = &pinner_;
    order.attached = *parse_attached(testing::attached_frame(sample_));
    const auto files = sample_.files();
    for (std::size_t i = 0; i < files.size(); ++i) {
      order.segments.push_back(*cache_.get(files[i].get(), sample_.segment_bytes[i]));
    }
    order.slots.bucket_bytes = kSlot;
    order.slots.free_fraction = 1;
    order.direct = true;
    order.leaves = sample_.leaves();
    // To the control thread, as the agent's link does.
    order.say = [this](SessionNews news) {
      boost::asio::post(loop_.io(), [this, news = std::make_shared<SessionNews>(std::move(news))] {
        hear(std::move(*news));
      });
    };
    session_.start(std::move(order));
  }
  void hear(SessionNews news) {
    if (auto* const offered = std::get_if<SlotsOffered>(&news)) offer(*offered);
    if (const auto* const wanted = std::get_if<BucketWanted>(&news)) {
      wanted_.push_back(*wanted);
      if (on_wanted) on_wanted(*wanted);
      wish(*wanted);
    }
    if (const auto* const ended = std::get_if<ReadsEnded>(&news)) {
      ended_ = *ended;
      if (reads_->is_over()) session_.session->reads_over(ended->why);
      reads_->end(ended->why);
    }
  }
  void wish(const BucketWanted& wanted) {
    if (withholds_wishes_) return withheld_.push_back(wanted);
    reads_->want({wanted.bucket, wanted.slot, wanted.verified, wanted.wrong});
  }
  void offer(const SlotsOffered& offered) {
    auto landing = puller_->connector().use_device_memory(
        offered.memory.get(), offered.bucket_bytes * offered.slots, near_);
    if (!landing) return reads_->end(landing.error().message());
    const std::uint64_t bucket_bytes = offered.bucket_bytes;
    reads_->offer({.landing = std::move(*landing),
                   .bucket_bytes = bucket_bytes,
                   .slots = offered.slots,
                   .buckets = [this, bucket_bytes]() -> Result<std::vector<bucket::DirectBucket>> {
                     const auto contents = sample_.contents();
                     TRY(const auto plan, bucket::Plan::create(contents, bucket_bytes));
                     return bucket::direct_buckets(contents, plan);
                   }});
  }
  // The pull's part, as in PullJob.
  async::Task<std::string> read() {
    co_await boost::asio::this_coro::throw_if_cancelled(false);
    std::optional<pull::DirectSlots> slots;
    while (!(slots = reads_->take_slots())) {
      if (reads_->ended()) co_return *reads_->ended();
      co_await reads_->changed->wait_until(steady_now() + 1s);
    }
    const auto buckets = slots->buckets();
    std::vector<pull::PlanSource> views;
    pull::SourceTable table;
    for (std::size_t i = 0; i < peers_.size(); ++i) {
      pull::ActiveSource& source = table.emplace_back();
      source.name = sources_[i]->name();
      source.record = sources_[i]->record(1);
      source.peer = peers_[i];
      source.layout = std::make_shared<const Layout>(sample_.layout);
      views.push_back({source.layout});
    }
    auto plan = pull::plan_direct(checkpoint_, views, *buckets, slots->bucket_bytes);
    if (!plan) co_return plan.error().message();
    auto closed = slots->landing.other_homes;
    pull::DirectTransfer transfer(
        environment_, silence_, *reads_,
        {.plan = std::move(*plan),
         .slots = std::move(*slots),
         .sources = std::move(table),
         .paths = {.id = {"m", 1}, .forced_transport = "verbs", .closed_homes = std::move(closed)},
         .ask_again = [this] { return ask_again(); },
         .renew_every = 5ms});
    std::string why = co_await transfer.run();
    wrong_ = transfer.wrong();
    co_return why;
  }
  async::Task<std::vector<proto::Source>> ask_again() {
    ++serial_;
    std::vector<proto::Source> records;
    for (const auto& source : sources_) records.push_back(source->record(serial_));
    co_return records;
  }
  // Runs the session to its end, with a worker that takes everything.
  SessionEnd run(bool copy_is_here) {
    reads_ = std::make_shared<pull::DirectReads>(
        loop_.executor(),
        pull::DirectReads::Answers{
            .landed = [this](std::size_t bucket) { session_.session->landed(bucket); },
            .over = [this](const std::string& why) { session_.session->reads_over(why); }});
    for (const auto& source : sources_) peers_.push_back(source->peer());
    begin_session();
    if (copy_is_here) session_.session->tell({}, true);
    session_.taken = std::async(std::launch::async, [this] {
      session_.worker->open();
      session_.worker->take_all();
      session_.worker->close();
    });
    why_ = loop_.run(read());
    reads_->finish(why_);
    // A session that expects bytes of a copy ends in any case. `all` tells the two apart.
    session_.session->tell({}, true);
    loop_.run_until([this] {
      return session_.end.wait_for(0s) == std::future_status::ready && ended_.has_value();
    });
    session_.taken.get();
    for (const auto& peer : peers_) peer->close();
    EXPECT_EQ(session_.worker->compare(sample_), "");
    EXPECT_EQ(device_->memory()->free_bytes, device_->memory()->total_bytes);
    return session_.end.get();
  }

  const bucket::testing::Sample sample_ = sample();
  rpc::testing::Loop loop_;
  FakeNetwork network_;
  FakeVerbs puller_api_{network_, "puller"};
  std::unique_ptr<transport::verbs::VerbsPuller> puller_;
  std::vector<std::unique_ptr<SourceHost>> sources_;
  std::vector<std::shared_ptr<pull::SourcePeer>> peers_;
  std::shared_ptr<const Checkpoint> checkpoint_;
  WorkerPool blocking_{"blocking", 2, 16};
  std::unique_ptr<transport::Engine> engine_ = transport::Engine::create({1});
  metrics::Metrics metrics_;
  pull::PullMetrics pull_metrics_{metrics_};
  pull::PullEnvironment environment_;
  pull::Silence silence_{20s, steady_now()};
  std::vector<std::string> near_{"mlx5_1:1"};

  std::unique_ptr<bucket::Device> device_ = bucket::make_double_device("double:0", 64 * kMiB);
  bucket::Pinner pinner_{*device_, 2};
  SegmentCache cache_{pinner_};
  std::shared_ptr<pull::DirectReads> reads_;
  std::function<void(const BucketWanted&)> on_wanted;
  std::vector<BucketWanted> wanted_;
  // Buckets that nobody has asked the pull for yet.
  bool withholds_wishes_ = false;
  std::vector<BucketWanted> withheld_;
  std::uint64_t serial_ = 1;
  std::optional<ReadsEnded> ended_;
  std::vector<pull::WrongBytes> wrong_;
  std::string why_;
  testing::StartedSession session_;
};

TEST_F(DirectReadsTest, EveryByteReachesTheWorkerAlthoughThisHostHasNoCopy) {
  const auto end = run(false);
  EXPECT_FALSE(end.error) << end.error->message();
  ASSERT_TRUE(ended_);
  EXPECT_TRUE(ended_->all) << ended_->why;
  EXPECT_EQ(end.bytes, sample_.contents().total_bytes());
  EXPECT_EQ(end.refilled, 0u);
  EXPECT_EQ(wanted_.size(), end.buckets);
}

// Otherwise the sources would end the sessions after a minute.
TEST_F(DirectReadsTest, SessionsAreRenewedByFreshGrants) {
  withholds_wishes_ = true;
  for (const auto& source : sources_) {
    source->on_renewal = [this] {
      const auto renewed = [](const auto& host) { return host->renewed_by() > 3; };
      if (!std::ranges::all_of(sources_, renewed) || !withholds_wishes_) return;
      withholds_wishes_ = false;
      for (const auto& wanted : withheld_) wish(wanted);
    };
  }
  const auto end = run(false);
  EXPECT_FALSE(end.error) << end.error->message();
  ASSERT_TRUE(ended_);
  EXPECT_TRUE(ended_->all) << ended_->why;
  for (const auto& source : sources_) EXPECT_GT(source->renewed_by(), 3u) << source->name();
}

TEST_F(DirectReadsTest, BytesThatNicsWriteIntoGpuMemoryAreCounted) {
  const auto end = run(false);
  EXPECT_FALSE(end.error) << end.error->message();
  const std::string text = metrics_.text();
  const std::string labels = R"({memory="gpu",rail="mlx5_1:1",transport="verbs"} )";
  EXPECT_THAT(text, HasSubstr(fmt::format("\nrekindle_pull_moved_bytes_total{}{}\n", labels,
                                          sample_.contents().total_bytes())));
  EXPECT_THAT(text, HasSubstr("\nrekindle_pull_moving_seconds_total" + labels));
  EXPECT_THAT(text, Not(HasSubstr("\nrekindle_pull_moving_seconds_total" + labels + "0\n")));
}

TEST_F(DirectReadsTest, AFlippedByteIsFoundOnTheDeviceAndItsTileIsReadAgain) {
  sources_.pop_back();
  // In the first tensor's tile. The source's copy is right again when the tile is read once more.
  std::byte& byte = sources_[0]->segment(0)[sample_.layout.entries()[0].offset_bytes + 1000];
  byte ^= std::byte{1};
  on_wanted = [&byte](const BucketWanted& wanted) {
    if (!wanted.wrong.empty()) byte ^= std::byte{1};
  };
  const auto end = run(false);
  EXPECT_FALSE(end.error) << end.error->message();
  ASSERT_TRUE(ended_);
  EXPECT_TRUE(ended_->all) << ended_->why;
  EXPECT_EQ(end.refilled, 1u);
  ASSERT_EQ(wrong_.size(), 1u);
  EXPECT_EQ(wrong_[0].slices, 1u) << "the sender is blamed";
}

TEST_F(DirectReadsTest, ASourceThatStaysWrongIsNotReadFromForEver) {
  sources_.pop_back();
  sources_[0]->segment(0)[sample_.layout.entries()[0].offset_bytes + 1000] ^= std::byte{1};
  const auto end = run(true);
  EXPECT_FALSE(end.error) << end.error->message();
  ASSERT_TRUE(ended_);
  EXPECT_FALSE(ended_->all);
}

TEST_F(DirectReadsTest, ALostSourceIsReplacedByTheOther) {
  on_wanted = [this](const BucketWanted& wanted) {
    if (wanted_.size() == 3 && wanted.wrong.empty()) sources_[0]->stop();
  };
  const auto end = run(false);
  EXPECT_FALSE(end.error) << end.error->message();
  ASSERT_TRUE(ended_);
  EXPECT_TRUE(ended_->all) << ended_->why;
}

TEST_F(DirectReadsTest, WithoutAnySourceTheRestComesFromThisHostsCopy) {
  on_wanted = [this](const BucketWanted&) {
    if (wanted_.size() != 3) return;
    for (const auto& source : sources_) source->stop();
  };
  const auto end = run(true);
  EXPECT_FALSE(end.error) << end.error->message();
  ASSERT_TRUE(ended_);
  EXPECT_FALSE(ended_->all);
  EXPECT_LE(ended_->buckets, 2u);
}

TEST_F(DirectReadsTest, ANicThatRefusesTheMemoryLeavesTheSessionToThisHostsCopy) {
  network_.fail_call(FakeCall::kRegDmabufMr,
                     {.error = EOPNOTSUPP, .count = 1, .device = "puller/mlx5_1"});
  const auto end = run(true);
  EXPECT_FALSE(end.error) << end.error->message();
  EXPECT_THAT(why_, HasSubstr("GPU memory with mlx5_1"));
  ASSERT_TRUE(ended_);
  EXPECT_FALSE(ended_->all);
  EXPECT_EQ(ended_->buckets, 0u);
}

TEST_F(DirectReadsTest, SourcesWithoutRdmaLeaveTheSessionToThisHostsCopy) {
  for (const auto& source : sources_) source->offers_verbs = false;
  const auto end = run(true);
  EXPECT_FALSE(end.error) << end.error->message();
  EXPECT_THAT(why_, HasSubstr("offers no transport"));
  ASSERT_TRUE(ended_);
  EXPECT_EQ(ended_->buckets, 0u);
}

}  // namespace
}  // namespace rekindle::device
