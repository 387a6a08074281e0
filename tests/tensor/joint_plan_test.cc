#include "src/tensor/joint_plan.h"

#include <algorithm>
#include <set>

#include <gtest/gtest.h>

#include "src/tensor/tile_piece.h"
#include "tests/tensor/random_tensors.h"

namespace rekindle {
namespace {

using test::below;
using test::Rng;

DeclaredTensor tensor(std::string name, const Shape& shape, std::vector<Box> boxes,
                      DType dtype = DType::kBF16) {
  return {{std::move(name), dtype, shape}, std::move(boxes)};
}

// Rows [begin, end) of a matrix.
Box rows(std::uint64_t begin, std::uint64_t end, std::uint64_t width) {
  return {{begin, 0}, {end - begin, width}};
}
Box columns(std::uint64_t begin, std::uint64_t end, std::uint64_t height) {
  return {{0, begin}, {height, end - begin}};
}

// Hosts a, b, … with two ranks each; rank i has the boxes `boxes[i]` of one tensor.
std::vector<JointHost> two_per_host(const Shape& shape, std::vector<std::vector<Box>> boxes) {
  std::vector<JointHost> hosts;
  for (std::uint32_t rank = 0; rank < boxes.size(); ++rank) {
    if (rank % 2 == 0) hosts.push_back({std::string(1, static_cast<char>('a' + rank / 2)), {}});
    hosts.back().ranks.push_back({rank, {tensor("w", shape, boxes[rank])}});
  }
  return hosts;
}

JointPlan plan_of(std::vector<JointHost> hosts) {
  auto plan = JointPlan::create(std::move(hosts));
  if (!plan) throw std::runtime_error(plan.error().message());
  return *std::move(plan);
}

std::string error_of(std::vector<JointHost> hosts) {
  const auto plan = JointPlan::create(std::move(hosts));
  if (plan) return "none";
  EXPECT_EQ(plan.error().code(), ErrorCode::kInvalid);
  return plan.error().message();
}

std::vector<TensorBox> list(std::span<const TensorBox> boxes) {
  return {boxes.begin(), boxes.end()};
}

using Tiles = std::vector<TileIndex>;
using Hosts = std::vector<std::uint32_t>;

// 16 KiB: one tile.
TEST(JointPlanTest, RowShardsOfTwoHostsShareTheirOneTile) {
  const Shape shape{64, 128};
  const JointPlan plan = plan_of(two_per_host(
      shape, {{rows(0, 16, 128)}, {rows(16, 32, 128)}, {rows(32, 48, 128)}, {rows(48, 64, 128)}}));
  EXPECT_EQ(plan.host_count(), 2u);
  EXPECT_EQ(plan.host_name(1), "b");
  EXPECT_EQ(list(plan.writes(2)), (std::vector<TensorBox>{{0, rows(32, 48, 128)}}));
  EXPECT_EQ(plan.boxes(0), (std::vector<TensorBox>{{0, rows(0, 16, 128)}, {0, rows(16, 32, 128)}}));
  EXPECT_TRUE(plan.writes(9).empty());
  EXPECT_TRUE(plan.is_shared(0));
  EXPECT_EQ(plan.finisher(0), 0u);
  EXPECT_EQ(plan.cells(0), (std::vector<JointPlan::Cell>{{rows(0, 16, 128), {0}},
                                                         {rows(16, 32, 128), {0}},
                                                         {rows(32, 48, 128), {1}},
                                                         {rows(48, 64, 128), {1}}}));
  EXPECT_EQ(plan.tiles_of(0).finished, Tiles{0});
  EXPECT_EQ(plan.tiles_of(1).shared, Tiles{0});
  EXPECT_TRUE(plan.tiles_of(1).finished.empty());
  EXPECT_TRUE(plan.tiles_of(0).whole.empty());
  EXPECT_EQ(plan.ranks_with(0, rows(10, 20, 128)), (std::vector<std::uint32_t>{0, 1}));
}

TEST(JointPlanTest, ShardsThatEndAtBordersOfTilesShareNone) {
  const Shape shape{2048, 2048};  // 8 MiB; tiles have 128 columns
  const JointPlan plan = plan_of(two_per_host(shape, {{columns(0, 512, 2048)},
                                                      {columns(512, 1024, 2048)},
                                                      {columns(1024, 1536, 2048)},
                                                      {columns(1536, 2048, 2048)}}));
  const auto first = plan.tiles_of(0);
  const auto second = plan.tiles_of(1);
  EXPECT_TRUE(first.shared.empty());
  EXPECT_TRUE(second.shared.empty());
  EXPECT_EQ(first.whole.size() + second.whole.size(), plan.tiles().tile_count());
}

TEST(JointPlanTest, ATileOfOneHostIsWholeThoughItsRanksHavePartsOfIt) {
  const JointPlan plan =
      plan_of(two_per_host({64, 128}, {{columns(0, 64, 64)}, {columns(64, 128, 64)}}));
  EXPECT_FALSE(plan.is_shared(0));
  EXPECT_EQ(plan.tiles_of(0).whole, Tiles{0});
}

TEST(JointPlanTest, ReplicasOnOneHostAreWrittenByTheRankWithTheFewestBytes) {
  std::vector<JointHost> hosts{{"a", {{0, {}}, {1, {}}}}};
  for (int i = 0; i < 4; ++i) {
    for (auto& rank : hosts[0].ranks) {
      const Shape shape{4, 4};
      rank.tensors.push_back(tensor("w" + std::to_string(i), shape, {Box::whole(shape)}));
    }
  }
  const JointPlan plan = plan_of(hosts);
  const Box whole = Box::whole({4, 4});
  EXPECT_EQ(list(plan.writes(0)), (std::vector<TensorBox>{{0, whole}, {2, whole}}));
  EXPECT_EQ(list(plan.writes(1)), (std::vector<TensorBox>{{1, whole}, {3, whole}}));
  EXPECT_EQ(plan.ranks_with(1, whole), (std::vector<std::uint32_t>{0, 1}));
}

TEST(JointPlanTest, ReplicasOnTwoHostsAreBothKept) {
  const Box whole = Box::whole({64, 128});
  const JointPlan plan = plan_of(two_per_host({64, 128}, {{whole}, {whole}, {whole}, {}}));
  EXPECT_EQ(plan.boxes(0), (std::vector<TensorBox>{{0, whole}}));
  EXPECT_EQ(plan.boxes(1), (std::vector<TensorBox>{{0, whole}}));
  EXPECT_FALSE(plan.is_shared(0));
  EXPECT_EQ(plan.tiles_of(1).whole, Tiles{0});
}

TEST(JointPlanTest, AHostWithAWholeTileTakesPartIfAnotherHasAPartOfIt) {
  const Box whole = Box::whole({64, 128});
  const JointPlan plan = plan_of(two_per_host({64, 128}, {{rows(8, 16, 128)}, {}, {whole}, {}}));
  EXPECT_EQ(plan.finisher(0), 1u) << "host a does not have the first element";
  EXPECT_EQ(plan.cells(0),
            (std::vector<JointPlan::Cell>{
                {rows(0, 8, 128), {1}}, {rows(8, 16, 128), {0, 1}}, {rows(16, 64, 128), {1}}}));
  EXPECT_EQ(plan.tiles_of(1).shared, Tiles{0});
  EXPECT_TRUE(plan.tiles_of(1).whole.empty());
}

TEST(JointPlanTest, PartialOverlapsOfAHostAreWrittenOnce) {
  const JointPlan plan =
      plan_of(two_per_host({8, 4}, {{rows(0, 5, 4)}, {rows(3, 8, 4)}, {rows(0, 8, 4)}, {}}));
  EXPECT_EQ(plan.boxes(0),
            (std::vector<TensorBox>{{0, rows(0, 3, 4)}, {0, rows(3, 5, 4)}, {0, rows(5, 8, 4)}}));
  EXPECT_EQ(plan.boxes(1), (std::vector<TensorBox>{{0, rows(0, 8, 4)}}));
  EXPECT_EQ(plan.ranks_with(0, rows(3, 5, 4)), (std::vector<std::uint32_t>{0, 1, 2}));
}

TEST(JointPlanTest, FlatShardsAreUpToThreeBoxes) {
  // Elements [0, 10), [10, 21) and [21, 32) of a matrix of 8 x 4.
  const std::vector<std::vector<Box>> boxes{{rows(0, 2, 4), {{2, 0}, {1, 2}}},
                                            {{{2, 2}, {1, 2}}, rows(3, 5, 4), {{5, 0}, {1, 1}}},
                                            {{{5, 1}, {1, 3}}, rows(6, 8, 4)}};
  const JointPlan plan = plan_of(two_per_host({8, 4}, boxes));
  EXPECT_EQ(plan.boxes(0).size(), 5u);
  EXPECT_EQ(plan.boxes(1).size(), 2u);
  EXPECT_EQ(plan.cells(0).size(), 7u);
}

TEST(JointPlanTest, FilesAndEmptyTensorsAndScalarsArePlanned) {
  std::vector<JointHost> hosts{{"a", {{0, {}}, {1, {}}}}, {"b", {{2, {}}}}};
  const std::string file = "__rekindle_file__/config.json";
  hosts[0].ranks[0].tensors = {tensor(file, {100}, {Box::whole({100})}, DType::kU8),
                               tensor("empty", {0, 4}, {})};
  hosts[0].ranks[1].tensors = {tensor("empty", {0, 4}, {Box::whole({0, 4})})};
  hosts[1].ranks[0].tensors = {tensor("scalar", {}, {Box::whole({})})};
  const JointPlan plan = plan_of(hosts);
  ASSERT_EQ(plan.tensors().size(), 3u);
  EXPECT_EQ(list(plan.writes(0)),
            (std::vector<TensorBox>{{0, Box::whole({100})}, {1, Box::whole({0, 4})}}));
  EXPECT_TRUE(plan.writes(1).empty());
  EXPECT_EQ(list(plan.writes(2)), (std::vector<TensorBox>{{2, Box::whole({})}}));
  EXPECT_EQ(plan.tiles_of(0).whole, Tiles{0});
  EXPECT_EQ(plan.tiles_of(1).whole, Tiles{1});
}

TEST(JointPlanTest, ErrorsNameTensorsRanksAndHosts) {
  const Box whole = Box::whole({8, 4});
  EXPECT_EQ(error_of({}), "no rank declares a tensor");
  EXPECT_EQ(error_of({{"a", {{0, {tensor("w", {8, 4}, {whole})}}}},
                      {"b", {{5, {tensor("w", {8, 8}, {})}}}}}),
            "'w' is BF16 [8, 4] at rank 0 of a and BF16 [8, 8] at rank 5 of b");
  EXPECT_EQ(error_of({{"a", {{0, {tensor("w", {8, 4}, {whole})}}}},
                      {"b", {{5, {tensor("w", {8, 4}, {}, DType::kF32)}}}}}),
            "'w' is BF16 [8, 4] at rank 0 of a and F32 [8, 4] at rank 5 of b");
  EXPECT_EQ(error_of({{"a", {{3, {}}}}, {"b", {{3, {}}}}}), "rank 3 declares twice: at a and at b");
  EXPECT_EQ(error_of({{"a", {{3, {tensor("w", {8, 4}, {whole}), tensor("w", {8, 4}, {})}}}}}),
            "rank 3 of a declares 'w' twice");
  EXPECT_EQ(error_of(two_per_host({8, 4}, {{rows(0, 5, 4), rows(4, 8, 4)}})),
            "boxes [0:5, 0:4] and [4:8, 0:4] of 'w' overlap, and both are of rank 0 of a");
  EXPECT_EQ(error_of(two_per_host({8, 4}, {{rows(0, 3, 4)}, {}, {rows(5, 8, 4)}})),
            "no rank has elements [3:5, 0:4] of 'w' [8, 4]");
  EXPECT_EQ(error_of({{"a",
                       {{0,
                         {tensor("u", {8, 4}, {rows(0, 3, 4)}), tensor("v", {8, 4}, {}),
                          tensor("w", {2}, {})}}}}}),
            "no rank has elements [3:8, 0:4] of 'u' [8, 4]; 2 more tensors have elements that no "
            "rank has");
  EXPECT_NE(error_of(two_per_host({8, 4}, {{rows(4, 9, 4)}})).find("rank 0 of a: 'w': "),
            std::string::npos);
  EXPECT_NE(error_of({{"a", {{7, {tensor("", {8, 4}, {})}}}}}).find("rank 7 of a: "),
            std::string::npos);
}

TEST(JointPlanTest, RanksAreNamedInAFewWords) {
  const std::vector<std::uint32_t> ranks{3, 11, 12, 15, 16, 17};
  const auto name = [&](std::size_t count) { return name_ranks(std::span(ranks).first(count)); };
  EXPECT_EQ(name(1), "rank 3");
  EXPECT_EQ(name(2), "ranks 3 and 11");
  EXPECT_EQ(name(4), "ranks 3, 11, 12 and 15");
  EXPECT_EQ(name(6), "ranks 3, 11, 12 and 3 more");
}

// Declarations in which boxes of different ranks overlap, and those of one rank do not.
std::vector<JointHost> random_hosts(Rng& rng) {
  std::vector<JointHost> hosts(1 + below(rng, 4));
  std::vector<TensorInfo> infos;
  for (std::uint64_t i = 1 + below(rng, 3); i > 0; --i) {
    infos.push_back({"w" + std::to_string(i), DType::kU8, test::random_shape(rng, 3, 6)});
  }
  std::uint32_t number = 0;
  for (std::size_t h = 0; h < hosts.size(); ++h) {
    hosts[h].name = "host-" + std::to_string(h);
    for (std::uint64_t i = below(rng, 4); i > 0; --i) {
      Declaration& rank = hosts[h].ranks.emplace_back();
      rank.rank = number++;
      for (const TensorInfo& info : infos) {
        std::vector<Box> boxes;
        for (std::uint64_t tries = below(rng, 4); tries > 0; --tries) {
          const Box box =
              below(rng, 4) == 0 ? Box::whole(info.shape) : test::random_box(rng, info.shape);
          const auto overlaps = [&](const Box& other) { return intersect(box, other).has_value(); };
          if (std::ranges::none_of(boxes, overlaps)) boxes.push_back(box);
        }
        if (!boxes.empty() || below(rng, 2) == 0) rank.tensors.push_back({info, boxes});
      }
    }
  }
  return hosts;
}

// For one tensor: per element, the ranks that declared it.
using Grid = std::vector<std::set<std::uint32_t>>;

Grid declared_grid(const std::vector<JointHost>& hosts, const TensorInfo& info) {
  const Box whole = Box::whole(info.shape);
  Grid grid(whole.elements());
  for (const JointHost& host : hosts) {
    for (const Declaration& rank : host.ranks) {
      for (const DeclaredTensor& tensor : rank.tensors) {
        if (tensor.info.name != info.name) continue;
        for (const Box& box : tensor.boxes) {
          test::for_each_element(
              box, [&](const Dims& at) { grid[test::index_in(whole, at)].insert(rank.rank); });
        }
      }
    }
  }
  return grid;
}

std::map<std::uint32_t, std::uint32_t> host_of_rank(const std::vector<JointHost>& hosts) {
  std::map<std::uint32_t, std::uint32_t> result;
  for (std::uint32_t h = 0; h < hosts.size(); ++h) {
    for (const Declaration& rank : hosts[h].ranks) result[rank.rank] = h;
  }
  return result;
}

// Whether each tensor has a rank for each element.
bool is_covered(const std::vector<JointHost>& hosts) {
  bool any = false;
  for (const JointHost& host : hosts) {
    for (const Declaration& rank : host.ranks) {
      for (const DeclaredTensor& tensor : rank.tensors) {
        any = true;
        for (const auto& ranks : declared_grid(hosts, tensor.info)) {
          if (ranks.empty()) return false;
        }
      }
    }
  }
  return any;
}

void expect_writes_match(const JointPlan& plan, const std::vector<JointHost>& hosts,
                         TensorIndex tensor, const Grid& grid) {
  const auto host_of = host_of_rank(hosts);
  const Box whole = Box::whole(plan.tensors()[tensor].shape);
  std::vector<std::map<std::uint32_t, int>> written(grid.size());  // per element and host
  for (const auto& entry : host_of) {
    const std::uint32_t rank = entry.first;
    const std::uint32_t host = entry.second;
    EXPECT_TRUE(std::ranges::is_sorted(plan.writes(rank)));
    for (const TensorBox& write : plan.writes(rank)) {
      if (write.tensor != tensor) continue;
      test::for_each_element(write.box, [&](const Dims& at) {
        const std::uint64_t index = test::index_in(whole, at);
        EXPECT_TRUE(grid[index].contains(rank)) << "rank " << rank << " does not have " << index;
        ++written[index][host];
      });
    }
  }
  for (std::size_t i = 0; i < grid.size(); ++i) {
    std::map<std::uint32_t, int> expected;
    for (const std::uint32_t rank : grid[i]) expected[host_of.at(rank)] = 1;
    EXPECT_EQ(written[i], expected) << "element " << i;
  }
}

// Every tensor here is one tile.
void expect_tile_matches(const JointPlan& plan, const std::vector<JointHost>& hosts, TileIndex tile,
                         const Grid& grid) {
  const auto host_of = host_of_rank(hosts);
  std::vector<std::set<std::uint32_t>> holders(grid.size());
  std::map<std::uint32_t, std::size_t> held;
  for (std::size_t i = 0; i < grid.size(); ++i) {
    for (const std::uint32_t rank : grid[i]) holders[i].insert(host_of.at(rank));
    for (const std::uint32_t host : holders[i]) ++held[host];
  }
  const bool shared =
      std::ranges::any_of(held, [&](const auto& part) { return part.second < grid.size(); });
  EXPECT_EQ(plan.is_shared(tile), shared);
  EXPECT_EQ(plan.finisher(tile), *holders[0].begin());
  const Box box = plan.tiles().tile_box(tile);
  std::vector<int> seen(grid.size());
  for (const JointPlan::Cell& cell : plan.cells(tile)) {
    test::for_each_element(cell.box, [&](const Dims& at) {
      const std::uint64_t index = test::index_in(box, at);
      ++seen[index];
      EXPECT_EQ(cell.hosts, Hosts(holders[index].begin(), holders[index].end()));
    });
    for (const std::uint32_t host : cell.hosts) {
      EXPECT_TRUE(std::ranges::any_of(plan.boxes(host), [&](const TensorBox& write) {
        return write.tensor == plan.tiles().tensor_of(tile) && contains(write.box, cell.box);
      })) << "the cell is in one box of each host";
    }
  }
  EXPECT_TRUE(std::ranges::all_of(seen, [](int count) { return count == 1; }));
  for (std::uint32_t host = 0; host < hosts.size(); ++host) {
    const JointPlan::HostTiles tiles = plan.tiles_of(host);
    const auto has = [&](const Tiles& list) { return std::ranges::count(list, tile) == 1; };
    EXPECT_EQ(has(tiles.shared), shared && held.contains(host));
    EXPECT_EQ(has(tiles.whole), !shared && held.contains(host));
    EXPECT_EQ(has(tiles.finished), shared && host == *holders[0].begin());
  }
}

void expect_ranks_match(const JointPlan& plan, TensorIndex tensor, const Grid& grid, Rng& rng) {
  const Box whole = Box::whole(plan.tensors()[tensor].shape);
  const Box box = test::random_box(rng, whole.extent);
  std::set<std::uint32_t> expected;
  test::for_each_element(box, [&](const Dims& at) {
    const auto& ranks = grid[test::index_in(whole, at)];
    expected.insert(ranks.begin(), ranks.end());
  });
  const auto ranks = plan.ranks_with(tensor, box);
  EXPECT_EQ(ranks, std::vector<std::uint32_t>(expected.begin(), expected.end()));
}

TEST(JointPlanTest, EveryPlanIsThatOfAGridOfElements) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  int planned = 0;
  int refused = 0;
  for (int round = 0; round < 2000; ++round) {
    const std::vector<JointHost> hosts = random_hosts(rng);
    const auto plan = JointPlan::create(hosts);
    ASSERT_EQ(plan.has_value(), is_covered(hosts)) << (plan ? "" : plan.error().message());
    ++(plan ? planned : refused);
    if (!plan) continue;
    for (TensorIndex tensor = 0; tensor < plan->tensors().size(); ++tensor) {
      const Grid grid = declared_grid(hosts, plan->tensors()[tensor]);
      expect_writes_match(*plan, hosts, tensor, grid);
      expect_tile_matches(*plan, hosts, plan->tiles().first_tile(tensor), grid);
      expect_ranks_match(*plan, tensor, grid, rng);
    }
  }
  EXPECT_GT(planned, 100);
  EXPECT_GT(refused, 100);
}

// Hosts that cut a tensor of several tiles, each one with its own copy or part of it.
std::vector<JointHost> hosts_of_large_tensor(Rng& rng, const Shape& shape) {
  std::vector<JointHost> hosts;
  std::uint32_t number = 0;
  for (int copy = 0; copy < 2; ++copy) {
    std::vector<Box> boxes{Box::whole(shape)};
    for (int cut = 0; cut < 4; ++cut) {
      Box& box = boxes[below(rng, boxes.size())];
      const std::size_t axis = below(rng, shape.rank());
      if (box.extent[axis] < 2) continue;
      Box rest = box;
      box.extent[axis] = 1 + below(rng, box.extent[axis] - 1);
      rest.offset[axis] += box.extent[axis];
      rest.extent[axis] -= box.extent[axis];
      boxes.push_back(rest);
    }
    for (const Box& box : boxes) {
      if (hosts.empty() || below(rng, 3) > 0) {
        hosts.push_back({"host-" + std::to_string(hosts.size()), {}});
      }
      hosts.back().ranks.push_back({number++, {tensor("w", shape, {box}, DType::kF32)}});
    }
  }
  return hosts;
}

// The piece of a cell, from the written box of the host that has it.
std::string piece_of_host(const JointPlan& plan, std::uint32_t host, const TilePart& cell,
                          std::span<const std::byte> whole, const Shape& shape) {
  for (const TensorBox& write : plan.boxes(host)) {
    if (!contains(write.box, cell.box)) continue;
    const auto array = test::naive_extract(write.box, Box::whole(shape), whole, 4);
    std::string piece(piece_bytes(cell), '\0');
    make_piece(cell, array, write.box, piece);
    return piece;
  }
  return {};
}

TEST(JointPlanTest, PiecesOfTheCellsGiveTheLeavesOfSharedTiles) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  const Shape shape{90, 1024};  // the last dimension is cut in 16 tiles
  const auto whole = test::random_bytes(rng, shape.product() * 4);
  int shared = 0;
  for (int round = 0; round < 10; ++round) {
    const JointPlan plan = plan_of(hosts_of_large_tensor(rng, shape));
    ASSERT_GT(plan.tiles().tile_count(), 1u);
    for (TileIndex tile = 0; tile < plan.tiles().tile_count(); ++tile) {
      if (!plan.is_shared(tile)) continue;
      ++shared;
      const Box box = plan.tiles().tile_box(tile);
      TileAssembly assembly(box, 4);
      for (const JointPlan::Cell& cell : plan.cells(tile)) {
        const TilePart part{cell.box, box, 4};
        const std::string piece = piece_of_host(plan, cell.hosts[0], part, whole, shape);
        ASSERT_TRUE(assembly.add(cell.box, piece));
        EXPECT_EQ(piece_of_host(plan, cell.hosts.back(), part, whole, shape), piece);
      }
      ASSERT_TRUE(assembly.complete());
      EXPECT_EQ(assembly.leaf(), digest_box(box, 4, whole, Box::whole(shape)));
    }
    std::vector<int> leaves(plan.tiles().tile_count());
    for (std::uint32_t host = 0; host < plan.host_count(); ++host) {
      const auto tiles = plan.tiles_of(host);
      for (const TileIndex tile : tiles.whole) leaves[tile] = 1;
      for (const TileIndex tile : tiles.finished) leaves[tile] += 2;
    }
    for (TileIndex tile = 0; tile < leaves.size(); ++tile) {
      EXPECT_EQ(leaves[tile], plan.is_shared(tile) ? 2 : 1) << "each tile has a leaf";
    }
  }
  EXPECT_GT(shared, 10);
}

TEST(JointPlanTest, ThePlanMakesALayoutOfEachHost) {
  const std::uint64_t seed = std::random_device{}();
  SCOPED_TRACE(seed);
  Rng rng(seed);
  for (int round = 0; round < 300; ++round) {
    const auto plan = JointPlan::create(random_hosts(rng));
    if (!plan) continue;
    for (std::uint32_t host = 0; host < plan->host_count(); ++host) {
      const auto packed = pack_layout(plan->tensors(), plan->boxes(host), 1 << 20);
      ASSERT_TRUE(packed) << packed.error().message();
      EXPECT_EQ(packed->layout.boxes(), plan->boxes(host));
    }
  }
}

}  // namespace
}  // namespace rekindle
