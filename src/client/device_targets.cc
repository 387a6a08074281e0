#include "src/client/device_targets.h"

#include <algorithm>
#include <string>
#include <string_view>

namespace rekindle::client {

namespace {

using Pieces = std::span<const bucket::Piece>;

std::string place_of(const bucket::Piece& piece) {
  if (piece.whole) return fmt::format("'{}'", piece.name());
  return fmt::format("'{}' at [{}]", piece.name(), fmt::join(piece.offset(), ", "));
}

bool is_at(const bucket::Piece& piece, const std::uint64_t* offset) {
  return offset == nullptr || std::equal(piece.offset().begin(), piece.offset().end(), offset);
}

// Finds the piece of a target.
class Finder {
 public:
  explicit Finder(Pieces pieces) : pieces_(pieces), taken_(pieces.size()) {}

  Result<std::uint32_t> take(const rk_target& target) {
    if (target.tensor == nullptr) return fail(ErrorCode::kInvalid, "a target without a name");
    const Pieces all = named(target.tensor);
    if (all.empty()) {
      return fail(ErrorCode::kNotFound, "the session has no tensor '{}'", target.tensor);
    }
    if (target.offset == nullptr && all.size() > 1) {
      return fail(ErrorCode::kInvalid, "the session has {} boxes of '{}': name the offset of each",
                  all.size(), target.tensor);
    }
    TRY(const std::uint32_t found, choose(all, target));
    taken_[found] = true;
    return found;
  }

 private:
  // Pieces are sorted by name, and most callers name targets in that order.
  Pieces named(std::string_view name) {
    if (next_ == pieces_.size() || pieces_[next_].name() != name) {
      const auto before = [](const bucket::Piece& piece, std::string_view wanted) {
        return piece.name() < wanted;
      };
      const auto at = std::lower_bound(pieces_.begin(), pieces_.end(), name, before);
      next_ = static_cast<std::size_t>(at - pieces_.begin());
    }
    const std::size_t first = next_;
    while (next_ < pieces_.size() && pieces_[next_].name() == name) ++next_;
    return pieces_.subspan(first, next_ - first);
  }

  // Boxes at one offset either differ in size or are equal.
  Result<std::uint32_t> choose(Pieces all, const rk_target& target) {
    const bucket::Piece* other = nullptr;
    bool twice = false;
    for (const bucket::Piece& piece : all) {
      if (!is_at(piece, target.offset)) continue;
      other = &piece;
      if (piece.bytes != target.bytes) continue;
      const auto index = static_cast<std::uint32_t>(&piece - pieces_.data());
      if (!taken_[index]) return index;
      twice = true;
    }
    if (other == nullptr) {
      const std::span<const std::uint64_t> offset(target.offset, all[0].offset().size());
      return fail(ErrorCode::kNotFound, "the session has no box of '{}' at [{}]", target.tensor,
                  fmt::join(offset, ", "));
    }
    if (twice) {
      return fail(ErrorCode::kInvalid, "{} has two targets: which one?", place_of(*other));
    }
    return fail(ErrorCode::kInvalid, "{} has {} bytes, its target {}", place_of(*other),
                other->bytes, target.bytes);
  }

  const Pieces pieces_;
  std::vector<bool> taken_;
  // Behind the pieces that were asked for last.
  std::size_t next_ = 0;
};

}  // namespace

PieceProgress::PieceProgress(const bucket::Contents& contents) : contents_(contents) {
  missing_.reserve(contents.pieces().size());
  for (std::size_t i = 0; i < contents.pieces().size(); ++i) missing_.push_back(at_first(i));
}

std::uint64_t PieceProgress::at_first(std::size_t piece) const {
  return std::max<std::uint64_t>(contents_.pieces()[piece].bytes, 1);
}

Result<void> PieceProgress::account(const FilledBucket& bucket) {
  for (const bucket::Part& part : bucket.parts) {
    const bool known = part.piece < missing_.size();
    const std::uint64_t size = known ? contents_.pieces()[part.piece].bytes : 0;
    const std::uint64_t counts = size == 0 ? 1 : part.bytes;
    if (!known || (part.bytes == 0) != (size == 0) || part.offset_bytes > size ||
        part.bytes > size - part.offset_bytes || part.at % bucket::kPartAlignment != 0 ||
        part.at > bucket.bytes || part.bytes > bucket.bytes - part.at ||
        counts > missing_[part.piece]) {
      return fail(ErrorCode::kInternal,
                  "a bucket has bytes that do not fit: {} at {} of tensor {}, at {} of {}",
                  part.bytes, part.offset_bytes, part.piece, part.at, bucket.bytes);
    }
    missing_[part.piece] -= counts;
    if (missing_[part.piece] == 0) ++whole_;
  }
  return {};
}

Result<void> DeviceTargets::aim(Pieces pieces, std::span<const rk_target> targets,
                                const PieceProgress& progress) {
  std::vector<bucket::DeviceAddress> next(pieces.size());
  Finder finder(pieces);
  for (const rk_target& target : targets) {
    TRY(const std::uint32_t piece, finder.take(target));
    if (pieces[piece].bytes == 0) continue;
    if (target.data == nullptr) {
      return fail(ErrorCode::kInvalid, "the target of {} is null", place_of(pieces[piece]));
    }
    next[piece] = reinterpret_cast<std::uintptr_t>(target.data);
    if (progress.begun(piece) && (addresses_.empty() || addresses_[piece] != next[piece])) {
      return fail(ErrorCode::kInvalid,
                  "{} was handed out before this call: name its target when the load begins",
                  place_of(pieces[piece]));
    }
  }
  for (std::size_t i = 0; i < addresses_.size(); ++i) {
    if (addresses_[i] != 0 && next[i] == 0 && progress.half_done(i)) {
      return fail(ErrorCode::kInvalid, "{} is half written: name its target again",
                  place_of(pieces[i]));
    }
  }
  addresses_ = std::move(next);
  return {};
}

std::vector<bucket::Move> DeviceTargets::moves_of(const FilledBucket& bucket) const {
  std::vector<bucket::Move> moves;
  moves.reserve(bucket.parts.size());
  for (const bucket::Part& part : bucket.parts) {
    const bucket::DeviceAddress target = addresses_[part.piece];
    if (target == 0) continue;
    moves.push_back({bucket.at + part.at, target + part.offset_bytes, part.bytes});
  }
  return moves;
}

}  // namespace rekindle::client
