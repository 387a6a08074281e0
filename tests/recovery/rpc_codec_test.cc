#include <random>

#include <gtest/gtest.h>

#include "recovery/rpc/convert.h"
#include "recovery/rpc/frame_codec.h"
#include "recovery/rpc/rpc.h"

namespace rekindle::rpc {
namespace {

proto::Frame request_frame(std::uint64_t id, std::size_t body_bytes) {
  proto::Frame frame;
  frame.mutable_request()->set_call_id(id);
  frame.mutable_request()->set_method(proto::COORDINATOR_STATUS);
  frame.mutable_request()->set_deadline_ms(1);
  frame.mutable_request()->set_body(std::string(body_bytes, 'x'));
  return frame;
}

std::string header(std::uint32_t length) {
  std::string bytes;
  for (int shift = 24; shift >= 0; shift -= 8) bytes += static_cast<char>(length >> shift & 0xff);
  return bytes;
}

TEST(FrameCodec, TheBytesOfAFrameAreKnown) {
  proto::Frame frame;
  frame.mutable_cancel()->set_call_id(5);
  const auto bytes = encode_frame(frame);
  ASSERT_TRUE(bytes);
  EXPECT_EQ(*bytes, std::string("\x00\x00\x00\x04\x32\x02\x08\x05", 8));
}

TEST(FrameCodec, AFrameComesOutOnlyWithItsLastByte) {
  const std::string bytes = *encode_frame(request_frame(7, 300));
  FrameDecoder decoder(kMaxFrameBytes);
  EXPECT_FALSE(decoder.mid_frame());
  for (std::size_t i = 0; i + 1 < bytes.size(); ++i) {
    decoder.feed({&bytes[i], 1});
    const auto body = decoder.next();
    ASSERT_TRUE(body);
    ASSERT_FALSE(*body) << "after byte " << i;
    ASSERT_TRUE(decoder.mid_frame());
  }
  decoder.feed({&bytes.back(), 1});
  const auto body = decoder.next();
  ASSERT_TRUE(body && *body);
  EXPECT_EQ(decode_frame(**body)->request().call_id(), 7u);
  EXPECT_FALSE(decoder.mid_frame());
}

TEST(FrameCodec, FramesSurviveAnyCut) {
  const unsigned seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  std::mt19937 random(seed);
  std::string stream;
  constexpr std::uint64_t kFrames = 200;
  for (std::uint64_t id = 0; id < kFrames; ++id) {
    stream += *encode_frame(request_frame(id + 1, random() % 5000));
  }
  FrameDecoder decoder(kMaxFrameBytes);
  std::uint64_t got = 0;
  for (std::size_t at = 0; at < stream.size();) {
    const std::size_t size = std::min<std::size_t>(1 + random() % 9000, stream.size() - at);
    decoder.feed({&stream[at], size});
    at += size;
    for (;;) {
      auto body = decoder.next();
      ASSERT_TRUE(body);
      if (!*body) break;
      ASSERT_EQ(decode_frame(**body)->request().call_id(), ++got);
    }
  }
  EXPECT_EQ(got, kFrames);
  EXPECT_FALSE(decoder.mid_frame());
}

TEST(FrameCodec, AnOversizeFrameIsRefusedAtItsHeader) {
  FrameDecoder decoder(kMaxFrameBytes);
  decoder.feed(header(kMaxFrameBytes));
  EXPECT_TRUE(decoder.next());  // exactly the cap may come
  FrameDecoder strict(kMaxFrameBytes);
  strict.feed(header(kMaxFrameBytes + 1));
  const auto body = strict.next();
  ASSERT_FALSE(body);
  EXPECT_EQ(body.error().code(), ErrorCode::kInvalid);
  EXPECT_FALSE(strict.next()) << "it stays failed";
}

TEST(FrameCodec, TheCapBeforeTheHelloIsSmaller) {
  FrameDecoder decoder(kMaxHelloFrameBytes);
  decoder.feed(header(kMaxHelloFrameBytes + 1));
  EXPECT_FALSE(decoder.next());
  decoder.set_cap(kMaxFrameBytes);
  EXPECT_TRUE(decoder.next());
}

TEST(FrameCodec, AnHttpRequestIsRefusedWithAHint) {
  FrameDecoder decoder(kMaxHelloFrameBytes);
  decoder.feed("GET / HTTP/1.1\r\n");
  const auto body = decoder.next();
  ASSERT_FALSE(body);
  EXPECT_NE(body.error().message().find("Rekindle"), std::string::npos);
}

TEST(FrameCodec, AnEmptyFrameIsRefused) {
  FrameDecoder decoder(kMaxFrameBytes);
  decoder.feed(header(0));
  EXPECT_FALSE(decoder.next());
}

TEST(FrameCodec, GarbageAndUnknownKindsAreTypedErrors) {
  EXPECT_EQ(decode_frame("\xff\xff\xff\xff").error().code(), ErrorCode::kInvalid);
  EXPECT_EQ(decode_frame(std::string("\x9a\x06\x00", 3)).error().code(), ErrorCode::kInvalid);
}

TEST(FrameCodec, AMessageThatFitsNoFrameIsNotSent) {
  EXPECT_EQ(encode_frame(request_frame(1, kMaxFrameBytes)).error().code(), ErrorCode::kInvalid);
  EXPECT_TRUE(encode_frame(request_frame(1, kMaxFrameBytes - 64)));
}

TEST(Convert, EveryErrorCodeCrossesTheWire) {
  for (const auto code :
       {ErrorCode::kInvalid, ErrorCode::kNotFound, ErrorCode::kTimeout, ErrorCode::kPeerLost,
        ErrorCode::kStale, ErrorCode::kCorrupt, ErrorCode::kExhausted, ErrorCode::kDenied,
        ErrorCode::kUnavailable, ErrorCode::kInternal}) {
    const auto back = from_status(to_status(Error(code, "why")));
    ASSERT_FALSE(back);
    EXPECT_EQ(back.error().code(), code);
    EXPECT_EQ(back.error().message(), "why");
  }
  EXPECT_TRUE(from_status(ok_status()));
}

TEST(Convert, AnUnknownStatusCodeIsAnError) {
  proto::Status status;
  status.set_code(static_cast<proto::StatusCode>(99));
  EXPECT_EQ(from_status(status).error().code(), ErrorCode::kInternal);
}

TEST(Convert, AMessageFromTheWireStaysOnOneLine) {
  proto::Status status;
  status.set_code(proto::STATUS_DENIED);
  status.set_message("a\nb\x1b[31m");
  EXPECT_EQ(from_status(status).error().message(), "a b [31m");
}

TEST(Convert, TileRangesAreChecked) {
  const TileRuns runs = {{0, 3}, {3, 4}, {10, 12}};
  EXPECT_EQ(*from_proto(to_proto(runs), 12), runs);
  EXPECT_FALSE(from_proto(to_proto(runs), 11)) << "past the end";
  EXPECT_FALSE(from_proto(to_proto(TileRuns{{3, 3}}), 12)) << "empty";
  EXPECT_FALSE(from_proto(to_proto(TileRuns{{3, 5}, {4, 6}}), 12)) << "overlap";
  EXPECT_FALSE(from_proto(to_proto(TileRuns{{5, 6}, {0, 1}}), 12)) << "descending";
  proto::IndexRanges odd = to_proto(runs);
  odd.add_begin(20);
  EXPECT_FALSE(from_proto(odd, 100)) << "a begin without an end";
}

TEST(Convert, ABadModelNameIsRefused) {
  EXPECT_FALSE(from_proto(to_proto(ModelVersion{"../etc", 1})));
  const ModelVersion id{"qwen3", 41};
  EXPECT_EQ(*from_proto(to_proto(id)), id);
}

}  // namespace
}  // namespace rekindle::rpc
