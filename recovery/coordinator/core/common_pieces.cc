#include "recovery/coordinator/core/common_pieces.h"

#include <algorithm>
#include <optional>
#include <unordered_set>

namespace rekindle::coordinator {

namespace {

// Classes that save less than so many others are left out.
constexpr std::size_t kMostClasses = 1024;
// Of the best classes, those whose members are tried as a set.
constexpr std::size_t kMostSets = 64;
// A communicator costs more than it saves for a smaller part of what a member wants.
constexpr std::uint64_t kLeastPart = 8;

// Ascending.
using Members = std::vector<std::uint32_t>;
// Pieces that the same members want.
struct Class {
  Members members;
  std::uint64_t bytes = 0;
  std::vector<std::uint64_t> keys;
};

std::uint64_t saved(const Members& members, std::uint64_t bytes) {
  return bytes * (members.size() - 1);
}

bool all_in(const Members& some, const Members& others) {
  return std::ranges::includes(others, some);
}

class Finder {
 public:
  explicit Finder(std::span<const Pieces* const> wanted) : wanted_(wanted) {
    for (const Pieces* pieces : wanted) {
      std::uint64_t bytes = 0;
      for (const WantedPiece& piece : *pieces) bytes += piece.bytes;
      payload_.push_back(bytes);
    }
    find_classes();
  }

  std::vector<CommonPieces> find() {
    std::vector<bool> is_free(wanted_.size(), true);
    std::vector<CommonPieces> found;
    std::vector<Members> refused;
    while (const auto best = best_set(is_free, refused)) {
      auto common = common_of(*best);
      if (!common) {
        refused.push_back(*best);
        continue;
      }
      for (const std::size_t member : common->members) is_free[member] = false;
      found.push_back(std::move(*common));
    }
    return found;
  }

 private:
  struct Occurrence {
    std::uint64_t key = 0;
    std::uint32_t member = 0;
    std::uint64_t bytes = 0;
  };

  void find_classes() {
    std::vector<Occurrence> all;
    for (std::uint32_t member = 0; member < wanted_.size(); ++member) {
      for (const auto& [key, bytes] : *wanted_[member]) all.push_back({key, member, bytes});
    }
    std::ranges::sort(all, {},
                      [](const Occurrence& each) { return std::pair(each.key, each.member); });
    std::map<Members, Class> classes;
    for (auto it = all.begin(); it != all.end();) {
      const auto end =
          std::find_if(it, all.end(), [&](const Occurrence& each) { return each.key != it->key; });
      if (end - it < 2) {
        it = end;
        continue;
      }
      Members members;
      for (auto each = it; each != end; ++each) members.push_back(each->member);
      // A member that has a piece twice would have no place for the second one.
      const bool once = std::ranges::adjacent_find(members) == members.end();
      if (once) {
        Class& same = classes[members];
        same.bytes += it->bytes;
        same.keys.push_back(it->key);
      }
      it = end;
    }
    for (auto& [members, same] : classes) {
      same.members = members;
      classes_.push_back(std::move(same));
    }
    std::ranges::stable_sort(classes_, std::greater(),
                             [](const Class& each) { return saved(each.members, each.bytes); });
    if (classes_.size() > kMostClasses) classes_.resize(kMostClasses);
  }

  std::uint64_t bytes_of(const Members& members) const {
    std::uint64_t bytes = 0;
    for (const Class& each : classes_) bytes += all_in(members, each.members) ? each.bytes : 0;
    return bytes;
  }

  bool is_worth(const Members& members, std::uint64_t bytes) const {
    return bytes > 0 && std::ranges::all_of(members, [&](std::uint32_t member) {
             return bytes >= payload_[member] / kLeastPart;
           });
  }

  std::optional<Members> best_set(const std::vector<bool>& is_free,
                                  const std::vector<Members>& refused) const {
    std::optional<Members> best;
    std::uint64_t most = 0;
    const std::size_t count = std::min(classes_.size(), kMostSets);
    for (const Class& each : std::span(classes_).first(count)) {
      Members members;
      std::ranges::copy_if(each.members, std::back_inserter(members),
                           [&](std::uint32_t member) { return is_free[member]; });
      if (members.size() < 2 || std::ranges::find(refused, members) != refused.end()) continue;
      const std::uint64_t bytes = bytes_of(members);
      if (!is_worth(members, bytes) || saved(members, bytes) <= most) continue;
      most = saved(members, bytes);
      best = std::move(members);
    }
    return best;
  }

  // Without members that have the pieces in another order than the first one. nullopt: then there
  // is only one.
  std::optional<CommonPieces> common_of(const Members& members) const {
    std::unordered_set<std::uint64_t> keys;
    for (const Class& each : classes_) {
      if (all_in(members, each.members)) keys.insert(each.keys.begin(), each.keys.end());
    }
    CommonPieces common;
    common.bytes = bytes_of(members);
    std::vector<std::uint64_t> order;
    for (const std::uint32_t member : members) {
      std::vector<std::uint64_t> its_order;
      PieceRuns runs;
      const Pieces& pieces = *wanted_[member];
      for (std::uint32_t i = 0; i < pieces.size(); ++i) {
        if (!keys.contains(pieces[i].key)) continue;
        its_order.push_back(pieces[i].key);
        if (!runs.empty() && runs.back().second == i) {
          ++runs.back().second;
        } else {
          runs.emplace_back(i, i + 1);
        }
      }
      if (common.members.empty()) order = its_order;
      if (its_order != order) continue;
      common.members.push_back(member);
      common.runs.push_back(std::move(runs));
    }
    if (common.members.size() < 2) return std::nullopt;
    return common;
  }

  const std::span<const Pieces* const> wanted_;
  // Of each member.
  std::vector<std::uint64_t> payload_;
  // Those that save the most first.
  std::vector<Class> classes_;
};

}  // namespace

std::vector<CommonPieces> find_common_pieces(std::span<const Pieces* const> wanted) {
  return Finder(wanted).find();
}

void KnownPieces::add(const Digest& contents, Pieces pieces,
                      const std::function<bool(const Digest&)>& is_wanted) {
  if (knows(contents)) return;
  const std::size_t count = pieces.size();
  if (count_ + count > most_) {
    std::erase_if(known_, [&](const auto& item) {
      if (is_wanted(item.first)) return false;
      count_ -= item.second.pieces == nullptr ? 0 : item.second.count;
      return true;
    });
  }
  Known& known = known_[contents];
  known.count = count;
  if (count_ + count <= most_) {
    known.pieces = std::make_unique<const Pieces>(std::move(pieces));
    count_ += count;
  }
  // Their agents are asked again.
  std::erase_if(known_, [&](const auto& item) {
    return item.second.pieces == nullptr && count_ + item.second.count <= most_;
  });
}

const Pieces* KnownPieces::find(const Digest& contents) const {
  const auto found = known_.find(contents);
  return found == known_.end() ? nullptr : found->second.pieces.get();
}

}  // namespace rekindle::coordinator
