#pragma once

#include <cstdint>
#include <memory>

#include "src/bucket/device.h"
#include "src/cuda/handles.h"

// Private to src/cuda.
namespace rekindle::cuda {

// An allocation of cuMemCreate with a POSIX file descriptor as its handle. It lives as long as this
// handle, a mapping, or a descriptor, in any process.
using AllocationHandle = Handle<CUmemGenericAllocationHandle, &Api::block_release>;

// Such an allocation at an address of this process.
class CudaBlock final : public bucket::Block {
 public:
  // Made by this process.
  static Result<std::unique_ptr<CudaBlock>> create(const std::shared_ptr<const Context>& context,
                                                   std::uint64_t bytes);
  // Made by any process. kInvalid, kUnavailable: see bucket::Device::open_block().
  static Result<std::unique_ptr<CudaBlock>> open(const std::shared_ptr<const Context>& context,
                                                 int fd, std::uint64_t bytes,
                                                 bucket::Access access);
  ~CudaBlock() override;
  CudaBlock(const CudaBlock&) = delete;
  CudaBlock& operator=(const CudaBlock&) = delete;

  bucket::DeviceAddress address() const override { return address_; }
  std::uint64_t bytes() const override { return bytes_; }
  Result<UniqueFd> export_descriptor() override;
  bucket::Access access() const override { return access_; }
  Result<void> set_access(bucket::Access access) override;

 private:
  CudaBlock(const std::shared_ptr<const Context>& context, CUmemGenericAllocationHandle allocation,
            std::uint64_t bytes)
      : allocation_(context, allocation), bytes_(bytes) {}
  CUresult map(bucket::Access access);
  CUresult allow(bucket::Access access);
  const Context& context() const { return allocation_.context(); }

  const AllocationHandle allocation_;
  // Of a block that was opened, because the driver exports only blocks that this process has made.
  // Empty otherwise.
  UniqueFd descriptor_;
  const std::uint64_t bytes_;
  // 0: no address was reserved.
  CUdeviceptr address_ = 0;
  bool mapped_ = false;
  bucket::Access access_ = bucket::Access::kWrite;
};

// What an allocation is rounded up to, in bytes; 0: the driver does not say.
std::uint64_t block_granularity(const Context& context);

}  // namespace rekindle::cuda
