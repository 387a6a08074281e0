#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "recovery/pull/pull_types.h"
#include "src/base/digest.h"
#include "src/bucket/round_plan.h"
#include "src/store/segment_store.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/layout.h"

namespace rekindle::worker {

// What a worker asks for. Workers that ask for the same share one feed.
struct Wanted {
  ModelVersion id;
  std::string shard;
  std::string spec_json;
  std::vector<pull::NamedBox> boxes;
  std::string fallback_dir;
  std::string transport;
  auto operator<=>(const Wanted&) const = default;
};

// The part of a copy that a worker gets. Its encoding is kept: with tens of thousands of tensors,
// encoding takes longer than the rest of an attach, and it is the same for all workers that want
// the same.
struct Portion {
  Layout layout;
  std::vector<TensorBox> wanted;    // parts of the layout's boxes; empty: the whole layout
  TileSet held;                     // the tiles of the wanted boxes
  std::uint64_t payload_bytes = 0;  // of the wanted boxes
  Digest contents;                  // as bucket::digest_of
  std::vector<bucket::PieceKey> pieces;
  std::string encoded;  // encode_portion()

  static std::shared_ptr<const Portion> make(const Checkpoint& checkpoint, Layout layout,
                                             std::vector<TensorBox> wanted);
};

using Copies = std::vector<std::shared_ptr<const store::StoredVersion>>;
struct Found {
  std::shared_ptr<const store::StoredVersion> stored;  // null: no copy has everything
  std::shared_ptr<const Portion> portion;
};
// Finds a copy that has every wanted box, preferably each in one piece. Blocks: the rules go
// through many tensors.
Result<Found> find_portion(const Copies& copies, const Wanted& wanted);

// The latest results of find_portion(), for workers that come back and for workers on the host's
// other GPUs. Keeps no copy alive. Control thread only.
class RecentPortions {
 public:
  // `copies`: all copies of the version in the store. Finds nothing if they have changed since.
  Found find(const Copies& copies, const Wanted& wanted) const;
  void add(const Copies& copies, const Wanted& wanted, const Found& found);

 private:
  static constexpr std::size_t kMost = 32;
  struct Entry {
    Wanted wanted;
    std::vector<std::weak_ptr<const store::StoredVersion>> copies;
    std::weak_ptr<const store::StoredVersion> stored;
    std::shared_ptr<const Portion> portion;
  };
  std::deque<Entry> entries_;
};

}  // namespace rekindle::worker
