#include "src/bucket/round_plan.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "src/base/blake3.h"

namespace rekindle::bucket {

namespace {

void add(std::string& out, std::uint64_t number) {
  static_assert(std::endian::native == std::endian::little);
  out.append(reinterpret_cast<const char*>(&number), sizeof number);
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

// The boxes in the order of pieces.
std::vector<const TensorBox*> sorted_by_tensor(std::span<const TensorBox> boxes) {
  std::vector<const TensorBox*> sorted;
  for (const TensorBox& each : boxes) sorted.push_back(&each);
  std::ranges::stable_sort(sorted, {}, &TensorBox::tensor);
  return sorted;
}

// The pieces of each share, in order, and then those without a share.
Result<std::vector<std::vector<std::uint32_t>>> pieces_of_shares(
    std::span<const Piece> pieces, std::span<const std::uint32_t> share_of, std::uint32_t shares) {
  if (share_of.size() != pieces.size()) {
    return fail(ErrorCode::kInvalid, "a round shares out {} pieces of {}", share_of.size(),
                pieces.size());
  }
  std::vector<std::vector<std::uint32_t>> of_shares(shares + std::size_t{1});
  for (std::uint32_t i = 0; i < pieces.size(); ++i) {
    if (share_of[i] == kNoShare) {
      of_shares[shares].push_back(i);
      continue;
    }
    if (share_of[i] >= shares) {
      return fail(ErrorCode::kInvalid, "'{}' is in share {} of a round with {}", pieces[i].name(),
                  share_of[i], shares);
    }
    of_shares[share_of[i]].push_back(i);
  }
  return of_shares;
}

Result<Plan> plan_in_order(const Contents& contents, std::span<const std::uint32_t> pieces,
                           std::uint64_t room) {
  std::uint64_t bytes = 0;
  for (const std::uint32_t piece : pieces) bytes += contents.pieces()[piece].bytes;
  const auto too_many = [&] {
    return fail(ErrorCode::kInvalid,
                "{} bytes take more than {} buckets of {} each: ask for larger buckets", bytes,
                kMostBuckets, room);
  };
  // Checked before a plan is made that would not fit memory, and again when it is known.
  if (bytes / room > kMostBuckets) return too_many();
  TRY(Plan plan, Plan::in_order(contents, pieces, room));
  if (plan.size() > kMostBuckets) return too_many();
  return plan;
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
  std::string all;
  for (const TensorBox* each : sorted_by_tensor(boxes)) {
    add(all, tensors[each->tensor], each->box);
  }
  return blake3(as_bytes(all));
}

std::vector<PieceKey> keys_of(const TensorSet& tensors, std::span<const TensorBox> boxes) {
  std::vector<PieceKey> keys;
  keys.reserve(boxes.size());
  std::string text;
  for (const TensorBox* each : sorted_by_tensor(boxes)) {
    const TensorInfo& info = tensors[each->tensor];
    text.clear();
    add(text, info, each->box);
    PieceKey& piece = keys.emplace_back();
    const Digest digest = blake3(as_bytes(text));
    std::memcpy(&piece.key, digest.bytes.data(), sizeof piece.key);
    piece.bytes = each->box.elements() * dtype_size_bytes(info.dtype);
  }
  return keys;
}

std::vector<std::uint32_t> share_out(std::span<const Piece> pieces, std::uint32_t shares,
                                     const PieceRuns& brought) {
  // A plan without shares is refused later.
  shares = std::max(shares, 1u);
  std::vector<std::uint32_t> share_of(pieces.size(), brought.empty() ? 0 : kNoShare);
  for (const auto& [begin, end] : brought) {
    for (std::size_t i = begin; i < std::min<std::size_t>(end, pieces.size()); ++i) share_of[i] = 0;
  }
  std::uint64_t left = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) left += share_of[i] == 0 ? pieces[i].bytes : 0;
  std::uint32_t share = 0;
  std::uint64_t taken = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (share_of[i] == kNoShare) continue;
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
                                    std::uint64_t bucket_bytes, std::uint64_t seal_room,
                                    std::uint64_t rest_bytes) {
  if (shares == 0) return fail(ErrorCode::kInvalid, "a round without owners brings nothing");
  RoundPlan round;
  round.share_bytes_ = bucket_bytes / shares / kPartAlignment * kPartAlignment;
  if (round.share_bytes_ < seal_room + kPartAlignment) {
    return fail(ErrorCode::kInvalid,
                "buckets of {} bytes are too small for {} owners, {} is the least", bucket_bytes,
                shares, shares * (seal_room + kPartAlignment));
  }
  const std::uint64_t room = round.share_bytes_ - seal_room;
  TRY(auto pieces, pieces_of_shares(contents.pieces(), share_of, shares));
  const auto rest = std::move(pieces.back());
  pieces.pop_back();
  for (const auto& own : pieces) {
    TRY(Plan plan, plan_in_order(contents, own, room));
    round.size_ = std::max(round.size_, plan.size());
    round.plans_.push_back(std::move(plan));
  }
  if (!rest.empty()) {
    if (rest_bytes == 0) rest_bytes = round.bucket_bytes();
    TRY(round.rest_, plan_in_order(contents, rest, rest_bytes));
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
