#pragma once

#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "src/bucket/device.h"
#include "src/cuda/handles.h"
#include "src/cuda/move_kernel.h"

namespace rekindle::cuda {

// Private to src/cuda. One thread at a time.
class CudaStream final : public bucket::Stream {
 public:
  // Owns `stream`, or borrows it.
  CudaStream(std::shared_ptr<const Context> context, CUstream stream, bool owned,
             std::uint64_t longest_pitch);
  ~CudaStream() override;
  Result<void> upload(std::span<const bucket::Upload> copies) override;
  Result<void> move(std::span<const bucket::Move> copies) override;
  Result<void> download(std::span<const bucket::Download> copies) override;
  Result<void> digest(std::span<const BoxBytes> boxes, bucket::Digests& into) override;
  Result<void> record(bucket::Event& event) override;
  Result<void> wait(bucket::Event& event) override;
  Result<void> finish(TimePoint deadline) override;

  CUstream get() const { return stream_; }
  const Context& context() const { return *context_; }

 private:
  CUresult copy_in(std::span<const bucket::Upload> copies);
  CUresult copy_rows(const bucket::Upload& copy);
  CUresult copy_out(const bucket::Download& copy);
  CUresult move_few(std::span<const bucket::Move> copies);
  CUresult move_small(std::span<const bucket::Move> copies);
  // The memory range that was looked up last.
  struct Range {
    CUdeviceptr begin = 0;
    CUdeviceptr end = 0;
  };
  bool is_here(Range& known, CUdeviceptr address, std::uint64_t bytes) const;
  bool begin_batch(std::size_t count);
  bool copy_batch();
  Error error(CUresult result, std::string_view what) const;

  const std::shared_ptr<const Context> context_;
  const CUstream stream_;
  const bool owned_;
  // Empty if the stream is borrowed.
  const StreamHandle owner_;
  const std::uint64_t longest_pitch_;
  // The driver takes many copies in one call.
  bool batches_;
  std::vector<bucket::Upload> uploads_;
  std::vector<bucket::Download> downloads_;
  struct Batch {
    std::vector<CUdeviceptr> to;
    std::vector<CUdeviceptr> from;
    std::vector<std::size_t> bytes;
  } batch_;
  std::vector<bucket::Move> small_;
  std::vector<bucket::Move> large_;
  bool has_looked_for_kernel_ = false;
  // Null: not loaded yet, or the driver cannot compile it.
  std::unique_ptr<MoveKernel> kernel_;
};

}  // namespace rekindle::cuda
