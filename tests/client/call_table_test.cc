#include "src/client/call_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/worker.pb.h"

namespace rekindle::client {
namespace {

using namespace std::chrono_literals;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class CallTableTest : public ::testing::Test {
 protected:
  std::uint64_t begin(const Request& request, std::uint64_t session = 0, bool wants_answer = true) {
    const auto call = table_.begin(request, session, 0ms, wants_answer ? inbox_ : nullptr);
    if (!call) throw std::runtime_error(call.error().message());
    return *call;
  }
  void deliver(std::uint64_t call, std::uint64_t session, Reply reply) {
    Message message;
    message.agent.call = call;
    message.agent.session = session;
    message.agent.reply = std::move(reply);
    table_.deliver(std::move(message));
  }
  std::vector<proto::WorkerFrame> sent() {
    std::vector<proto::WorkerFrame> frames;
    for (const CallTable::Outgoing& frame : table_.take_outgoing()) {
      EXPECT_TRUE(frames.emplace_back().ParseFromString(frame.body));
    }
    return frames;
  }

  CallTable table_;
  const std::shared_ptr<Inbox> inbox_ = std::make_shared<Inbox>();
};

TEST_F(CallTableTest, AnAnswerGoesToItsCallOnce) {
  const std::uint64_t first = begin(PingRequest{});
  const std::uint64_t second = begin(PingRequest{});
  EXPECT_GT(first, kHelloCall);
  EXPECT_GT(second, first);
  const auto frames = sent();
  ASSERT_EQ(frames.size(), 2u);
  EXPECT_EQ(frames[1].call(), second);
  deliver(second, 0, PongReply{});
  deliver(second, 0, PongReply{});
  ASSERT_THAT(inbox_->messages, SizeIs(1));
  EXPECT_FALSE(inbox_->take_answer(first));
  EXPECT_TRUE(inbox_->take_answer(second));
}

TEST_F(CallTableTest, ASessionGetsItsEventsUntilItIsForgotten) {
  deliver(0, 5, TilesReady{});
  EXPECT_THAT(inbox_->messages, IsEmpty()) << "there is no such session";
  deliver(begin(AttachRequest{}), 5, AttachedReply{});
  deliver(0, 5, TilesReady{});
  EXPECT_THAT(inbox_->messages, SizeIs(2));
  table_.forget_session(5, inbox_);
  deliver(0, 5, TilesReady{});
  EXPECT_THAT(inbox_->messages, SizeIs(2));
}

TEST_F(CallTableTest, ASessionThatNobodyWaitsForIsDetached) {
  const std::uint64_t attach = begin(AttachRequest{});
  const std::uint64_t publish = begin(PublishBeginRequest{});
  EXPECT_FALSE(table_.forget_call(attach, *inbox_));
  EXPECT_FALSE(table_.forget_call(publish, *inbox_));
  (void)sent();
  deliver(attach, 5, AttachedReply{});
  deliver(publish, 6, PublishBegunReply{});
  const auto frames = sent();
  ASSERT_EQ(frames.size(), 2u);
  EXPECT_TRUE(frames[0].has_detach());
  EXPECT_EQ(frames[0].session(), 5u);
  EXPECT_TRUE(frames[1].has_publish_abandon());
  EXPECT_EQ(frames[1].session(), 6u);
}

TEST_F(CallTableTest, AnAnswerThatHasJustComeIsNotForgotten) {
  const std::uint64_t call = begin(PingRequest{});
  deliver(call, 0, PongReply{});
  EXPECT_TRUE(table_.forget_call(call, *inbox_));
  EXPECT_FALSE(table_.forget_call(call, *inbox_));
}

TEST_F(CallTableTest, AnAgentThatDoesNotReadIsSentNoMore) {
  const PublishCommitRequest small;
  begin(AttachRequest{.spec_json = std::string(9u << 20, 'x')});
  EXPECT_EQ(table_.begin(small, 0, 0ms, inbox_).error().code(), ErrorCode::kUnavailable);
  (void)sent();
  EXPECT_EQ(table_.begin(small, 0, 0ms, inbox_).error().code(), ErrorCode::kUnavailable)
      << "the socket has not taken it";
  table_.set_backlog(0);
  EXPECT_TRUE(table_.begin(small, 0, 0ms, inbox_));
  const AttachRequest too_large{.spec_json = std::string(65u << 20, 'x')};
  EXPECT_EQ(table_.begin(too_large, 0, 0ms, inbox_).error().code(), ErrorCode::kInvalid);
}

TEST_F(CallTableTest, AfterCloseEveryCallFailsWithTheFirstReason) {
  begin(PingRequest{});
  table_.close(Error(ErrorCode::kPeerLost, "killed"));
  table_.close(Error(ErrorCode::kStale, "later"));
  ASSERT_TRUE(inbox_->closed);
  EXPECT_EQ(inbox_->closed->message(), "killed");
  const auto refused = table_.begin(PingRequest{}, 0, 0ms, inbox_);
  EXPECT_EQ(refused.error().message(), "killed");
  EXPECT_THAT(table_.take_outgoing(), IsEmpty());
}

}  // namespace
}  // namespace rekindle::client
