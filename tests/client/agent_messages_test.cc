// src/client/agent_messages.h against the generated code of proto/worker.proto.
#include "src/client/agent_messages.h"

#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "proto/worker.pb.h"

namespace rekindle::client {
namespace {

using ::testing::ElementsAre;

proto::WorkerFrame parsed(const RequestHeader& header, const Request& request) {
  proto::WorkerFrame frame;
  EXPECT_TRUE(frame.ParseFromString(encode(header, request)));
  EXPECT_TRUE(frame.GetReflection()->GetUnknownFields(frame).empty());
  return frame;
}

template <typename T>
T decoded(const proto::AgentFrame& frame) {
  auto message = decode(frame.SerializeAsString());
  EXPECT_TRUE(message) << message.error().message();
  EXPECT_TRUE(std::holds_alternative<T>(message->reply));
  return std::get<T>(message->reply);
}

TEST(AgentMessages, RequestsAreReadByTheGeneratedCode) {
  const auto hello = parsed({1, 0, 0}, HelloRequest{1, 3, "librekindle 0.1.0", 77, 4026531836});
  EXPECT_EQ(hello.call(), 1u);
  EXPECT_EQ(hello.hello().protocol_min(), 1u);
  EXPECT_EQ(hello.hello().protocol_max(), 3u);
  EXPECT_EQ(hello.hello().software(), "librekindle 0.1.0");
  EXPECT_EQ(hello.hello().pid(), 77u);
  EXPECT_EQ(hello.hello().pid_namespace(), 4026531836u);

  AttachRequest request{.model = "m",
                        .latest = true,
                        .shard = "tp=0/2",
                        .spec_json = "{}",
                        .boxes = {{"w", {0, std::uint64_t{1} << 40}, {3, 4}}, {"v", {}, {}}},
                        .instance = "i",
                        .generation = std::uint64_t{1} << 50,
                        .rank = 2,
                        .world = 4,
                        .fallback_dir = "/f",
                        .device = "GPU-6f2c",
                        .bucket_bytes = std::uint64_t{1} << 40,
                        .group = "chat",
                        .traceparent = "00-4b",
                        .resident_key = "torch 2",
                        .resident_shared = true};
  auto attach = parsed({2, 3, 4000}, request);
  EXPECT_EQ(attach.session(), 3u);
  EXPECT_EQ(attach.deadline_ms(), 4000u);
  EXPECT_EQ(attach.attach().model(), "m");
  EXPECT_TRUE(attach.attach().latest());
  EXPECT_EQ(attach.attach().shard(), "tp=0/2");
  EXPECT_EQ(attach.attach().spec_json(), "{}");
  ASSERT_EQ(attach.attach().boxes_size(), 2);
  EXPECT_EQ(attach.attach().boxes(0).tensor(), "w");
  EXPECT_THAT(attach.attach().boxes(0).offset(), ElementsAre(0, std::uint64_t{1} << 40));
  EXPECT_THAT(attach.attach().boxes(0).extent(), ElementsAre(3, 4));
  EXPECT_EQ(attach.attach().boxes(1).tensor(), "v");
  EXPECT_EQ(attach.attach().instance(), "i");
  EXPECT_EQ(attach.attach().generation(), std::uint64_t{1} << 50);
  EXPECT_EQ(attach.attach().rank(), 2u);
  EXPECT_EQ(attach.attach().world(), 4u);
  EXPECT_EQ(attach.attach().fallback_dir(), "/f");
  EXPECT_EQ(attach.attach().device(), "GPU-6f2c");
  EXPECT_EQ(attach.attach().bucket_bytes(), std::uint64_t{1} << 40);
  EXPECT_EQ(attach.attach().group(), "chat");
  EXPECT_EQ(attach.attach().traceparent(), "00-4b");
  EXPECT_EQ(attach.attach().resident_key(), "torch 2");
  EXPECT_TRUE(attach.attach().resident_shared());
  request.latest = false;
  request.version = 9;
  attach = parsed({2, 3, 4000}, request);
  EXPECT_FALSE(attach.attach().latest());
  EXPECT_EQ(attach.attach().version(), 9u);

  const auto begin = parsed({5, 0, 1}, PublishBeginRequest{{"m", 7}, {{"w", "BF16", {2, 3}}}});
  EXPECT_EQ(begin.publish_begin().id().model(), "m");
  EXPECT_EQ(begin.publish_begin().id().version(), 7u);
  ASSERT_EQ(begin.publish_begin().tensors_size(), 1);
  EXPECT_EQ(begin.publish_begin().tensors(0).dtype(), "BF16");
  EXPECT_THAT(begin.publish_begin().tensors(0).shape(), ElementsAre(2, 3));
  EXPECT_EQ(parsed({6, 1, 0}, LoadedRequest{123}).loaded().bytes(), 123u);
  EXPECT_EQ(parsed({6, 1, 0}, WatchRequest{{"m", 4}}).watch().have().version(), 4u);
  EXPECT_TRUE(parsed({6, 1, 0}, DetachRequest{}).has_detach());
  EXPECT_TRUE(parsed({6, 0, 0}, PingRequest{}).has_ping());
  EXPECT_TRUE(parsed({6, 1, 0}, PublishCommitRequest{}).has_publish_commit());
  EXPECT_TRUE(parsed({6, 1, 0}, PublishAbandonRequest{}).has_publish_abandon());
  const ResidentTensor tensor{"w", 1, std::uint64_t{1} << 32, 8, true, WantedBox{"v", {2}, {4}}};
  const auto seal =
      parsed({6, 1, 0},
             SealResidentRequest{
                 "key", "places", {std::uint64_t{1} << 33, 7}, {tensor, ResidentTensor{}}, true});
  ASSERT_EQ(seal.seal_resident().tensors_size(), 2);
  EXPECT_EQ(seal.seal_resident().tensors(0).name(), "w");
  EXPECT_EQ(seal.seal_resident().tensors(0).block(), 1u);
  EXPECT_EQ(seal.seal_resident().tensors(0).offset(), std::uint64_t{1} << 32);
  EXPECT_EQ(seal.seal_resident().tensors(0).bytes(), 8u);
  EXPECT_TRUE(seal.seal_resident().tensors(0).changes());
  EXPECT_EQ(seal.seal_resident().tensors(0).source().tensor(), "v");
  EXPECT_THAT(seal.seal_resident().tensors(0).source().extent(), ElementsAre(4));
  EXPECT_FALSE(seal.seal_resident().tensors(1).has_source());
  EXPECT_TRUE(parsed({6, 1, 0}, MendResidentRequest{}).has_mend_resident());
  EXPECT_EQ(seal.seal_resident().key(), "key");
  EXPECT_EQ(seal.seal_resident().description(), "places");
  EXPECT_TRUE(seal.seal_resident().shared());
  EXPECT_THAT(seal.seal_resident().block_bytes(), ElementsAre(std::uint64_t{1} << 33, 7));
  EXPECT_TRUE(parsed({6, 1, 0}, WatchOrdersRequest{}).has_watch_orders());
  const auto result =
      parsed({6, 1, 0}, OrderResultRequest{8, Error(ErrorCode::kNotFound, "no b"), {{"load", 12}}});
  EXPECT_EQ(result.order_result().order(), 8u);
  EXPECT_EQ(result.order_result().error().code(), proto::STATUS_NOT_FOUND);
  EXPECT_EQ(result.order_result().error().message(), "no b");
  ASSERT_EQ(result.order_result().phases_size(), 1);
  EXPECT_EQ(result.order_result().phases(0).elapsed_us(), 12u);
  EXPECT_FALSE(parsed({6, 1, 0}, OrderResultRequest{8}).order_result().has_error());
  const auto update = parsed({7, 0, 9}, UpdateRequest{{"m", 7}, "chat", 1500});
  EXPECT_EQ(update.update().id().model(), "m");
  EXPECT_EQ(update.update().id().version(), 7u);
  EXPECT_EQ(update.update().group(), "chat");
  EXPECT_EQ(update.update().gather_ms(), 1500u);
}

TEST(AgentMessages, RepliesOfTheGeneratedCodeAreRead) {
  proto::AgentFrame frame;
  frame.set_call(11);
  frame.set_session(12);
  frame.set_descriptors(2);
  auto& attached = *frame.mutable_attached();
  attached.mutable_id()->set_model("qwen3");
  attached.mutable_id()->set_version(41);
  attached.mutable_root()->set_value(std::string(32, 'r'));
  attached.set_layout("layout");
  attached.set_tensor_set("tensors");
  attached.add_segment_bytes(std::uint64_t{5} << 32);
  attached.add_segment_bytes(7);
  attached.mutable_ready()->add_begin(1);
  attached.mutable_ready()->add_end(200);
  attached.set_rung("peers");
  auto& wanted = *attached.add_wanted();
  wanted.set_tensor("w");
  wanted.add_offset(3);
  wanted.add_extent(4);
  attached.set_device_channel(true);
  attached.set_no_device_channel("a MIG slice");
  attached.mutable_resident()->set_description("places");
  attached.mutable_resident()->set_shared(true);
  attached.mutable_resident()->add_block_bytes(std::uint64_t{1} << 33);
  const std::string bytes = frame.SerializeAsString();
  auto message = decode(bytes);
  ASSERT_TRUE(message) << message.error().message();
  EXPECT_EQ(message->call, 11u);
  EXPECT_EQ(message->session, 12u);
  EXPECT_EQ(message->descriptors, 2u);
  const auto reply = std::get<AttachedReply>(message->reply);
  EXPECT_EQ(reply.id, (ModelVersion{"qwen3", 41}));
  EXPECT_EQ(reply.layout, "layout");
  EXPECT_EQ(reply.tensor_set, "tensors");
  EXPECT_THAT(reply.segment_bytes, ElementsAre(std::uint64_t{5} << 32, 7));
  EXPECT_THAT(reply.ready, ElementsAre(std::pair(1u, 200u)));
  EXPECT_EQ(reply.rung, "peers");
  EXPECT_THAT(reply.wanted, ElementsAre(WantedBox{"w", {3}, {4}}));
  EXPECT_TRUE(reply.device_channel);
  EXPECT_EQ(reply.no_device_channel, "a MIG slice");
  EXPECT_EQ(reply.resident.description, "places");
  EXPECT_TRUE(reply.resident.shared);
  EXPECT_THAT(reply.resident.block_bytes, ElementsAre(std::uint64_t{1} << 33));

  frame.mutable_hello()->set_protocol(1);
  frame.mutable_hello()->set_incarnation("0123456789abcdef");
  frame.mutable_hello()->set_client(3);
  frame.mutable_hello()->set_ping_interval_ms(4);
  frame.mutable_hello()->set_silence_ms(5);
  frame.mutable_hello()->set_keeps_residents(true);
  frame.mutable_hello()->set_gives_orders(true);
  const auto hello = decoded<HelloReply>(frame);
  EXPECT_EQ(hello.protocol, 1u);
  EXPECT_EQ(hello.client, 3u);
  EXPECT_EQ(hello.ping_interval_ms, 4u);
  EXPECT_EQ(hello.silence_ms, 5u);
  EXPECT_TRUE(hello.keeps_residents);
  EXPECT_TRUE(hello.gives_orders);

  frame.mutable_order()->set_number(6);
  frame.mutable_order()->mutable_damaged()->add_tensors("w");
  frame.mutable_order()->mutable_damaged()->add_tensors("v");
  auto order = decoded<OrderReply>(frame);
  EXPECT_EQ(order.number, 6u);
  ASSERT_TRUE(order.damaged);
  EXPECT_THAT(order.damaged->tensors, ElementsAre("w", "v"));
  EXPECT_FALSE(order.serve);
  frame.mutable_order()->mutable_serve()->set_model("b");
  frame.mutable_order()->mutable_serve()->set_version(3);
  order = decoded<OrderReply>(frame);
  ASSERT_TRUE(order.serve);
  EXPECT_EQ(order.serve->model, "b");
  EXPECT_EQ(order.serve->version, 3u);
  EXPECT_FALSE(order.serve->latest);

  frame.mutable_ready()->mutable_ready()->add_begin(3);
  frame.mutable_ready()->mutable_ready()->add_end(4);
  frame.mutable_ready()->set_bytes_done(100);
  frame.mutable_ready()->set_complete(true);
  frame.mutable_ready()->set_rung("fallback");
  EXPECT_TRUE(decoded<TilesReady>(frame).complete);
  EXPECT_EQ(decoded<TilesReady>(frame).rung, "fallback");
  EXPECT_THAT(decoded<TilesReady>(frame).ready, ElementsAre(std::pair(3u, 4u)));
  frame.mutable_committed()->mutable_id()->set_version(6);
  frame.mutable_committed()->add_phases()->set_name("plan");
  EXPECT_EQ(decoded<CommittedReply>(frame).id.version, 6u);
  frame.mutable_new_version()->mutable_id()->set_version(8);
  EXPECT_EQ(decoded<NewVersion>(frame).id.version, 8u);
  frame.mutable_publish_begun()->set_layout("x");
  frame.mutable_publish_begun()->add_segment_bytes(9);
  EXPECT_THAT(decoded<PublishBegunReply>(frame).segment_bytes, ElementsAre(9));
  frame.mutable_published()->mutable_id()->set_model("p");
  EXPECT_EQ(decoded<PublishedReply>(frame).id.model, "p");
  frame.mutable_pong();
  decoded<PongReply>(frame);
  frame.mutable_done();
  decoded<DoneReply>(frame);
  frame.mutable_updated()->set_members(8);
  frame.mutable_updated()->set_ready(7);
  frame.mutable_updated()->set_by_broadcast(6);
  frame.mutable_updated()->set_elapsed_ms(std::uint64_t{1} << 40);
  frame.mutable_updated()->set_why("rank 1 of i on b: died");
  const auto updated = decoded<UpdatedReply>(frame);
  EXPECT_EQ(updated.members, 8u);
  EXPECT_EQ(updated.ready, 7u);
  EXPECT_EQ(updated.by_broadcast, 6u);
  EXPECT_EQ(updated.elapsed_ms, std::uint64_t{1} << 40);
  EXPECT_EQ(updated.why, "rank 1 of i on b: died");
  auto& phase = *frame.mutable_updated()->add_phases();
  phase.set_name("copy");
  phase.set_median_us(1);
  phase.set_p95_us(2);
  phase.set_slowest_us(3);
  phase.set_slowest("rank 1 of i on b");
  const auto timed = decoded<UpdatedReply>(frame);
  ASSERT_EQ(timed.phases.size(), 1u);
  EXPECT_EQ(timed.phases[0].name, "copy");
  EXPECT_EQ(timed.phases[0].median_us, 1u);
  EXPECT_EQ(timed.phases[0].p95_us, 2u);
  EXPECT_EQ(timed.phases[0].slowest_us, 3u);
  EXPECT_EQ(timed.phases[0].slowest, "rank 1 of i on b");
}

TEST(AgentMessages, ErrorsKeepTheirCode) {
  for (int code = proto::STATUS_INVALID; code <= proto::STATUS_INTERNAL; ++code) {
    proto::AgentFrame frame;
    frame.mutable_error()->set_code(static_cast<proto::StatusCode>(code));
    frame.mutable_error()->set_message("why");
    const auto message = decode(frame.SerializeAsString());
    ASSERT_TRUE(message && message->error);
    EXPECT_EQ(static_cast<int>(message->error->code()) + 1, code);
    EXPECT_EQ(message->error->message(), "why");
  }
}

TEST(AgentMessages, EveryCutOfAMessageIsAnErrorOrAMessage) {
  proto::AgentFrame frame;
  frame.set_call(1);
  frame.mutable_attached()->set_layout(std::string(300, 'x'));
  frame.mutable_attached()->mutable_ready()->add_begin(1);
  frame.mutable_attached()->mutable_ready()->add_end(2);
  frame.mutable_attached()->add_segment_bytes(1 << 30);
  frame.mutable_attached()->set_device_channel(true);
  frame.mutable_attached()->set_no_device_channel("no GPU");
  const std::string bytes = frame.SerializeAsString();
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(decode(std::string_view(bytes).substr(0, size))) << size;
  }
  EXPECT_TRUE(decode(bytes));
}

TEST(AgentMessages, UnequalRunsAreRefused) {
  proto::AgentFrame frame;
  frame.mutable_ready()->mutable_ready()->add_begin(1);
  EXPECT_FALSE(decode(frame.SerializeAsString()));
}

TEST(AgentMessages, GarbageNeverDoesMoreThanFail) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  proto::AgentFrame frame;
  frame.set_call(300);
  frame.mutable_attached()->set_layout("layout");
  frame.mutable_attached()->mutable_ready()->add_begin(1);
  frame.mutable_attached()->mutable_ready()->add_end(2);
  frame.mutable_attached()->add_wanted()->set_tensor("w");
  const std::string bytes = frame.SerializeAsString();
  int accepted = 0;
  for (int round = 0; round < 20'000; ++round) {
    std::string spoilt = bytes;
    for (std::uint64_t i = 0, n = 1 + random() % 4; i < n; ++i) {
      spoilt[random() % spoilt.size()] = static_cast<char>(random());
    }
    if (decode(spoilt)) ++accepted;
  }
  EXPECT_GT(accepted, 0);
}

}  // namespace
}  // namespace rekindle::client
