#include "src/ipc/frame.h"

#include <random>

#include <sys/mman.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/ipc/socket_pair.h"

namespace rekindle::ipc {
namespace {

using namespace rekindle::ipc::testing;  // NOLINT(google-build-using-namespace)
using ::testing::HasSubstr;

constexpr TimePoint kStart{std::chrono::seconds(1000)};

std::string header(std::uint32_t length, std::uint16_t descriptors, std::uint16_t flags) {
  std::string out;
  for (int shift = 24; shift >= 0; shift -= 8) out += static_cast<char>(length >> shift & 0xff);
  for (const unsigned value : {unsigned{descriptors}, unsigned{flags}}) {
    out += static_cast<char>(value >> 8);
    out += static_cast<char>(value & 0xff);
  }
  return out;
}

std::string frame_of(std::string_view body) {
  return header(static_cast<std::uint32_t>(body.size()), 0, 0) + std::string(body);
}

// The error of the next frame; "": none.
std::string error_of(FrameReader& reader) {
  auto frame = reader.next();
  return frame ? "" : frame.error().message();
}

TEST(FrameReader, KnownBytesAreAFrame) {
  FrameReader reader(0);
  reader.feed(std::string("\0\0\0\3\0\0\0\0abc", 11), {}, kStart);
  auto frame = reader.next();
  ASSERT_TRUE(frame && *frame);
  EXPECT_EQ((*frame)->body, "abc");
  frame = reader.next();
  ASSERT_TRUE(frame);
  EXPECT_FALSE(*frame);
}

TEST(FrameReader, FramesCutAnywhereComeOutWhole) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::vector<std::string> bodies;
  std::string stream;
  for (int i = 0; i < 200; ++i) {
    bodies.push_back(std::string(1 + random() % 3000, static_cast<char>('a' + i % 26)));
    stream += frame_of(bodies.back());
  }
  FrameReader reader(0);
  std::size_t next = 0;
  for (std::size_t at = 0; at < stream.size();) {
    const std::size_t size = std::min<std::size_t>(1 + random() % 5000, stream.size() - at);
    reader.feed(std::string_view(stream).substr(at, size), {}, kStart);
    at += size;
    while (true) {
      auto frame = reader.next();
      ASSERT_TRUE(frame) << frame.error().message();
      if (!*frame) break;
      ASSERT_LT(next, bodies.size());
      EXPECT_EQ((*frame)->body, bodies[next++]);
    }
  }
  EXPECT_EQ(next, bodies.size());
  EXPECT_FALSE(reader.deadline());
}

TEST(FrameReader, AnOversizeFrameIsRefusedByItsHeader) {
  FrameReader reader(0);
  reader.feed(header(kMaxFrameBytes + 1, 0, 0), {}, kStart);
  EXPECT_THAT(error_of(reader), HasSubstr("over the cap"));
  reader.feed(frame_of("fine"), {}, kStart);
  EXPECT_THAT(error_of(reader), HasSubstr("over the cap")) << "a failed reader stays failed";
}

TEST(FrameReader, TheLargestFrameOfTheStreamIsTaken) {
  FrameReader reader(0);
  reader.feed(frame_of(std::string(kMaxFrameBytes, 'x')), {}, kStart);
  auto frame = reader.next();
  ASSERT_TRUE(frame && *frame);
  EXPECT_EQ((*frame)->body.size(), kMaxFrameBytes);
}

TEST(FrameReader, EmptyFramesAndUnknownFlagsAreRefused) {
  FrameReader empty(0);
  empty.feed(header(0, 0, 0), {}, kStart);
  EXPECT_THAT(error_of(empty), HasSubstr("empty"));
  FrameReader flags(0);
  flags.feed(header(3, 0, 2) + "abc", {}, kStart);
  EXPECT_THAT(error_of(flags), HasSubstr("unknown flags"));
}

TEST(FrameReader, MoreDescriptorsThanExpectedAreRefusedByTheHeader) {
  FrameReader reader(2);
  reader.feed(header(3, 3, 0), {}, kStart);
  EXPECT_THAT(error_of(reader), HasSubstr("at most 2"));
}

TEST(FrameReader, DeclaredDescriptorsThatDidNotComeAreAnError) {
  FrameReader reader(2);
  Pipe pipe = make_pipe();
  reader.feed(header(3, 2, 0) + "abc", one(std::move(pipe.write)), kStart);
  EXPECT_THAT(error_of(reader), HasSubstr("declares 2 descriptors, 1 came"));
  EXPECT_TRUE(all_writers_closed(pipe));
}

TEST(FrameReader, DescriptorsThatNoFrameDeclaresAreClosedAndAnError) {
  FrameReader reader(2);
  Pipe pipe = make_pipe();
  reader.feed(frame_of("abc"), one(std::move(pipe.write)), kStart);
  EXPECT_THAT(error_of(reader), HasSubstr("no frame declares"));
  EXPECT_TRUE(all_writers_closed(pipe));
}

TEST(FrameReader, DescriptorsDoNotPileUpBehindAFrameThatNeverEnds) {
  FrameReader reader(2);
  Pipe pipe = make_pipe();
  reader.feed(header(1000, 2, 0), copies_of(pipe.write.get(), 2), kStart);
  EXPECT_EQ(error_of(reader), "");
  reader.feed("x", copies_of(pipe.write.get(), 5), kStart);
  EXPECT_THAT(error_of(reader), HasSubstr("descriptors are waiting"));
  pipe.write.reset();
  EXPECT_TRUE(all_writers_closed(pipe));
}

TEST(FrameReader, DescriptorsGoToTheFramesThatDeclareThem) {
  FrameReader reader(8);
  Pipe first = make_pipe();
  Pipe second = make_pipe();
  std::vector<UniqueFd> fds = copies_of(first.write.get(), 2);
  fds.push_back(UniqueFd(::dup(second.write.get())));
  reader.feed(header(1, 2, 0) + "a" + header(1, 0, 0) + "b" + header(1, 1, 0) + "c", std::move(fds),
              kStart);
  std::vector<Frame> frames;
  for (int i = 0; i < 3; ++i) {
    auto frame = reader.next();
    ASSERT_TRUE(frame && *frame);
    frames.push_back(std::move(**frame));
  }
  ASSERT_EQ(frames[0].descriptors.size(), 2u);
  EXPECT_TRUE(same_file(frames[0].descriptors[1].get(), first.write.get()));
  EXPECT_TRUE(frames[1].descriptors.empty());
  ASSERT_EQ(frames[2].descriptors.size(), 1u);
  EXPECT_TRUE(same_file(frames[2].descriptors[0].get(), second.write.get()));
}

TEST(FrameReader, TheDeadlineIsThatOfTheFrameAtTheFront) {
  FrameReader reader(0);
  EXPECT_FALSE(reader.deadline());
  reader.feed(frame_of("abc") + std::string(1, '\0'), {}, kStart);
  ASSERT_TRUE(reader.next());
  EXPECT_EQ(reader.deadline(), kStart + kFrameDeadline);
  const TimePoint later = kStart + std::chrono::seconds(3);
  reader.feed(std::string("\0\0\1\0\0\0\0x\0", 9), {}, later);  // ends it, begins another
  ASSERT_TRUE(reader.next());
  EXPECT_EQ(reader.deadline(), later + kFrameDeadline);
  reader.feed(std::string_view("\0", 1), {}, later + std::chrono::seconds(4));
  EXPECT_EQ(reader.deadline(), later + kFrameDeadline) << "single bytes do not move it";
}

TEST(FrameReader, ASpilledBodyMustBeASealedMemfdOfItsSize) {
  const auto error_with = [](UniqueFd fd, std::uint32_t length) {
    FrameReader reader(0);
    reader.feed(header(length, 1, 1), one(std::move(fd)), kStart);
    return error_of(reader);
  };
  Pipe pipe = make_pipe();
  EXPECT_THAT(error_with(std::move(pipe.read), 5), HasSubstr("not a sealed memfd"));
  UniqueFd open(::memfd_create("open", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::write(open.get(), "hello", 5), 5);
  EXPECT_THAT(error_with(std::move(open), 5), HasSubstr("not a sealed memfd"));
  auto sealed = sealed_memfd("hello");
  ASSERT_TRUE(sealed);
  EXPECT_THAT(error_with(UniqueFd(::dup(sealed->get())), 6), HasSubstr("memfd of 5"));
  EXPECT_EQ(error_with(UniqueFd(::dup(sealed->get())), 5), "");
  FrameReader none(0);
  none.feed(header(5, 0, 1), {}, kStart);
  EXPECT_THAT(error_of(none), HasSubstr("without the memfd"));
  FrameReader large(0);
  large.feed(header(kMaxSpilledBytes + 1, 1, 1), one(std::move(*sealed)), kStart);
  EXPECT_THAT(error_of(large), HasSubstr("over the cap"));
}

TEST(FrameWriter, RefusesWhatDoesNotFit) {
  FrameWriter writer;
  EXPECT_EQ(writer.push("").error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(writer.push(std::string(kMaxSpilledBytes + 1ul, 'x')).error().code(),
            ErrorCode::kInvalid);
  EXPECT_TRUE(writer.empty());
}

TEST(FrameWriter, TheDeadlineBeginsWithTheFirstByte) {
  auto [ours, theirs] = socket_pair();
  FrameWriter writer;
  ASSERT_TRUE(writer.push(std::string(kMaxFrameBytes, 'x')));
  EXPECT_FALSE(writer.deadline());
  // More than a socket buffers.
  ASSERT_TRUE(writer.send_some(ours.get(), kStart));
  EXPECT_EQ(writer.deadline(), kStart + kFrameDeadline);
  EXPECT_FALSE(writer.empty());
  theirs.reset();
  auto sent = writer.send_some(ours.get(), kStart);
  ASSERT_FALSE(sent);
  EXPECT_EQ(sent.error().code(), ErrorCode::kPeerLost);
}

}  // namespace
}  // namespace rekindle::ipc
