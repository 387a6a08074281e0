#include "tests/planner/plan_oracle.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <numeric>

#include <fmt/format.h>

#include "src/base/blake3.h"
#include "src/tensor/tile_proof.h"

namespace rekindle::planner::testing {

namespace {

using Bytes = std::vector<std::byte>;

// Calls visit(coordinates) for each element.
template <typename Visit>
void for_each_element(const Box& box, const Visit& visit) {
  if (box.empty()) return;
  Dims at = box.offset;
  while (true) {
    visit(at);
    std::size_t i = box.rank();
    while (true) {
      if (i == 0) return;
      --i;
      if (++at[i] < box.offset[i] + box.extent[i]) break;
      at[i] = box.offset[i];
    }
  }
}

std::uint64_t index_in(const Box& array, const Dims& at) {
  std::uint64_t index = 0;
  for (std::size_t i = 0; i < array.rank(); ++i) {
    index = index * array.extent[i] + (at[i] - array.offset[i]);
  }
  return index;
}

Bytes poison(std::uint64_t size, unsigned value) { return Bytes(size, std::byte(value)); }

// Whether the elements of `part` follow each other in `array`, counted one by one.
bool is_one_run_of_elements(const Box& part, const Box& array) {
  std::uint64_t next = 0;
  bool first = true;
  bool run = true;
  for_each_element(part, [&](const Dims& at) {
    const std::uint64_t index = index_in(array, at);
    run = run && (first || index == next);
    first = false;
    next = index + 1;
  });
  return run;
}

class Oracle {
 public:
  Oracle(const Scenario& scenario, const Plan& plan, Random& random)
      : scenario_(scenario), plan_(plan), random_(random), tensors_(scenario.checkpoint->tensors) {}

  std::vector<std::string> run() {
    fill_tensors();
    fill_sources();
    fill_destination();
    find_wanted();
    find_proved();
    execute();
    check_destination();
    check_missing();
    check_totals();
    return std::move(failures_);
  }

 private:
  enum class Want : std::uint8_t { kNo, kHeld, kNobody };
  struct Landed {
    SourceIndex source = 0;
    Expansion expansion;
  };

  template <typename... Args>
  void failed(fmt::format_string<Args...> format, Args&&... args) {
    if (failures_.size() < 20)
      failures_.push_back(fmt::format(format, std::forward<Args>(args)...));
  }

  std::uint64_t element_bytes(TensorIndex tensor) const {
    return dtype_size_bytes(tensors_[tensor].dtype);
  }
  bool held(const Scenario::Source& source, TileIndex tile) const {
    return source.held == nullptr || source.held->test(tile);
  }
  // Calls visit(tile, part of `box` in it).
  template <typename Visit>
  void for_each_tile(TensorIndex tensor, const Box& box, const Visit& visit) const {
    const TileMap& map = scenario_.checkpoint->tiles;
    for (TileIndex tile = map.first_tile(tensor); tile < map.first_tile(tensor + 1); ++tile) {
      if (const auto part = intersect(map.tile_box(tile), box)) visit(tile, *part);
    }
  }

  void fill_tensors() {
    for (const TensorInfo& tensor : tensors_.tensors()) {
      Bytes& bytes = truth_.emplace_back(tensor.size_bytes());
      for (std::size_t i = 0; i < bytes.size(); i += 8) {
        const std::uint64_t word = random_();
        std::memcpy(bytes.data() + i, &word, std::min<std::size_t>(8, bytes.size() - i));
      }
      wants_.emplace_back(tensor.shape.product(), Want::kNo);
    }
  }

  void copy_true_bytes(TensorIndex tensor, const Box& part, const Box& array, std::byte* to) const {
    const std::uint64_t size = element_bytes(tensor);
    const Box whole = Box::whole(tensors_[tensor].shape);
    for_each_row(part, [&](const Dims& at, std::uint64_t row) {
      std::memcpy(to + index_in(array, at) * size,
                  truth_[tensor].data() + index_in(whole, at) * size, row * size);
    });
  }
  // Calls visit(first coordinates, elements) for each row of the last dimension.
  template <typename Visit>
  static void for_each_row(const Box& box, const Visit& visit) {
    if (box.empty()) return;
    if (box.rank() == 0) return visit(box.offset, 1);
    Box heads = box;
    heads.extent[box.rank() - 1] = 1;
    for_each_element(heads, [&](const Dims& at) { visit(at, box.extent[box.rank() - 1]); });
  }

  void fill_sources() {
    for (const Scenario::Source& source : scenario_.sources) {
      const Layout& layout = *scenario_.layouts[source.layout];
      std::vector<Bytes>& segments = sources_.emplace_back();
      for (const SegmentSpec& segment : layout.segments()) {
        segments.push_back(poison(segment.size_bytes, 0xEE));
      }
      for (const LayoutEntry& entry : layout.entries()) {
        for_each_tile(entry.tensor, entry.box, [&](TileIndex tile, const Box& part) {
          if (!held(source, tile)) return;
          copy_true_bytes(entry.tensor, part, entry.box,
                          segments[entry.segment].data() + entry.offset_bytes);
        });
      }
    }
  }

  void fill_destination() {
    for (const SegmentSpec& segment : scenario_.destination->segments()) {
      destination_.push_back(poison(segment.size_bytes, 0xDD));
      writes_.emplace_back(segment.size_bytes, std::uint8_t{0});
    }
  }

  void find_wanted() {
    for (const LayoutEntry& entry : scenario_.destination->entries()) {
      const Box whole = Box::whole(tensors_[entry.tensor].shape);
      for_each_tile(entry.tensor, entry.box, [&](TileIndex tile, const Box& part) {
        if (scenario_.have != nullptr && scenario_.have->test(tile)) return;
        // A part without a proof is verified with the rest of its tile, so all of the tile has to
        // be held.
        const Box tile_box = scenario_.checkpoint->tiles.tile_box(tile);
        mark(entry.tensor, tile_box, whole, Want::kNobody);
        wanted_bytes_ += part.elements() * element_bytes(entry.tensor);
        for (const Scenario::Source& source : scenario_.sources) {
          if (!held(source, tile)) continue;
          for (const LayoutEntry& at : scenario_.layouts[source.layout]->entries_of(entry.tensor)) {
            if (const auto shared = intersect(at.box, tile_box)) {
              mark(entry.tensor, *shared, whole, Want::kHeld);
            }
          }
        }
      });
    }
  }
  // Parts of tiles that nobody holds whole may still be proved.
  void find_proved() {
    const TileMap& map = scenario_.checkpoint->tiles;
    for (TileIndex tile = 0; tile < map.tile_count(); ++tile) {
      const TensorIndex tensor = map.tensor_of(tile);
      if (!can_be_proved(tensor, tile)) continue;
      mark(tensor, map.tile_box(tile), Box::whole(tensors_[tensor].shape), Want::kHeld);
    }
  }
  // Every wanted part is one run, and each of its elements lies in a part that a source proves.
  bool can_be_proved(TensorIndex tensor, TileIndex tile) const {
    const Box tile_box = scenario_.checkpoint->tiles.tile_box(tile);
    bool wanted = scenario_.have == nullptr || !scenario_.have->test(tile);
    bool any = false;
    for (const LayoutEntry& entry : scenario_.destination->entries_of(tensor)) {
      const auto part = intersect(entry.box, tile_box);
      if (!part) continue;
      any = true;
      wanted = wanted && is_one_run_of_elements(*part, tile_box) && *part != tile_box;
      std::vector<char> proved(part->elements());
      for (const Scenario::Source& source : scenario_.sources) {
        if (!held(source, tile)) continue;
        for (const Box& box : provable_boxes(source, tensor, tile)) {
          const auto shared = intersect(box, *part);
          if (!shared) continue;
          for_each_element(*shared, [&](const Dims& at) { proved[index_in(*part, at)] = 1; });
        }
      }
      wanted = wanted && std::ranges::all_of(proved, [](char one) { return one != 0; });
    }
    return any && wanted;
  }
  // All of the tile, or the parts of which the source keeps short proofs.
  std::vector<Box> provable_boxes(const Scenario::Source& source, TensorIndex tensor,
                                  TileIndex tile) const {
    const Box whole = scenario_.checkpoint->tiles.tile_box(tile);
    const std::uint64_t tile_bytes = whole.elements() * element_bytes(tensor);
    std::vector<Box> boxes;
    std::uint64_t elements = 0;
    std::uint64_t proofs = 0;
    bool runs = true;
    for (const LayoutEntry& entry : scenario_.layouts[source.layout]->entries_of(tensor)) {
      const auto part = intersect(entry.box, whole);
      if (!part) continue;
      boxes.push_back(*part);
      elements += part->elements();
      runs = runs && is_one_run_of_elements(*part, whole);
      const std::uint64_t begin = index_in(whole, part->offset) * element_bytes(tensor);
      const std::uint64_t end = begin + part->elements() * element_bytes(tensor);
      if (runs) proofs += proof_bytes({begin, end}, tile_bytes);
    }
    if (elements == whole.elements()) return {whole};
    const bool kept =
        source.proves_parts && runs && 64 * proofs <= elements * element_bytes(tensor);
    return kept ? boxes : std::vector<Box>();
  }
  void mark(TensorIndex tensor, const Box& part, const Box& whole, Want want) {
    for_each_row(part, [&](const Dims& at, std::uint64_t row) {
      const auto begin = static_cast<std::ptrdiff_t>(index_in(whole, at));
      std::fill_n(wants_[tensor].begin() + begin, row, want);
    });
  }

  void execute() {
    std::vector<SliceIndex> order(plan_.slice_count());
    std::iota(order.begin(), order.end(), SliceIndex{0});
    std::shuffle(order.begin(), order.end(), random_);
    landed_.resize(order.size());
    for (const SliceIndex slice : order) {
      const SliceIndex first = plan_.group_first(slice);
      const SliceIndex size = plan_.group_size(slice);
      if (slice < first || slice >= first + size || first + size > plan_.slice_count()) {
        failed("slice {} is not in its group", slice);
        return;
      }
      read(slice);
      if (++arrived_[first] == size) complete(first, size);
    }
  }

  void read(SliceIndex slice) {
    Landed& landed = landed_[slice];
    std::vector<SourceIndex> candidates;
    for (SourceIndex source = 0; source < transport::kMaxSources; ++source) {
      if (plan_.candidates(slice).test(source)) candidates.push_back(source);
    }
    if (candidates.empty() || candidates.back() >= scenario_.sources.size()) {
      failed("slice {} has no candidates, or ones that do not exist", slice);
      return;
    }
    landed.source = candidates[pick(random_, 0, candidates.size() - 1)];
    plan_.expand(slice, landed.source, landed.expansion);
    const bool shared = plan_.kind(slice) == SliceKind::kStaged;
    Bytes& staging = staging_[shared ? plan_.group_first(slice) : slice];
    if (staging.empty()) staging = poison(landed.expansion.staging_bytes, 0xCC);
    if (staging.size() != landed.expansion.staging_bytes)
      failed("slice {}: staging differs", slice);
    const bool last = slice + 1 == plan_.group_first(slice) + plan_.group_size(slice);
    if (shared && !last && !landed.expansion.scatter.empty()) {
      failed("slice {} scatters before its group is there", slice);
    }
    if (!shared && (!staging.empty() || !landed.expansion.scatter.empty())) {
      failed("slice {} takes a detour", slice);
    }
    std::uint64_t bytes = 0;
    for (const PlannedRead& one : landed.expansion.reads) {
      const Bytes& from = sources_[landed.source].at(one.remote_segment);
      if (shared) {
        copy(slice, one.copy, from, staging, nullptr);
      } else {
        copy(slice, one.copy, from, destination_.at(one.local_segment),
             &writes_.at(one.local_segment));
      }
      bytes += one.copy.total_bytes();
    }
    if (bytes != plan_.slice_bytes(slice)) {
      failed("slice {} brings {} bytes, not {}", slice, bytes, plan_.slice_bytes(slice));
    }
  }

  void scatter(SliceIndex slice, const PlannedScatter& one, const Bytes& staging) {
    copy(slice, one.copy, staging, destination_.at(one.local_segment),
         &writes_.at(one.local_segment));
  }

  void copy(SliceIndex slice, const StridedCopy& one, const Bytes& from, Bytes& to,
            std::vector<std::uint8_t>* writes) {
    for (std::uint64_t i = 0; i < one.count; ++i) {
      const std::uint64_t src = one.src_offset + i * one.src_stride;
      const std::uint64_t dst = one.dst_offset + i * one.dst_stride;
      if (src + one.run_bytes > from.size() || dst + one.run_bytes > to.size()) {
        failed("slice {} copies outside: {}+{} of {} to {} of {}", slice, src, one.run_bytes,
               from.size(), dst, to.size());
        return;
      }
      std::memcpy(to.data() + dst, from.data() + src, one.run_bytes);
      if (writes == nullptr) continue;
      for (std::uint64_t b = dst; b < dst + one.run_bytes; ++b) ++(*writes)[b];
    }
  }

  void complete(SliceIndex first, SliceIndex size) {
    const SliceIndex last = first + size - 1;
    std::vector<TileWork> work;
    for (SliceIndex slice = first; slice < last; ++slice) {
      plan_.tiles(slice, work);
      if (!work.empty()) failed("slice {} lists tiles before its group is there", slice);
      if (plan_.kind(slice) != plan_.kind(last) || plan_.bucket(slice) != plan_.bucket(last)) {
        failed("the group of slice {} is mixed", slice);
      }
    }
    plan_.tiles(last, work);
    for (const TileWork& tile : work) check_tile(last, tile);
    if (plan_.kind(last) != SliceKind::kStaged) return;
    for (const PlannedScatter& one : landed_[last].expansion.scatter) {
      scatter(last, one, staging_[first]);
    }
  }

  void check_tile(SliceIndex slice, const TileWork& work) {
    const TileMap& map = scenario_.checkpoint->tiles;
    if (map.tensor_of(work.tile) != work.tensor) failed("tile {}: wrong tensor", work.tile);
    const Box whole = map.tile_box(work.tile);
    verified_[work.tile].push_back(work.box);
    if (plan_.kind(slice) == SliceKind::kRange) {
      const auto& source = scenario_.sources[landed_.at(slice).source];
      const auto boxes = provable_boxes(source, work.tensor, work.tile);
      const bool provable =
          std::ranges::any_of(boxes, [&](const Box& box) { return contains(box, work.box); });
      if (!provable || !held(source, work.tile) || !is_one_run_of_elements(work.box, whole) ||
          plan_.group_size(slice) != 1) {
        failed("tile {}: its source cannot prove {}", work.tile, work.box.to_string());
      }
      return;
    }
    if (work.box != whole) failed("tile {} is not whole in slice {}", work.tile, slice);
    if (plan_.kind(slice) != SliceKind::kStaged) return;
    const Bytes& staging = staging_[plan_.group_first(slice)];
    Bytes expected(whole.elements() * element_bytes(work.tensor));
    copy_true_bytes(work.tensor, whole, whole, expected.data());
    if (work.staging_offset + expected.size() > staging.size() ||
        std::memcmp(expected.data(), staging.data() + work.staging_offset, expected.size()) != 0) {
      failed("tile {}: wrong bytes in staging", work.tile);
    }
  }

  // Each wanted element exactly once and right, when all that is wanted of its tile is held;
  // nothing else is touched.
  void check_destination() {
    for (const LayoutEntry& entry : scenario_.destination->entries()) {
      const Box tensor = Box::whole(tensors_[entry.tensor].shape);
      const std::uint64_t size = element_bytes(entry.tensor);
      for_each_tile(entry.tensor, entry.box, [&](TileIndex tile, const Box& part) {
        const bool planned = tile_is_available(entry.tensor, tile);
        check_verified(tile, entry.tensor, planned);
        for_each_row(part, [&](const Dims& at, std::uint64_t row) {
          const std::uint64_t offset = entry.offset_bytes + index_in(entry.box, at) * size;
          std::vector<std::uint8_t>& writes = writes_[entry.segment];
          for (std::uint64_t b = offset; b < offset + row * size; ++b) {
            if (writes[b] != (planned ? 1 : 0)) {
              failed("{} {}: written {} times, planned {}", tensors_[entry.tensor].name,
                     at.to_string(), writes[b], planned);
            }
            writes[b] = 0;
          }
          if (planned && std::memcmp(destination_[entry.segment].data() + offset,
                                     truth_[entry.tensor].data() + index_in(tensor, at) * size,
                                     row * size) != 0) {
            failed("{} {}: wrong bytes", tensors_[entry.tensor].name, at.to_string());
          }
        });
      });
    }
    for (const auto& segment : writes_) {
      for (std::size_t b = 0; b < segment.size(); ++b) {
        if (segment[b] != 0) failed("byte {} outside of all entries was written", b);
      }
    }
  }

  // Something of it is wanted, and all of it is held by somebody.
  bool tile_is_available(TensorIndex tensor, TileIndex tile) const {
    const Box whole = Box::whole(tensors_[tensor].shape);
    bool wanted = false;
    bool held_all = true;
    for_each_row(scenario_.checkpoint->tiles.tile_box(tile),
                 [&](const Dims& at, std::uint64_t row) {
                   const std::uint64_t begin = index_in(whole, at);
                   for (std::uint64_t i = begin; i < begin + row; ++i) {
                     wanted |= wants_[tensor][i] != Want::kNo;
                     held_all &= wants_[tensor][i] != Want::kNobody;
                   }
                 });
    return wanted && held_all;
  }

  // Listed once if whole; if in parts, they are disjoint and make up what is wanted of it.
  void check_verified(TileIndex tile, TensorIndex tensor, bool planned) {
    const auto found = verified_.find(tile);
    if ((found != verified_.end()) != planned) {
      failed("tile {} is {} listed", tile, planned ? "not" : "wrongly");
      return;
    }
    if (!planned) return;
    std::uint64_t listed = 0;
    const Box whole = scenario_.checkpoint->tiles.tile_box(tile);
    for (const Box& box : found->second) listed += box.elements();
    if (found->second.size() == 1 && found->second[0] == whole) return;
    std::uint64_t wanted = 0;
    for (const LayoutEntry& entry : scenario_.destination->entries_of(tensor)) {
      if (const auto part = intersect(entry.box, whole)) wanted += part->elements();
    }
    if (listed != wanted) failed("tile {}: {} elements verified of {}", tile, listed, wanted);
  }

  void check_missing() {
    for (const MissingBox& missing : plan_.missing()) {
      const Box whole = Box::whole(tensors_[missing.tensor].shape);
      for_each_element(missing.box, [&](const Dims& at) {
        Want& want = wants_[missing.tensor][index_in(whole, at)];
        if (want != Want::kNobody) {
          failed("{} {} is no missing element", tensors_[missing.tensor].name, at.to_string());
        }
        want = Want::kNo;
      });
    }
    for (TensorIndex tensor = 0; tensor < tensors_.size(); ++tensor) {
      const auto left = std::count(wants_[tensor].begin(), wants_[tensor].end(), Want::kNobody);
      if (left > 0) failed("{} elements of {} are missing, untold", left, tensors_[tensor].name);
    }
  }

  void check_totals() {
    std::uint64_t wire = 0;
    std::uint32_t bucket = 0;
    for (SliceIndex slice = 0; slice < plan_.slice_count(); ++slice) {
      wire += plan_.slice_bytes(slice);
      if (plan_.bucket(slice) < bucket || plan_.bucket(slice) > bucket + 1) {
        failed("slice {} is in bucket {} after {}", slice, plan_.bucket(slice), bucket);
      }
      bucket = plan_.bucket(slice);
    }
    if (plan_.slice_count() > 0 && bucket + 1 != plan_.bucket_count()) failed("bucket count");
    if (wire != plan_.wire_bytes()) failed("wire_bytes {} != {}", plan_.wire_bytes(), wire);
    if (wanted_bytes_ != plan_.wanted_bytes()) {
      failed("wanted_bytes {} != {}", plan_.wanted_bytes(), wanted_bytes_);
    }
  }

  const Scenario& scenario_;
  const Plan& plan_;
  Random& random_;
  const TensorSet& tensors_;
  std::vector<Bytes> truth_;
  std::vector<std::vector<Want>> wants_;  // per element
  std::vector<std::vector<Bytes>> sources_;
  std::vector<Bytes> destination_;
  std::vector<std::vector<std::uint8_t>> writes_;  // per byte
  std::vector<Landed> landed_;
  std::map<SliceIndex, Bytes> staging_;
  std::map<SliceIndex, SliceIndex> arrived_;  // per group
  std::map<TileIndex, std::vector<Box>> verified_;
  std::uint64_t wanted_bytes_ = 0;
  std::vector<std::string> failures_;
};

}  // namespace

std::vector<std::string> check_plan(const Scenario& scenario, const Plan& plan, Random& random) {
  return Oracle(scenario, plan, random).run();
}

Digest digest_plan(const Plan& plan) {
  Blake3 hasher;
  const auto add = [&](std::string_view text) { hasher.update(as_bytes(text)); };
  Expansion expansion;
  std::vector<TileWork> tiles;
  for (SliceIndex slice = 0; slice < plan.slice_count(); ++slice) {
    add(fmt::format("slice {} {} {} {} {} {}\n", plan.slice_bytes(slice),
                    static_cast<int>(plan.kind(slice)), plan.candidates(slice).word(0),
                    plan.bucket(slice), plan.group_first(slice), plan.group_size(slice)));
    plan.tiles(slice, tiles);
    for (const TileWork& work : tiles) {
      add(fmt::format("tile {} {} {}\n", work.tile, work.box.to_string(), work.staging_offset));
    }
    for (SourceIndex source = 0; source < transport::kMaxSources; ++source) {
      if (!plan.candidates(slice).test(source)) continue;
      plan.expand(slice, source, expansion);
      for (const PlannedRead& read : expansion.reads) {
        add(fmt::format("read {} {} {} {} {} {}\n", read.remote_segment, read.local_segment,
                        read.copy.src_offset, read.copy.dst_offset, read.copy.run_bytes,
                        read.copy.count));
      }
    }
  }
  for (const MissingBox& missing : plan.missing()) {
    add(fmt::format("missing {} {}\n", missing.tensor, missing.box.to_string()));
  }
  return hasher.finish();
}

}  // namespace rekindle::planner::testing
