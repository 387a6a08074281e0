#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "recovery/pull/placing.h"
#include "recovery/pull/tile_verifier.h"
#include "src/store/segment_store.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/layout.h"

namespace rekindle::pull {

// A pull's copy once it has its place. Its files stay the same when it is committed, under other
// names. What is in `verified` stays as it is.
struct Arriving {
  std::shared_ptr<const Checkpoint> checkpoint;
  Layout layout;
  std::shared_ptr<const VerifiedTiles> verified;
  std::vector<std::shared_ptr<const store::MappedSegment>> segments;  // as in the layout
  std::shared_ptr<Placing> placing = {};  // for who may write to it while it is held
};

// For those who read a copy while it arrives. On the control thread.
struct PullWatch {
  std::function<void(Arriving)> on_begun;
  // Asked again and again between on_begun and the first byte that is fetched: while it says so the
  // pull waits, without a place at its sources. None: it does not. It waits for who writes to its
  // copy (Arriving::placing) in any case.
  std::function<bool()> held;
  // Before the pull fails because somebody else fills the same files: it may be tried again when
  // that has ended.
  std::function<void()> on_place_taken;
};

}  // namespace rekindle::pull
