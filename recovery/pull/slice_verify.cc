// PlanSliceSource: verification, on the digest pool.
#include <bit>
#include <cstring>
#include <memory>
#include <utility>

#include "recovery/pull/slice_source.h"
#include "src/base/log.h"
#include "src/store/fault_guard.h"
#include "src/tensor/canonical.h"
#include "src/tensor/tile_proof.h"

namespace rekindle::pull {

using planner::Expansion;
using planner::SliceKind;
using planner::TileWork;
using transport::SliceIndex;
using transport::SourceIndex;
using transport::Verdict;

namespace {

constexpr int kProofAsks = 3;  // for one slice that has landed

}  // namespace

// Parts of tiles that wait for a proof, as the question goes from one source to the next.
struct PlanSliceSource::RangeCheck {
  SliceIndex slice = 0;
  SourceIndex source = 0;  // that the bytes came from
  std::vector<TileWork> works;
  transport::SourceMask open;  // may still be asked
  int asks = 0;
};

void PlanSliceSource::verify(SliceIndex slice, SourceIndex source) {
  if (plan_.kind(slice) == SliceKind::kRange) return verify_range(slice, source);
  if (plan_.group_size(slice) > 1) return verify_group(slice, source);
  const Verdict verdict = verify_tiles(slice, source, source);
  {
    const std::lock_guard lock(mutex_);
    leave_staging(slice);
  }
  finish(slice, verdict);
}

// The tiles that `slice` completes: copied out of staging and marked when all of them are good.
// Without a sender whom all bytes are from, those that are good are marked even when others are
// not: the bytes are not read again in this transfer, or a marked tile would be written to.
Verdict PlanSliceSource::verify_tiles(SliceIndex slice, SourceIndex source,
                                      std::optional<SourceIndex> sender) {
  std::byte* staging = staging_of(slice);
  const bool staged = plan_.kind(slice) == SliceKind::kStaged;
  Expansion expansion;
  if (staging != nullptr) expand_plan(slice, source, expansion);
  if (staging != nullptr && !staged && !scatter(expansion, staging)) return Verdict::kLocalFault;
  std::vector<TileWork> works;
  plan_.tiles(slice, works);
  std::vector<TileIndex> verified;
  Verdict verdict = Verdict::kAccept;
  for (const auto& work : works) {
    const Verdict tile = verify_tile(work, staged ? staging : nullptr);
    if (tile == Verdict::kLocalFault) return tile;
    if (tile == Verdict::kAccept) {
      verified.push_back(work.tile);
      continue;
    }
    verdict = tile;
    note_wrong(work, sender);
    if (sender || staged) return verdict;
  }
  if (staged && staging != nullptr && !scatter(expansion, staging)) return Verdict::kLocalFault;
  for (const TileIndex tile : verified) mark(tile);
  return verdict;
}

// Slices whose tiles are complete only together: they are accepted as they land, and the tiles are
// verified with the last of them. When a tile does not verify and the slices came from different
// sources, nobody can tell whose part was wrong: the tiles stay unmarked, and the next plan of this
// pull reads them from one.
void PlanSliceSource::verify_group(SliceIndex slice, SourceIndex source) {
  const SliceIndex first = plan_.group_first(slice);
  const SliceIndex last = first + plan_.group_size(slice) - 1;
  if (plan_.kind(slice) == SliceKind::kDirect && !scatter_own(slice, source)) {
    return finish(slice, Verdict::kLocalFault);
  }
  bool complete = false;
  bool spoiled = false;
  {
    const std::lock_guard lock(mutex_);
    Group& group = groups_[first];
    spoiled = group.spoiled;
    complete = !spoiled && ++group.landed == plan_.group_size(slice);
    if (spoiled) leave_staging(slice);  // what it was read again for is left to the next plan
  }
  const auto sender = only_source(first, last);
  Verdict verdict = Verdict::kAccept;
  if (complete) {
    SourceIndex of_last = 0;
    while (!plan_.candidates(last).test(of_last)) ++of_last;  // any will do: only where bytes go
    verdict = verify_tiles(last, of_last, sender);
    const std::lock_guard lock(mutex_);
    for (SliceIndex i = first; i <= last; ++i) leave_staging(i);
    if (verdict == Verdict::kAccept) {
      groups_.erase(first);
    } else {
      groups_[first].spoiled = true;
    }
  }
  if (verdict == Verdict::kRetry && !sender) {
    counters_->rejected_bytes += plan_.slice_bytes(slice);
    verdict = Verdict::kAccept;
  }
  finish(slice, verdict);
}

// The source that all slices of a group come from.
std::optional<SourceIndex> PlanSliceSource::only_source(SliceIndex first, SliceIndex last) const {
  transport::SourceMask all;
  for (SliceIndex i = first; i <= last; ++i) all = all | info(i).candidates;
  if (all.count() != 1) return std::nullopt;
  return static_cast<SourceIndex>(std::countr_zero(all.bits()));
}

void PlanSliceSource::note_wrong(const TileWork& work, std::optional<SourceIndex> sender) {
  const TensorInfo& info = checkpoint_.tensors[work.tensor];
  const std::string where = canonical::printable(info.name) + work.box.to_string();
  ++counters_->corrupt_tiles;
  log::warn("pull.tile_corrupt", "tile", where, "source",
            sender ? std::to_string(*sender) : "several together");
  const std::lock_guard lock(mutex_);
  WrongBytes& wrong = wrong_[sender];
  ++wrong.slices;
  wrong.where = where;
}

WrongBytes PlanSliceSource::wrong_bytes(std::optional<SourceIndex> source) const {
  const std::lock_guard lock(mutex_);
  const auto found = wrong_.find(source);
  return found == wrong_.end() ? WrongBytes() : found->second;
}

// A slice whose covering reads landed in staging of its own.
bool PlanSliceSource::scatter_own(SliceIndex slice, SourceIndex source) {
  std::byte* staging = staging_of(slice);
  if (staging == nullptr) return true;
  Expansion expansion;
  expand_plan(slice, source, expansion);
  const bool written = scatter(expansion, staging);
  const std::lock_guard lock(mutex_);
  leave_staging(slice);
  return written;
}

// The source is asked for the rest of the path from each part to its leaf.
void PlanSliceSource::verify_range(SliceIndex slice, SourceIndex source) {
  if (!scatter_own(slice, source)) return finish(slice, Verdict::kLocalFault);
  auto check = std::make_shared<RangeCheck>();
  check->slice = slice;
  check->source = source;
  check->open = info(slice).candidates;
  plan_.tiles(slice, check->works);
  ask_for_proofs(std::move(check), source);
}

void PlanSliceSource::ask_for_proofs(std::shared_ptr<RangeCheck> check, SourceIndex from) {
  check->open.reset(from);
  ++check->asks;
  const auto& works = check->works;
  range_prover_(from, works, [self = shared_from_this(), check, from](const RangeProofs& proofs) {
    auto job = [self, check, from, proofs] { self->judge(check, from, proofs); };
    if (!self->digest_pool_.try_submit(job)) job();
  });
}

// A source whose bytes or proof are wrong, or that says its own copy is bad, has earned a strike.
// One that cannot be asked has not: another one that holds the same may prove it as well.
void PlanSliceSource::judge(const std::shared_ptr<RangeCheck>& check, SourceIndex from,
                            const RangeProofs& proofs) {
  if (proofs) {
    Verdict verdict = proofs->size() == check->works.size() ? Verdict::kAccept : Verdict::kRetry;
    for (std::size_t i = 0; verdict == Verdict::kAccept && i < check->works.size(); ++i) {
      verdict = verify_part(check->works[i], (*proofs)[i]);
      if (verdict == Verdict::kRetry) note_wrong(check->works[i], check->source);
    }
    if (verdict == Verdict::kAccept) mark_parts(check->works);
    return finish(check->slice, verdict);
  }
  log::warn("pull.range_proof_failed", "source", from, "error", proofs.error());
  if (proofs.error().code() == ErrorCode::kCorrupt && from == check->source) {
    if (!check->works.empty()) note_wrong(check->works.front(), from);
    return finish(check->slice, Verdict::kRetry);
  }
  for (SourceIndex next = 0; check->asks < kProofAsks && next < transport::kMaxSources; ++next) {
    if (check->open.test(next)) return ask_for_proofs(check, next);
  }
  finish(check->slice, Verdict::kUndecided);
}

void PlanSliceSource::mark_parts(const std::vector<TileWork>& works) {
  for (const auto& work : works) {
    bool whole = false;
    {
      const std::lock_guard lock(mutex_);
      whole = --parts_open_[work.tile] == 0;
    }
    if (whole) mark(work.tile);
  }
}

// Bytes that differ because the destination lost them are nobody's fault: up to the end of its last
// page a file that was cut short reads as zeros.
Verdict PlanSliceSource::compare(const Digest& expected,
                                 const std::function<Digest()>& digest) const {
  bool good = false;
  const auto read =
      store::guard_mapping_access("the destination", [&] { good = digest() == expected; });
  if (!read) return Verdict::kLocalFault;
  if (good) return Verdict::kAccept;
  return destination_.check_sizes() ? Verdict::kRetry : Verdict::kLocalFault;
}

Verdict PlanSliceSource::verify_tile(const TileWork& work, const std::byte* staging) const {
  const TensorInfo& info = checkpoint_.tensors[work.tensor];
  const TileGrid& grid = checkpoint_.tiles.grid(work.tensor);
  const std::uint64_t local_tile = work.tile - checkpoint_.tiles.first_tile(work.tensor);
  const Digest& expected = checkpoint_.tile_digests[work.tile];
  if (staging != nullptr) {
    const std::uint64_t bytes = work.box.elements() * dtype_size_bytes(info.dtype);
    const std::span array(staging + work.staging_offset, static_cast<std::size_t>(bytes));
    return compare(expected, [&] { return digest_tile(info, grid, local_tile, array, work.box); });
  }
  const LayoutEntry* entry = entry_holding(work.tensor, work.box);
  if (entry == nullptr) return Verdict::kRetry;
  return compare(expected,
                 [&] { return digest_tile(info, grid, local_tile, array_of(*entry), entry->box); });
}

Verdict PlanSliceSource::verify_part(const TileWork& work, std::string_view proof) const {
  const LayoutEntry* entry = entry_holding(work.tensor, work.box);
  if (entry == nullptr) return Verdict::kRetry;
  const std::uint64_t element_bytes = dtype_size_bytes(checkpoint_.tensors[work.tensor].dtype);
  // Copied out first: what follows owns memory, and a fault in the mapping leaves by longjmp.
  std::vector<std::byte> part(work.box.elements() * element_bytes);
  const auto read = store::guard_mapping_access("the destination", [&] {
    copy_box(work.box, array_of(*entry), entry->box, part, work.box, element_bytes);
  });
  if (!read) return Verdict::kLocalFault;
  const Box tile = checkpoint_.tiles.tile_box(work.tile);
  const auto leaf = leaf_by_proof(part, range_in_tile(work.box, tile, element_bytes),
                                  tile.elements() * element_bytes, proof);
  if (leaf && *leaf == checkpoint_.tile_digests[work.tile]) return Verdict::kAccept;
  return destination_.check_sizes() ? Verdict::kRetry : Verdict::kLocalFault;
}

Error PlanSliceSource::local_fault(SliceIndex) { return destination_.access_error(); }

const LayoutEntry* PlanSliceSource::entry_holding(TensorIndex tensor, const Box& box) const {
  for (const auto& entry : layout_.entries_of(tensor)) {
    if (contains(entry.box, box)) return &entry;
  }
  return nullptr;
}

std::span<const std::byte> PlanSliceSource::array_of(const LayoutEntry& entry) const {
  const std::uint64_t bytes =
      entry.box.elements() * dtype_size_bytes(checkpoint_.tensors[entry.tensor].dtype);
  return destination_.segment(entry.segment).subspan(entry.offset_bytes, bytes);
}

void PlanSliceSource::mark(TileIndex tile) {
  destination_.mark_verified(tile);
  verified_->set(tile);
}

void PlanSliceSource::finish(SliceIndex slice, Verdict verdict) {
  const std::uint64_t bytes = plan_.slice_bytes(slice);
  (verdict == Verdict::kAccept ? counters_->verified_bytes : counters_->rejected_bytes) += bytes;
  {
    const std::lock_guard lock(batch_mutex_);
    if (batch_ != nullptr) batch_->resolve(slice, verdict);
  }
  verifying_.fetch_sub(1, std::memory_order_release);
}

bool PlanSliceSource::scatter(const Expansion& expansion, const std::byte* staging) {
  return store::guard_mapping_access(
             "the destination",
             [&] {
               for (const auto& piece : expansion.scatter) {
                 const auto& copy = piece.copy;
                 std::byte* base =
                     destination_.segment(piece.local_segment).data() + copy.dst_offset;
                 for (std::uint64_t i = 0; i < copy.count; ++i) {
                   std::memcpy(base + i * copy.dst_stride,
                               staging + copy.src_offset + i * copy.src_stride, copy.run_bytes);
                 }
               }
             })
      .has_value();
}

std::byte* PlanSliceSource::staging_of(SliceIndex slice) const {
  const std::lock_guard lock(mutex_);
  const auto found = staged_.find(staging_key(slice));
  return found == staged_.end() ? nullptr : found->second.buffer;
}

}  // namespace rekindle::pull
