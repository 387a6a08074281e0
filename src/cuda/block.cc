#include "src/cuda/block.h"

#include <cerrno>

#include <fcntl.h>

#include "src/base/duplicate_fd.h"
#include "src/base/units.h"

namespace rekindle::cuda {

namespace {

// Whether a block could not be opened because it is none, or has another size. For a file that is
// no block, the driver says "unknown error"; the device goes on working.
bool is_no_block(CUresult result) {
  switch (result) {
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_UNKNOWN:
      return true;
    default:
      return false;
  }
}

CUmemAllocationProp properties_on(CUdevice device) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  properties.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  properties.location.id = device;
  return properties;
}

}  // namespace

std::uint64_t block_granularity(const Context& context) {
  const CUmemAllocationProp properties = properties_on(context.device());
  std::size_t bytes = 0;
  const CUresult result = context.run([&] {
    return context.api().block_granularity(&bytes, &properties,
                                           CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
  });
  return result == CUDA_SUCCESS ? bytes : 0;
}

Result<std::unique_ptr<CudaBlock>> CudaBlock::create(const std::shared_ptr<const Context>& context,
                                                     std::uint64_t bytes) {
  const Api& api = context->api();
  const CUmemAllocationProp properties = properties_on(context->device());
  CUmemGenericAllocationHandle allocation{};
  CUresult result =
      context->run([&] { return api.block_create(&allocation, bytes, &properties, 0); });
  if (result != CUDA_SUCCESS) {
    return fail(unavailable_of(api, result, fmt::format("allocate a block of {} bytes", bytes)));
  }
  std::unique_ptr<CudaBlock> block(new CudaBlock(context, allocation, bytes));
  result = block->map(bucket::Access::kWrite);
  if (result != CUDA_SUCCESS) {
    return fail(unavailable_of(api, result, fmt::format("map a block of {} bytes", bytes)));
  }
  return block;
}

Result<std::unique_ptr<CudaBlock>> CudaBlock::open(const std::shared_ptr<const Context>& context,
                                                   int fd, std::uint64_t bytes,
                                                   bucket::Access access) {
  TRY(UniqueFd descriptor, duplicate(fd, "keep the descriptor of a block"));
  const Api& api = context->api();
  CUmemGenericAllocationHandle allocation{};
  // The driver takes the descriptor as the value of a pointer.
  void* const handle = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
  CUresult result = context->run([&] {
    return api.block_import(&allocation, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  });
  const auto refused = [&](std::string_view what) {
    const Error error = unavailable_of(api, result, what);
    return is_no_block(result) ? fail(Error(ErrorCode::kInvalid, error.message())) : fail(error);
  };
  if (result != CUDA_SUCCESS) return refused("open a block of another process");
  std::unique_ptr<CudaBlock> block(new CudaBlock(context, allocation, bytes));
  CUmemAllocationProp properties{};
  result = context->run([&] { return api.block_properties(&properties, allocation); });
  if (result != CUDA_SUCCESS) return refused("ask what a block of another process is");
  if (properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      properties.location.id != context->device()) {
    return fail(ErrorCode::kInvalid, "this is a block of another GPU");
  }
  block->descriptor_ = std::move(descriptor);
  result = block->map(access);
  if (result != CUDA_SUCCESS) {
    return refused(fmt::format("map a block of another process, with {} bytes", bytes));
  }
  return block;
}

CUresult CudaBlock::map(bucket::Access access) {
  const Api& api = context().api();
  return context().run([&] {
    CUresult result = api.address_reserve(&address_, bytes_, 0, 0, 0);
    if (result != CUDA_SUCCESS) {
      address_ = 0;
      return result;
    }
    result = api.block_map(address_, bytes_, 0, allocation_.get(), 0);
    if (result != CUDA_SUCCESS) return result;
    mapped_ = true;
    return allow(access);
  });
}

// With the context of the device.
CUresult CudaBlock::allow(bucket::Access access) {
  CUmemAccessDesc allowed{};
  allowed.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  allowed.location.id = context().device();
  allowed.flags = access == bucket::Access::kRead ? CU_MEM_ACCESS_FLAGS_PROT_READ
                                                  : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  const CUresult result = context().api().block_access(address_, bytes_, &allowed, 1);
  if (result == CUDA_SUCCESS) access_ = access;
  return result;
}

Result<void> CudaBlock::set_access(bucket::Access access) {
  const CUresult result = context().run([&] { return allow(access); });
  if (result == CUDA_SUCCESS) return {};
  return fail(unavailable_of(context().api(), result,
                             fmt::format("change the access to a block of {} bytes", bytes_)));
}

CudaBlock::~CudaBlock() {
  if (address_ == 0) return;
  const Api& api = context().api();
  context().run([&] {
    if (mapped_) api.block_unmap(address_, bytes_);
    return api.address_free(address_, bytes_);
  });
}

Result<UniqueFd> CudaBlock::export_descriptor() {
  if (descriptor_) return duplicate(descriptor_.get(), "keep the descriptor of a block");
  const Api& api = context().api();
  int fd = -1;
  const CUresult result = context().run([&] {
    return api.block_export(&fd, allocation_.get(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  });
  if (result != CUDA_SUCCESS) {
    return fail(unavailable_of(api, result, "export a block as a file descriptor"));
  }
  return UniqueFd(fd);
}

}  // namespace rekindle::cuda
