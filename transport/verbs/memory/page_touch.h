#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace rekindle::transport::verbs {

// Faults pages in before a device pins them. The device would do it on one thread, page by page.

enum class TouchMode : std::uint8_t {
  kRead,   // no byte is written, nor any page marked as written
  kWrite,  // no byte changes, but the pages are made ready to be written
};

// Returns 0, EFAULT or ENOMEM. EFAULT: there is no page, as the file was truncated or its file
// system is full.
int touch_pages(std::span<const std::byte> memory, TouchMode mode);
// Does the same page by page, for kernels without MADV_POPULATE_* (before 5.14).
int touch_pages_one_by_one(std::span<const std::byte> memory, TouchMode mode);

// Asks for huge pages where they exist: for private memory (fd -1) and tmpfs.
void advise_huge_pages(std::span<const std::byte> memory, int fd);

}  // namespace rekindle::transport::verbs
