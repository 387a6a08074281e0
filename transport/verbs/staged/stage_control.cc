#include "transport/verbs/staged/stage_control.h"

#include <cerrno>

#include <sys/mman.h>

#include "src/base/units.h"

namespace rekindle::transport::verbs {

Result<std::unique_ptr<StageControl>> StageControl::create(Device& device) {
  static_assert((2 * kMaxStageBlocks + 1) * kStageMessageBytes <= kPageBytes);
  std::unique_ptr<StageControl> control(new StageControl);
  void* const page =
      ::mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return fail_errno(errno, "messages of a staged link: mmap");
  control->page_ = static_cast<std::byte*>(page);
  // A child must not share a page that a NIC writes to.
  (void)::madvise(page, kPageBytes, MADV_DONTFORK);
  control->mr_ = MrHandle(
      device.api().reg_mr(device.pd(), page, kPageBytes, IBV_ACCESS_LOCAL_WRITE), {&device.api()});
  if (!control->mr_) return fail_errno(errno, device.name() + ": register messages");
  return control;
}

StageControl::~StageControl() {
  mr_.reset();
  if (page_ != nullptr) ::munmap(page_, kPageBytes);
}

}  // namespace rekindle::transport::verbs
