#include "src/ipc/framed_socket.h"

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/detached.hpp>
#include <boost/asio/io_context.hpp>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/ipc/socket_pair.h"

namespace rekindle::ipc {
namespace {

using namespace std::chrono_literals;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class FramedSocketTest : public ::testing::Test {
 protected:
  void start(FramedSocketOptions options = {}) {
    auto [ours, theirs] = testing::socket_pair();
    socket_ = std::make_shared<FramedSocket>(context_.get_executor(),
                                             *Channel::adopt(std::move(ours), kMaxFrameDescriptors),
                                             std::move(options));
    other_.emplace(*Channel::adopt(std::move(theirs), kMaxFrameDescriptors));
    boost::asio::co_spawn(
        context_,
        [this, socket = socket_]() -> boost::asio::awaitable<void> {
          FramedSocket::OnFrame on_frame = [this](Frame frame) {
            bodies_.push_back(frame.body);
            return on_frame_(std::move(frame));
          };
          why_ = co_await socket->run(std::move(on_frame));
        },
        boost::asio::detached);
  }
  bool ended() {
    const auto give_up = testing::soon();
    while (!why_ && SteadyClock().now() < give_up) run();
    return why_.has_value();
  }
  void run() {
    context_.restart();
    context_.run_for(5ms);
  }

  boost::asio::io_context context_;
  std::shared_ptr<FramedSocket> socket_;
  std::optional<Channel> other_;
  std::function<Result<void>(Frame)> on_frame_ = [](const Frame&) { return Result<void>(); };
  std::vector<std::string> bodies_;
  std::optional<Error> why_;
};

TEST_F(FramedSocketTest, PassesFramesBothWaysUntilTheOtherEndCloses) {
  start({.at_end = Error(ErrorCode::kPeerLost, "has gone")});
  on_frame_ = [this](const Frame& frame) { return socket_->send("re: " + frame.body); };
  ASSERT_TRUE(other_->send("one", {}, testing::soon()));
  ASSERT_TRUE(other_->send("two", {}, testing::soon()));
  while (bodies_.size() < 2) run();
  EXPECT_EQ(other_->receive(testing::soon())->body, "re: one");
  EXPECT_EQ(other_->receive(testing::soon())->body, "re: two");
  other_.reset();
  ASSERT_TRUE(ended());
  EXPECT_EQ(why_->message(), "has gone");
  EXPECT_TRUE(socket_->closed());
  EXPECT_TRUE(socket_->send("late"));
}

TEST_F(FramedSocketTest, FramesSentBeforeItRunsGoOut) {
  auto [ours, theirs] = testing::socket_pair();
  const auto socket = std::make_shared<FramedSocket>(
      context_.get_executor(), *Channel::adopt(std::move(ours), 0), FramedSocketOptions{});
  ASSERT_TRUE(socket->send("early"));
  auto other = Channel::adopt(std::move(theirs), 0);
  EXPECT_EQ(other->receive(testing::soon())->body, "early");
}

TEST_F(FramedSocketTest, AnErrorOfTheOwnerEndsIt) {
  start();
  on_frame_ = [](const Frame&) -> Result<void> { return fail(ErrorCode::kInvalid, "nonsense"); };
  ASSERT_TRUE(other_->send("one", {}, testing::soon()));
  ASSERT_TRUE(other_->send("two", {}, testing::soon()));
  ASSERT_TRUE(ended());
  EXPECT_EQ(why_->message(), "nonsense");
  EXPECT_THAT(bodies_, ElementsAre("one"));
}

TEST_F(FramedSocketTest, NoFrameIsPassedOnAfterClose) {
  start();
  on_frame_ = [this](const Frame&) {
    socket_->close(Error(ErrorCode::kStale, "enough"));
    return Result<void>();
  };
  ASSERT_TRUE(other_->send("one", {}, testing::soon()));
  ASSERT_TRUE(other_->send("two", {}, testing::soon()));
  ASSERT_TRUE(ended());
  EXPECT_EQ(why_->message(), "enough");
  EXPECT_THAT(bodies_, ElementsAre("one"));
}

TEST_F(FramedSocketTest, AnEndThatDoesNotReadIsCutOff) {
  start({.max_queued_bytes = 1 << 20});
  for (int i = 0; i < 100 && !socket_->closed(); ++i) {
    ASSERT_TRUE(socket_->send(std::string(kMaxFrameBytes, 'x')));
  }
  ASSERT_TRUE(ended());
  EXPECT_EQ(why_->code(), ErrorCode::kTimeout);
  EXPECT_THAT(why_->message(), HasSubstr("does not read"));
}

TEST_F(FramedSocketTest, AFrameThatDoesNotEndClosesIt) {
  start();
  const std::string begun("\0\0\0\5", 4);
  ASSERT_EQ(::write(other_->fd(), begun.data(), begun.size()), 4);
  const TimePoint before = socket_->last_heard();
  while (socket_->last_heard() == before) run();
  socket_->check(socket_->last_heard() + kFrameDeadline / 2);
  EXPECT_FALSE(socket_->closed());
  socket_->check(socket_->last_heard() + kFrameDeadline);
  ASSERT_TRUE(ended());
  EXPECT_EQ(why_->code(), ErrorCode::kPeerLost);
}

}  // namespace
}  // namespace rekindle::ipc
