#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>

#include "tests/support/process.h"

// Damage to files of copies at rest, and pulls that are caught in their middle while it happens.
namespace rekindle::testing {

// As any program may: the kernel stamps the file.
void flip_by_write(const std::filesystem::path& file, std::uint64_t at);

// A mapping in which every page was written to before: what is stored through it afterwards stamps
// nothing, as when the memory itself goes bad. An agent without leases cannot tell that it is
// there.
class SilentFlips {
 public:
  explicit SilentFlips(const std::filesystem::path& file);
  ~SilentFlips();
  SilentFlips(const SilentFlips&) = delete;
  SilentFlips& operator=(const SilentFlips&) = delete;
  void flip(std::uint64_t at) { bytes_[at] = static_cast<char>(bytes_[at] ^ 0x10); }

 private:
  volatile char* bytes_ = nullptr;
  std::size_t size_ = 0;
};

// The share of a running pull's tiles that have verified, by its resume file below `destination`;
// 0 while there is none.
double verified_share(const std::filesystem::path& destination);

// A pull to `destination` that was stopped (SIGSTOP) with a part of its bytes verified; nullptr,
// and a failure, when it was never caught in its middle.
std::unique_ptr<Process> stopped_pull(const Spawn& pull, const std::filesystem::path& destination);

}  // namespace rekindle::testing
