#include "src/ipc/channel.h"

#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/ipc/socket_pair.h"

namespace rekindle::ipc {
namespace {

using namespace rekindle::ipc::testing;  // NOLINT(google-build-using-namespace)
using ::testing::HasSubstr;

struct Ends {
  Channel ours, theirs;
};

Ends make_ends(std::size_t max_descriptors = kMaxFrameDescriptors) {
  auto [ours, theirs] = socket_pair();
  return {*Channel::adopt(std::move(ours), max_descriptors),
          *Channel::adopt(std::move(theirs), max_descriptors)};
}

TimePoint in(std::chrono::milliseconds time) { return SteadyClock().now() + time; }

TEST(Channel, FramesOfAllSizesArriveInOrder) {
  Ends ends = make_ends();
  const std::vector<std::size_t> sizes = {1,       100, kMaxFrameBytes, kMaxFrameBytes + 1, 5 << 20,
                                          1 << 16, 3};
  std::thread sender([&] {
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      const auto sent =
          ends.ours.send(std::string(sizes[i], static_cast<char>('a' + i)), {}, soon());
      ASSERT_TRUE(sent) << sent.error().message();
    }
  });
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    auto frame = ends.theirs.receive(soon());
    ASSERT_TRUE(frame) << frame.error().message();
    EXPECT_EQ(frame->body, std::string(sizes[i], static_cast<char>('a' + i)));
    EXPECT_TRUE(frame->descriptors.empty());
  }
  sender.join();
}

TEST(Channel, DescriptorsArriveWithTheirFrameAndAreClosedOnExec) {
  Ends ends = make_ends();
  Pipe pipe = make_pipe();
  ASSERT_TRUE(ends.ours.send("none", {}, soon()));
  ASSERT_TRUE(ends.ours.send("two", copies_of(pipe.write.get(), 2), soon()));
  ASSERT_TRUE(ends.ours.send("last", {}, soon()));
  EXPECT_TRUE(ends.theirs.receive(soon())->descriptors.empty());
  auto two = ends.theirs.receive(soon());
  ASSERT_TRUE(two);
  ASSERT_EQ(two->descriptors.size(), 2u);
  for (const UniqueFd& fd : two->descriptors) {
    EXPECT_TRUE(same_file(fd.get(), pipe.write.get()));
    EXPECT_EQ(::fcntl(fd.get(), F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  }
  EXPECT_TRUE(ends.theirs.receive(soon())->descriptors.empty());
}

TEST(Channel, MoreDescriptorsThanTheKernelTakesAtOnceArrive) {
  Ends ends = make_ends();
  Pipe pipe = make_pipe();
  constexpr std::size_t kMany = 2 * kMaxDescriptorsAtOnce + 50;
  ASSERT_TRUE(ends.ours.send("many", copies_of(pipe.write.get(), kMany), soon()));
  ASSERT_TRUE(ends.ours.send("next", {}, soon()));
  auto many = ends.theirs.receive(soon());
  ASSERT_TRUE(many) << many.error().message();
  EXPECT_EQ(many->body, "many");
  EXPECT_EQ(many->descriptors.size(), kMany);
  auto next = ends.theirs.receive(soon());
  ASSERT_TRUE(next) << next.error().message();
  EXPECT_TRUE(next->descriptors.empty());
}

TEST(Channel, ALargeBodyKeepsItsDescriptors) {
  Ends ends = make_ends(1);
  Pipe pipe = make_pipe();
  const std::string body(3 << 20, 'y');
  ASSERT_TRUE(ends.ours.send(body, copies_of(pipe.write.get(), 1), soon()));
  auto frame = ends.theirs.receive(soon());
  ASSERT_TRUE(frame) << frame.error().message();
  EXPECT_EQ(frame->body, body);
  ASSERT_EQ(frame->descriptors.size(), 1u);
  EXPECT_TRUE(same_file(frame->descriptors[0].get(), pipe.write.get()));
}

TEST(Channel, DescriptorsOfADyingConnectionAreClosed) {
  Pipe pipe = make_pipe();
  {
    // It expects no descriptors.
    Ends ends = make_ends(0);
    ASSERT_TRUE(ends.ours.send("x", copies_of(pipe.write.get(), 3), soon()));
    auto frame = ends.theirs.receive(soon());
    ASSERT_FALSE(frame);
    EXPECT_EQ(frame.error().code(), ErrorCode::kInvalid);
  }
  pipe.write.reset();
  EXPECT_TRUE(all_writers_closed(pipe));
}

TEST(Channel, TheEndOfTheStreamIsAPeerLost) {
  Ends ends = make_ends();
  ASSERT_TRUE(ends.ours.send("last words", {}, soon()));
  { const Channel gone = std::move(ends.ours); }
  EXPECT_EQ(ends.theirs.receive(soon())->body, "last words");
  auto end = ends.theirs.receive(soon());
  ASSERT_FALSE(end);
  EXPECT_EQ(end.error().code(), ErrorCode::kPeerLost);
}

TEST(Channel, WaitingEndsAtTheDeadlineAndMayGoOn) {
  Ends ends = make_ends();
  auto none = ends.theirs.receive(in(std::chrono::milliseconds(10)));
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().code(), ErrorCode::kTimeout);
  ASSERT_TRUE(ends.ours.send("late", {}, soon()));
  EXPECT_EQ(ends.theirs.receive(soon())->body, "late");
}

TEST(Channel, SendingToWhoDoesNotReadEndsAtTheDeadline) {
  Ends ends = make_ends();
  auto sent =
      ends.ours.send(std::string(kMaxFrameBytes, 'x'), {}, in(std::chrono::milliseconds(10)));
  ASSERT_FALSE(sent);
  EXPECT_EQ(sent.error().code(), ErrorCode::kTimeout);
}

TEST(Channel, AFrameThatDoesNotEndWithinItsTimeLosesThePeer) {
  Ends ends = make_ends();
  ASSERT_EQ(::write(ends.ours.fd(), "\0\0", 2), 2);
  const TimePoint now = SteadyClock().now();
  auto received = ends.theirs.receive_some(now);
  ASSERT_TRUE(received);
  EXPECT_EQ(*received, Received::kSomething);
  EXPECT_EQ(ends.theirs.deadline(), now + kFrameDeadline);
  EXPECT_TRUE(ends.theirs.check_deadline(now + kFrameDeadline - std::chrono::milliseconds(1)));
  auto late = ends.theirs.check_deadline(now + kFrameDeadline);
  ASSERT_FALSE(late);
  EXPECT_EQ(late.error().code(), ErrorCode::kPeerLost);
  EXPECT_THAT(late.error().message(), HasSubstr("did not end it"));
}

TEST(Channel, PollTimeoutsAreRoundedUpAndNeverNegative) {
  const TimePoint now = SteadyClock().now();
  EXPECT_EQ(poll_timeout_ms(now, now - std::chrono::seconds(5)), 0);
  EXPECT_EQ(poll_timeout_ms(now, now + std::chrono::microseconds(1)), 1);
  EXPECT_EQ(poll_timeout_ms(now, now + std::chrono::hours(10'000)), 3'600'000);
}

}  // namespace
}  // namespace rekindle::ipc
