#include "src/cuda/device.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "src/base/units.h"
#include "src/cuda/api.h"
#include "src/cuda/block.h"
#include "src/cuda/cuda_device.h"
#include "src/cuda/digest_kernel.h"
#include "src/cuda/handles.h"
#include "src/cuda/stream.h"

namespace rekindle::cuda {

namespace {

std::string id_of(const CUuuid& uuid, bool slice) {
  std::string id = slice ? "MIG" : "GPU";
  for (std::size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) id += '-';
    id += fmt::format("{:02x}", static_cast<unsigned char>(uuid.bytes[i]));
  }
  return id;
}

// The driver API does not mark a slice. A slice has a UUID of its own beside its GPU's, and "MIG"
// in its name.
bool is_slice(const Api& api, CUdevice device, const CUuuid& uuid, const std::string& name) {
  CUuuid whole{};
  if (api.whole_device_uuid != nullptr && api.whole_device_uuid(&whole, device) == CUDA_SUCCESS &&
      std::memcmp(whole.bytes, uuid.bytes, sizeof(uuid.bytes)) != 0) {
    return true;
  }
  return name.find(" MIG ") != std::string::npos;
}

CUresult summarize(const Api& api, int ordinal, DeviceSummary& out) {
  CUdevice device = 0;
  CUuuid uuid{};
  std::array<char, 256> name{};
  std::size_t total_bytes = 0;
  int events = 0;
  const auto calls = {
      api.device_get(&device, ordinal),
      api.device_name(name.data(), static_cast<int>(name.size() - 1), device),
      api.device_uuid(&uuid, device), api.device_total_memory(&total_bytes, device),
      api.device_attribute(&events, CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED, device)};
  const auto failed =
      std::find_if(calls.begin(), calls.end(), [](CUresult one) { return one != CUDA_SUCCESS; });
  if (failed != calls.end()) return *failed;
  out.ordinal = ordinal;
  out.name = name.data();
  out.total_bytes = total_bytes;
  const bool slice = is_slice(api, device, uuid, out.name);
  out.id = id_of(uuid, slice);
  if (slice) {
    out.not_shareable = "it is a MIG slice";
  } else if (events == 0) {
    out.not_shareable = "its driver has no events between processes";
  }
  return CUDA_SUCCESS;
}

}  // namespace

Result<std::vector<DeviceSummary>> list_devices(const Driver& driver) {
  const Api& api = driver.api();
  int count = 0;
  if (const CUresult result = api.device_count(&count); result != CUDA_SUCCESS) {
    return fail(error_of(api, result, "count the GPUs"));
  }
  std::vector<DeviceSummary> devices(static_cast<std::size_t>(count));
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    const CUresult result = summarize(api, ordinal, devices[static_cast<std::size_t>(ordinal)]);
    if (result != CUDA_SUCCESS) {
      return fail(error_of(api, result, fmt::format("ask what GPU {} is", ordinal)));
    }
  }
  return devices;
}

Result<std::unique_ptr<bucket::Device>> open_device_by_id(std::shared_ptr<const Driver> driver,
                                                          std::string_view id) {
  TRY(const auto devices, list_devices(*driver));
  const auto found = std::find_if(devices.begin(), devices.end(),
                                  [&](const DeviceSummary& device) { return device.id == id; });
  if (found == devices.end()) {
    return fail(ErrorCode::kNotFound,
                "this process sees no GPU {} among {}: is it visible (CUDA_VISIBLE_DEVICES), is it "
                "of this host?",
                id, devices.size());
  }
  return open_device(std::move(driver), found->ordinal);
}

Result<int> current_device_ordinal(const Driver& driver) {
  const Api& api = driver.api();
  CUdevice current = 0;
  int count = 0;
  CUresult result = api.context_device(&current);
  if (result == CUDA_ERROR_INVALID_CONTEXT) return 0;
  if (result == CUDA_SUCCESS) result = api.device_count(&count);
  for (int ordinal = 0; result == CUDA_SUCCESS && ordinal < count; ++ordinal) {
    CUdevice device = 0;
    result = api.device_get(&device, ordinal);
    if (result == CUDA_SUCCESS && device == current) return ordinal;
  }
  if (result == CUDA_SUCCESS) result = CUDA_ERROR_INVALID_DEVICE;
  return fail(error_of(api, result, "ask for the thread's GPU"));
}

namespace {

// IPC shares whole blocks of this size, so no other allocation may lie in a shared one.
constexpr std::uint64_t kSharedBlock = 2ull << 20;

template <typename Native>
bucket::Handle handle_of(const Native& native) {
  return {std::string(reinterpret_cast<const char*>(&native), sizeof(native)), UniqueFd()};
}

template <typename Native>
Result<Native> native_of(const bucket::Handle& handle, std::string_view kind) {
  Native native{};
  if (handle.bytes.size() != sizeof(native) || handle.fd) {
    return fail(ErrorCode::kInvalid, "this is no CUDA handle of {}: it has {} bytes", kind,
                handle.bytes.size());
  }
  std::memcpy(&native, handle.bytes.data(), sizeof(native));
  return native;
}

}  // namespace

Result<std::shared_ptr<const Context>> Context::retain(std::shared_ptr<const Driver> driver,
                                                       CUdevice device) {
  CUcontext context = nullptr;
  const CUresult result = driver->api().primary_context_retain(&context, device);
  if (result != CUDA_SUCCESS) {
    return fail(error_of(driver->api(), result, fmt::format("open GPU {}", device)));
  }
  return std::shared_ptr<const Context>(new Context(std::move(driver), device, context));
}

Result<std::unique_ptr<bucket::Device>> open_device(std::shared_ptr<const Driver> driver,
                                                    int ordinal) {
  TRY(auto devices, list_devices(*driver));
  if (ordinal < 0 || static_cast<std::size_t>(ordinal) >= devices.size()) {
    return fail(ErrorCode::kNotFound, "there is no GPU {}: this process sees {}", ordinal,
                devices.size());
  }
  CUdevice device = 0;
  const CUresult result = driver->api().device_get(&device, ordinal);
  if (result != CUDA_SUCCESS) {
    return fail(error_of(driver->api(), result, fmt::format("find GPU {}", ordinal)));
  }
  TRY(auto context, Context::retain(std::move(driver), device));
  return std::make_unique<CudaDevice>(std::move(context),
                                      std::move(devices[static_cast<std::size_t>(ordinal)]));
}

CudaDevice::CudaDevice(std::shared_ptr<const Context> context, DeviceSummary summary)
    : context_(std::move(context)),
      summary_(std::move(summary)),
      longest_pitch_(static_cast<std::uint64_t>(attribute(CU_DEVICE_ATTRIBUTE_MAX_PITCH))),
      pins_read_only_(attribute(CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED) != 0),
      orders_nic_writes_(attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING) >=
                         CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER) {}

int CudaDevice::attribute(CUdevice_attribute which) const {
  int value = 0;
  const CUresult result = api().device_attribute(&value, which, context_->device());
  return result == CUDA_SUCCESS ? value : 0;
}

Error CudaDevice::error(CUresult result, std::string_view what) const {
  return error_of(api(), result, fmt::format("{}: {}", summary_.id, what));
}

Error CudaDevice::ipc_error(CUresult result, std::string_view what) const {
  return unavailable_of(api(), result, fmt::format("{}: {}", summary_.id, what));
}

Result<void> CudaDevice::check_shareable() const {
  if (summary_.not_shareable.empty()) return {};
  return fail(ErrorCode::kUnavailable, "{} cannot be shared with another process: {}", summary_.id,
              summary_.not_shareable);
}

Result<bucket::DeviceMemory> CudaDevice::memory() const {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
  const CUresult result =
      context_->run([&] { return api().memory_info(&free_bytes, &total_bytes); });
  if (result != CUDA_SUCCESS) return fail(error(result, "ask for free memory"));
  return bucket::DeviceMemory{free_bytes, total_bytes};
}

Result<std::unique_ptr<bucket::Memory>> CudaDevice::allocate(std::uint64_t bytes) {
  if (bytes == 0) return fail(ErrorCode::kInvalid, "allocate 0 bytes on {}", summary_.id);
  if (bytes > summary_.total_bytes) {
    return fail(ErrorCode::kExhausted, "allocate {} bytes on {}: it has {}", bytes, summary_.id,
                summary_.total_bytes);
  }
  const std::uint64_t whole = (bytes + kSharedBlock - 1) / kSharedBlock * kSharedBlock;
  CUdeviceptr address = 0;
  const CUresult result = context_->run([&] { return api().memory_allocate(&address, whole); });
  if (result != CUDA_SUCCESS) return fail(error(result, fmt::format("allocate {} bytes", whole)));
  return std::make_unique<CudaMemory<MemoryHandle>>(context_, address, bytes);
}

Result<std::unique_ptr<bucket::Event>> CudaDevice::make_event() {
  const bool shareable = summary_.not_shareable.empty();
  return make_event(shareable ? CU_EVENT_INTERPROCESS : CU_EVENT_DEFAULT);
}

// A driver of version 580 crashes where a stream of another device waits for a shareable event.
Result<std::unique_ptr<bucket::Event>> CudaDevice::make_local_event() {
  return make_event(CU_EVENT_DEFAULT);
}

Result<std::unique_ptr<bucket::Event>> CudaDevice::make_event(unsigned kind) {
  const unsigned flags = CU_EVENT_DISABLE_TIMING | kind;
  CUevent event = nullptr;
  const CUresult result = context_->run([&] { return api().event_create(&event, flags); });
  if (result != CUDA_SUCCESS) return fail(error(result, "make an event"));
  return std::make_unique<CudaEvent>(context_, event);
}

Result<std::unique_ptr<bucket::Stream>> CudaDevice::make_stream() {
  CUstream stream = nullptr;
  const CUresult result =
      context_->run([&] { return api().stream_create(&stream, CU_STREAM_NON_BLOCKING); });
  if (result != CUDA_SUCCESS) return fail(error(result, "make a stream"));
  return std::make_unique<CudaStream>(context_, stream, true, longest_pitch_);
}

Result<std::unique_ptr<bucket::Stream>> CudaDevice::borrow_stream(void* stream) {
  return std::make_unique<CudaStream>(context_, static_cast<CUstream>(stream), false,
                                      longest_pitch_);
}

std::shared_ptr<const DigestKernel> CudaDevice::digest_kernel() {
  const std::lock_guard lock(kernel_mutex_);
  if (!has_looked_for_kernel_) {
    has_looked_for_kernel_ = true;
    context_->run([this] {
      digest_kernel_ = DigestKernel::load(context_);
      return CUDA_SUCCESS;
    });
  }
  return digest_kernel_;
}

Result<std::unique_ptr<bucket::Digests>> CudaDevice::make_digests(std::size_t capacity) {
  auto kernel = digest_kernel();
  if (kernel == nullptr) {
    return fail(ErrorCode::kUnavailable,
                "{} computes no digests: its driver cannot compile the kernels (is its JIT "
                "compiler, libnvidia-ptxjitcompiler, installed?)",
                summary_.id);
  }
  TRY(auto memory, allocate(CudaDigests::device_bytes(capacity)));
  auto digests = std::make_unique<CudaDigests>(std::move(kernel), std::move(memory), capacity);
  // Without pinned memory it works as well, but the caller waits for the stream.
  if (auto pinned = pin(digests->host_memory()); pinned) {
    digests->keep(std::move(*pinned),
                  attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) != 0);
  }
  return digests;
}

Result<bool> CudaDevice::is_done(const bucket::Event& event) {
  const CUevent asked = static_cast<const CudaEvent&>(event).get();
  const CUresult result = context_->run([&] { return api().event_query(asked); });
  if (result == CUDA_SUCCESS) return true;
  if (result == CUDA_ERROR_NOT_READY) return false;
  return fail(error(result, "ask whether an event is done"));
}

Result<std::unique_ptr<bucket::Pin>> CudaDevice::pin(std::span<const std::byte> memory) {
  void* const start = const_cast<std::byte*>(memory.data());
  const CUresult result = context_->run([&] {
    const CUresult writable =
        api().host_register(start, memory.size(), CU_MEMHOSTREGISTER_PORTABLE);
    const bool again = writable != CUDA_SUCCESS && writable != CUDA_ERROR_OUT_OF_MEMORY &&
                       writable != CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED && !is_fatal(writable);
    if (!again || !pins_read_only_) return writable;
    // Segments may be mapped read-only.
    return api().host_register(start, memory.size(),
                               CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_READ_ONLY);
  });
  if (result != CUDA_SUCCESS) {
    return fail(unavailable_of(
        api(), result, fmt::format("{}: pin {} bytes of host memory", summary_.id, memory.size())));
  }
  return std::make_unique<CudaPin>(context_, memory);
}

Result<bucket::Handle> CudaDevice::share(bucket::Memory& memory) {
  TRY_VOID(check_shareable());
  CUipcMemHandle native{};
  const CUresult result =
      context_->run([&] { return api().ipc_get_memory_handle(&native, memory.address()); });
  if (result != CUDA_SUCCESS) return fail(ipc_error(result, "share memory with another process"));
  return handle_of(native);
}

Result<bucket::Handle> CudaDevice::share(bucket::Event& event) {
  TRY_VOID(check_shareable());
  CUipcEventHandle native{};
  const CUevent shared = static_cast<CudaEvent&>(event).get();
  const CUresult result =
      context_->run([&] { return api().ipc_get_event_handle(&native, shared); });
  if (result != CUDA_SUCCESS) return fail(ipc_error(result, "share an event with another process"));
  return handle_of(native);
}

Result<std::unique_ptr<bucket::Memory>> CudaDevice::open_memory(const bucket::Handle& handle,
                                                                std::uint64_t bytes) {
  TRY_VOID(check_shareable());
  TRY(const auto native, native_of<CUipcMemHandle>(handle, "memory"));
  CUdeviceptr address = 0;
  CUresult result = context_->run([&] {
    return api().ipc_open_memory_handle(&address, native, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  });
  if (result != CUDA_SUCCESS) return fail(ipc_error(result, "open another process's memory"));
  auto memory = std::make_unique<CudaMemory<OpenedMemoryHandle>>(context_, address, bytes);
  CUdeviceptr start = 0;
  std::size_t size = 0;
  result = context_->run([&] { return api().memory_range(&start, &size, address); });
  if (result != CUDA_SUCCESS) return fail(ipc_error(result, "measure another process's memory"));
  if (const std::uint64_t before = address - start; before > size || bytes > size - before) {
    return fail(ErrorCode::kInvalid, "{}: another process's memory has fewer than {} bytes",
                summary_.id, bytes);
  }
  return memory;
}

Result<std::unique_ptr<bucket::Event>> CudaDevice::open_event(const bucket::Handle& handle) {
  TRY_VOID(check_shareable());
  TRY(const auto native, native_of<CUipcEventHandle>(handle, "an event"));
  CUevent event = nullptr;
  const CUresult result =
      context_->run([&] { return api().ipc_open_event_handle(&event, native); });
  if (result != CUDA_SUCCESS) return fail(ipc_error(result, "open another process's event"));
  return std::make_unique<CudaEvent>(context_, event);
}

Result<UniqueFd> CudaDevice::export_memory(bucket::Memory& memory) {
  if (api().export_range == nullptr || attribute(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED) == 0) {
    return fail(ErrorCode::kUnavailable, "{}: its driver exports no dmabufs", summary_.id);
  }
  int fd = -1;
  const std::uint64_t whole = round_up(memory.bytes(), kPageBytes);
  const CUresult result = context_->run(
      [&] { return api().export_range(&fd, memory.address(), whole, kDmabufHandle, 0); });
  if (result != CUDA_SUCCESS) return fail(ipc_error(result, "export memory as a dmabuf"));
  return UniqueFd(fd);
}

Result<void> CudaDevice::check_has_blocks() const {
  if (attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) != 0 &&
      attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) != 0) {
    return {};
  }
  return fail(ErrorCode::kUnavailable, "{}: its driver exports no memory as a file descriptor",
              summary_.id);
}

Result<std::unique_ptr<bucket::Block>> CudaDevice::allocate_block(std::uint64_t bytes) {
  TRY_VOID(check_has_blocks());
  if (bytes == 0 || bytes > summary_.total_bytes) {
    return fail(bytes == 0 ? ErrorCode::kInvalid : ErrorCode::kExhausted,
                "allocate {} bytes on {}: it has {}", bytes, summary_.id, summary_.total_bytes);
  }
  const std::uint64_t granularity = block_granularity(*context_);
  if (granularity == 0) {
    return fail(ErrorCode::kUnavailable, "{}: its driver does not say how large blocks are",
                summary_.id);
  }
  TRY(auto block, CudaBlock::create(context_, round_up(bytes, granularity)));
  return block;
}

Result<std::unique_ptr<bucket::Block>> CudaDevice::open_block(const UniqueFd& block,
                                                              std::uint64_t bytes,
                                                              bucket::Access access) {
  TRY_VOID(check_has_blocks());
  if (bytes == 0 || bytes > summary_.total_bytes || !block) {
    return fail(ErrorCode::kInvalid, "this is no block of {} bytes of {}", bytes, summary_.id);
  }
  TRY(auto opened, CudaBlock::open(context_, block.get(), bytes, access));
  return opened;
}

Result<void> CudaDevice::see_nic_writes() {
  if (orders_nic_writes_) return {};
  if (api().flush_nic_writes == nullptr) {
    return fail(ErrorCode::kUnavailable, "{}: its driver cannot wait for writes of NICs",
                summary_.id);
  }
  const CUresult result =
      context_->run([&] { return api().flush_nic_writes(kFlushCurrentContext, kFlushToOwner); });
  if (result != CUDA_SUCCESS) return fail(ipc_error(result, "wait for writes of NICs"));
  return {};
}

// Peers over PCIe have no atomics, and their copies would take the link to the host.
Result<void> CudaDevice::reach_peer(bucket::Device& peer) {
  const auto* const other = dynamic_cast<const CudaDevice*>(&peer);
  if (other == nullptr || other == this) return Device::reach_peer(peer);
  int reaches = 0;
  int atomics = 0;
  const CUdevice theirs = other->context_->device();
  CUresult result = api().can_access_peer(&reaches, context_->device(), theirs);
  if (result == CUDA_SUCCESS) {
    result = api().peer_attribute(&atomics, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED,
                                  context_->device(), theirs);
  }
  if (result != CUDA_SUCCESS) return fail(ipc_error(result, "ask for the link to " + peer.id()));
  if (reaches == 0 || atomics == 0) return Device::reach_peer(peer);
  result = context_->run([&] { return api().context_enable_peer(other->context_->get(), 0); });
  if (result == CUDA_SUCCESS || result == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) return {};
  return fail(ipc_error(result, "open the link to " + peer.id()));
}

}  // namespace rekindle::cuda
