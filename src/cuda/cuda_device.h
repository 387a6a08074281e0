#pragma once

#include <memory>
#include <mutex>
#include <string>

#include "src/cuda/device.h"
#include "src/cuda/digest_kernel.h"
#include "src/cuda/handles.h"

namespace rekindle::cuda {

// Private to src/cuda; device.h makes it.
class CudaDevice final : public bucket::Device {
 public:
  CudaDevice(std::shared_ptr<const Context> context, DeviceSummary summary);

  const std::string& id() const override { return summary_.id; }
  const std::string& name() const override { return summary_.name; }
  Result<bucket::DeviceMemory> memory() const override;
  Result<std::unique_ptr<bucket::Memory>> allocate(std::uint64_t bytes) override;
  Result<std::unique_ptr<bucket::Event>> make_event() override;
  Result<std::unique_ptr<bucket::Event>> make_local_event() override;
  Result<std::unique_ptr<bucket::Stream>> make_stream() override;
  Result<std::unique_ptr<bucket::Stream>> borrow_stream(void* stream) override;
  Result<std::unique_ptr<bucket::Digests>> make_digests(std::size_t capacity) override;
  Result<bool> is_done(const bucket::Event& event) override;
  Result<std::unique_ptr<bucket::Pin>> pin(std::span<const std::byte> memory) override;

  Result<bucket::Handle> share(bucket::Memory& memory) override;
  Result<bucket::Handle> share(bucket::Event& event) override;
  Result<std::unique_ptr<bucket::Memory>> open_memory(const bucket::Handle& handle,
                                                      std::uint64_t bytes) override;
  Result<std::unique_ptr<bucket::Event>> open_event(const bucket::Handle& handle) override;
  Result<UniqueFd> export_memory(bucket::Memory& memory) override;
  Result<void> see_nic_writes() override;
  Result<void> reach_peer(bucket::Device& peer) override;
  Result<std::unique_ptr<bucket::Block>> allocate_block(std::uint64_t bytes) override;
  Result<std::unique_ptr<bucket::Block>> open_block(const UniqueFd& block, std::uint64_t bytes,
                                                    bucket::Access access) override;

  const std::shared_ptr<const Context>& context() const { return context_; }
  int ordinal() const { return summary_.ordinal; }

 private:
  const Api& api() const { return context_->api(); }
  // 0: not known.
  int attribute(CUdevice_attribute which) const;
  // Null: the driver cannot compile it.
  std::shared_ptr<const DigestKernel> digest_kernel();
  // `kind`: CU_EVENT_DEFAULT or CU_EVENT_INTERPROCESS.
  Result<std::unique_ptr<bucket::Event>> make_event(unsigned kind);
  Result<void> check_shareable() const;
  Result<void> check_has_blocks() const;
  Error error(CUresult result, std::string_view what) const;
  Error ipc_error(CUresult result, std::string_view what) const;

  const std::shared_ptr<const Context> context_;
  const DeviceSummary summary_;
  const std::uint64_t longest_pitch_;
  const bool pins_read_only_;
  // Its work sees completed writes of NICs without a flush.
  const bool orders_nic_writes_;
  std::mutex kernel_mutex_;
  // Both are guarded by kernel_mutex_.
  bool has_looked_for_kernel_ = false;
  std::shared_ptr<const DigestKernel> digest_kernel_;
};

}  // namespace rekindle::cuda
