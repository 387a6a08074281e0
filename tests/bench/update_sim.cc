// An update of a trainer's new weights to every GPU of an inference fleet, in virtual time: the
// plans, the coordinator's core and its rounds are the product's; links and latencies are a model
// (docs/reference/performance.md). Prints its seconds beside those of the links alone:
//   update_sim [--OPTION VALUE]... [--assert]
// An unknown option prints the list. --assert: exits with 1 if the model contradicts the plans.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <fmt/format.h>

#include "recovery/coordinator/round_wire.h"
#include "recovery/joint/host_copy.h"
#include "recovery/planner/shard_spec.h"
#include "recovery/planner/slice_plan.h"
#include "recovery/pull/first_tiles.h"
#include "src/base/units.h"
#include "src/bucket/contents.h"
#include "src/bucket/round_plan.h"
#include "src/store/segment_store.h"
#include "src/tensor/joint_plan.h"
#include "tests/bench/spread_model.h"
#include "tests/planner/model_tensors.h"
#include "tests/recovery/coordinator_fixture.h"

namespace rekindle::bench {
namespace {

using namespace std::chrono_literals;
using coordinator::PartyOrder;
using coordinator::RoundMember;
using coordinator::RoundMemberState;

template <typename T>
T check(Result<T> result) {
  if (result) return std::move(*result);
  fmt::print(stderr, "update_sim: {}\n", result.error().message());
  std::exit(1);
}
void check(const Result<void>& result) {
  if (result) return;
  fmt::print(stderr, "update_sim: {}\n", result.error().message());
  std::exit(1);
}

// CPU seconds of this thread: what one core needs, also where others use the machine.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// The CPU time of calls, all together and of the longest one.
class Timed {
 public:
  template <typename Call>
  auto operator()(Call call) {
    const double begin = cpu_seconds();
    auto result = call();
    const double took = cpu_seconds() - begin;
    total_ += took;
    longest_ = std::max(longest_, took);
    ++count_;
    return result;
  }
  double total() const { return total_; }
  double longest() const { return longest_; }
  double mean() const { return count_ == 0 ? 0 : total_ / count_; }
  int count() const { return count_; }

 private:
  double total_ = 0;
  double longest_ = 0;
  int count_ = 0;
};

class Options {
 public:
  Options(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string name = argv[i];
      if (name == "--assert") {
        asserts = true;
      } else if (values_.contains(name) && i + 1 < argc) {
        values_[name] = std::atof(argv[++i]);
      } else {
        for (const auto& [option, value] : values_) fmt::print(stderr, "{} {}\n", option, value);
        std::exit(2);
      }
    }
  }
  double operator[](const std::string& name) const { return values_.at("--" + name); }
  std::uint32_t count(const std::string& name) const {
    return static_cast<std::uint32_t>((*this)[name]);
  }

  bool asserts = false;

 private:
  std::map<std::string, double> values_{
      {"--layers", 61},       {"--trainer-hosts", 32}, {"--trainer-ranks", 256},
      {"--hosts", 16},        {"--gpus", 8},           {"--tp", 8},
      {"--nics", 8},          {"--nic-gb", 50},        {"--pcie-gb", 50},
      {"--keep-gb", 8},       {"--fetch-gb", 400},     {"--verify-gb", 1000},
      {"--bucket-mib", 256},  {"--slots", 3},          {"--rtt-ms", 1},
      {"--connect-ms", 20},   {"--spread-us", 100},    {"--release-us", 500},
      {"--fetched-us", 2000}, {"--plan-threads", 8}};
};

// The new version, and the layouts of the trainer's hosts that make it up.
struct Trained {
  std::string config;
  std::shared_ptr<const Checkpoint> checkpoint;
  std::vector<Layout> parts;
  std::size_t boxes = 0;
  // What an agent does with the metadata of a new version.
  Timed parse;
};

// "…mlp.experts.17.up_proj.weight": 17.
std::optional<std::uint64_t> expert_of(std::string_view name) {
  constexpr std::string_view kMark = ".experts.";
  const auto at = name.find(kMark);
  if (at == std::string_view::npos) return std::nullopt;
  return std::strtoull(name.data() + at + kMark.size(), nullptr, 10);
}

// FSDP cuts dimension 0 evenly. The experts of a layer are one stack for it.
std::optional<Box> fsdp_box(const TensorInfo& info, std::uint64_t experts, std::uint32_t rank,
                            std::uint32_t world) {
  const auto expert = expert_of(info.name);
  const std::uint64_t rows = info.shape[0];
  const std::uint64_t stack = expert ? rows * experts : rows;
  const std::uint64_t each = (stack + world - 1) / world;
  const std::uint64_t first = expert.value_or(0) * rows;
  const std::uint64_t begin = std::max(first, std::min(stack, rank * each));
  const std::uint64_t end = std::min(first + rows, (rank + 1) * each);
  if (begin >= end) return std::nullopt;
  Box box = Box::whole(info.shape);
  box.offset[0] = begin - first;
  box.extent[0] = end - begin;
  return box;
}

JointHost declare(const TensorSet& tensors, std::uint64_t experts, std::uint32_t host,
                  const Options& options) {
  const std::uint32_t world = options.count("trainer-ranks");
  const std::uint32_t per_host = world / options.count("trainer-hosts");
  JointHost result{fmt::format("trainer-{:02}", host), {}};
  for (std::uint32_t rank = host * per_host; rank < (host + 1) * per_host; ++rank) {
    Declaration declaration{rank, {}};
    for (const TensorInfo& info : tensors.tensors()) {
      if (const auto box = fsdp_box(info, experts, rank, world)) {
        declaration.tensors.push_back({info, {*box}});
      }
    }
    result.ranks.push_back(std::move(declaration));
  }
  return result;
}

Trained train(const Options& options) {
  Trained result;
  result.config = planner::testing::kimi_k2_config();
  const std::string layers = "\"num_hidden_layers\": 61";
  result.config.replace(result.config.find(layers), layers.size(),
                        fmt::format("\"num_hidden_layers\": {}", options.count("layers")));
  TensorSet tensors = check(TensorSet::create(planner::testing::model_tensors(result.config)));
  std::uint64_t experts = 1;
  for (const TensorInfo& info : tensors.tensors()) {
    if (const auto expert = expert_of(info.name)) experts = std::max(experts, *expert + 1);
  }
  std::vector<JointHost> hosts;
  for (std::uint32_t host = 0; host < options.count("trainer-hosts"); ++host) {
    hosts.push_back(declare(tensors, experts, host, options));
    for (const Declaration& rank : hosts.back().ranks) result.boxes += rank.tensors.size();
  }
  const JointPlan plan = check(JointPlan::create(std::move(hosts)));
  for (std::uint32_t host = 0; host < plan.host_count(); ++host) {
    auto layout = check(joint::layout_of_host(plan, host));
    if (layout) result.parts.push_back(std::move(*layout));
  }
  std::vector<Digest> leaves(plan.tiles().tile_count());
  for (std::size_t i = 0; i < leaves.size(); ++i) std::memcpy(leaves[i].bytes.data(), &i, sizeof i);
  const ModelVersion id{"kimi-k2", 2};
  const Digest root = checkpoint_root(id, tensors, plan.tiles(), leaves);
  const std::string bytes = tensors.serialize();
  result.checkpoint = check(result.parse([&]() -> Result<std::shared_ptr<const Checkpoint>> {
    TRY(TensorSet parsed, TensorSet::parse(bytes));
    return Checkpoint::create(id, std::move(parsed), leaves, root);
  }));
  return result;
}

// What all workers of one tensor-parallel rank want, the same in each instance.
struct Shard {
  PackedLayout packed;
  std::optional<bucket::Contents> contents;
  Digest digest;
};
struct Shards {
  std::vector<Shard> ranks;
  Timed wanted;
  Timed attach;
};

Shards shard(const Trained& trained, std::uint32_t tp) {
  Shards result;
  const TensorSet& tensors = trained.checkpoint->tensors;
  const auto spec = check(planner::ShardSpec::builtin(trained.config));
  const std::string set = tensors.serialize();
  for (std::uint32_t rank = 0; rank < tp; ++rank) {
    PackedLayout packed = check(result.wanted([&]() -> Result<PackedLayout> {
      TRY(const auto boxes, spec.boxes(tensors, trained.config, {{rank, tp}, {}, {}}));
      return pack_layout(tensors, boxes, store::kMaxSegmentBytes);
    }));
    const std::string layout = packed.layout.serialize();
    std::vector<std::uint64_t> sizes;
    for (const SegmentSpec& segment : packed.layout.segments()) sizes.push_back(segment.size_bytes);
    Shard& one = result.ranks.emplace_back(Shard{std::move(packed), std::nullopt, {}});
    one.digest = result.attach([&] {
      one.contents.emplace(check(bucket::Contents::create(set, layout, {}, sizes)));
      return bucket::digest_of(*one.contents);
    });
  }
  return result;
}

// The coordinator's core, the trainers that hold the version, and the hosts that want it.
class Fleet {
 public:
  struct Seat {
    std::uint32_t host = 0;
    std::uint32_t shard = 0;
  };
  struct Party {
    std::vector<Seat> ranks;
    std::vector<std::uint32_t> owners;
    std::uint64_t bucket_bytes = 0;
  };

  Fleet(const Options& options, const Trained& trained, const Shards& shards)
      : options_(options), trained_(trained), shards_(shards) {
    publish();
    add_hosts();
    std::vector<coordinator::NodeInfo> all = trainers_;
    all.insert(all.end(), hosts_.begin(), hosts_.end());
    // Beyond the grace of a coordinator that has just started.
    world_.pass(3s, all);
    say_all();
  }

  coordinator::UpdatePlan dry_run() {
    return check(world_.core->plan_update(trained_.checkpoint->id, "g", world_.now));
  }
  // A round up to the order to spread.
  std::vector<Party> update() {
    round_ = check(core_(
        [&] { return world_.core->begin_update(trained_.checkpoint->id, "g", {}, world_.now); }));
    count_orders();
    each_member([&](RoundMember& member) {
      member.id = trained_.checkpoint->id;
      member.state = RoundMemberState::kJoined;
      member.round = round_;
      member.root = trained_.checkpoint->root;
      member.bucket_bytes = static_cast<std::uint64_t>(options_["bucket-mib"]) * kMiB;
      member.fetches = true;
    });
    say_all();
    count_orders();
    bring_ids();
    count_orders();
    return parties();
  }
  // One pull for each rank's copy. Returns the number of sources that each is offered.
  std::vector<std::size_t> open_pulls() {
    std::vector<std::size_t> offered;
    for (std::uint32_t host = 0; host < hosts_.size(); ++host) {
      for (std::size_t i = 0; i < reports_[host].members.size(); ++i) {
        const std::string shard =
            fmt::format("tp={}/{}", reports_[host].members[i].rank, shards_.ranks.size());
        const auto opened = check(
            core_([&] { return world_.open(hosts_[host], "kimi-k2", std::uint64_t{2}, shard); }));
        std::set<Digest> parts;
        for (const auto& source : opened.sources) parts.insert(source.layout);
        offered.push_back(parts.size());
      }
    }
    return offered;
  }

  const Timed& core() const { return core_; }
  std::size_t order_bytes() const { return order_bytes_; }

 private:
  void publish() {
    const Checkpoint& checkpoint = *trained_.checkpoint;
    std::vector<Digest> layouts;
    for (const Layout& part : trained_.parts) layouts.push_back(part.digest());
    check(world_.core->publish("", {}, checkpoint.id, checkpoint.root, checkpoint.tensors.digest(),
                               checkpoint.tensors.total_bytes(), world_.now, {}, layouts));
    for (std::size_t i = 0; i < trained_.parts.size(); ++i) {
      trainers_.push_back(world_.node(fmt::format("trainer-{:02}", i)));
      check(world_.enroll(trainers_.back()));
      coordinator::Holding holding;
      holding.id = checkpoint.id;
      holding.root = checkpoint.root;
      holding.tensor_set = checkpoint.tensors.digest();
      holding.layout = layouts[i];
      holding.payload_bytes = trained_.parts[i].payload_bytes();
      holding.checkpoint_bytes = checkpoint.tensors.total_bytes();
      holding.complete = holding.verified = true;
      holding.checkpoint_tiles = checkpoint.tiles.tile_count();
      check(world_.announce(trainers_.back(), {holding}));
    }
  }
  // Instances fill hosts one after the other. All serve the version before.
  void add_hosts() {
    const std::uint32_t gpus = options_.count("gpus");
    const auto tp = static_cast<std::uint32_t>(shards_.ranks.size());
    for (std::uint32_t host = 0; host < options_.count("hosts"); ++host) {
      hosts_.push_back(world_.node(fmt::format("inference-{:02}", host)));
      check(world_.enroll(hosts_.back()));
      coordinator::RoundReport& report = reports_.emplace_back();
      report.node_id = hosts_.back().node_id;
      report.incarnation = hosts_.back().incarnation;
      report.device_life = "device process of " + report.node_id;
      for (std::uint32_t gpu = 0; gpu < gpus; ++gpu) {
        const std::uint32_t place = host * gpus + gpu;
        RoundMember& member = report.members.emplace_back();
        member.session = place + 1;
        member.group = "g";
        member.instance = fmt::format("instance-{}", place / tp);
        member.rank = place % tp;
        member.id = {"kimi-k2", 1};
        member.device = fmt::format("GPU-{}", place);
        member.contents = shards_.ranks[member.rank].digest;
        member.payload_bytes = shards_.ranks[member.rank].contents->total_bytes();
        seats_[member.session] = {host, member.rank};
      }
    }
  }
  template <typename Change>
  void each_member(Change change) {
    for (auto& report : reports_) {
      for (RoundMember& member : report.members) change(member);
    }
  }
  void say_all() {
    for (auto& report : reports_) {
      ++report.sequence;
      check(core_([&] { return world_.core->report_round(report, world_.now); }));
    }
  }
  void count_orders() {
    for (const auto& host : hosts_) {
      const auto orders = core_([&] { return world_.core->rounds().orders_for(host.node_id); });
      order_bytes_ += coordinator::to_proto(orders).ByteSizeLong();
    }
  }
  // The device processes of first ranks make the ids of the communicators.
  void bring_ids() {
    for (auto& report : reports_) {
      for (const auto& order : world_.core->rounds().orders_for(report.node_id)) {
        for (const PartyOrder& party : order.parties) {
          if (party.make_id) report.ids.push_back({round_, party.party, "an id", ""});
        }
      }
    }
    say_all();
  }
  std::vector<Party> parties() {
    std::map<std::uint32_t, Party> found;
    for (const auto& host : hosts_) {
      for (const auto& order : world_.core->rounds().orders_for(host.node_id)) {
        for (const PartyOrder& party : order.parties) {
          Party& here = found[party.party];
          here.owners = party.owners;
          here.bucket_bytes = party.bucket_bytes;
          here.ranks.resize(party.ranks);
          for (const auto& place : party.members) {
            here.ranks[place.rank] = seats_.at(place.session);
          }
        }
      }
    }
    std::vector<Party> result;
    for (auto& [number, party] : found) result.push_back(std::move(party));
    return result;
  }

  const Options& options_;
  const Trained& trained_;
  const Shards& shards_;
  coordinator::testing::CoreWorld world_;
  std::vector<coordinator::NodeInfo> trainers_;
  std::vector<coordinator::NodeInfo> hosts_;
  std::vector<coordinator::RoundReport> reports_;
  // By session.
  std::map<std::uint64_t, Seat> seats_;
  coordinator::RoundId round_ = 0;
  Timed core_;
  std::size_t order_bytes_ = 0;
};

// A slice of a share's pull.
struct Read {
  std::size_t source = 0;
  double bytes = 0;
  // The first bucket of the share that needs it.
  std::size_t bucket = 0;
  // Bytes of the same pull before it.
  double before = 0;
  // Indices into the parties and their ranks.
  std::size_t party = 0;
  std::size_t rank = 0;
};

// The pulls of shares: what each host reads from which source, in which order.
struct Pulls {
  std::vector<std::vector<Read>> by_host;
  double wire_bytes = 0;
  double staged_bytes = 0;
  double range_bytes = 0;
  double share_bytes = 0;
  Timed plan;
};

class SharePull {
 public:
  SharePull(const Checkpoint& checkpoint, const bucket::Plan& share)
      : bucket_of_(checkpoint.tiles.tile_count(), static_cast<std::uint32_t>(share.size())) {
    TileSet wanted(checkpoint.tiles.tile_count());
    for (std::size_t bucket = share.size(); bucket-- > 0;) {
      for (const auto& [begin, end] : share.tiles(bucket)) {
        wanted.set_range(begin, end);
        std::fill(bucket_of_.begin() + begin, bucket_of_.begin() + end,
                  static_cast<std::uint32_t>(bucket));
      }
    }
    wanted_ = wanted.ranges();
  }

  // Plans as the agent does, and appends the reads in their order.
  void plan(const Checkpoint& checkpoint, const Layout& destination,
            std::span<const planner::SourceView> sources, Pulls& pulls, const Read& place,
            std::vector<Read>& out) const {
    std::vector<transport::SliceIndex> order;
    const auto plan = check(pulls.plan([&]() -> Result<std::unique_ptr<planner::Plan>> {
      const pull::FirstTiles first(checkpoint.tiles.tile_count(), std::span(&wanted_, 1));
      const TileSet have = first.all_but(std::nullopt);
      TRY(auto made, planner::plan_pull({&checkpoint, &destination, sources, &have}, {}));
      order = first.order(*made);
      return made;
    }));
    if (!plan->missing().empty()) {
      check(Result<void>(fail(ErrorCode::kInternal, "no source has {}",
                              planner::describe_missing(checkpoint, plan->missing(), 3))));
    }
    Read read = place;
    std::vector<TileIndex> tiles;
    for (const transport::SliceIndex slice : order) {
      read.source = plan->candidates(slice).next();
      read.bytes = static_cast<double>(plan->slice_bytes(slice));
      plan->tiles_read(slice, tiles);
      read.bucket = bucket_of_.size();
      for (const TileIndex tile : tiles) {
        read.bucket = std::min<std::size_t>(read.bucket, bucket_of_[tile]);
      }
      out.push_back(read);
      read.before += read.bytes;
      if (plan->kind(slice) == planner::SliceKind::kStaged) pulls.staged_bytes += read.bytes;
      if (plan->kind(slice) == planner::SliceKind::kRange) pulls.range_bytes += read.bytes;
    }
    pulls.wire_bytes += read.before;
  }

 private:
  // Of each tile: the first bucket of the share that needs it.
  std::vector<std::uint32_t> bucket_of_;
  TileRuns wanted_;
};

struct Rounds {
  std::vector<bucket::RoundPlan> plans;
  Timed plan;
};

Rounds plan_rounds(const Shards& shards, const std::vector<Fleet::Party>& parties) {
  Rounds result;
  for (const Fleet::Party& party : parties) {
    const bucket::Contents& contents = *shards.ranks[party.ranks.front().shard].contents;
    const auto owners = static_cast<std::uint32_t>(party.owners.size());
    result.plans.push_back(check(result.plan([&] {
      return bucket::RoundPlan::create(contents, bucket::share_out(contents.pieces(), owners),
                                       owners, party.bucket_bytes, bucket::kSealRoom);
    })));
  }
  return result;
}

Pulls plan_pulls(const Trained& trained, const Shards& shards,
                 const std::vector<Fleet::Party>& parties, const Rounds& rounds,
                 std::size_t hosts) {
  Pulls pulls;
  pulls.by_host.resize(hosts);
  std::vector<planner::SourceView> sources;
  for (const Layout& part : trained.parts) sources.push_back({&part, nullptr, false});
  for (std::size_t p = 0; p < parties.size(); ++p) {
    for (std::size_t share = 0; share < parties[p].owners.size(); ++share) {
      const std::size_t rank = parties[p].owners[share];
      const Fleet::Seat seat = parties[p].ranks[rank];
      const bucket::Plan& plan = rounds.plans[p].plan_of(static_cast<std::uint32_t>(share));
      pulls.share_bytes += static_cast<double>(plan.payload_bytes());
      Read place;
      place.party = p;
      place.rank = rank;
      SharePull(*trained.checkpoint, plan)
          .plan(*trained.checkpoint, shards.ranks[seat.shard].packed.layout, sources, pulls, place,
                pulls.by_host[seat.host]);
    }
  }
  // The pulls of a host go on side by side.
  for (auto& reads : pulls.by_host) std::ranges::stable_sort(reads, {}, &Read::before);
  return pulls;
}

// What the links have to carry by the plans.
struct Load {
  std::vector<std::vector<double>> given;
  std::vector<SpreadParty> parties;
};

Load load_of(const std::vector<Fleet::Party>& parties, const Rounds& rounds, const Pulls& pulls,
             std::size_t sources) {
  Load load;
  for (std::size_t p = 0; p < parties.size(); ++p) {
    const bucket::RoundPlan& plan = rounds.plans[p];
    SpreadParty& party = load.parties.emplace_back();
    party.share_bytes = static_cast<double>(plan.share_bytes());
    party.buckets = plan.size();
    for (std::size_t rank = 0; rank < parties[p].ranks.size(); ++rank) {
      SpreadRank& here = party.ranks.emplace_back();
      here.host = parties[p].ranks[rank].host;
      here.upload_bytes.resize(plan.size());
      here.needs.assign(plan.size(), std::vector<double>(sources));
    }
    for (std::size_t share = 0; share < parties[p].owners.size(); ++share) {
      const bucket::Plan& own = plan.plan_of(static_cast<std::uint32_t>(share));
      SpreadRank& owner = party.ranks[parties[p].owners[share]];
      for (std::size_t k = 0; k < own.size(); ++k) {
        owner.upload_bytes[k] = static_cast<double>(own.bytes(k));
      }
    }
  }
  for (const auto& reads : pulls.by_host) {
    auto& given = load.given.emplace_back(sources);
    for (const Read& read : reads) {
      given[read.source] += read.bytes;
      auto& needs = load.parties[read.party].ranks[read.rank].needs;
      if (read.bucket < needs.size()) needs[read.bucket][read.source] = given[read.source];
    }
  }
  // A bucket needs what the buckets before it need.
  for (SpreadParty& party : load.parties) {
    for (SpreadRank& rank : party.ranks) {
      for (std::size_t k = 1; k < rank.needs.size(); ++k) {
        for (std::size_t s = 0; s < sources; ++s) {
          rank.needs[k][s] = std::max(rank.needs[k][s], rank.needs[k - 1][s]);
        }
      }
    }
  }
  return load;
}

// No schedule beats this: each host receives the union of its ranks' boxes once, each GPU receives
// its boxes, and some trainer host sends each byte.
struct Bound {
  double host_bytes = 0;
  double gpu_bytes = 0;
  double host_seconds = 0;
  double gpu_seconds = 0;
  double trainer_seconds = 0;
  double seconds() const { return std::max({host_seconds, gpu_seconds, trainer_seconds}); }
};

Bound links_alone(const Options& options, const Trained& trained, const Shards& shards) {
  const TensorSet& tensors = trained.checkpoint->tensors;
  const std::uint32_t gpus = options.count("gpus");
  const auto tp = static_cast<std::uint32_t>(shards.ranks.size());
  Bound bound;
  for (std::uint32_t host = 0; host < options.count("hosts"); ++host) {
    // The boxes of tensor-parallel ranks are disjoint or equal.
    std::set<TensorBox> here;
    double bytes = 0;
    for (std::uint32_t gpu = 0; gpu < gpus; ++gpu) {
      const Layout& layout = shards.ranks[(host * gpus + gpu) % tp].packed.layout;
      for (const TensorBox& box : layout.boxes()) {
        if (!here.insert(box).second) continue;
        bytes +=
            static_cast<double>(box.box.elements() * dtype_size_bytes(tensors[box.tensor].dtype));
      }
      bound.gpu_bytes = std::max(bound.gpu_bytes, static_cast<double>(layout.payload_bytes()));
    }
    bound.host_bytes = std::max(bound.host_bytes, bytes);
    if (host + 1 >= std::max(1u, tp / gpus)) break;  // The others are like these.
  }
  const double host_rate = options["nics"] * options["nic-gb"] * 1e9;
  bound.host_seconds = bound.host_bytes / host_rate;
  bound.gpu_seconds = bound.gpu_bytes / (options["pcie-gb"] * 1e9);
  bound.trainer_seconds =
      static_cast<double>(tensors.total_bytes()) / options["trainer-hosts"] / host_rate;
  return bound;
}

SpreadRates rates_of(const Options& options) {
  SpreadRates rates;
  rates.host = options["nics"] * options["nic-gb"] * 1e9;
  rates.gpu = options["pcie-gb"] * 1e9;
  rates.verify = options["verify-gb"] * 1e9;
  rates.fetch = options["fetch-gb"] * 1e9;
  rates.keep = options["keep-gb"] * 1e9;
  rates.spread_start = options["spread-us"] * 1e-6;
  rates.release = options["release-us"] * 1e-6;
  rates.fetched = options["fetched-us"] * 1e-6;
  rates.slots = options.count("slots");
  return rates;
}

// Calls of equal length on the planning threads of a host.
double on_threads(const Options& options, const Timed& timed, double calls) {
  return std::ceil(calls / options["plan-threads"]) * timed.mean();
}

void expect(const Options& options, bool holds, const char* what) {
  if (!options.asserts || holds) return;
  fmt::print(stderr, "update_sim: it does not hold that {}\n", what);
  std::exit(1);
}

// From the command to the first byte of a share: all tables of an earlier version with the same
// tensors are kept.
double print_preparation(const Options& options, const Trained& trained, const Shards& shards,
                         const Rounds& rounds, const Pulls& pulls) {
  const double ranks = options["gpus"];
  const double plans = on_threads(options, pulls.plan, ranks);
  const double calls = (options["connect-ms"] + 4 * options["rtt-ms"]) * 1e-3;
  const double all =
      trained.parse.mean() + shards.attach.mean() + rounds.plan.mean() + plans + calls;
  fmt::print(
      "preparation  {:.3f} s: metadata {:.3f}, contents {:.3f}, round plan {:.3f}, pull plan "
      "{:.3f} "
      "(longest {:.3f}), calls {:.3f}\n",
      all, trained.parse.mean(), shards.attach.mean(), rounds.plan.mean(), plans,
      pulls.plan.longest(), calls);
  fmt::print("             the first time also the boxes and files of a shard, {:.3f} s\n",
             on_threads(options, shards.wanted, ranks));
  return all;
}

void print_round(const Trained& trained, const std::vector<Fleet::Party>& parties,
                 const Rounds& rounds) {
  const TensorSet& tensors = trained.checkpoint->tensors;
  const bucket::RoundPlan& first = rounds.plans.front();
  fmt::print("version      {} tensors, {:.1f} GB, {} boxes at {} hosts\n", tensors.size(),
             static_cast<double>(tensors.total_bytes()) / 1e9, trained.boxes, trained.parts.size());
  fmt::print("round        {} parties of {}, {} owners each, {} buckets of {} x {:.2f} MiB\n",
             parties.size(), parties.front().ranks.size(), parties.front().owners.size(),
             first.size(), first.shares(), static_cast<double>(first.share_bytes()) / kMiB);
}

void print_control(const Fleet& fleet, const std::vector<std::size_t>& offered,
                   const Pulls& pulls) {
  const auto [fewest, most] = std::ranges::minmax(offered);
  fmt::print(
      "coordinator  {} calls, {:.1f} ms CPU, {:.1f} KB of orders, {} pulls of {} to {} parts\n",
      fleet.core().count(), fleet.core().total() * 1e3,
      static_cast<double>(fleet.order_bytes()) / 1e3, offered.size(), fewest, most);
  fmt::print(
      "fetches      {:.1f} GB of shares, {:.1f} GB on the wire ({:.1f} staged, {:.1f} ranges)\n",
      pulls.share_bytes / 1e9, pulls.wire_bytes / 1e9, pulls.staged_bytes / 1e9,
      pulls.range_bytes / 1e9);
}

// Returns the bytes that the busiest inference host has received.
double print_links(const SpreadModel& model, const coordinator::UpdatePlan& dry_run,
                   std::size_t sources, std::size_t hosts) {
  std::vector<double> out;
  std::vector<double> in;
  for (std::size_t i = 0; i < sources; ++i) out.push_back(model.source_out(i));
  for (std::size_t i = 0; i < hosts; ++i) in.push_back(model.host_in(i));
  const auto [least, most] = std::ranges::minmax(out);
  const double in_most = std::ranges::max(in);
  const auto& planned = dry_run.hosts.front();
  fmt::print(
      "links        trainer host out {:.1f} to {:.1f} GB, inference host in {:.1f} GB; the "
      "dry run says {:.1f}\n",
      least / 1e9, most / 1e9, in_most / 1e9,
      static_cast<double>(planned.fetches + planned.receives) / 1e9);
  return in_most;
}

void run(const Options& options) {
  const Trained trained = train(options);
  const Shards shards = shard(trained, options.count("tp"));
  Fleet fleet(options, trained, shards);
  const auto dry_run = fleet.dry_run();
  const auto parties = fleet.update();
  const auto offered = fleet.open_pulls();
  const Rounds rounds = plan_rounds(shards, parties);
  const std::size_t hosts = options.count("hosts");
  const std::size_t sources = trained.parts.size();
  const Pulls pulls = plan_pulls(trained, shards, parties, rounds, hosts);
  print_round(trained, parties, rounds);
  print_control(fleet, offered, pulls);

  Load load = load_of(parties, rounds, pulls, sources);
  SpreadModel model(rates_of(options), load.given, std::move(load.parties));
  const double spreading = model.run();
  const double before = print_preparation(options, trained, shards, rounds, pulls);
  fmt::print("spreading    {:.3f} s, all fetched after {:.3f} s, kept {:.1f} GB\n", spreading,
             model.fetched(), model.kept_bytes() / 1e9);
  const double received = print_links(model, dry_run, sources, hosts);
  const Bound bound = links_alone(options, trained, shards);
  fmt::print(
      "links alone  {:.3f} s: NICs of a host {:.3f} ({:.1f} GB), link of a GPU {:.3f} ({:.1f} "
      "GB), trainers {:.3f}\n",
      bound.seconds(), bound.host_seconds, bound.host_bytes / 1e9, bound.gpu_seconds,
      bound.gpu_bytes / 1e9, bound.trainer_seconds);
  fmt::print("update       {:.3f} s, {:.3f} of the links alone (spreading {:.3f})\n",
             before + spreading, (before + spreading) / bound.seconds(),
             spreading / bound.seconds());
  expect(options, spreading >= bound.seconds(), "no schedule beats the links alone");
  expect(options, std::ranges::min(offered) == sources, "each pull is offered all parts");
  expect(options, received >= bound.host_bytes, "each host receives its ranks' boxes");
  expect(options, pulls.wire_bytes >= pulls.share_bytes, "the pulls fetch all shares");
}

}  // namespace
}  // namespace rekindle::bench

int main(int argc, char** argv) {
  rekindle::bench::run(rekindle::bench::Options(argc, argv));
  return 0;
}
