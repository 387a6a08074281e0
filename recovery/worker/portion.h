#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "recovery/pull/pull_types.h"
#include "src/store/segment_store.h"
#include "src/tensor/checkpoint.h"
#include "src/tensor/layout.h"

namespace rekindle::worker {

// What a worker asks for. Two that ask for the same share one supply.
struct Wanted {
  ModelVersion id;
  std::string shard;
  std::string spec_json;
  std::vector<pull::NamedBox> boxes;
  std::string fallback_dir;
  std::string transport;
  auto operator<=>(const Wanted&) const = default;
};

// What of a copy a worker gets, and the words that tell it so: of tens of thousands of tensors they
// take longer than everything else of an attach, and are the same for all who want the same.
struct Portion {
  Layout layout;
  std::vector<TensorBox> wanted;    // parts of what the layout holds; empty: all that it holds
  TileSet held;                     // tiles that are wanted
  std::uint64_t payload_bytes = 0;  // likewise
  std::string words;                // attached_words()

  static std::shared_ptr<const Portion> make(const Checkpoint& checkpoint, Layout layout,
                                             std::vector<TensorBox> wanted);
};

using Copies = std::vector<std::shared_ptr<const store::StoredVersion>>;
struct Found {
  std::shared_ptr<const store::StoredVersion> stored;  // null: no copy has it all
  std::shared_ptr<const Portion> portion;
};
// Of the copies of a version one that has every wanted box, best one that has them in one piece.
// Blocking: rules over many tensors.
Result<Found> find_portion(const Copies& copies, const Wanted& wanted);

// What was found lately, for workers that come back and for those on the host's other GPUs. Keeps
// no copy from going. Control thread only.
class RecentPortions {
 public:
  // `copies`: all that the store has of the version. Null: they are others than then.
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
