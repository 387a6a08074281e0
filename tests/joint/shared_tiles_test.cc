#include "recovery/joint/shared_tiles.h"

#include <latch>
#include <optional>
#include <random>

#include <gtest/gtest.h>

#include "recovery/joint/host_copy.h"
#include "tests/joint/joint_sample.h"
#include "tests/recovery/rpc_fixture.h"

namespace rekindle::joint {
namespace {

using namespace rpc::testing;
using test::code_of;
using test::kId;
using test::plan_of;
using test::rows;

class SharedTilesTest : public ::testing::Test {
 protected:
  static Roster roster() {
    Roster roster;
    roster.id = kId;
    return roster;
  }
  proto::JointPieces pieces(std::uint32_t host, const test::WholeTensor& tensor) const {
    proto::JointPieces pieces;
    auto& piece = *pieces.add_pieces();
    piece.set_tile(0);
    piece.set_data(test::pieces_of(*plan_, host, 0, tensor));
    return pieces;
  }
  std::uint32_t taken(std::uint32_t host) {
    return must(loop_.run(shared_.take(host, pieces(host, tensor_), steady_now() + 5s)));
  }

  test::Rng rng_{std::random_device{}()};
  const test::WholeTensor tensor_ = test::random_tensor(rng_, "w", DType::kBF16, {64, 128});
  // One tile.
  const std::shared_ptr<const JointPlan> plan_ =
      plan_of(tensor_.info, {{rows(0, 21, 128)}, {rows(15, 64, 128)}});
  Loop loop_;
  const Roster roster_ = roster();
  Course course_{loop_.executor(), kId};
  WorkerPool blocking_{"blocking", 1, 8};
  WorkerPool digests_{"digests", 1, 8};
  SharedTiles shared_{{blocking_, digests_}, roster_, course_, plan_, {0}};
};

TEST_F(SharedTilesTest, TheDigestPoolDigestsACompleteTile) {
  std::latch busy(1);
  digests_.submit([&busy] { busy.wait(); });
  std::optional<Result<SharedTiles::Leaves>> leaves;
  boost::asio::co_spawn(loop_.io(), shared_.next_leaves(),
                        [&](std::exception_ptr, Result<SharedTiles::Leaves> found) {
                          leaves.emplace(std::move(found));
                        });
  EXPECT_EQ(taken(0), 1u);
  EXPECT_EQ(taken(1), 1u) << "the control thread answers while the pool is busy";
  loop_.run(async::sleep_for(20ms));
  EXPECT_FALSE(leaves) << "no other thread digests it";
  busy.count_down();
  loop_.run_until([&] { return leaves.has_value(); });
  ASSERT_TRUE(*leaves) << leaves->error().message();
  EXPECT_EQ((*leaves)->tiles, std::vector<TileIndex>{0});
  EXPECT_EQ((*leaves)->digests, std::vector<Digest>{blake3(tensor_.bytes)});
  auto rest = loop_.run(shared_.next_leaves());
  ASSERT_TRUE(rest);
  EXPECT_TRUE(rest->tiles.empty()) << "all are returned";
}

TEST_F(SharedTilesTest, OtherBytesOfAReplicaEndThePublication) {
  test::WholeTensor other = tensor_;
  other.bytes[18 * 128 * 2] ^= std::byte{1};  // row 18
  EXPECT_EQ(taken(0), 1u);
  auto refused = loop_.run(shared_.take(1, pieces(1, other), steady_now() + 5s));
  EXPECT_EQ(code_of(refused), ErrorCode::kInvalid);
  ASSERT_TRUE(course_.error());
  EXPECT_TRUE(course_.error()->message().starts_with("m@7: 'w' [15:21, 0:128]"))
      << course_.error()->message();
  EXPECT_EQ(code_of(loop_.run(shared_.next_leaves())), ErrorCode::kInvalid) << "no wait goes on";
}

// The lead computes the layout of every host, so that it need not believe a claim.
TEST(HostLayout, IsThatOfTheFilesOfAllRanks) {
  const TensorInfo info{"w", DType::kU8, {64, 128}};
  std::vector<JointHost> hosts{
      {"a", {{0, {{info, {rows(0, 16, 128)}}}}, {1, {{info, {rows(16, 32, 128)}}}}}},
      {"b", {{2, {{info, {rows(32, 64, 128)}}}}}},
      {"c", {{3, {}}}}};
  const JointPlan plan = must(JointPlan::create(std::move(hosts)));
  const auto a = must(layout_of_host(plan, 0));
  ASSERT_TRUE(a);
  ASSERT_EQ(a->entries().size(), 2u);
  EXPECT_EQ(a->entries()[0].box, rows(0, 16, 128));
  EXPECT_EQ(a->entries()[1].box, rows(16, 32, 128));
  EXPECT_EQ(a->segments().size(), 2u);
  EXPECT_NE(a->segments()[0].name, a->segments()[1].name);
  const auto b = must(layout_of_host(plan, 1));
  ASSERT_TRUE(b);
  EXPECT_EQ(b->digest(), must(pack_rank(plan, 2)).layout.digest());
  EXPECT_FALSE(must(layout_of_host(plan, 2))) << "it has no elements, so it has no copy";
}

}  // namespace
}  // namespace rekindle::joint
