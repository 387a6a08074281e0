#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "src/tensor/tile.h"

namespace rekindle::pull {

// Tiles of a copy that others than its pull write, in place, while the pull is held. Control thread
// only.
class Placing {
 public:
  using TileRuns = std::vector<std::pair<TileIndex, TileIndex>>;

  // The pull does not go on while somebody keeps this. Null: it went on before.
  std::shared_ptr<const bool> begin() { return closed_ ? nullptr : writing_; }
  // Whole tiles that nobody writes again, before who wrote them lets go.
  void landed(const TileRuns& runs) { landed_.insert(landed_.end(), runs.begin(), runs.end()); }

  bool busy() const { return writing_.use_count() > 1; }
  // From here on the pull writes itself. What has landed, and verifies or not.
  TileRuns close() {
    closed_ = true;
    return std::exchange(landed_, {});
  }

 private:
  const std::shared_ptr<const bool> writing_ = std::make_shared<const bool>(true);
  bool closed_ = false;
  TileRuns landed_;
};

}  // namespace rekindle::pull
