#pragma once

#include <cstddef>
#include <string_view>

#include <cuda.h>

#include "src/base/result.h"

// Private to src/cuda: the CUDA driver calls that it makes, as pointers that Driver::load() finds.
// The names on the left are ours, the names on the right NVIDIA's.
namespace rekindle::cuda {

// CUmemcpyAttributes, which toolkits before 12.8 lack.
struct BatchAttributes {
  int source_order = 0;
  int source_hint[2] = {};
  int target_hint[2] = {};
  unsigned flags = 0;
};
// CU_MEMCPY_SRC_ACCESS_ORDER_STREAM.
inline constexpr int kSourceInStreamOrder = 1;
#if CUDA_VERSION >= 12080
static_assert(sizeof(BatchAttributes) == sizeof(CUmemcpyAttributes) &&
              kSourceInStreamOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM);
#endif
// cuMemcpyBatchAsync as of 12.8. The toolkit's declaration may differ.
using BatchCopy = CUresult(CUDAAPI*)(CUdeviceptr* to, CUdeviceptr* from, std::size_t* bytes,
                                     std::size_t count, BatchAttributes* attributes,
                                     std::size_t* attribute_starts, std::size_t attribute_count,
                                     std::size_t* failed, CUstream stream);

// cuMemGetHandleForAddressRange, and CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD. Older toolkits lack both.
using ExportRange = CUresult(CUDAAPI*)(void* handle, CUdeviceptr address, std::size_t bytes,
                                       int type, unsigned long long flags);
inline constexpr int kDmabufHandle = 1;
// cuFlushGPUDirectRDMAWrites, with its only target and the scope of this device.
using FlushNicWrites = CUresult(CUDAAPI*)(int target, int scope);
inline constexpr int kFlushCurrentContext = 0;
inline constexpr int kFlushToOwner = 100;

#define REKINDLE_CUDA_CALLS(CALL)                                \
  CALL(init, cuInit)                                             \
  CALL(driver_version, cuDriverGetVersion)                       \
  CALL(error_name, cuGetErrorName)                               \
  CALL(error_text, cuGetErrorString)                             \
  CALL(device_count, cuDeviceGetCount)                           \
  CALL(device_get, cuDeviceGet)                                  \
  CALL(device_name, cuDeviceGetName)                             \
  CALL(device_uuid, cuDeviceGetUuid)                             \
  CALL(device_total_memory, cuDeviceTotalMem)                    \
  CALL(device_attribute, cuDeviceGetAttribute)                   \
  CALL(primary_context_retain, cuDevicePrimaryCtxRetain)         \
  CALL(primary_context_release, cuDevicePrimaryCtxRelease)       \
  CALL(context_push, cuCtxPushCurrent)                           \
  CALL(context_pop, cuCtxPopCurrent)                             \
  CALL(context_device, cuCtxGetDevice)                           \
  CALL(context_enable_peer, cuCtxEnablePeerAccess)               \
  CALL(can_access_peer, cuDeviceCanAccessPeer)                   \
  CALL(peer_attribute, cuDeviceGetP2PAttribute)                  \
  CALL(memory_info, cuMemGetInfo)                                \
  CALL(memory_allocate, cuMemAlloc)                              \
  CALL(memory_free, cuMemFree)                                   \
  CALL(memory_range, cuMemGetAddressRange)                       \
  CALL(block_granularity, cuMemGetAllocationGranularity)         \
  CALL(block_create, cuMemCreate)                                \
  CALL(block_release, cuMemRelease)                              \
  CALL(block_export, cuMemExportToShareableHandle)               \
  CALL(block_import, cuMemImportFromShareableHandle)             \
  CALL(block_properties, cuMemGetAllocationPropertiesFromHandle) \
  CALL(address_reserve, cuMemAddressReserve)                     \
  CALL(address_free, cuMemAddressFree)                           \
  CALL(block_map, cuMemMap)                                      \
  CALL(block_unmap, cuMemUnmap)                                  \
  CALL(block_access, cuMemSetAccess)                             \
  CALL(pointer_attribute, cuPointerGetAttribute)                 \
  CALL(host_register, cuMemHostRegister)                         \
  CALL(host_unregister, cuMemHostUnregister)                     \
  CALL(module_load, cuModuleLoadData)                            \
  CALL(module_unload, cuModuleUnload)                            \
  CALL(module_function, cuModuleGetFunction)                     \
  CALL(launch, cuLaunchKernel)                                   \
  CALL(stream_create, cuStreamCreate)                            \
  CALL(stream_destroy, cuStreamDestroy)                          \
  CALL(stream_query, cuStreamQuery)                              \
  CALL(stream_wait_event, cuStreamWaitEvent)                     \
  CALL(event_create, cuEventCreate)                              \
  CALL(event_destroy, cuEventDestroy)                            \
  CALL(event_record, cuEventRecord)                              \
  CALL(event_query, cuEventQuery)                                \
  CALL(ipc_get_memory_handle, cuIpcGetMemHandle)                 \
  CALL(ipc_open_memory_handle, cuIpcOpenMemHandle)               \
  CALL(ipc_close_memory_handle, cuIpcCloseMemHandle)             \
  CALL(ipc_get_event_handle, cuIpcGetEventHandle)                \
  CALL(ipc_open_event_handle, cuIpcOpenEventHandle)              \
  CALL(copy_to_device, cuMemcpyHtoDAsync)                        \
  CALL(copy_in_device, cuMemcpyDtoDAsync)                        \
  CALL(copy_to_host, cuMemcpyDtoHAsync)                          \
  CALL(copy_2d, cuMemcpy2DAsync)

struct Api {
#define REKINDLE_CUDA_MEMBER(member, function) decltype(&::function) member = nullptr;
  REKINDLE_CUDA_CALLS(REKINDLE_CUDA_MEMBER)
#undef REKINDLE_CUDA_MEMBER
  // cuDeviceGetUuid as before 11.4: the UUID of the whole GPU, also for a MIG slice. May be null.
  decltype(&::cuDeviceGetUuid) whole_device_uuid = nullptr;
  // Null: the driver is older than 11.7.
  ExportRange export_range = nullptr;
  // Null: the driver is older than 11.3.
  FlushNicWrites flush_nic_writes = nullptr;
  // Null: the driver is older than 12.8.
  BatchCopy copy_batch = nullptr;
};

// After such a result the context, and often the process, cannot use the device any more.
bool is_fatal(CUresult result);
// "`what`: CUDA_ERROR_…: its text". kExhausted: out of memory. kInternal: no other code fits.
Error error_of(const Api& api, CUresult result, std::string_view what);
// The same, but kUnavailable if this host or driver does not support the call.
Error unavailable_of(const Api& api, CUresult result, std::string_view what);

}  // namespace rekindle::cuda
