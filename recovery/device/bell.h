#pragma once

#include <cerrno>
#include <cstdint>

#include <sys/eventfd.h>
#include <unistd.h>

#include "src/base/result.h"
#include "src/base/unique_fd.h"

namespace rekindle::device {

// Wakes a thread that polls. Any thread rings it; it is heard once, however often it rang.
class Bell {
 public:
  static Result<Bell> create() {
    UniqueFd fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!fd) return fail_errno(errno, "create an eventfd");
    return Bell(std::move(fd));
  }
  int fd() const { return fd_.get(); }
  void ring() const {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(fd_.get(), &one, sizeof one);
  }
  void hear() const {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto got = ::read(fd_.get(), &count, sizeof count);
  }

 private:
  explicit Bell(UniqueFd fd) : fd_(std::move(fd)) {}
  UniqueFd fd_;
};

}  // namespace rekindle::device
