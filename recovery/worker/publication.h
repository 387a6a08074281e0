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

// A version that a trainer writes, into files of the store's file system that it maps. At the
// commit the store takes over the files that the trainer has let go of, and copies the others. The
// calls block.
class Publication {
 public:
  // Creates files with all their pages in a new directory below `parent`. A lack of memory shows
  // here as kExhausted, and not later as SIGBUS. The content of the files is undefined.
  static Result<std::unique_ptr<Publication>> begin(store::SegmentStore& store,
                                                    const std::filesystem::path& parent,
                                                    ModelVersion id, const TensorSet& tensors);
  // Removes the files that the store has not taken over.
  ~Publication();
  Publication(const Publication&) = delete;
  Publication& operator=(const Publication&) = delete;

  const ModelVersion& id() const { return id_; }
  const Layout& layout() const { return packed_.layout; }
  Result<std::vector<UniqueFd>> open_segments() const;  // for writing
  store::FilledSegments filled() const { return {tensors_, packed_, segments_}; }
  // The trainer did not say that it is done, so the store must not reuse the files.
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
