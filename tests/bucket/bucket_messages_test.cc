// src/bucket/bucket_messages.h against the generated code of proto/bucket.proto.
#include "src/bucket/bucket_messages.h"

#include <random>

#include <sys/mman.h>
#include <sys/stat.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/bucket.pb.h"

namespace rekindle::bucket {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Frame = proto::BucketFrame;

constexpr std::uint64_t kLarge = std::uint64_t{1} << 50;

// Which file a descriptor is of.
UniqueFd a_file() { return UniqueFd(::memfd_create("wire-test", MFD_CLOEXEC)); }
ino_t file_of(const UniqueFd& fd) {
  struct stat status {};
  return ::fstat(fd.get(), &status) == 0 ? status.st_ino : 0;
}

Frame parsed(const Encoded& encoded) {
  Frame frame;
  EXPECT_TRUE(frame.ParseFromString(encoded.body));
  EXPECT_TRUE(frame.GetReflection()->GetUnknownFields(frame).empty());
  return frame;
}

template <typename T>
T decoded(const Frame& frame, std::vector<UniqueFd> descriptors = {}) {
  auto message = decode(frame.SerializeAsString(), std::move(descriptors));
  if (!message) throw std::runtime_error(message.error().message());
  return std::get<T>(std::move(*message));
}

TEST(BucketMessages, WhatIsWrittenIsReadByTheGeneratedCode) {
  BuffersMessage buffers{.bucket_bytes = 64u << 20,
                         .memory_bytes = kLarge,
                         .memory = {std::string("mem\0ory", 7), {}},
                         .filled = {},
                         .warning = "one bucket only"};
  for (const char* const name : {"e0", "e1", ""}) buffers.filled.push_back({name, {}});
  const Frame first = parsed(encode(std::move(buffers)));
  EXPECT_EQ(first.buffers().bucket_bytes(), 64u << 20);
  EXPECT_EQ(first.buffers().memory_bytes(), kLarge);
  EXPECT_EQ(first.buffers().memory().handle(), std::string("mem\0ory", 7));
  EXPECT_FALSE(first.buffers().memory().with_descriptor());
  ASSERT_EQ(first.buffers().filled_size(), 3);
  EXPECT_EQ(first.buffers().filled(1).handle(), "e1");
  EXPECT_EQ(first.buffers().warning(), "one bucket only");

  const Frame filled =
      parsed(encode(FilledMessage{2, kLarge, {{7, kLarge, 300, 256}, {0xffffffff, 0, 0, 512}}}));
  EXPECT_EQ(filled.filled().slot(), 2u);
  EXPECT_EQ(filled.filled().sequence(), kLarge);
  EXPECT_THAT(filled.filled().parts(), ElementsAre(7, kLarge, 300, 256, 0xffffffff, 0, 0, 512));
  EXPECT_THAT(parsed(encode(FilledMessage{})).filled().parts(), IsEmpty());
  EXPECT_TRUE(parsed(encode(FinishedMessage{})).has_finished());

  const Frame failed = parsed(encode(FailedMessage{Error(ErrorCode::kUnavailable, "no IPC")}));
  EXPECT_EQ(failed.failed().code(), proto::STATUS_UNAVAILABLE);
  EXPECT_EQ(failed.failed().message(), "no IPC");

  OpenedMessage opened;
  opened.released.push_back({"r0", {}});
  EXPECT_EQ(parsed(encode(std::move(opened))).opened().released(0).handle(), "r0");
  const Frame released = parsed(encode(ReleasedMessage{1, 5}));
  EXPECT_EQ(released.released().slot(), 1u);
  EXPECT_EQ(released.released().sequence(), 5u);
}

TEST(BucketMessages, WhatTheGeneratedCodeWritesIsRead) {
  Frame frame;
  auto& buffers = *frame.mutable_buffers();
  buffers.set_bucket_bytes(3);
  buffers.set_memory_bytes(kLarge);
  buffers.mutable_memory()->set_handle("m");
  buffers.add_filled()->set_handle("e");
  buffers.add_filled();
  buffers.set_warning("w");
  const auto read = decoded<BuffersMessage>(frame);
  EXPECT_EQ(read.bucket_bytes, 3u);
  EXPECT_EQ(read.memory_bytes, kLarge);
  EXPECT_EQ(read.memory.bytes, "m");
  ASSERT_EQ(read.filled.size(), 2u);
  EXPECT_EQ(read.filled[0].bytes, "e");
  EXPECT_EQ(read.filled[1].bytes, "");
  EXPECT_EQ(read.warning, "w");

  frame.mutable_filled()->set_slot(1);
  frame.mutable_filled()->set_sequence(kLarge);
  for (const std::uint64_t number : {4u, 5u, 6u, 256u}) frame.mutable_filled()->add_parts(number);
  const auto filled = decoded<FilledMessage>(frame);
  EXPECT_EQ(filled.slot, 1u);
  EXPECT_EQ(filled.sequence, kLarge);
  EXPECT_THAT(filled.parts, ElementsAre(Part{4, 5, 6, 256}));
  frame.mutable_finished();
  decoded<FinishedMessage>(frame);
  frame.mutable_opened()->add_released()->set_handle("r");
  EXPECT_EQ(decoded<OpenedMessage>(frame).released.at(0).bytes, "r");
  frame.mutable_released()->set_slot(8);
  frame.mutable_released()->set_sequence(9);
  EXPECT_EQ(decoded<ReleasedMessage>(frame).slot, 8u);
  EXPECT_EQ(decoded<ReleasedMessage>(frame).sequence, 9u);
  for (int code = proto::STATUS_INVALID; code <= proto::STATUS_INTERNAL; ++code) {
    frame.mutable_failed()->set_code(static_cast<proto::StatusCode>(code));
    frame.mutable_failed()->set_message("why");
    EXPECT_EQ(static_cast<int>(decoded<FailedMessage>(frame).error.code()) + 1, code);
    EXPECT_EQ(decoded<FailedMessage>(frame).error.message(), "why");
  }
  frame.mutable_failed()->clear_code();
  EXPECT_EQ(decoded<FailedMessage>(frame).error.code(), ErrorCode::kInternal);
}

TEST(BucketMessages, DescriptorsGoToTheHandlesThatHaveOne) {
  BuffersMessage buffers;
  buffers.memory = {"memory", a_file()};
  buffers.filled.push_back({"first", {}});
  buffers.filled.push_back({"second", a_file()});
  const ino_t memory = file_of(buffers.memory.fd);
  const ino_t second = file_of(buffers.filled[1].fd);
  ASSERT_NE(memory, second);
  Encoded encoded = encode(std::move(buffers));
  ASSERT_EQ(encoded.descriptors.size(), 2u);
  const Frame frame = parsed(encoded);
  EXPECT_TRUE(frame.buffers().memory().with_descriptor());
  EXPECT_FALSE(frame.buffers().filled(0).with_descriptor());
  EXPECT_TRUE(frame.buffers().filled(1).with_descriptor());
  auto message = decode(encoded.body, std::move(encoded.descriptors));
  ASSERT_TRUE(message) << message.error().message();
  const auto& read = std::get<BuffersMessage>(*message);
  EXPECT_EQ(file_of(read.memory.fd), memory);
  EXPECT_FALSE(read.filled[0].fd);
  EXPECT_EQ(file_of(read.filled[1].fd), second);

  OpenedMessage opened;
  opened.released.push_back({"", a_file()});
  const ino_t released = file_of(opened.released[0].fd);
  encoded = encode(std::move(opened));
  message = decode(encoded.body, std::move(encoded.descriptors));
  ASSERT_TRUE(message);
  EXPECT_EQ(file_of(std::get<OpenedMessage>(*message).released.at(0).fd), released);
}

TEST(BucketMessages, TooFewAndTooManyDescriptorsAreRefused) {
  Frame frame;
  frame.mutable_opened()->add_released()->set_with_descriptor(true);
  EXPECT_EQ(decode(frame.SerializeAsString(), {}).error().code(), ErrorCode::kInvalid);
  std::vector<UniqueFd> two;
  two.push_back(a_file());
  two.push_back(a_file());
  EXPECT_EQ(decode(frame.SerializeAsString(), std::move(two)).error().code(), ErrorCode::kInvalid);
  frame.mutable_finished();
  std::vector<UniqueFd> one;
  one.push_back(a_file());
  EXPECT_EQ(decode(frame.SerializeAsString(), std::move(one)).error().code(), ErrorCode::kInvalid);
}

TEST(BucketMessages, WhatDoesNotFitIsRefused) {
  Frame frame;
  EXPECT_FALSE(decode(frame.SerializeAsString(), {})) << "no kind";
  EXPECT_FALSE(decode(std::string("\x7a\x00", 2), {})) << "kind 15";
  EXPECT_FALSE(decode(std::string("\x08\x01", 2), {})) << "a number for a message";
  frame.mutable_filled()->add_parts(1);
  EXPECT_FALSE(decode(frame.SerializeAsString(), {})) << "a part of one number";
  frame.mutable_filled()->set_parts(0, kLarge);
  for (int i = 0; i < 3; ++i) frame.mutable_filled()->add_parts(0);
  EXPECT_FALSE(decode(frame.SerializeAsString(), {})) << "a piece of 50 bits";
  frame.mutable_buffers()->set_bucket_bytes(1);
  EXPECT_FALSE(decode(frame.SerializeAsString(), {})) << "no memory";
  for (int i = 0; i < 2000; ++i) frame.mutable_opened()->add_released();
  EXPECT_FALSE(decode(frame.SerializeAsString(), {})) << "2000 events";
}

std::vector<Encoded> one_of_each() {
  std::vector<Encoded> all;
  BuffersMessage buffers{.bucket_bytes = 1 << 20,
                         .memory_bytes = 3 << 20,
                         .memory = {"a handle of the memory", {}},
                         .filled = {},
                         .warning = "warning"};
  for (int i = 0; i < 3; ++i) buffers.filled.push_back({std::string(64, 'e'), {}});
  all.push_back(encode(std::move(buffers)));
  all.push_back(encode(FilledMessage{1, 300, {{1, 2, 3, 256}, {70'000, kLarge, 5, 512}}}));
  all.push_back(encode(FailedMessage{Error(ErrorCode::kTimeout, "why")}));
  OpenedMessage opened;
  for (int i = 0; i < 3; ++i) opened.released.push_back({std::string(64, 'r'), {}});
  all.push_back(encode(std::move(opened)));
  all.push_back(encode(ReleasedMessage{1, 300}));
  return all;
}

TEST(BucketMessages, EveryCutOfAMessageIsAnError) {
  for (const Encoded& encoded : one_of_each()) {
    const std::string_view body = encoded.body;
    for (std::size_t size = 0; size < body.size(); ++size) {
      EXPECT_FALSE(decode(body.substr(0, size), {})) << size << " of " << body.size();
    }
    EXPECT_TRUE(decode(body, {}));
  }
}

TEST(BucketMessages, DamageNeverDoesMoreThanFail) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  int accepted = 0;
  for (const Encoded& encoded : one_of_each()) {
    for (int round = 0; round < 5'000; ++round) {
      std::string spoilt = encoded.body;
      for (std::uint64_t i = 0, n = 1 + random() % 4; i < n; ++i) {
        spoilt[random() % spoilt.size()] = static_cast<char>(random());
      }
      const auto message = decode(spoilt, {});
      if (message) {
        ++accepted;
      } else {
        EXPECT_EQ(message.error().code(), ErrorCode::kInvalid);
      }
    }
  }
  EXPECT_GT(accepted, 0);
}

}  // namespace
}  // namespace rekindle::bucket
