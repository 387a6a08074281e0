#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "src/base/result.h"
#include "transport/verbs/memory/memory_registrar.h"

namespace rekindle::transport::verbs {

// Memory of a GPU that NICs write to, by its dmabuf. The memory belongs to another process, and is
// mapped nowhere here. Reserved addresses stand for it: whoever touches them by mistake crashes,
// and no other memory has them. This has not run with a NIC that accepts a dmabuf.
class GpuMemory final : public RegisteredMemory {
 public:
  // Registers bytes [0, bytes) of the dmabuf `fd`, which may be closed afterwards, with each of the
  // devices. All of them take it, or the error is that of the first one that does not.
  static Result<std::shared_ptr<GpuMemory>> create(std::span<const Device* const> devices, int fd,
                                                   std::uint64_t bytes);
  ~GpuMemory() override;
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;

  std::span<std::byte> addresses() const { return {addresses_, size_}; }

  std::span<const std::byte> bytes() const override { return addresses(); }
  const Piece* find(const Device& device, std::uint64_t offset) const override;
  std::vector<Piece> pieces(const Device& device) const override;
  std::uint64_t change_count() const override { return on_.size(); }
  bool settled() const override { return true; }
  bool wait_settled(TimePoint /*deadline*/) const override { return true; }
  std::vector<Error> problems() const override { return {}; }

 private:
  struct On {
    const Device* device;
    Piece piece;
    MrHandle mr;
  };
  GpuMemory(std::byte* addresses, std::size_t size) : addresses_(addresses), size_(size) {}

  std::byte* const addresses_;
  const std::size_t size_;
  // By device; fixed once created.
  std::vector<On> on_;
};

}  // namespace rekindle::transport::verbs
