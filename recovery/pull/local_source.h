#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "src/base/result.h"
#include "src/base/worker_pool.h"
#include "src/store/segment_store.h"
#include "src/tensor/checkpoint.h"
#include "transport/path.h"

// Sources whose bytes this process has mapped: copies in the own store with another layout, and the
// last rung of the ladder, a fallback directory of safetensors files.
namespace rekindle::pull {

struct FileSource {
  std::shared_ptr<const Checkpoint> checkpoint;
  std::shared_ptr<const Layout> layout;
  std::vector<std::unique_ptr<store::MappedSegment>> files;  // as in the layout
  std::vector<std::span<const std::byte>> segments() const;
};

// The tensors of `known` that lie in `directory` with the same dtype and shape. Nothing is
// digested: the pull verifies every tile.
Result<std::shared_ptr<FileSource>> open_file_source(const std::filesystem::path& directory,
                                                     std::shared_ptr<const Checkpoint> known);

// For when no peer can say what `id` consists of: takes the directory for it and digests all of it.
Result<std::shared_ptr<FileSource>> adopt_file_source(const std::filesystem::path& directory,
                                                      const ModelVersion& id, WorkerPool& pool);

// A Path over mapped bytes. Region i is segments[i], generation 0. poll() copies in bounded steps.
// Where a source file was truncated under its mapping the op ends in kFault; where the destination
// was, in kLocalFault.
class MemoryPath final : public transport::Path {
 public:
  MemoryPath(std::string name, std::vector<std::span<const std::byte>> segments,
             std::shared_ptr<const void> keep_alive);

  Result<std::size_t> post(std::span<const transport::ReadOp> ops) override;
  std::size_t poll(std::span<transport::Completion> out) override;
  void abort() override;
  std::size_t in_flight() const override { return queue_.size(); }
  std::uint64_t bytes_landed() const override { return bytes_landed_; }
  int wait_fd() const override { return -1; }
  std::string_view transport() const override { return "local"; }
  std::string describe() const override { return name_; }

 private:
  transport::OpStatus execute(const transport::ReadOp& op);

  const std::string name_;
  const std::vector<std::span<const std::byte>> segments_;
  const std::shared_ptr<const void> keep_alive_;
  std::deque<transport::ReadOp> queue_;
  std::uint64_t bytes_landed_ = 0;
  bool aborted_ = false;
};

}  // namespace rekindle::pull
