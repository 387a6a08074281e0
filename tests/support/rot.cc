#include "tests/support/rot.h"

#include <bit>
#include <csignal>
#include <fstream>
#include <iterator>

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "src/store/store_directory.h"

namespace rekindle::testing {

namespace fs = std::filesystem;

namespace {

constexpr double kEnough = 32.0 / 384;  // of the tiles, verified, when the puller is stopped
constexpr double kTooMuch = 0.75;
constexpr int kTries = 20;  // to catch it in the middle

// Unlike find_file(): empty while there is none, and files may come and go, for the pull is
// running.
fs::path resume_file_below(const fs::path& destination) {
  std::error_code gone;
  for (fs::recursive_directory_iterator item(destination, gone), end; !gone && item != end;
       item.increment(gone)) {
    if (item->path().filename() == store::kResumeName) return item->path();
  }
  return {};
}

}  // namespace

void flip_by_write(const fs::path& file, std::uint64_t at) {
  const int fd = ::open(file.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_GE(fd, 0) << file;
  char byte = 0;
  ASSERT_EQ(::pread(fd, &byte, 1, static_cast<off_t>(at)), 1);
  byte = static_cast<char>(byte ^ 0x10);
  ASSERT_EQ(::pwrite(fd, &byte, 1, static_cast<off_t>(at)), 1);
  ::close(fd);
}

SilentFlips::SilentFlips(const fs::path& file) {
  const int fd = ::open(file.c_str(), O_RDWR | O_CLOEXEC);
  EXPECT_GE(fd, 0) << file;
  size_ = fs::file_size(file);
  bytes_ = static_cast<volatile char*>(
      ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  EXPECT_NE(bytes_, MAP_FAILED);
  for (std::size_t at = 0; at < size_; at += 4096) bytes_[at] = bytes_[at];
  ::close(fd);
}

SilentFlips::~SilentFlips() { ::munmap(const_cast<char*>(bytes_), size_); }

// Bits set behind the header of the resume file (src/store/resume_file.cc).
double verified_share(const fs::path& destination) {
  constexpr std::streamoff kHeaderBytes = 56;
  std::ifstream file(resume_file_below(destination), std::ios::binary);
  if (!file.seekg(kHeaderBytes)) return 0;
  const std::string bitmap(std::istreambuf_iterator<char>(file), {});
  int set = 0;
  for (const char byte : bitmap) set += std::popcount(static_cast<unsigned char>(byte));
  return bitmap.empty() ? 0 : set / (8.0 * static_cast<double>(bitmap.size()));
}

std::unique_ptr<Process> stopped_pull(const Spawn& pull, const fs::path& destination) {
  for (int i = 0; i < kTries; ++i) {
    fs::remove_all(destination);
    auto process = std::make_unique<Process>(pull);
    (void)eventually([&] { return !process->running() || verified_share(destination) >= kEnough; });
    if (!process->running()) continue;
    process->signal(SIGSTOP);
    if (verified_share(destination) <= kTooMuch) return process;
  }
  ADD_FAILURE() << "no pull could be stopped in the middle";
  return nullptr;
}

}  // namespace rekindle::testing
