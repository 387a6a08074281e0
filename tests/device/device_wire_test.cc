// Valid and invalid orders to spread, and the answers of a device process.
#include "recovery/device/device_wire.h"

#include <functional>
#include <limits>

#include <unistd.h>

#include <gtest/gtest.h>

namespace rekindle::device {
namespace {

SpreadOrder good_order() { return {7, "c-1", "id", 1, 3, 64 << 20, {2, 0}}; }

TEST(DeviceWire, AnOrderToSpreadComesAsItWasSent) {
  const auto got = from_proto(to_proto(good_order()));
  ASSERT_TRUE(got) << got.error().message();
  EXPECT_EQ(got->session, 7u);
  EXPECT_EQ(got->communicator, "c-1");
  EXPECT_EQ(got->id, "id");
  EXPECT_EQ(got->rank, 1u);
  EXPECT_EQ(got->ranks, 3u);
  EXPECT_EQ(got->bucket_bytes, 64u << 20);
  EXPECT_EQ(got->owners, (std::vector<std::uint32_t>{2, 0}));
}

TEST(DeviceWire, NonsenseIsRefusedInOneLine) {
  const std::vector<std::function<void(SpreadOrder&)>> wrong = {
      [](SpreadOrder& o) { o.communicator = ""; },
      [](SpreadOrder& o) { o.communicator = "two\nlines"; },
      [](SpreadOrder& o) { o.communicator = std::string(129, 'x'); },
      [](SpreadOrder& o) { o.id = std::string(4097, 'x'); },
      [](SpreadOrder& o) { o.rank = 3; },
      [](SpreadOrder& o) { o.ranks = 0; },
      [](SpreadOrder& o) { o.ranks = std::numeric_limits<std::uint32_t>::max(); },
      [](SpreadOrder& o) { o.owners.clear(); },
      [](SpreadOrder& o) { o.owners = {3}; },
      [](SpreadOrder& o) {
        o.owners = {1, 1};
      },
      [](SpreadOrder& o) {
        o.owners = {0, 1, 2, 0};
      },
      [](SpreadOrder& o) { o.bucket_bytes = 0; },
      [](SpreadOrder& o) { o.bucket_bytes = 511; },
      [](SpreadOrder& o) { o.bucket_bytes = (256 << 20) + 1; },
      [](SpreadOrder& o) { o.keep_count = 4; },
      [](SpreadOrder& o) { o.ranks_here = 0; },
      [](SpreadOrder& o) { o.ranks_here = o.ranks + 1; },
      [](SpreadOrder& o) { o.keep_count = o.keep_index = 2; },
  };
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    auto order = good_order();
    wrong[i](order);
    const auto got = from_proto(to_proto(order));
    ASSERT_FALSE(got) << i;
    EXPECT_EQ(got.error().code(), ErrorCode::kInvalid) << i;
    EXPECT_EQ(got.error().message().find('\n'), std::string::npos) << i;
  }
}

TEST(DeviceWire, SlotsThatAreOfferedHaveADescriptorAndASize) {
  const auto offered = [](std::uint32_t slots, std::uint64_t bytes, bool with_memory) {
    proto::SlotsOffered message;
    message.set_slots(slots);
    message.set_bucket_bytes(bytes);
    return from_proto(message, with_memory ? UniqueFd(::dup(0)) : UniqueFd()).has_value();
  };
  EXPECT_TRUE(offered(3, 64 << 20, true));
  EXPECT_FALSE(offered(3, 64 << 20, false));
  EXPECT_FALSE(offered(0, 64 << 20, true));
  EXPECT_FALSE(offered(65, 64 << 20, true));
  EXPECT_FALSE(offered(3, 1, true));
  EXPECT_FALSE(offered(3, std::numeric_limits<std::uint64_t>::max(), true));
}

TEST(DeviceWire, WhatIsKeptIsToldByTiles) {
  auto order = good_order();
  order.keep_index = 1;
  order.keep_count = 2;
  order.ranks_here = 2;
  const auto got = from_proto(to_proto(order));
  ASSERT_TRUE(got) << got.error().message();
  EXPECT_EQ(got->keep_index, 1u);
  EXPECT_EQ(got->keep_count, 2u);
  EXPECT_EQ(got->ranks_here, 2u);
  SpreadOver over;
  over.kept = {{0, 7, 1, 1}, {7, 8, 1, 2}, {100, 200, 3, 3}};
  over.kept_bytes = 123;
  over.verify = std::chrono::microseconds(17);
  const auto said = from_proto(to_proto(over));
  EXPECT_EQ(said.kept, over.kept);
  EXPECT_EQ(said.kept_bytes, 123u);
  EXPECT_EQ(said.verify, std::chrono::microseconds(17));
  using Runs = std::vector<bucket::KeptTiles>;
  for (const Runs& wrong :
       {Runs{{3, 3, 1, 1}}, Runs{{0, 5, 1, 1}, {4, 6, 1, 1}}, Runs{{0, 1, 2, 1}}}) {
    over.kept = wrong;
    EXPECT_TRUE(from_proto(to_proto(over)).kept.empty()) << "it is fetched instead";
  }
}

TEST(DeviceWire, WhatASessionSaysComesAsItWasSaid) {
  const DeviceJoined joined{7, 1 << 20, {1, 2}, 99, {"c-1"}};
  const auto got = from_proto(to_proto(joined));
  ASSERT_TRUE(got);
  EXPECT_EQ(got->session, 7u);
  EXPECT_EQ(got->bucket_bytes, 1u << 20);
  EXPECT_EQ(got->contents, (Digest{1, 2}));
  EXPECT_EQ(got->payload_bytes, 99u);
  EXPECT_EQ(got->communicators, joined.communicators);

  SpreadOver over;
  over.session = 8;
  over.buckets = 3;
  over.bytes = 4;
  over.elapsed = std::chrono::microseconds(5);
  over.meet = std::chrono::microseconds(6);
  const auto fine = from_proto(to_proto(over));
  EXPECT_FALSE(fine.error);
  EXPECT_EQ(fine.session, 8u);
  EXPECT_EQ(fine.buckets, 3u);
  EXPECT_EQ(fine.bytes, 4u);
  EXPECT_EQ(fine.elapsed.count(), 5);
  EXPECT_EQ(fine.meet.count(), 6);
  over.error = Error(ErrorCode::kPeerLost, "a rank has gone");
  const auto failed = from_proto(to_proto(over));
  ASSERT_TRUE(failed.error);
  EXPECT_EQ(failed.error->code(), ErrorCode::kPeerLost);
  EXPECT_EQ(failed.error->message(), "a rank has gone");
  EXPECT_FALSE(failed.worker_lost);
  over.error.reset();
  over.worker_lost = Error(ErrorCode::kTimeout, "the worker hangs");
  const auto discarded = from_proto(to_proto(over));
  EXPECT_FALSE(discarded.error);
  ASSERT_TRUE(discarded.worker_lost);
  EXPECT_EQ(discarded.worker_lost->code(), ErrorCode::kTimeout);
  EXPECT_EQ(discarded.worker_lost->message(), "the worker hangs");

  EXPECT_EQ(*from_proto(to_proto(1, std::string("id"))), "id");
  EXPECT_FALSE(from_proto(to_proto(1, std::string())));
  EXPECT_EQ(from_proto(to_proto(1, fail(ErrorCode::kNotFound, "no NCCL"))).error().message(),
            "no NCCL");
}

TEST(DeviceWire, AJoinedSessionHasBucketsAndNames) {
  DeviceJoined joined{7, 1 << 20, {1, 2}, 99, {""}};
  EXPECT_FALSE(from_proto(to_proto(joined)));
  joined.communicators = std::vector<std::string>(65, "c");
  EXPECT_FALSE(from_proto(to_proto(joined)));
  joined.communicators.clear();
  EXPECT_TRUE(from_proto(to_proto(joined)));
  joined.bucket_bytes = 0;
  EXPECT_FALSE(from_proto(to_proto(joined)));
}

}  // namespace
}  // namespace rekindle::device
