#include <algorithm>
#include <optional>
#include <string_view>
#include <unordered_map>

#include "src/tensor/canonical.h"
#include "src/tensor/joint_plan.h"

// How a JointPlan is made: the declarations are checked and grouped by tensor, each element of a
// host is given to one of its ranks, and the boxes of all hosts must cover every tensor.
namespace rekindle {

namespace {

// Boxes of different hosts that overlap are cut; a limit for what hostile declarations can cost.
constexpr std::size_t kMaxFragments = 1 << 16;

std::vector<Box> without(std::span<const Box> boxes, const Box& taken) {
  std::vector<Box> rest;
  for (const Box& box : boxes) subtract(box, taken, rest);
  return rest;
}

// Each box once, in the order of the index.
std::vector<BoxIndex::Entry> distinct_boxes(std::span<const BoxIndex::Entry> entries) {
  std::vector<BoxIndex::Entry> distinct(entries.begin(), entries.end());
  const auto end = std::unique(distinct.begin(), distinct.end(),
                               [](const auto& a, const auto& b) { return *a.box == *b.box; });
  distinct.erase(end, distinct.end());
  return distinct;
}

// The elements in any of the boxes; nullopt if they overlap in too many ways.
std::optional<std::uint64_t> covered_elements(const BoxIndex& boxes) {
  std::uint64_t covered = 0;
  for (const BoxIndex::Entry& entry : boxes.entries()) {
    std::vector<Box> rest{*entry.box};
    for (const BoxIndex::Entry& before : boxes.near(*entry.box)) {
      if (&before >= &entry || rest.empty()) break;
      if (intersect(*before.box, *entry.box)) rest = without(rest, *before.box);
      if (rest.size() > kMaxFragments) return std::nullopt;
    }
    for (const Box& box : rest) covered += box.elements();
  }
  return covered;
}

// A box of elements that are in none of the boxes, which do not cover the whole.
Box find_hole(const Box& whole, const BoxIndex& boxes) {
  const auto entries = boxes.entries();
  struct Region {
    Box box;
    std::size_t next = 0;  // the first of the boxes that may share elements with it
  };
  std::vector<Region> regions{{whole, 0}};
  std::vector<Box> rest;
  while (!regions.empty()) {
    Region region = regions.back();
    regions.pop_back();
    while (region.next < entries.size() && !intersect(region.box, *entries[region.next].box)) {
      ++region.next;
    }
    if (region.next == entries.size()) return region.box;
    rest.clear();
    subtract(region.box, *entries[region.next].box, rest);
    for (std::size_t i = rest.size(); i-- > 0;) regions.push_back({rest[i], region.next + 1});
  }
  return {};
}

}  // namespace

class JointPlan::Planner {
 public:
  explicit Planner(std::vector<JointHost> hosts) : declared_(std::move(hosts)) {}

  Result<JointPlan> plan() {
    TRY_VOID(read_roster());
    TRY_VOID(read_tensors());
    TRY(TensorSet tensors, tensor_set());
    TRY(TileMap tiles, TileMap::create(tensors));
    JointPlan plan(std::move(tensors), std::move(tiles));
    for (TensorIndex tensor = 0; tensor < plan.tensors_.size(); ++tensor) {
      TRY_VOID(assign_tensor(plan, tensor));
    }
    for (JointHost& host : declared_) plan.hosts_.push_back({std::move(host.name), {}});
    for (std::uint32_t i = 0; i < ranks_.size(); ++i) {
      plan.hosts_[ranks_[i].host].ranks.push_back(ranks_[i].number);
      plan.rank_by_number_.emplace(ranks_[i].number, i);
    }
    plan.ranks_ = std::move(ranks_);
    index_boxes(plan);
    TRY_VOID(check_cover(plan));
    return plan;
  }

 private:
  // A tensor, who declared it first, and all boxes of it in the order of the roster. An owner is an
  // index into `ranks_`.
  struct Known {
    const TensorInfo* info = nullptr;
    std::uint32_t first_rank = 0;
    std::uint32_t last_rank = 0;
    std::vector<BoxIndex::Entry> boxes;
    // Of an empty tensor: the first rank of each host that declared it.
    std::vector<std::uint32_t> writers;
  };

  std::string rank_name(std::uint32_t rank) const {
    return fmt::format("rank {} of {}", ranks_[rank].number,
                       canonical::printable(declared_[ranks_[rank].host].name));
  }
  static std::string quoted(const TensorInfo& info) {
    return fmt::format("'{}'", canonical::printable(info.name));
  }
  static std::string describe(const TensorInfo& info) {
    return fmt::format("{} {}", dtype_name(info.dtype), info.shape.to_string());
  }

  Result<void> read_roster() {
    std::unordered_map<std::uint32_t, std::uint32_t> hosts;
    std::size_t boxes = 0;
    for (std::uint32_t host = 0; host < declared_.size(); ++host) {
      for (const Declaration& rank : declared_[host].ranks) {
        const auto [known, is_new] = hosts.emplace(rank.rank, host);
        if (!is_new) {
          return fail(ErrorCode::kInvalid, "rank {} declares twice: at {} and at {}", rank.rank,
                      canonical::printable(declared_[known->second].name),
                      canonical::printable(declared_[host].name));
        }
        ranks_.push_back({rank.rank, host, {}});
        for (const DeclaredTensor& tensor : rank.tensors) {
          boxes += std::max<std::size_t>(1, tensor.boxes.size());
        }
      }
    }
    if (boxes <= kMaxJointBoxes) return {};
    return fail(ErrorCode::kInvalid,
                "the ranks declare {} boxes together, the most supported is {}", boxes,
                kMaxJointBoxes);
  }

  Result<void> read_tensors() {
    std::unordered_map<std::string_view, std::uint32_t> known;
    std::uint32_t rank = 0;
    for (const JointHost& host : declared_) {
      for (const Declaration& declaration : host.ranks) {
        for (const DeclaredTensor& tensor : declaration.tensors) {
          const auto [at, is_new] =
              known.try_emplace(tensor.info.name, static_cast<std::uint32_t>(known_.size()));
          if (is_new) known_.push_back({&tensor.info, rank, rank, {}, {}});
          TRY_VOID(read_tensor(tensor, rank, is_new, known_[at->second]));
        }
        ++rank;
      }
    }
    if (known_.empty()) return fail(ErrorCode::kInvalid, "no rank declares a tensor");
    std::ranges::sort(known_, {}, [](const Known& tensor) { return tensor.info->name; });
    return {};
  }

  Result<void> read_tensor(const DeclaredTensor& tensor, std::uint32_t rank, bool is_new,
                           Known& known) {
    const TensorInfo& info = tensor.info;
    if (is_new) {
      if (auto ok = check_tensor(info); !ok) {
        return fail(std::move(ok).error().with_context(rank_name(rank)));
      }
    } else if (info.dtype != known.info->dtype || info.shape != known.info->shape) {
      return fail(ErrorCode::kInvalid, "{} is {} at {} and {} at {}", quoted(info),
                  describe(*known.info), rank_name(known.first_rank), describe(info),
                  rank_name(rank));
    } else if (known.last_rank == rank) {
      return fail(ErrorCode::kInvalid, "{} declares {} twice", rank_name(rank), quoted(info));
    }
    if (info.shape.product() == 0 &&
        (is_new || ranks_[known.last_rank].host != ranks_[rank].host)) {
      known.writers.push_back(rank);
    }
    known.last_rank = rank;
    const std::size_t before = known.boxes.size();
    for (const Box& box : tensor.boxes) {
      if (auto ok = check_box(box, info.shape); !ok) {
        return fail(std::move(ok).error().with_context(
            fmt::format("{}: {}", rank_name(rank), quoted(info))));
      }
      if (!box.empty()) known.boxes.push_back({&box, rank});
    }
    return check_own_boxes(info, std::span(known.boxes).subspan(before));
  }

  Result<void> check_own_boxes(const TensorInfo& info, std::span<const BoxIndex::Entry> boxes) {
    if (boxes.size() < 2) return {};
    if (boxes.size() > kMaxBoxesPerTensor) {
      return too_many_boxes(info, boxes.size(), rank_name(boxes[0].owner));
    }
    const BoxIndex index({boxes.begin(), boxes.end()});
    const auto overlap = index.find_overlap();
    if (!overlap) return {};
    return fail(ErrorCode::kInvalid, "boxes {} and {} of {} overlap, and both are of {}",
                overlap->first.box->to_string(), overlap->second.box->to_string(), quoted(info),
                rank_name(boxes[0].owner));
  }

  static Failure too_many_boxes(const TensorInfo& info, std::size_t boxes, std::string_view at) {
    return fail(ErrorCode::kInvalid, "{} is in {} boxes or more at {}, the most supported is {}",
                quoted(info), boxes, at, kMaxBoxesPerTensor);
  }

  Result<TensorSet> tensor_set() const {
    std::vector<TensorInfo> infos;
    infos.reserve(known_.size());
    for (const Known& tensor : known_) infos.push_back(*tensor.info);
    return TensorSet::create(std::move(infos));
  }

  // Gives every element that a host has to one of its ranks.
  Result<void> assign_tensor(JointPlan& plan, TensorIndex tensor) {
    const Known& known = known_[tensor];
    for (const std::uint32_t rank : known.writers) {
      ranks_[rank].writes.push_back({tensor, Box::whole(known.info->shape)});
    }
    const auto boxes = std::span(known.boxes);
    for (std::size_t begin = 0; begin < boxes.size();) {
      const std::uint32_t host = ranks_[boxes[begin].owner].host;
      std::size_t end = begin;
      while (end < boxes.size() && ranks_[boxes[end].owner].host == host) ++end;
      TRY_VOID(assign_on_host(plan, tensor, boxes.subspan(begin, end - begin)));
      begin = end;
    }
    return {};
  }

  Result<void> assign_on_host(JointPlan& plan, TensorIndex tensor,
                              std::span<const BoxIndex::Entry> boxes) {
    const TensorInfo& info = *known_[tensor].info;
    const std::vector<OwnedCell> cells = cells_on_host(boxes);
    if (cells.size() > kMaxBoxesPerTensor) {
      const JointHost& host = declared_[ranks_[boxes[0].owner].host];
      return too_many_boxes(info, cells.size(), canonical::printable(host.name));
    }
    std::vector<std::uint32_t> writers;
    for (const OwnedCell& cell : cells) {
      const auto fewest =
          std::ranges::min_element(cell.owners, {}, [&](std::uint32_t rank) { return load(rank); });
      ranks_[*fewest].writes.push_back({tensor, cell.box});
      load(*fewest) += cell.box.elements() * dtype_size_bytes(info.dtype);
      writers.push_back(*fewest);
    }
    for (const BoxIndex::Entry& entry : boxes) {
      const auto cell = std::ranges::lower_bound(cells, *entry.box, {}, &OwnedCell::box);
      const bool written = cell != cells.end() && cell->box == *entry.box &&
                           writers[static_cast<std::size_t>(cell - cells.begin())] == entry.owner;
      if (!written) plan.yielded_[tensor].push_back({*entry.box, entry.owner});
    }
    return {};
  }

  // The boxes of a host, cut where different ones overlap.
  static std::vector<OwnedCell> cells_on_host(std::span<const BoxIndex::Entry> boxes) {
    if (boxes.size() == 1) return {{*boxes[0].box, {boxes[0].owner}}};
    const BoxIndex all({boxes.begin(), boxes.end()});
    const BoxIndex distinct(distinct_boxes(all.entries()));
    if (distinct.find_overlap()) return cut_into_cells(all.entries(), kMaxBoxesPerTensor);
    std::vector<OwnedCell> cells;
    for (const BoxIndex::Entry& entry : all.entries()) {
      if (cells.empty() || cells.back().box != *entry.box) cells.push_back({*entry.box, {}});
      cells.back().owners.push_back(entry.owner);
    }
    std::ranges::sort(cells, {}, &OwnedCell::box);
    return cells;
  }

  std::uint64_t& load(std::uint32_t rank) {
    if (load_.size() < ranks_.size()) load_.resize(ranks_.size());
    return load_[rank];
  }

  static void index_boxes(JointPlan& plan) {
    std::vector<std::vector<BoxIndex::Entry>> entries(plan.tensors_.size());
    for (std::uint32_t rank = 0; rank < plan.ranks_.size(); ++rank) {
      for (const TensorBox& write : plan.ranks_[rank].writes) {
        if (!write.box.empty()) entries[write.tensor].push_back({&write.box, rank});
      }
    }
    plan.written_.reserve(entries.size());
    for (auto& own : entries) plan.written_.emplace_back(std::move(own));
  }

  static Result<void> check_cover(const JointPlan& plan) {
    std::string first_hole;
    std::size_t more = 0;
    for (TensorIndex tensor = 0; tensor < plan.tensors_.size(); ++tensor) {
      const TensorInfo& info = plan.tensors_[tensor];
      const BoxIndex boxes(distinct_boxes(plan.written_[tensor].entries()));
      const auto covered = covered_elements(boxes);
      if (!covered) {
        return fail(ErrorCode::kInvalid, "the boxes of {} overlap in too many ways", quoted(info));
      }
      if (*covered == info.shape.product()) continue;
      if (!first_hole.empty()) {
        ++more;
        continue;
      }
      const Box hole = find_hole(Box::whole(info.shape), boxes);
      first_hole = fmt::format("no rank has elements {} of {} {}", hole.to_string(), quoted(info),
                               info.shape.to_string());
    }
    if (first_hole.empty()) return {};
    if (more == 0) return fail(ErrorCode::kInvalid, "{}", first_hole);
    return fail(ErrorCode::kInvalid, "{}; {} more {} elements that no rank has", first_hole, more,
                more == 1 ? "tensor has" : "tensors have");
  }

  std::vector<JointHost> declared_;
  std::vector<Rank> ranks_;          // in the order of the roster
  std::vector<std::uint64_t> load_;  // per rank: bytes given to it so far
  std::vector<Known> known_;         // sorted by name
};

Result<JointPlan> JointPlan::create(std::vector<JointHost> hosts) {
  return Planner(std::move(hosts)).plan();
}

}  // namespace rekindle
