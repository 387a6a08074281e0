#include "transport/verbs/device/memory_window.h"

#include <cerrno>
#include <cstring>

#include "transport/verbs/device/fabric.h"

namespace rekindle::transport::verbs {

Result<MemoryWindow> MemoryWindow::allocate(Device& device) {
  MemoryWindow window;
  window.handle_ = MwHandle(device.api().alloc_mw(device.pd(), IBV_MW_TYPE_2), {&device.api()});
  if (!window.handle_) {
    ++device.windows().refused;
    return fail(ErrorCode::kExhausted, "{}", std::strerror(errno));
  }
  window.key_ = ibv_inc_rkey(window.handle_->rkey);
  window.counts_ = &device.windows();
  ++window.counts_->allocated;
  return window;
}

MemoryWindow& MemoryWindow::operator=(MemoryWindow&& other) noexcept {
  if (this == &other) return *this;
  deallocate();
  handle_ = std::move(other.handle_);
  key_ = other.key_;
  counts_ = other.counts_;
  return *this;
}

void MemoryWindow::deallocate() {
  if (!handle_) return;
  handle_.reset();
  --counts_->allocated;
}

ibv_send_wr MemoryWindow::binding(ibv_mr* mr, std::uint64_t address, std::uint64_t bytes) const {
  ibv_send_wr request{};
  request.opcode = IBV_WR_BIND_MW;
  request.bind_mw.mw = handle_.get();
  request.bind_mw.rkey = key_;
  request.bind_mw.bind_info = {mr, address, bytes, IBV_ACCESS_REMOTE_READ};
  return request;
}

ibv_send_wr MemoryWindow::invalidation() const {
  ibv_send_wr request{};
  request.opcode = IBV_WR_LOCAL_INV;
  request.invalidate_rkey = key_;
  return request;
}

}  // namespace rekindle::transport::verbs
