#pragma once

namespace rekindle::pull {

// The decisions between the transfers of a pull: what to do with a plan, where to look for more
// sources, and when to stop. Pure.
class PullRounds {
 public:
  enum class Next { kDone, kTransfer, kFindSources };
  struct PlanFacts {
    bool has_slices = false;
    // No source's layout covers some of the boxes.
    bool has_missing = false;
    // Some sources are being filled.
    bool any_growing = false;
    // Only then: no source holds any of the slices as of now.
    bool nothing_readable = false;
  };
  // While sources are being filled, the pull first reads what they have, although boxes are
  // missing: meanwhile they get more.
  static Next next(const PlanFacts& plan) {
    if (!plan.has_slices && !plan.has_missing) return Next::kDone;
    const bool part_first = plan.has_slices && plan.any_growing;
    if (part_first) return plan.nothing_readable ? Next::kFindSources : Next::kTransfer;
    return plan.has_missing ? Next::kFindSources : Next::kTransfer;
  }

  enum class Search { kReadFallback, kGiveUp, kAskAgain };
  struct SearchFacts {
    // A fallback directory was not read yet.
    bool has_fallback = false;
    // Sources are only behind, or busy.
    bool worth_waiting = false;
    // No source has sent a byte for too long.
    bool silent = false;
  };
  static Search search(const SearchFacts& facts) {
    const bool fallback = facts.has_fallback && (!facts.worth_waiting || facts.silent);
    if (fallback) return Search::kReadFallback;
    return facts.silent ? Search::kGiveUp : Search::kAskAgain;
  }

  enum class After { kGoOn, kAwaitGrants, kStop };
  struct TransferFacts {
    // Tiles verified, or a source was quarantined.
    bool gained = false;
    bool grants_refused = false;
    bool silent = false;
  };
  // A pull stops after some transfers in a row that gained nothing. A transfer whose grants had run
  // out does not count: the coordinator has fresh ones when it is back.
  After after(const TransferFacts& facts) {
    if (facts.gained) {
      fruitless_ = 0;
      return After::kGoOn;
    }
    if (facts.grants_refused && !facts.silent) return After::kAwaitGrants;
    return ++fruitless_ == kFruitlessTransfers ? After::kStop : After::kGoOn;
  }

 private:
  static constexpr int kFruitlessTransfers = 5;
  int fruitless_ = 0;
};

}  // namespace rekindle::pull
