#include "src/bucket/round_plan.h"

#include <algorithm>
#include <string>

#include "src/base/blake3.h"

namespace rekindle::bucket {

namespace {

void add(std::string& out, std::uint64_t number) {
  for (int shift = 0; shift < 64; shift += 8) out.push_back(static_cast<char>(number >> shift));
}

void add(std::string& out, std::string_view text) {
  add(out, std::uint64_t{text.size()});
  out.append(text);
}

void add(std::string& out, std::span<const std::uint64_t> numbers) {
  add(out, std::uint64_t{numbers.size()});
  for (const std::uint64_t number : numbers) add(out, number);
}

void add(std::string& out, const TensorInfo& info, const Box& box) {
  add(out, info.name);
  add(out, dtype_name(info.dtype));
  add(out, box.offset.span());
  add(out, box.extent.span());
  add(out, info.shape.span());
}

// The pieces of each share, in order.
Result<std::vector<std::vector<std::uint32_t>>> pieces_of_shares(
    std::span<const Piece> pieces, std::span<const std::uint32_t> share_of, std::uint32_t shares) {
  if (share_of.size() != pieces.size()) {
    return fail(ErrorCode::kInvalid, "a round shares out {} pieces of {}", share_of.size(),
                pieces.size());
  }
  std::vector<std::vector<std::uint32_t>> of_shares(shares);
  for (std::uint32_t i = 0; i < pieces.size(); ++i) {
    if (share_of[i] >= shares) {
      return fail(ErrorCode::kInvalid, "'{}' is in share {} of a round with {}", pieces[i].name(),
                  share_of[i], shares);
    }
    of_shares[share_of[i]].push_back(i);
  }
  return of_shares;
}

Failure too_many(std::uint64_t bytes, std::uint64_t share_bytes) {
  return fail(ErrorCode::kInvalid,
              "a share of {} bytes takes more than {} buckets of {} each: ask for larger buckets",
              bytes, kMostBuckets, share_bytes);
}

}  // namespace

Digest digest_of(const Contents& contents) {
  std::string all;
  for (const Piece& piece : contents.pieces()) {
    add(all, contents.tensors()[piece.tensor], piece.box());
  }
  return blake3(as_bytes(all));
}

Digest digest_of(const TensorSet& tensors, std::span<const TensorBox> boxes) {
  std::vector<const TensorBox*> sorted;
  for (const TensorBox& each : boxes) sorted.push_back(&each);
  std::ranges::stable_sort(sorted, {}, &TensorBox::tensor);
  std::string all;
  for (const TensorBox* each : sorted) add(all, tensors[each->tensor], each->box);
  return blake3(as_bytes(all));
}

std::vector<std::uint32_t> share_out(std::span<const Piece> pieces, std::uint32_t shares) {
  // A plan without shares is refused later.
  shares = std::max(shares, 1u);
  std::uint64_t left = 0;
  for (const Piece& piece : pieces) left += piece.bytes;
  std::vector<std::uint32_t> share_of(pieces.size());
  std::uint32_t share = 0;
  std::uint64_t taken = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const std::uint64_t bytes = pieces[i].bytes;
    const std::uint64_t fair = left / (shares - share);
    // The piece goes to the owner that it brings closer to a fair share of the rest.
    if (share + 1 < shares && taken > 0 && taken + bytes / 2 > fair) {
      left -= taken;
      taken = 0;
      ++share;
    }
    share_of[i] = share;
    taken += bytes;
  }
  return share_of;
}

Result<RoundPlan> RoundPlan::create(const Contents& contents,
                                    std::span<const std::uint32_t> share_of, std::uint32_t shares,
                                    std::uint64_t bucket_bytes, std::uint64_t seal_room) {
  if (shares == 0) return fail(ErrorCode::kInvalid, "a round without owners brings nothing");
  RoundPlan round;
  round.share_bytes_ = bucket_bytes / shares / kPartAlignment * kPartAlignment;
  if (round.share_bytes_ < seal_room + kPartAlignment) {
    return fail(ErrorCode::kInvalid,
                "buckets of {} bytes are too small for {} owners, {} is the least", bucket_bytes,
                shares, shares * (seal_room + kPartAlignment));
  }
  const std::uint64_t room = round.share_bytes_ - seal_room;
  TRY(const auto pieces, pieces_of_shares(contents.pieces(), share_of, shares));
  for (const auto& own : pieces) {
    std::uint64_t bytes = 0;
    for (const std::uint32_t piece : own) bytes += contents.pieces()[piece].bytes;
    // Checked before a plan is made that would not fit memory, and again when it is known.
    if (bytes / room > kMostBuckets) return too_many(bytes, room);
    TRY(Plan plan, Plan::in_order(contents, own, room));
    if (plan.size() > kMostBuckets) return too_many(bytes, room);
    round.size_ = std::max(round.size_, plan.size());
    round.plans_.push_back(std::move(plan));
  }
  return round;
}

std::vector<Part> RoundPlan::parts(std::size_t index) const {
  std::vector<Part> all;
  for (std::uint32_t share = 0; share < shares(); ++share) {
    if (index >= plans_[share].size()) continue;
    for (Part part : plans_[share].parts(index)) {
      part.at += share * share_bytes_;
      all.push_back(part);
    }
  }
  return all;
}

}  // namespace rekindle::bucket
