#pragma once

#include <filesystem>
#include <memory>
#include <vector>

#include "src/base/ids.h"
#include "src/base/result.h"
#include "src/base/unique_fd.h"
#include "src/store/segment_store.h"
#include "src/tensor/layout.h"
#include "src/tensor/tensor_set.h"

namespace rekindle::worker {

// A version that a trainer writes: files of the store's file system that it maps. At its commit the
// store takes those over that the trainer has let go of, and copies the others. Blocking calls.
class Publication {
 public:
  // A directory of its own below `parent`, all pages there: kExhausted comes here, not as SIGBUS.
  // What is in them is anything.
  static Result<std::unique_ptr<Publication>> begin(store::SegmentStore& store,
                                                    const std::filesystem::path& parent,
                                                    ModelVersion id, const TensorSet& tensors);
  ~Publication();  // removes the files that the store has not taken over
  Publication(const Publication&) = delete;
  Publication& operator=(const Publication&) = delete;

  const ModelVersion& id() const { return id_; }
  const Layout& layout() const { return packed_.layout; }
  Result<std::vector<UniqueFd>> open_segments() const;  // for writing
  store::FilledSegments filled() const { return {tensors_, packed_, segments_}; }
  // Its trainer has not said that it is done: nobody else writes to the files later.
  void left_mapped() { left_mapped_ = true; }

 private:
  Publication(store::SegmentStore& store, ModelVersion id, const TensorSet& tensors,
              PackedLayout packed, std::filesystem::path directory)
      : store_(store),
        id_(std::move(id)),
        tensors_(tensors),
        packed_(std::move(packed)),
        directory_(std::move(directory)) {}
  store::SegmentStore& store_;
  std::vector<std::shared_ptr<store::MappedSegment>> segments_;
  bool left_mapped_ = false;
  const ModelVersion id_;
  const TensorSet tensors_;
  const PackedLayout packed_;
  const std::filesystem::path directory_;
};

}  // namespace rekindle::worker
