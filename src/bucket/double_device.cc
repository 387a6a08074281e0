#include "src/bucket/double_device.h"

#include <algorithm>
#include <atomic>
#include <mutex>

#include <sys/stat.h>

#include "src/base/duplicate_fd.h"
#include "src/base/units.h"
#include "src/bucket/double_stream.h"

namespace rekindle::bucket {

namespace {

constexpr std::string_view kPrefix = "double:";
constexpr std::string_view kMemoryHandle = "memory";
constexpr std::string_view kEventHandle = "event";
constexpr const char* kDeviceFileName = "rekindle-device";
// As on a GPU.
constexpr std::uint64_t kBlockBytes = 2 << 20;

Result<void> check_handle(const Handle& handle, std::string_view kind, std::uint64_t bytes) {
  if (handle.bytes != kind || !handle.fd) {
    return fail(ErrorCode::kInvalid, "this is no handle of a double device's {}", kind);
  }
  if (!has_fixed_size(handle.fd.get(), bytes)) {
    return fail(ErrorCode::kInvalid, "the handle of a double device's {} has fewer than {} bytes",
                kind, bytes);
  }
  return {};
}

Result<Handle> copy_handle(const UniqueFd& fd, std::string_view kind) {
  if (!fd) {
    return fail(ErrorCode::kUnavailable, "share a double device's {}: it was opened from a handle",
                kind);
  }
  TRY(auto copy, duplicate(fd.get(), "share a double device's memory"));
  return Handle{std::string(kind), std::move(copy)};
}

// The allocated part of the memory.
class Budget {
 public:
  explicit Budget(std::uint64_t total) : total_(total) {}
  bool take(std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    if (bytes > total_ - used_) return false;
    used_ += bytes;
    return true;
  }
  void give_back(std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    used_ -= bytes;
  }
  DeviceMemory state() const {
    const std::lock_guard lock(mutex_);
    return {total_ - used_, total_};
  }

 private:
  const std::uint64_t total_;
  mutable std::mutex mutex_;
  std::uint64_t used_ = 0;
};

class DoubleMemory final : public Memory {
 public:
  DoubleMemory(std::unique_ptr<Mapping> mapping, UniqueFd fd, std::shared_ptr<Budget> budget)
      : mapping_(std::move(mapping)), fd_(std::move(fd)), budget_(std::move(budget)) {}
  ~DoubleMemory() override {
    if (budget_ != nullptr) budget_->give_back(mapping_->bytes());
  }
  DeviceAddress address() const override {
    return reinterpret_cast<std::uintptr_t>(mapping_->data());
  }
  std::uint64_t bytes() const override { return mapping_->bytes(); }
  const UniqueFd& fd() const { return fd_; }
  Mapping& mapping() const { return *mapping_; }

 private:
  const std::unique_ptr<Mapping> mapping_;
  // Both are empty if the memory was opened from a handle.
  const UniqueFd fd_;
  const std::shared_ptr<Budget> budget_;
};

class DoubleBlock final : public Block {
 public:
  // `budget`: null if the block was opened.
  DoubleBlock(std::unique_ptr<Mapping> mapping, UniqueFd fd, std::shared_ptr<Budget> budget)
      : memory_(std::move(mapping), std::move(fd), std::move(budget)) {}
  DeviceAddress address() const override { return memory_.address(); }
  std::uint64_t bytes() const override { return memory_.bytes(); }
  Result<UniqueFd> export_descriptor() override {
    TRY(auto handle, copy_handle(memory_.fd(), kMemoryHandle));
    return std::move(handle.fd);
  }
  Access access() const override { return memory_.mapping().access(); }
  Result<void> set_access(Access access) override { return memory_.mapping().set_access(access); }

 private:
  const DoubleMemory memory_;
};

class DoublePin final : public Pin {};

class DoubleDevice final : public Device {
 public:
  DoubleDevice(std::string id, std::uint64_t memory_bytes)
      : id_(std::move(id)), budget_(std::make_shared<Budget>(memory_bytes)) {}

  const std::string& id() const override { return id_; }
  const std::string& name() const override { return name_; }
  Result<DeviceMemory> memory() const override { return budget_->state(); }
  Result<std::unique_ptr<Memory>> allocate(std::uint64_t bytes) override;
  Result<std::unique_ptr<Event>> make_event() override { return make_event_for(this); }
  Result<std::unique_ptr<Event>> make_local_event() override { return make_event_for(nullptr); }
  Result<std::unique_ptr<Stream>> make_stream() override {
    return make_double_stream(std::make_shared<DoubleQueue>(), *this);
  }
  Result<std::unique_ptr<Stream>> borrow_stream(void* stream) override;
  Result<std::unique_ptr<Digests>> make_digests(std::size_t capacity) override {
    return std::make_unique<DoubleDigests>(capacity);
  }
  Result<bool> is_done(const Event& event) override {
    const EventState& state = static_cast<const DoubleEvent&>(event).page().state();
    return state.completed.load() >= state.recorded.load();
  }
  Result<std::unique_ptr<Pin>> pin(std::span<const std::byte> /*memory*/) override {
    return std::make_unique<DoublePin>();
  }
  Result<Handle> share(Memory& memory) override {
    return copy_handle(static_cast<DoubleMemory&>(memory).fd(), kMemoryHandle);
  }
  Result<Handle> share(Event& event) override {
    return copy_handle(static_cast<DoubleEvent&>(event).fd(), kEventHandle);
  }
  Result<std::unique_ptr<Memory>> open_memory(const Handle& handle, std::uint64_t bytes) override;
  Result<std::unique_ptr<Event>> open_event(const Handle& handle) override;
  Result<std::unique_ptr<Block>> allocate_block(std::uint64_t bytes) override;
  Result<std::unique_ptr<Block>> open_block(const UniqueFd& block, std::uint64_t bytes,
                                            Access access) override;
  // The memory file itself.
  Result<UniqueFd> export_memory(Memory& memory) override {
    TRY(auto handle, share(memory));
    return std::move(handle.fd);
  }
  // Addresses of a double are plain pointers.
  Result<void> reach_peer(Device& peer) override {
    return is_double(peer.id()) ? Result<void>() : Device::reach_peer(peer);
  }

 private:
  // `only_for`: as in DoubleEvent.
  Result<std::unique_ptr<Event>> make_event_for(const Device* only_for);
  // A new file of this device, as T.
  template <typename T>
  Result<std::unique_ptr<T>> make_memory(std::uint64_t bytes);

  const std::string id_;
  const std::string name_ = "host memory";
  const std::shared_ptr<Budget> budget_;
  std::mutex mutex_;
  // Guarded by mutex_.
  std::weak_ptr<DoubleQueue> default_queue_;
};

template <typename T>
Result<std::unique_ptr<T>> DoubleDevice::make_memory(std::uint64_t bytes) {
  if (bytes == 0) return fail(ErrorCode::kInvalid, "allocate 0 bytes on {}", id_);
  if (!budget_->take(bytes)) {
    const DeviceMemory now = budget_->state();
    return fail(ErrorCode::kExhausted, "allocate {} bytes on {}: {} of {} are free", bytes, id_,
                now.free_bytes, now.total_bytes);
  }
  auto make = [&]() -> Result<std::unique_ptr<T>> {
    TRY(UniqueFd fd, make_memfd(kDeviceFileName, bytes));
    TRY(auto mapping, Mapping::of(fd.get(), bytes));
    return std::make_unique<T>(std::move(mapping), std::move(fd), budget_);
  };
  auto memory = make();
  if (!memory) budget_->give_back(bytes);
  return memory;
}

Result<std::unique_ptr<Memory>> DoubleDevice::allocate(std::uint64_t bytes) {
  return make_memory<DoubleMemory>(bytes);
}

Result<std::unique_ptr<Block>> DoubleDevice::allocate_block(std::uint64_t bytes) {
  return make_memory<DoubleBlock>(round_up(bytes, kBlockBytes));
}

Result<std::unique_ptr<Block>> DoubleDevice::open_block(const UniqueFd& block, std::uint64_t bytes,
                                                        Access access) {
  struct stat info {};
  if (bytes == 0 || !has_fixed_size(block.get(), bytes) || ::fstat(block.get(), &info) != 0 ||
      static_cast<std::uint64_t>(info.st_size) != bytes) {
    return fail(ErrorCode::kInvalid, "this is no block of {} bytes of {}", bytes, id_);
  }
  TRY(auto copy, duplicate(block.get(), "keep a block of a double device"));
  TRY(auto mapping, Mapping::of(copy.get(), bytes, access));
  return std::make_unique<DoubleBlock>(std::move(mapping), std::move(copy), nullptr);
}

Result<std::unique_ptr<Event>> DoubleDevice::make_event_for(const Device* only_for) {
  TRY(UniqueFd fd, make_memfd(kDeviceFileName, sizeof(EventState)));
  TRY(auto mapping, Mapping::of(fd.get(), sizeof(EventState)));
  return std::make_unique<DoubleEvent>(std::make_shared<EventPage>(std::move(mapping)),
                                       std::move(fd), only_for);
}

Result<std::unique_ptr<Stream>> DoubleDevice::borrow_stream(void* stream) {
  if (stream != nullptr) {
    return fail(ErrorCode::kInvalid, "{} has no stream but the default one: pass null", id_);
  }
  const std::lock_guard lock(mutex_);
  auto queue = default_queue_.lock();
  if (queue == nullptr) default_queue_ = queue = std::make_shared<DoubleQueue>();
  return make_double_stream(std::move(queue), *this);
}

Result<std::unique_ptr<Memory>> DoubleDevice::open_memory(const Handle& handle,
                                                          std::uint64_t bytes) {
  if (bytes == 0) return fail(ErrorCode::kInvalid, "open 0 bytes on {}", id_);
  TRY_VOID(check_handle(handle, kMemoryHandle, bytes));
  TRY(auto mapping, Mapping::of(handle.fd.get(), bytes));
  return std::make_unique<DoubleMemory>(std::move(mapping), UniqueFd(), nullptr);
}

Result<std::unique_ptr<Event>> DoubleDevice::open_event(const Handle& handle) {
  TRY_VOID(check_handle(handle, kEventHandle, sizeof(EventState)));
  TRY(auto mapping, Mapping::of(handle.fd.get(), sizeof(EventState)));
  return std::make_unique<DoubleEvent>(std::make_shared<EventPage>(std::move(mapping)), UniqueFd(),
                                       this);
}

}  // namespace

std::unique_ptr<Device> make_double_device(std::string id, std::uint64_t memory_bytes) {
  return std::make_unique<DoubleDevice>(std::move(id), memory_bytes);
}

bool is_double(std::string_view id) {
  return id.size() > kPrefix.size() && id.starts_with(kPrefix) &&
         std::all_of(id.begin() + kPrefix.size(), id.end(),
                     [](char c) { return c >= '0' && c <= '9'; });
}

}  // namespace rekindle::bucket
