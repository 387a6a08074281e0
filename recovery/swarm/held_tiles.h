#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <utility>

#include "src/tensor/tile.h"

namespace rekindle::swarm {

// The verified tiles of a copy, from this life of the process or an earlier one. Nobody writes to
// their bytes again, so they may be served. The set only grows. Thread-safe.
class HeldTiles {
 public:
  explicit HeldTiles(TileSet held) : tiles_(std::move(held)), count_(tiles_.count()) {}

  // Call it after the bytes are in place and verified.
  void set(TileIndex tile) {
    const std::lock_guard lock(mutex_);
    if (tiles_.test(tile)) return;
    tiles_.set(tile);
    count_.fetch_add(1, std::memory_order_release);
  }
  bool test(TileIndex tile) const {
    const std::lock_guard lock(mutex_);
    return tile < tiles_.size() && tiles_.test(tile);
  }
  bool test_range(TileIndex begin, TileIndex end) const {
    const std::lock_guard lock(mutex_);
    for (TileIndex tile = begin; tile < end; ++tile) {
      if (tile >= tiles_.size() || !tiles_.test(tile)) return false;
    }
    return true;
  }
  // Takes no lock. It shows whether anything is new.
  TileIndex count() const { return count_.load(std::memory_order_acquire); }
  TileSet snapshot() const {
    const std::lock_guard lock(mutex_);
    return tiles_;
  }

 private:
  mutable std::mutex mutex_;
  // Guarded by mutex_.
  TileSet tiles_;
  std::atomic<TileIndex> count_;
};

}  // namespace rekindle::swarm
