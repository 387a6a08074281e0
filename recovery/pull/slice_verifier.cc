#include "recovery/pull/slice_verifier.h"

#include <utility>

#include "src/base/log.h"
#include "src/tensor/canonical.h"

namespace rekindle::pull {

using planner::SliceKind;
using planner::TileWork;
using transport::SliceIndex;
using transport::SourceIndex;
using transport::Verdict;

namespace {

constexpr int kProofAsks = 3;  // for each slice

}  // namespace

// Parts of tiles that wait for a proof, while the question goes from one source to the next.
struct SliceVerifier::ProofQuest {
  SliceIndex slice = 0;
  SourceIndex sender = 0;
  std::vector<TileWork> works;
  transport::SourceMask open;  // may still be asked
  int asks = 0;
};

SliceVerifier::SliceVerifier(std::shared_ptr<const swarm::SliceCandidates> candidates,
                             std::shared_ptr<SliceStaging> staging,
                             std::shared_ptr<BatchLink> batch, TileVerifier tiles, Options options)
    : candidates_(std::move(candidates)),
      plan_(candidates_->plan()),
      staging_(std::move(staging)),
      batch_(std::move(batch)),
      tiles_(std::move(tiles)),
      options_(std::move(options)) {
  std::vector<TileWork> works;
  for (SliceIndex slice = 0; slice < plan_.slice_count(); ++slice) {
    if (plan_.kind(slice) != SliceKind::kRange) continue;
    works.clear();
    plan_.tiles(slice, works);
    for (const auto& work : works) ++parts_open_[work.tile];
  }
}

void SliceVerifier::submit(std::function<void()> job, int numa_node) {
  if (!options_.digest_pool.try_submit(job, numa_node)) job();
}

void SliceVerifier::landed(SliceIndex slice, SourceIndex source, int numa_node) {
  options_.counters->landed_bytes += plan_.slice_bytes(slice);
  under_way_.fetch_add(1, std::memory_order_relaxed);
  submit([self = shared_from_this(), slice, source] { self->verify(slice, source); }, numa_node);
}

void SliceVerifier::verify(SliceIndex slice, SourceIndex source) {
  if (plan_.kind(slice) == SliceKind::kRange) return verify_range(slice, source);
  if (plan_.group_size(slice) > 1) return verify_group(slice);
  const Verdict verdict = verify_tiles(slice, source, source);
  staging_->leave(slice);
  finish(slice, verdict);
}

// The tiles that `slice` completes are copied out of staging and marked when all of them are right.
// Where several sources sent the bytes (no `sender`), the right ones are marked although others are
// wrong: this transfer does not read them again, so nobody writes to a marked tile.
Verdict SliceVerifier::verify_tiles(SliceIndex slice, SourceIndex source,
                                    std::optional<SourceIndex> sender) {
  // Null: the slice lies in its place.
  std::byte* const staging = staging_->buffer_of(slice);
  std::vector<TileWork> works;
  plan_.tiles(slice, works);
  std::vector<TileIndex> verified;
  Verdict verdict = Verdict::kAccept;
  for (const auto& work : works) {
    const Verdict tile = tiles_.verify_tile(work, staging);
    if (tile == Verdict::kLocalFault) return tile;
    if (tile == Verdict::kAccept) {
      verified.push_back(work.tile);
      continue;
    }
    verdict = tile;
    note_wrong(work, sender);
    if (sender || staging != nullptr) return verdict;
  }
  if (staging != nullptr) {
    planner::Expansion expansion;
    candidates_->expand(slice, source, expansion);
    if (!tiles_.scatter(expansion, staging)) return Verdict::kLocalFault;
  }
  for (const TileIndex tile : verified) tiles_.mark(tile);
  return verdict;
}

// When a tile is wrong whose slices came from different sources, nobody can tell whose part was
// wrong. The tiles stay unmarked, and the next plan of this pull reads them from one source.
void SliceVerifier::verify_group(SliceIndex slice) {
  const SliceIndex first = plan_.group_first(slice);
  const SliceIndex last = first + plan_.group_size(slice) - 1;
  bool complete = false;
  bool spoiled = false;
  {
    const std::lock_guard lock(mutex_);
    Group& group = groups_[first];
    spoiled = group.spoiled;
    complete = !spoiled && ++group.landed == plan_.group_size(slice);
  }
  if (spoiled) staging_->leave(slice);
  const auto sender = candidates_->only_source(first, last);
  Verdict verdict = complete ? complete_group(first, last, sender) : Verdict::kAccept;
  if (verdict == Verdict::kRetry && !sender) {
    options_.counters->rejected_bytes += plan_.slice_bytes(slice);
    verdict = Verdict::kAccept;
  }
  finish(slice, verdict);
}

Verdict SliceVerifier::complete_group(SliceIndex first, SliceIndex last,
                                      std::optional<SourceIndex> sender) {
  // Any candidate will do here: it only says where the bytes go.
  SourceIndex of_last = 0;
  while (!plan_.candidates(last).test(of_last)) ++of_last;
  const Verdict verdict = verify_tiles(last, of_last, sender);
  const std::lock_guard lock(mutex_);
  for (SliceIndex i = first; i <= last; ++i) staging_->leave(i);
  if (verdict == Verdict::kAccept) {
    groups_.erase(first);
  } else {
    groups_[first].spoiled = true;
  }
  return verdict;
}

void SliceVerifier::note_wrong(const TileWork& work, std::optional<SourceIndex> sender) {
  const auto& checkpoint = *tiles_.copy().manifest().checkpoint;
  const std::string where =
      canonical::printable(checkpoint.tensors[work.tensor].name) + work.box.to_string();
  ++options_.counters->corrupt_tiles;
  log::warn("pull.tile_corrupt", "tile", where, "source",
            sender ? std::to_string(*sender) : "several together");
  const std::lock_guard lock(mutex_);
  WrongBytes& wrong = wrong_[sender];
  ++wrong.slices;
  wrong.where = where;
}

WrongBytes SliceVerifier::wrong_bytes(std::optional<SourceIndex> source) const {
  const std::lock_guard lock(mutex_);
  const auto found = wrong_.find(source);
  return found == wrong_.end() ? WrongBytes() : found->second;
}

// A source is asked for the rest of the path from each part to the leaf of its tile.
void SliceVerifier::verify_range(SliceIndex slice, SourceIndex source) {
  auto quest = std::make_shared<ProofQuest>();
  quest->slice = slice;
  quest->sender = source;
  quest->open = candidates_->info(slice).candidates;
  plan_.tiles(slice, quest->works);
  ask_for_proofs(std::move(quest), source);
}

void SliceVerifier::ask_for_proofs(std::shared_ptr<ProofQuest> quest, SourceIndex from) {
  quest->open.reset(from);
  ++quest->asks;
  const auto& works = quest->works;
  options_.prover(from, works, [self = shared_from_this(), quest, from](const RangeProofs& proofs) {
    self->submit([self, quest, from, proofs] { self->judge(quest, from, proofs); });
  });
}

// Wrong bytes or a wrong proof count against their sender, and so does its word that its copy is
// bad. No answer does not: another source with the same bytes may prove them.
void SliceVerifier::judge(const std::shared_ptr<ProofQuest>& quest, SourceIndex from,
                          const RangeProofs& proofs) {
  if (proofs) {
    Verdict verdict = proofs->size() == quest->works.size() ? Verdict::kAccept : Verdict::kRetry;
    for (std::size_t i = 0; verdict == Verdict::kAccept && i < quest->works.size(); ++i) {
      verdict = tiles_.verify_part(quest->works[i], (*proofs)[i]);
      if (verdict == Verdict::kRetry) note_wrong(quest->works[i], quest->sender);
    }
    if (verdict == Verdict::kAccept) mark_parts(quest->works);
    return finish(quest->slice, verdict);
  }
  log::warn("pull.range_proof_failed", "source", from, "error", proofs.error());
  if (proofs.error().code() == ErrorCode::kCorrupt && from == quest->sender) {
    if (!quest->works.empty()) note_wrong(quest->works.front(), from);
    return finish(quest->slice, Verdict::kRetry);
  }
  const SourceIndex next = quest->open.next();
  if (quest->asks < kProofAsks && next < transport::kMaxSources) return ask_for_proofs(quest, next);
  finish(quest->slice, Verdict::kUndecided);
}

void SliceVerifier::mark_parts(const std::vector<TileWork>& works) {
  for (const auto& work : works) {
    bool whole = false;
    {
      const std::lock_guard lock(mutex_);
      whole = --parts_open_[work.tile] == 0;
    }
    if (whole) tiles_.mark(work.tile);
  }
}

void SliceVerifier::finish(SliceIndex slice, Verdict verdict) {
  PullCounters& counters = *options_.counters;
  (verdict == Verdict::kAccept ? counters.verified_bytes : counters.rejected_bytes) +=
      plan_.slice_bytes(slice);
  batch_->tell([&](transport::Batch& batch) { batch.resolve(slice, verdict); });
  if (under_way_.fetch_sub(1, std::memory_order_acq_rel) == 1) when_idle(nullptr);
}

void SliceVerifier::when_idle(std::function<void()> call) {
  {
    const std::lock_guard lock(mutex_);
    if (call) on_idle_ = std::move(call);
    if (!busy())
      call = std::exchange(on_idle_, nullptr);
    else
      call = nullptr;
  }
  if (call) call();
}

std::byte* SliceStaging::acquire() {
  if (free_.empty()) {
    if (buffers_.size() == kMaxBuffers) return nullptr;
    buffers_.push_back(std::make_unique_for_overwrite<std::byte[]>(kBufferBytes));
    free_.push_back(buffers_.back().get());
  }
  std::byte* buffer = free_.back();
  free_.pop_back();
  return buffer;
}

Result<std::byte*> SliceStaging::take(SliceIndex slice, std::uint64_t bytes) {
  if (bytes > kBufferBytes) {
    return fail(ErrorCode::kInternal, "slice {} needs {} of staging, a buffer has {}", slice,
                format_bytes(bytes), format_bytes(kBufferBytes));
  }
  const std::lock_guard lock(mutex_);
  const auto found = staged_.find(plan_.group_first(slice));
  if (found != staged_.end()) {
    ++found->second.slices;
    return found->second.buffer;
  }
  std::byte* buffer = acquire();
  if (buffer == nullptr) return fail(ErrorCode::kExhausted, "no staging buffer is free");
  staged_[plan_.group_first(slice)] = {buffer, 1};
  return buffer;
}

void SliceStaging::leave(SliceIndex slice) {
  const std::lock_guard lock(mutex_);
  const auto found = staged_.find(plan_.group_first(slice));
  if (found == staged_.end() || --found->second.slices > 0) return;
  free_.push_back(found->second.buffer);
  staged_.erase(found);
}

std::byte* SliceStaging::buffer_of(SliceIndex slice) const {
  const std::lock_guard lock(mutex_);
  const auto found = staged_.find(plan_.group_first(slice));
  return found == staged_.end() ? nullptr : found->second.buffer;
}

}  // namespace rekindle::pull
