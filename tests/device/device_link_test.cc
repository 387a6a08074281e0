// The agent's side, with a real device process.
#include "recovery/device/device_link.h"

#include <csignal>
#include <future>
#include <span>

#include <fcntl.h>

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <gtest/gtest.h>

#include "src/base/blake3.h"
#include "src/bucket/double_device.h"
#include "src/bucket/round_plan.h"
#include "src/ipc/frame.h"
#include "tests/device/bucket_worker.h"

namespace rekindle::device {
namespace {

using namespace std::chrono_literals;
using testing::BucketWorker;

class DeviceLinkTest : public ::testing::Test, private DeviceEvents {
 protected:
  void start(std::vector<std::string> arguments = {}, std::string program = DEVICE_MAIN) {
    LinkOptions options;
    options.gpu = *parse_gpu("double:2:64MiB");
    options.gpu.arguments = std::move(arguments);
    options.gpu.bucket_bytes = 256 << 10;
    options.program = std::move(program);
    options.life.first_pause = 10ms;
    options.life.hello = hello_;
    link_ = std::make_unique<DeviceLink>(context_.get_executor(), std::move(options));
    link_->tell_events(this);
    link_->start();
  }
  ~DeviceLinkTest() override {
    bool closed = false;
    boost::asio::co_spawn(
        context_,
        [](DeviceLink& link, bool& done) -> async::Task<void> {
          co_await link.close(5s);
          done = true;
        }(*link_, closed),
        boost::asio::detached);
    EXPECT_TRUE(until([&] { return closed; }));
  }
  template <typename Done>
  bool until(Done done) {
    const auto give_up = std::chrono::steady_clock::now() + 20s;
    while (!done() && std::chrono::steady_clock::now() < give_up) {
      context_.restart();
      context_.run_for(5ms);
    }
    return done();
  }
  bool serving() {
    return until([&] { return link_->status().state == DeviceLife::State::kServing; });
  }
  void device_over(const DeviceOver& over) override { over_.push_back(over); }
  void device_joined(const DeviceJoined&) override {}
  void share_wanted(const ShareWanted&) override {}
  void spread_progress(std::uint64_t, std::uint64_t) override {}
  void spread_over(const SpreadOver&) override {}
  void meeting_id(std::uint64_t, const Result<std::string>&) override {}
  void slots_offered(SlotsOffered offered) override { offered_ = std::move(offered); }
  void bucket_wanted(const BucketWanted& wanted) override { wanted_.push_back(wanted); }
  void reads_ended(const ReadsEnded& ended) override { ended_ = ended; }
  DeviceOrder order(std::uint64_t session) {
    DeviceOrder order;
    order.session = session;
    order.device = "double:1";
    order.attached = testing::attached_frame(sample_);
    order.segments = sample_.files();
    return order;
  }

  const bucket::testing::Sample sample_ = bucket::testing::sample_of(
      {{"a", DType::kBF16, Shape{1024, 1024}}, {"b", DType::kF32, Shape{33, 77}}}, 7, 1 << 20);
  std::chrono::milliseconds hello_{20'000};
  boost::asio::io_context context_;
  std::vector<DeviceOver> over_;
  std::optional<SlotsOffered> offered_;
  std::vector<BucketWanted> wanted_;
  std::optional<ReadsEnded> ended_;
  std::unique_ptr<DeviceLink> link_;
};

std::vector<bucket::BlockFile> blocks_of(const UniqueFd& block, std::uint64_t bytes) {
  std::vector<bucket::BlockFile> blocks;
  blocks.push_back({UniqueFd(::fcntl(block.get(), F_DUPFD_CLOEXEC, 0)), bytes});
  return blocks;
}

TEST_F(DeviceLinkTest, BlocksOfAnotherProcessAreDigested) {
  constexpr std::uint64_t kBytes = 6 << 20;
  const auto device = bucket::make_double_device("double:1", kBytes);
  const auto block = *device->allocate_block(kBytes);
  auto* const bytes = reinterpret_cast<unsigned char*>(block->address());
  for (std::uint64_t i = 0; i < kBytes; ++i) bytes[i] = static_cast<unsigned char>(i * 7 >> 3);
  const UniqueFd descriptor = *block->export_descriptor();
  std::vector<Digest> expected;
  for (std::uint64_t at = 0; at < kBytes; at += 1 << 20) {
    expected.push_back(blake3({reinterpret_cast<std::byte*>(bytes) + at, 1 << 20}));
  }
  start();
  std::vector<Result<std::vector<Digest>>> answers;
  const auto take = [&](Result<std::vector<Digest>> answer) {
    answers.push_back(std::move(answer));
  };
  // Nobody serves yet.
  link_->check_blocks("double:1", blocks_of(descriptor, kBytes), take);
  EXPECT_TRUE(answers.empty()) << "it is answered later";
  ASSERT_TRUE(until([&] { return answers.size() == 1; }));
  EXPECT_FALSE(answers[0]);
  ASSERT_TRUE(serving());
  link_->check_blocks("double:1", blocks_of(descriptor, kBytes), take);
  ASSERT_TRUE(until([&] { return answers.size() == 2; }));
  ASSERT_TRUE(answers[1]) << answers[1].error().message();
  EXPECT_EQ(*answers[1], expected);
  link_->check_blocks("double:1", blocks_of(descriptor, kBytes / 2), take);
  ASSERT_TRUE(until([&] { return answers.size() == 3; }));
  EXPECT_EQ(answers[2].error().code(), ErrorCode::kInvalid);
  link_->check_blocks("double:9", blocks_of(descriptor, kBytes), take);
  ASSERT_TRUE(until([&] { return answers.size() == 4; }));
  EXPECT_EQ(answers[3].error().code(), ErrorCode::kNotFound);
  EXPECT_EQ(link_->status().restarts, 0u);
}

TEST_F(DeviceLinkTest, APartOfABlockIsDigestedReadAndWritten) {
  constexpr std::uint64_t kBytes = 6 << 20;
  constexpr std::uint64_t kPiece = 1 << 20;
  const auto device = bucket::make_double_device("double:1", kBytes);
  const auto block = *device->allocate_block(kBytes);
  auto* const bytes = reinterpret_cast<char*>(block->address());
  for (std::uint64_t i = 0; i < kBytes; ++i) bytes[i] = static_cast<char>(i * 7 >> 3);
  const UniqueFd descriptor = *block->export_descriptor();
  const auto part = [&](std::uint64_t offset, std::uint64_t length) {
    auto blocks = blocks_of(descriptor, kBytes);
    blocks[0].offset = offset;
    blocks[0].length = length;
    return blocks;
  };
  start();
  ASSERT_TRUE(serving());
  std::optional<Result<std::vector<Digest>>> digests;
  const auto check = [&](std::uint64_t offset, std::uint64_t length) {
    digests.reset();
    link_->check_blocks("double:1", part(offset, length),
                        [&](Result<std::vector<Digest>> got) { digests = std::move(got); });
    return until([&] { return digests.has_value(); });
  };
  ASSERT_TRUE(check(2 * kPiece, 2 * kPiece));
  const auto* const from = reinterpret_cast<const std::byte*>(bytes) + 2 * kPiece;
  EXPECT_EQ(**digests,
            (std::vector<Digest>{blake3({from, kPiece}), blake3({from + kPiece, kPiece})}));
  ASSERT_TRUE(check(5 * kPiece, 2 * kPiece));
  EXPECT_EQ(digests->error().code(), ErrorCode::kInvalid);

  std::optional<Result<std::string>> copied;
  const auto copy = [&](std::uint64_t offset, std::uint64_t length, std::string data) {
    copied.reset();
    link_->copy_block("double:1", std::move(part(offset, length)[0]), std::move(data),
                      [&](Result<std::string> got) { copied = std::move(got); });
    return until([&] { return copied.has_value(); });
  };
  ASSERT_TRUE(copy(kPiece, 1000, ""));
  EXPECT_EQ(**copied, std::string(bytes + kPiece, 1000));
  ASSERT_TRUE(copy(kPiece + 5, 3, "abc"));
  ASSERT_TRUE(copied->has_value()) << copied->error().message();
  EXPECT_EQ(std::string(bytes + kPiece + 5, 3), "abc");
  ASSERT_TRUE(copy(kBytes - 2, 3, "abc"));
  EXPECT_EQ(copied->error().code(), ErrorCode::kInvalid);
  ASSERT_TRUE(copy(0, kPiece + 1, ""));
  EXPECT_EQ(copied->error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(link_->status().restarts, 0u);
}

// A context of CUDA does not recover from such an error.
TEST_F(DeviceLinkTest, ACheckThatFailsOnItsDeviceEndsTheProcessAndANewOneChecks) {
  const auto device = bucket::make_double_device("double:1", 2 << 20);
  const UniqueFd descriptor = *(*device->allocate_block(2 << 20))->export_descriptor();
  start({"--failpoints", "device.check=error:EIO@2"});
  ASSERT_TRUE(serving());
  std::optional<Result<std::vector<Digest>>> answer;
  const auto check = [&] {
    answer.reset();
    link_->check_blocks("double:1", blocks_of(descriptor, 2 << 20),
                        [&](Result<std::vector<Digest>> got) { answer = std::move(got); });
    return until([&] { return answer.has_value(); });
  };
  ASSERT_TRUE(check());
  EXPECT_TRUE(answer->has_value());
  ASSERT_TRUE(check());
  EXPECT_EQ(answer->error().code(), ErrorCode::kInternal);
  ASSERT_TRUE(until([&] { return link_->status().restarts == 1; }));
  ASSERT_TRUE(serving());
  ASSERT_TRUE(check());
  EXPECT_TRUE(answer->has_value());
}

TEST_F(DeviceLinkTest, ACheckThatLosesItsProcessIsAnswered) {
  const auto device = bucket::make_double_device("double:1", 2 << 20);
  const UniqueFd descriptor = *(*device->allocate_block(2 << 20))->export_descriptor();
  start();
  ASSERT_TRUE(serving());
  const auto pid = static_cast<pid_t>(link_->status().pid);
  ::kill(pid, SIGSTOP);
  std::optional<Result<std::vector<Digest>>> answer;
  link_->check_blocks("double:1", blocks_of(descriptor, 2 << 20),
                      [&](Result<std::vector<Digest>> got) { answer = std::move(got); });
  ::kill(pid, SIGKILL);
  ASSERT_TRUE(until([&] { return answer.has_value(); }));
  EXPECT_EQ(answer->error().code(), ErrorCode::kPeerLost) << answer->error().message();
}

// The descriptor of its slots comes over the socket; the answer goes back to its thread.
TEST_F(DeviceLinkTest, ADirectSessionOffersItsSlotsAndUploadsWhatNoNicBrings) {
  start();
  ASSERT_TRUE(serving()) << link_->status().problem;
  DeviceOrder direct = order(7);
  const auto leaves = sample_.leaves();
  const auto bytes = std::as_bytes(std::span(leaves));
  direct.direct = true;
  direct.leaves = *ipc::sealed_memfd({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  direct.leaves_bytes = bytes.size();
  auto socket = link_->serve(std::move(direct));
  ASSERT_TRUE(socket) << socket.error().message();
  auto taken = std::async(std::launch::async, [&] {
    BucketWorker worker(std::move(*socket));
    worker.open();
    worker.take_all();
    return worker.compare(sample_);
  });
  link_->tell(7, {}, true);
  EXPECT_TRUE(until([&] { return !wanted_.empty(); }));
  EXPECT_TRUE(offered_);
  if (offered_) {
    EXPECT_EQ(offered_->session, 7u);
    EXPECT_TRUE(offered_->memory);
    EXPECT_EQ(offered_->contents, bucket::digest_of(sample_.contents()));
  }
  link_->reads_over(7, "no source is left");
  EXPECT_TRUE(until([&] { return !over_.empty(); }));
  EXPECT_EQ(taken.get(), "");
  EXPECT_FALSE(over_.front().error);
  ASSERT_TRUE(ended_);
  EXPECT_FALSE(ended_->all);
  EXPECT_EQ(ended_->why, "no source is left");
}

TEST_F(DeviceLinkTest, DeliversWhatItIsTold) {
  start();
  ASSERT_TRUE(serving()) << link_->status().problem;
  ASSERT_EQ(link_->status().devices.size(), 2u);
  auto socket = link_->serve(order(7));
  ASSERT_TRUE(socket) << socket.error().message();
  auto taken = std::async(std::launch::async, [&] {
    BucketWorker worker(std::move(*socket));
    worker.open();
    worker.take_all();
    return worker.compare(sample_);
  });
  link_->tell(7, {{0, 1}}, false);
  link_->tell(7, {}, true);
  ASSERT_TRUE(until([&] { return !over_.empty(); }));
  EXPECT_FALSE(over_.front().error);
  EXPECT_EQ(over_.front().session, 7u);
  EXPECT_EQ(over_.front().bytes, sample_.contents().total_bytes());
  EXPECT_EQ(taken.get(), "");
  EXPECT_EQ(link_->status().sessions, 0u);
}

TEST_F(DeviceLinkTest, AWorkerMayKeepABucketAsLongAsItsOrderSays) {
  start();
  ASSERT_TRUE(serving()) << link_->status().problem;
  DeviceOrder hurried = order(7);
  hurried.release = 300ms;
  auto socket = link_->serve(std::move(hurried));
  ASSERT_TRUE(socket) << socket.error().message();
  BucketWorker worker(std::move(*socket));
  worker.open();
  link_->tell(7, {}, true);
  ASSERT_TRUE(until([&] { return !over_.empty(); }));
  ASSERT_TRUE(over_.front().error);
  EXPECT_EQ(over_.front().error->code(), ErrorCode::kTimeout) << over_.front().error->message();
}

TEST_F(DeviceLinkTest, KilledItIsStartedAgainAndHoldsWhatItHeld) {
  start();
  link_->hold(1, sample_.files(), sample_.segment_bytes);
  const auto held = [&] {
    const auto status = link_->status();
    return status.held_bytes > 0 && status.pinned_bytes == status.held_bytes;
  };
  ASSERT_TRUE(until(held));
  auto socket = link_->serve(order(7));
  ASSERT_TRUE(socket);
  ASSERT_EQ(::kill(static_cast<pid_t>(link_->status().pid), SIGKILL), 0);
  ASSERT_TRUE(until([&] { return !over_.empty(); }));
  ASSERT_TRUE(over_.front().error);
  EXPECT_NE(over_.front().error->message().find("signal 9"), std::string::npos)
      << over_.front().error->message();
  ASSERT_TRUE(until([&] { return link_->status().restarts == 1; }));
  ASSERT_TRUE(serving());
  EXPECT_TRUE(until(held));
  auto again = link_->serve(order(8));
  ASSERT_TRUE(again) << again.error().message();
  again->reset();
  link_->drop(1);
  EXPECT_TRUE(until([&] { return link_->status().pinned_bytes == 0; }));
}

TEST_F(DeviceLinkTest, OneThatEndsAtOnceIsTriedAgainAndAgain) {
  start({"--exit"});
  ASSERT_TRUE(until([&] { return link_->status().restarts >= 3; }));
  const auto refused = link_->serve(order(1));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::kUnavailable);
  EXPECT_NE(refused.error().message().find("being restarted"), std::string::npos);
  EXPECT_NE(link_->status().problem.find("code 3"), std::string::npos) << link_->status().problem;
}

TEST_F(DeviceLinkTest, OneThatHangsIsKilled) {
  hello_ = 300ms;
  start({"--hang"});
  ASSERT_TRUE(until([&] { return link_->status().restarts >= 1; }));
  EXPECT_NE(link_->status().problem.find("did not say"), std::string::npos)
      << link_->status().problem;
}

TEST_F(DeviceLinkTest, ADeviceThatIsBeingOpenedHoldsUpNobodyElse) {
  start({"--failpoints", "device.open=sleep:3600000@2"});  // the first is open before it says hello
  ASSERT_TRUE(serving()) << link_->status().problem;
  ASSERT_TRUE(link_->serve(order(7)));
  auto other = order(8);
  other.device = "double:0";
  auto socket = link_->serve(std::move(other));
  ASSERT_TRUE(socket) << socket.error().message();
  auto taken = std::async(std::launch::async, [&] {
    BucketWorker worker(std::move(*socket));
    worker.open();
    worker.take_all();
    return worker.compare(sample_);
  });
  link_->tell(8, {}, true);
  ASSERT_TRUE(until([&] { return !over_.empty(); }));
  EXPECT_EQ(over_.front().session, 8u);
  EXPECT_FALSE(over_.front().error);
  EXPECT_EQ(taken.get(), "");
  EXPECT_EQ(link_->status().sessions, 1u);
}

TEST_F(DeviceLinkTest, ASessionThatVerifiesComparesItsUploadsWithTheLeaves) {
  start();
  ASSERT_TRUE(serving());
  auto leaves = sample_.leaves();
  // A digest of 'b' that no bytes match.
  leaves.back() = Digest{};
  const auto bytes = std::as_bytes(std::span(leaves));
  for (const bool verify : {false, true}) {
    over_.clear();
    auto ordered = order(verify ? 8 : 7);
    ordered.verify_upload = verify;
    ordered.leaves_bytes = bytes.size();
    ordered.leaves =
        *ipc::sealed_memfd({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
    auto socket = link_->serve(std::move(ordered));
    ASSERT_TRUE(socket) << socket.error().message();
    auto taken = std::async(std::launch::async, [&] {
      BucketWorker worker(std::move(*socket));
      worker.open();
      worker.take_all();
      return worker.failed();
    });
    link_->tell(verify ? 8 : 7, {}, true);
    ASSERT_TRUE(until([&] { return !over_.empty(); }));
    const auto failed = taken.get();
    EXPECT_EQ(over_.front().refilled, verify ? 1u : 0u);
    ASSERT_EQ(over_.front().error.has_value(), verify);
    if (!verify) continue;
    EXPECT_EQ(over_.front().error->code(), ErrorCode::kCorrupt);
    ASSERT_TRUE(failed);
    for (const std::string part : {"double:1", "tensor 'b'"}) {
      EXPECT_NE(failed->message().find(part), std::string::npos) << failed->message();
    }
  }
}

TEST_F(DeviceLinkTest, ItSaysWhichDevicesThereAre) {
  start();
  ASSERT_TRUE(serving());
  auto wrong = order(1);
  wrong.device = "GPU-x";
  const auto refused = link_->serve(std::move(wrong));
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().message(),
            "no GPU with UUID GPU-x is visible to the agent; it sees double:0, double:1");
}

TEST_F(DeviceLinkTest, AProgramThatIsNotThereIsAProblemNotAnEnd) {
  start({}, "/nonexistent/rekindle");
  ASSERT_TRUE(until([&] { return link_->status().restarts >= 1; }));
  EXPECT_FALSE(link_->serve(order(1)));
}

}  // namespace
}  // namespace rekindle::device
