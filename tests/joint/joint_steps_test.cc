#include <algorithm>
#include <chrono>
#include <optional>
#include <random>
#include <set>

#include <gtest/gtest.h>

#include "recovery/joint/joint_lead.h"
#include "recovery/joint/local_ranks.h"
#include "recovery/joint/tile_finisher.h"
#include "tests/joint/joint_sample.h"
#include "tests/support/effort.h"
#include "tests/support/numbered_digest.h"

// Joint publications of simulated hosts: the real lead, finishers and ranks, and in place of the
// agents' coroutines a random order of their steps. Nothing here asks the code under test for the
// expected result: the leaves are BLAKE3 digests of bytes that the test has cut itself.
namespace rekindle::joint {
namespace {

using namespace std::chrono_literals;
using test::below;
using test::code_of;
using test::kId;
using test::Rng;
using test::WholeTensor;

enum class Fault {
  kNone,
  kSilentHost,    // a host stops for ever
  kDesertedHost,  // all ranks of a host die before they commit, and do not come back
  kOtherBytes,    // one host has other bytes in one tensor
};

// What the ranks have.
struct Checkpointed {
  std::vector<WholeTensor> tensors;  // sorted by name
  std::vector<JointHost> declared;   // by host
};

void cut_one(Rng& rng, std::vector<Box>& boxes) {
  Box& box = boxes[below(rng, boxes.size())];
  if (box.rank() == 0) return;
  const std::size_t axis = below(rng, box.rank());
  if (box.extent[axis] < 2) return;
  Box rest = box;
  box.extent[axis] = 1 + below(rng, box.extent[axis] - 1);
  rest.offset[axis] += box.extent[axis];
  rest.extent[axis] -= box.extent[axis];
  boxes.push_back(rest);
}

Digest root_of(const std::vector<WholeTensor>& tensors) {
  std::vector<TensorInfo> infos;
  for (const WholeTensor& tensor : tensors) infos.push_back(tensor.info);
  const TensorSet set = must(TensorSet::create(infos));
  const TileMap tiles = must(TileMap::create(set));
  std::vector<Digest> leaves;
  for (TileIndex tile = 0; tile < tiles.tile_count(); ++tile) {
    leaves.push_back(tensors[tiles.tensor_of(tile)].leaf(tiles.tile_box(tile)));
  }
  return checkpoint_root(kId, set, tiles, leaves);
}

// Gives each box of one or two random cuts of a tensor to a random rank that has nothing there.
void share_out(Rng& rng, const TensorInfo& info, std::vector<Declaration*>& ranks) {
  for (Declaration* rank : ranks) rank->tensors.push_back({info, {}});
  for (std::uint64_t copies = 1 + below(rng, 2), copy = 0; copy < copies; ++copy) {
    std::vector<Box> boxes{Box::whole(info.shape)};
    for (std::uint64_t cuts = below(rng, 6); cuts > 0; --cuts) cut_one(rng, boxes);
    for (const Box& box : boxes) {
      const auto is_free = [&](const Declaration* rank) {
        return std::ranges::none_of(rank->tensors.back().boxes, [&](const Box& other) {
          return intersect(box, other).has_value();
        });
      };
      std::vector<Declaration*> free;
      std::ranges::copy_if(ranks, std::back_inserter(free), is_free);
      if (free.empty()) continue;  // only of the second copy
      free[below(rng, free.size())]->tensors.back().boxes.push_back(box);
    }
  }
  // Some ranks do not know the tensor.
  for (Declaration* rank : ranks) {
    if (rank->tensors.back().boxes.empty() && below(rng, 2) == 0) rank->tensors.pop_back();
  }
}

Checkpointed random_checkpoint(Rng& rng) {
  Checkpointed made;
  std::uint32_t number = 0;
  for (std::uint64_t host = 0, count = 1 + below(rng, 4); host < count; ++host) {
    made.declared.push_back({"host-" + std::to_string(host), {}});
    for (std::uint64_t i = 1 + below(rng, 3); i > 0; --i) {
      made.declared.back().ranks.push_back({number++, {}});
    }
  }
  std::vector<Declaration*> ranks;
  for (JointHost& host : made.declared) {
    for (Declaration& rank : host.ranks) ranks.push_back(&rank);
  }
  for (std::uint64_t i = 0, count = 1 + below(rng, 4); i < count; ++i) {
    // The first shape has several tiles.
    const Shape shape = below(rng, 4) == 0 ? Shape{20 + below(rng, 20), 1024}
                                           : rekindle::test::random_shape(rng, 3, 40);
    constexpr DType kTypes[] = {DType::kU8, DType::kBF16, DType::kF32};
    made.tensors.push_back(
        test::random_tensor(rng, "w" + std::to_string(i), kTypes[below(rng, 3)], shape));
    share_out(rng, made.tensors.back().info, ranks);
  }
  return made;
}

// One agent, its ranks and its steps. A host is its place in the roster.
struct Host {
  Host(const JointHost& from, std::uint32_t world) : ranks(kId, world) {
    for (const Declaration& rank : from.ranks) {
      numbers.push_back(rank.rank);
      owners.push_back(0);
    }
  }

  std::vector<std::uint32_t> numbers;
  std::vector<std::uint64_t> owners;  // the last process of each rank
  LocalRanks ranks;
  bool stopped = false;
  std::string page_bytes;  // the serialized declarations, when they are sealed
  std::uint64_t page_offset = 0;
  bool has_plan = false;
  std::vector<TileIndex> whole;   // leaves still to be sent, in any order
  std::vector<TileIndex> shared;  // pieces still to be sent, the next one at the back
  std::unique_ptr<TileFinisher> finisher;
  bool sent_layout = false;
  bool confirmed = false;
};

class JointWorld {
 public:
  JointWorld(std::uint64_t seed, Fault fault)
      : rng_(seed), fault_(fault), made_(random_checkpoint(rng_)) {
    std::vector<JointLead::Host> roster;
    std::uint32_t world = 0;
    for (const JointHost& host : made_.declared) {
      world += static_cast<std::uint32_t>(host.ranks.size());
    }
    for (const JointHost& host : made_.declared) {
      hosts_.push_back(std::make_unique<Host>(host, world));
      roster.push_back({host.name, hosts_.back()->numbers});
    }
    world_ = world;
    victim_ = static_cast<std::uint32_t>(below(rng_, hosts_.size()));
    fault_at_ = below(rng_, 60 * hosts_.size());
    wrong_tensor_ = below(rng_, made_.tensors.size());
    lead_.emplace(kId, std::move(roster), now_);
    std::vector<WholeTensor> published = made_.tensors;
    if (fault_ == Fault::kOtherBytes) spoil(published[wrong_tensor_]);
    root_ = root_of(published);
  }

  // Runs until the publication is complete or ended. False: it hangs, or an invariant is broken.
  bool run() {
    for (int step = 0; step < 200'000; ++step) {
      if (fault_ == Fault::kSilentHost && static_cast<std::uint64_t>(step) >= fault_at_) {
        hosts_[victim_]->stopped = true;
      }
      pass_time();
      const auto host = static_cast<std::uint32_t>(below(rng_, hosts_.size()));
      if (!hosts_[host]->stopped) take_step(host);
      if (lead_->phase() == Phase::kClaiming && below(rng_, 4) == 0) claim();
      check();
      if (::testing::Test::HasFailure()) return false;
      if (lead_->phase() == Phase::kComplete || lead_->phase() == Phase::kEnded) return true;
    }
    ADD_FAILURE() << "it hangs in phase " << static_cast<int>(lead_->phase());
    return false;
  }

  void expect_a_right_end() const {
    if (lead_->phase() == Phase::kComplete) {
      EXPECT_FALSE(lead_->why());
      EXPECT_EQ(lead_->root(), root_);
      EXPECT_NE(fault_, Fault::kDesertedHost);
      EXPECT_FALSE(contradicts_);
      if (fault_ == Fault::kSilentHost && hosts_[victim_]->stopped) {
        EXPECT_TRUE(hosts_[victim_]->confirmed);
      }
      return;
    }
    ASSERT_TRUE(lead_->why());
    const Error& why = *lead_->why();
    SCOPED_TRACE(why.message());
    const auto says = [&](const std::string& words) {
      return why.message().find(words) != std::string::npos;
    };
    switch (fault_) {
      case Fault::kNone:
        ADD_FAILURE() << "it ended without a fault";
        break;
      case Fault::kSilentHost:
        EXPECT_EQ(why.code(), ErrorCode::kPeerLost);
        EXPECT_TRUE(says("host-" + std::to_string(victim_) + " (rank"));
        for (std::uint32_t host = 0; host < hosts_.size(); ++host) {
          EXPECT_EQ(says("host-" + std::to_string(host) + " "), host == victim_);
        }
        break;
      case Fault::kDesertedHost:
        EXPECT_EQ(why.message(), "deserted");
        break;
      case Fault::kOtherBytes:
        EXPECT_EQ(why.code(), ErrorCode::kInvalid);
        EXPECT_TRUE(says("'" + made_.tensors[wrong_tensor_].info.name + "'"));
        EXPECT_TRUE(says("host-" + std::to_string(victim_) + " "));
        EXPECT_TRUE(contradicts_) << "no other host has these elements";
        break;
    }
  }

  bool complete() const { return lead_->phase() == Phase::kComplete; }

 private:
  bool maybe(std::uint64_t one_of) { return below(rng_, one_of) == 0; }

  void pass_time() {
    now_ += std::chrono::milliseconds(below(rng_, 300));
    if (maybe(500)) {  // the lead's process was stopped
      lead_->forgive(1min);
      now_ += 1min;
    }
    for (std::uint32_t host = 0; host < hosts_.size(); ++host) {
      if (!hosts_[host]->stopped) lead_->heard(host, now_);
    }
    lead_->advance(now_);
  }

  void take_step(std::uint32_t index) {
    Host& host = *hosts_[index];
    if (host.page_bytes.empty() || !host.ranks.unfilled(host.numbers).empty()) {
      move_a_rank(index);
    } else if (maybe(10)) {
      expect_that_ranks_cannot_restart(host);
    }
    if (host.page_bytes.empty()) return declare(index);
    if (host.page_offset < host.page_bytes.size()) return send_page(index);
    if (lead_->phase() == Phase::kDeclaring || lead_->phase() == Phase::kEnded) return;
    if (!host.has_plan) return read_plan(index);
    if (plan_ == nullptr || !host.ranks.unfilled(host.numbers).empty()) return;
    if (!host.whole.empty() && maybe(2)) return send_leaves(index);
    if (!host.shared.empty()) return send_pieces(index);
    finish(index);
    if (maybe(3)) try_confirm(index);
  }

  // Ranks start, die, come back and commit.
  void move_a_rank(std::uint32_t index) {
    Host& host = *hosts_[index];
    const std::size_t at = below(rng_, host.numbers.size());
    const std::uint32_t rank = host.numbers[at];
    const bool sealed = !host.page_bytes.empty();
    const bool filled = host.ranks.unfilled(std::vector{rank}).empty();
    const bool deserts = fault_ == Fault::kDesertedHost && index == victim_ && sealed;
    if (filled) return;
    if (!host.ranks.owns(rank, host.owners[at])) {
      if (deserts) {
        if (host.ranks.deserted()) lead_->end({ErrorCode::kPeerLost, "deserted"});
        return;
      }
      start(host, at, made_.declared[index].ranks[at]);
    } else if (deserts || maybe(6)) {
      host.ranks.leave(rank, host.owners[at]);
      EXPECT_FALSE(host.ranks.owns(rank, host.owners[at]));
    } else if (maybe(6)) {  // something that its last process has sent
      host.ranks.leave(rank, host.owners[at] + 1'000'000);
      EXPECT_TRUE(host.ranks.owns(rank, host.owners[at]));
      EXPECT_EQ(code_of(host.ranks.declare(world_, {rank, {}}, ++last_owner_)), ErrorCode::kDenied);
    } else if (host.has_plan && maybe(2)) {
      fill(host, at);
    }
  }

  void start(Host& host, std::size_t at, const Declaration& declaration) {
    const bool sealed = !host.page_bytes.empty();
    if (sealed && maybe(4)) {
      Declaration other = declaration;
      other.tensors.push_back({{"zzz", DType::kU8, {1}}, {}});
      EXPECT_EQ(code_of(host.ranks.declare(world_, other, ++last_owner_)), ErrorCode::kDenied);
    }
    host.owners[at] = ++last_owner_;
    EXPECT_EQ(code_of(host.ranks.declare(world_, declaration, host.owners[at])), std::nullopt);
  }

  void fill(Host& host, std::size_t at) {
    const std::uint32_t rank = host.numbers[at];
    auto packed = must(pack_layout(plan_->tensors(), plan_->writes(rank), 1 << 20));
    const store::FilledSegments filled{plan_->tensors(), packed, {}};
    EXPECT_EQ(code_of(host.ranks.fill(rank, ++last_owner_, filled)), ErrorCode::kStale);
    EXPECT_EQ(code_of(host.ranks.fill(rank, host.owners[at], filled)), std::nullopt);
    EXPECT_EQ(code_of(host.ranks.fill(rank, host.owners[at], filled)), ErrorCode::kStale);
  }

  void expect_that_ranks_cannot_restart(Host& host) {
    const std::size_t at = below(rng_, host.numbers.size());
    host.ranks.leave(host.numbers[at], host.owners[at]);
    EXPECT_EQ(code_of(host.ranks.declare(world_, {host.numbers[at], {}}, ++last_owner_)),
              ErrorCode::kDenied);
    EXPECT_TRUE(host.ranks.unfilled(host.numbers).empty());
  }

  // The roster is complete when all ranks of all hosts are present at the same time.
  void declare(std::uint32_t index) {
    Host& host = *hosts_[index];
    if (!roster_complete_) {
      roster_complete_ = std::ranges::all_of(
          hosts_, [](const auto& one) { return one->ranks.present() == one->numbers; });
      if (!roster_complete_) return;
    }
    host.ranks.seal(host.numbers);
    auto declarations = must(host.ranks.declarations(host.numbers));
    EXPECT_EQ(declarations, made_.declared[index].ranks);
    host.page_bytes = serialize_declarations({made_.declared[index].name, declarations});
  }

  void send_page(std::uint32_t index) {
    Host& host = *hosts_[index];
    const std::string page = host.page_bytes.substr(host.page_offset, 1 + below(rng_, 600));
    for (std::uint64_t times = 1 + below(rng_, 2); times > 0; --times) {
      EXPECT_EQ(
          code_of(lead_->put_declarations(index, host.page_offset, host.page_bytes.size(), page)),
          std::nullopt);
    }
    host.page_offset += page.size();
    if (maybe(10)) {
      EXPECT_EQ(code_of(lead_->put_leaves(index, {}, {})), ErrorCode::kUnavailable);
    }
  }

  void read_plan(std::uint32_t index) {
    Host& host = *hosts_[index];
    if (plan_ == nullptr) {
      std::vector<JointHost> table;
      for (std::uint32_t i = 0; i < hosts_.size(); ++i) {
        table.push_back(must(parse_declarations(lead_->declarations(i))));
      }
      plan_ = std::make_shared<const JointPlan>(must(JointPlan::create(std::move(table))));
      lead_->set_plan(plan_, layouts());
    }
    JointPlan::HostTiles tiles = plan_->tiles_of(index);
    host.finisher = std::make_unique<TileFinisher>(kId, plan_, std::move(tiles.finished));
    host.whole = std::move(tiles.whole);
    std::ranges::shuffle(host.whole, rng_);
    host.shared = std::move(tiles.shared);
    std::ranges::reverse(host.shared);
    host.has_plan = true;
  }

  std::vector<std::optional<Digest>> layouts() const {
    std::vector<std::optional<Digest>> layouts(hosts_.size());
    for (std::uint32_t i = 0; i < hosts_.size(); ++i) {
      if (!plan_->boxes(i).empty()) layouts[i] = rekindle::test::numbered_digest(i + 1);
    }
    return layouts;
  }

  std::vector<Box> boxes_at(std::uint32_t index, const std::string& name) const {
    std::vector<Box> boxes;
    for (const Declaration& rank : made_.declared[index].ranks) {
      for (const DeclaredTensor& tensor : rank.tensors) {
        if (tensor.info.name != name) continue;
        boxes.insert(boxes.end(), tensor.boxes.begin(), tensor.boxes.end());
      }
    }
    return boxes;
  }

  // Changes all that the victim has of the tensor.
  void spoil(WholeTensor& tensor) {
    const Box whole = Box::whole(tensor.info.shape);
    const std::uint64_t size = tensor.element_bytes();
    const std::vector<std::byte> right = tensor.bytes;
    const std::vector<Box> spoiled = boxes_at(victim_, tensor.info.name);
    for (const Box& box : spoiled) {
      rekindle::test::for_each_element(box, [&](const Dims& at) {
        const std::uint64_t first = rekindle::test::index_in(whole, at) * size;
        for (std::uint64_t i = first; i < first + size; ++i) {
          tensor.bytes[i] = right[i] ^ std::byte{0x10};
        }
      });
    }
    for (std::uint32_t host = 0; host < hosts_.size(); ++host) {
      if (host == victim_) continue;
      for (const Box& box : boxes_at(host, tensor.info.name)) {
        const auto meets = [&](const Box& other) { return intersect(box, other).has_value(); };
        if (std::ranges::any_of(spoiled, meets)) contradicts_ = true;
      }
    }
  }

  // What the host has of the tensor. The rest is not looked at.
  WholeTensor bytes_at(std::uint32_t index, TensorIndex tensor) const {
    WholeTensor whole = made_.tensors[tensor];
    if (fault_ == Fault::kOtherBytes && index == victim_ && tensor == wrong_tensor_) {
      for (std::byte& byte : whole.bytes) byte ^= std::byte{0x10};
    }
    return whole;
  }

  void send_leaves(std::uint32_t index) {
    Host& host = *hosts_[index];
    std::vector<std::pair<TileIndex, TileIndex>> runs;
    std::vector<Digest> leaves;
    for (std::uint64_t count = 1 + below(rng_, 5); count > 0 && !host.whole.empty(); --count) {
      const TileIndex tile = host.whole.back();
      host.whole.pop_back();
      runs.emplace_back(tile, tile + 1);
      leaves.push_back(
          bytes_at(index, plan_->tiles().tensor_of(tile)).leaf(plan_->tiles().tile_box(tile)));
    }
    put_leaves(index, runs, leaves);
  }

  void put_leaves(std::uint32_t index, const std::vector<std::pair<TileIndex, TileIndex>>& runs,
                  const std::vector<Digest>& leaves) {
    for (std::uint64_t times = 1 + below(rng_, 2); times > 0; --times) {
      EXPECT_EQ(code_of(lead_->put_leaves(index, runs, leaves)), std::nullopt);
    }
    for (const auto& [first, past] : runs) leaf_sent_.insert(first);
  }

  void send_pieces(std::uint32_t index) {
    Host& host = *hosts_[index];
    const TileIndex tile = host.shared.back();
    Host& to = *hosts_[plan_->finisher(tile)];
    if (to.stopped || to.finisher == nullptr || !to.finisher->has_room_for(tile)) return;
    const std::string pieces =
        test::pieces_of(*plan_, index, tile, bytes_at(index, plan_->tiles().tensor_of(tile)));
    for (std::uint64_t times = 1 + below(rng_, 2); times > 0; --times) {
      const auto added = to.finisher->add(index, tile, pieces);
      if (added) continue;
      lead_->end(added.error());  // as the finisher's agent does
      return;
    }
    host.shared.pop_back();
  }

  void finish(std::uint32_t index) {
    Host& host = *hosts_[index];
    std::vector<std::pair<TileIndex, TileIndex>> runs;
    std::vector<Digest> leaves;
    for (const auto& [tile, leaf] : test::take_leaves(*host.finisher)) {
      runs.emplace_back(tile, tile + 1);
      leaves.push_back(leaf);
    }
    put_leaves(index, runs, leaves);
    if (!host.finisher->complete() || !host.whole.empty() || lead_->phase() == Phase::kEnded)
      return;
    EXPECT_EQ(code_of(lead_->put_layout(index, layouts()[index])), std::nullopt);
    host.sent_layout = true;
  }

  void claim() {
    std::vector<Digest> expected;
    for (std::uint32_t i = 0; i < hosts_.size(); ++i) {
      const auto has_elements = [](const Declaration& rank) {
        return std::ranges::any_of(rank.tensors,
                                   [](const DeclaredTensor& one) { return !one.boxes.empty(); });
      };
      if (std::ranges::any_of(made_.declared[i].ranks, has_elements)) {
        expected.push_back(rekindle::test::numbered_digest(i + 1));
      }
    }
    EXPECT_EQ(lead_->layouts(), expected);
    const Digest root = checkpoint_root(kId, plan_->tensors(), plan_->tiles(), lead_->leaves());
    EXPECT_EQ(root, root_);
    lead_->claimed(root);
    claimed_ = true;
  }

  void try_confirm(std::uint32_t index) {
    const bool may = lead_->phase() == Phase::kCommitting || lead_->phase() == Phase::kComplete;
    EXPECT_EQ(code_of(lead_->confirm(index)),
              may ? std::nullopt : std::optional(ErrorCode::kInvalid));
    if (may) hosts_[index]->confirmed = true;
  }

  // What must hold after every step.
  void check() {
    const Phase phase = lead_->phase();
    EXPECT_GE(phase, phase_) << "phases do not go back";
    phase_ = phase;
    EXPECT_EQ(phase == Phase::kEnded, lead_->why().has_value());
    if (phase == Phase::kDeclaring || phase == Phase::kEnded) return;
    for (const auto& host : hosts_) EXPECT_EQ(host->page_offset, host->page_bytes.size());
    if (phase == Phase::kWriting) return;
    EXPECT_EQ(leaf_sent_.size(), plan_->tiles().tile_count());
    for (const auto& host : hosts_) {
      EXPECT_TRUE(host->sent_layout);
      EXPECT_TRUE(host->ranks.unfilled(host->numbers).empty());
    }
    EXPECT_EQ(phase != Phase::kClaiming, claimed_);
    EXPECT_EQ(phase == Phase::kComplete,
              std::ranges::all_of(hosts_, [](const auto& host) { return host->confirmed; }))
        << "complete, and some host has not confirmed";
  }

  Rng rng_;
  const Fault fault_;
  const Checkpointed made_;
  std::uint32_t world_ = 0;
  std::vector<std::unique_ptr<Host>> hosts_;
  std::optional<JointLead> lead_;
  std::shared_ptr<const JointPlan> plan_;
  TimePoint now_{1h};
  Phase phase_ = Phase::kDeclaring;
  bool roster_complete_ = false;
  bool claimed_ = false;
  std::set<TileIndex> leaf_sent_;
  std::uint64_t last_owner_ = 0;
  std::uint32_t victim_ = 0;
  std::uint64_t fault_at_ = 0;
  std::size_t wrong_tensor_ = 0;
  Digest root_;               // that a complete publication has
  bool contradicts_ = false;  // another host has elements that the victim has changed
};

// Returns how many of the publications were complete.
int run_worlds(Fault fault, std::uint64_t count) {
  const std::uint64_t first = std::random_device{}();
  int complete = 0;
  for (std::uint64_t seed = first; seed < first + testing::effort(count); ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    JointWorld world(seed, fault);
    if (!world.run()) break;
    world.expect_a_right_end();
    if (::testing::Test::HasFailure()) break;
    if (world.complete()) ++complete;
  }
  return complete;
}

TEST(JointSteps, WithoutAFaultEveryPublicationIsComplete) {
  EXPECT_EQ(run_worlds(Fault::kNone, 200), static_cast<int>(testing::effort(200)));
}

TEST(JointSteps, ASilentHostEndsThePublicationUnlessItHasConfirmed) {
  EXPECT_LT(run_worlds(Fault::kSilentHost, 200), static_cast<int>(testing::effort(200)));
}

TEST(JointSteps, AHostWithoutRanksEndsThePublication) {
  EXPECT_EQ(run_worlds(Fault::kDesertedHost, 100), 0);
}

// Bytes that no other host has cannot be told from right ones.
TEST(JointSteps, OtherBytesOfAReplicaEndThePublication) {
  EXPECT_LT(run_worlds(Fault::kOtherBytes, 200), static_cast<int>(testing::effort(200)));
}

}  // namespace
}  // namespace rekindle::joint
